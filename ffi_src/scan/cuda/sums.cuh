// The sums of tiles that blocks exchange through global memory where they share an axis.
//
// Each 32 bits of a sum are published together with a tag in one 64-bit word, so loads and stores need no order. To
// publish a sum, a block waits only for tiles that a counter has given out before its own, so some block can always go
// on, whatever blocks are running. Blocks wait only for sums of tiles, never for the fold of all that comes before a
// tile. So the order of folding is always the same, and tiles do not wait for each other in a chain. (Look-ahead and
// its warps are those of CCCL's warpspeed scan; the levels of sums, and hence the fixed order of folds, are not.)
#pragma once

#include "scan/cuda/folds.cuh"

namespace jaxgpuops::scan {

constexpr uint64_t kThere = uint64_t{1} << 32;

// The sums of tiles and of groups of them, in global memory.
template <class Policy>
struct Sums {
  using State = typename Policy::State;
  static constexpr int kWords = sizeof(State) / 4;
  static constexpr int kBatch = kWords >= 8 ? 2 : 16 / kWords;  // sums that are loaded together

  const Parameters& p;

  __device__ uint64_t* at(int level, int index, int64_t column) const {
    return p.words + ((p.level_at[level] + static_cast<int64_t>(index)) * p.columns + column) * kWords;
  }

  // kSoon: the words are set by atomics, which other blocks see sooner. Otherwise plain stores set them, which put less
  // load on the memory; that is better if each thread publishes the sum of a column.
  template <bool kSoon = true>
  __device__ void publish(int level, int index, int64_t column, State state) const {
    set<kSoon>(at(level, index, column), state);
  }

  // Calls body(i, sum i) for `count` sums of a level, in order, and waits for each until it has been published.
  template <bool kByTwo = true, class Body>
  __device__ void each(int level, int first, int count, int64_t column, Body body) const {
    for (int begin = 0; begin < count; begin += kBatch) {
      WordsOf<State> words[kBatch];
      bool there[kBatch], all;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) there[i] = begin + i >= count;
      do {
        all = true;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (!there[i]) there[i] = load<kByTwo>(at(level, first + begin + i, column), words[i]);
          all = all && there[i];
        }
      } while (!all);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (begin + i < count) body(begin + i, bits_as<State>(words[i]));
    }
  }

  // Folds `count` sums of a level, from the first of a group on, and then `state`.
  __device__ State fold(int level, int first, int count, int64_t column, State state) const {
    State trees[kGroupBits];
    each(level, first, count, column, [&](int i, State sum) {
      bool carry = true;
#pragma unroll
      for (int bit = 0; bit < kGroupBits; ++bit) {
        if (!carry) continue;
        carry = i >> bit & 1;
        if (carry) {
          sum = Policy::combine(trees[bit], sum, p.options);
        } else {
          trees[bit] = sum;
        }
      }
    });
#pragma unroll
    for (int bit = 0; bit < kGroupBits; ++bit)
      if (count >> bit & 1) state = Policy::combine(trees[bit], state, p.options);
    return state;
  }

  // Publishes a sum in words that are clear.
  template <bool kSoon = true>
  __device__ static void set(uint64_t* to, State state) {
    const auto words = bits_as<WordsOf<State>>(state);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kSoon) {
        set_word(to + w, kThere | words.word[w]);
      } else {
        store_relaxed(to + w, kThere | words.word[w]);
      }
    }
  }

  // Loads a sum if it has been published, two words at a time if their number is even.
  template <bool kByTwo = true>
  __device__ static bool load(const uint64_t* from, WordsOf<State>& state) {
    constexpr int kStep = kByTwo && kWords % 2 == 0 ? 2 : 1;
    bool there = true;
#pragma unroll
    for (int first = 0; first < kWords; first += kStep) {
      uint64_t words[kStep];
      if constexpr (kStep == 2) {
        load_two_words(from + first, words);
      } else {
        words[0] = load_relaxed(from + first);
      }
#pragma unroll
      for (int w = 0; w < kStep; ++w) {
        there = there && words[w] >= kThere;
        state.word[first + w] = static_cast<uint32_t>(words[w]);
      }
    }
    return there;
  }
};

// Finds the fold of all that comes before a tile: for each digit of the tile's number, it folds the sums that come
// before in the group. The block of the last tile of a group also publishes the group's sum, on every level on which a
// group ends with this tile.
//
// A warp calls it, and each lane has one sum of a group.
template <class Policy>
class Before {
 public:
  using State = typename Policy::State;

  __device__ Before(const Parameters& p, int tile, int64_t column)
      : p(p), tile(tile), column(column), sums{p}, before(Policy::identity(p.options)), sum(before), ends(true) {}

  // The loads of kAtOnce levels are in flight together. Levels take turns in the same registers, so that the code that
  // folds a level is compiled once.
  __device__ __forceinline__ State find() {
    WordsOf<State> words[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int level = 0; level < kAtOnce; ++level)
      if (level < p.levels) there[level] = load(level, words[level]);
#pragma unroll 1
    for (int level = 0; level < p.levels; ++level) {
      fold(level, words[0], there[0]);
#pragma unroll
      for (int i = 1; i < kAtOnce; ++i) {
        words[i - 1] = words[i];
        there[i - 1] = there[i];
      }
      if (level + kAtOnce < p.levels) there[kAtOnce - 1] = load(level + kAtOnce, words[kAtOnce - 1]);
    }
    return before;
  }

 private:
  static constexpr int kAtOnce = 3;  // three levels serve 2^15 tiles

  __device__ __forceinline__ bool load(int level, WordsOf<State>& words) const {
    const int lane = threadIdx.x % 32, index = tile >> (kGroupBits * level), digit = index % kGroup;
    const bool wanted =
        lane < digit || (level == 0 && digit == kGroup - 1);  // the last tile of a group also reads its own sum
    return !wanted || sums.load(sums.at(level, index - digit + lane, column), words);
  }

  __device__ __forceinline__ void fold(int level, WordsOf<State>& words, bool there) {
    const int lane = threadIdx.x % 32, index = tile >> (kGroupBits * level), digit = index % kGroup;
    while (!__all_sync(kEveryLane, there))
      if (!there) there = load(level, words);
    State mine = bits_as<State>(words);
    if (level > 0 && lane == kGroup - 1) mine = sum;
    const State all = scan_group<Policy>(p.options, mine);
    ends = ends && digit == kGroup - 1 && level + 1 < p.levels;
    if (ends) {
      sum = shuffle_from(all, kGroup - 1);
      if (lane == 0) sums.publish(level + 1, index / kGroup, column, sum);
    }
    if (digit != 0) before = Policy::combine(shuffle_from(all, digit - 1), before, p.options);
  }

  const Parameters& p;
  const int tile;
  const int64_t column;
  const Sums<Policy> sums;
  State before, sum;
  bool ends;  // this tile ends a group of the level below, whose sum is `sum`
};

// Clears all words: no sum has been published.
static __global__ void clear_workspace(unsigned* counters, uint64_t* words, int64_t count) {
  let_dependents_start();
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (first < kMostCounters) counters[first] = 0;
  for (int64_t i = first; i < count; i += int64_t{gridDim.x} * blockDim.x) words[i] = 0;
}

}  // namespace jaxgpuops::scan
