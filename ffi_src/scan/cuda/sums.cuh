// The sums of tiles that blocks exchange through global memory where they share an axis.
//
// A sum is published in words of 32 bits each, with a tag beside it that says so: one 64-bit access, so nothing has to
// be ordered. To publish a sum a block waits for nothing but tiles that come before in a counter's order, so there is
// always one that can go on, whatever blocks are running. Only sums are ever waited for, never what comes before
// another tile, so what is folded is always the same, and there is no chain from tile to tile. (Look-ahead and its
// warps are those of CCCL's warpspeed scan; the levels of sums, and hence the fixed order of folds, are not.)
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

  // kSoon: with atomics, which others see sooner; if not, with stores, which load memory less: better where each
  // thread has a column.
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

  // The fold of `count` sums of a level, from the first of a group on, and of `state` after them.
  __device__ State fold(int level, int first, int count, int64_t column, State state) const {
    State trees[kGroupBits];
    each(level, first, count, column, [&](int i, State sum) {
      bool carry = true;
#pragma unroll
      for (int bit = 0; bit < kGroupBits; ++bit) {
        if (!carry) continue;
        carry = i >> bit & 1;
        if (carry) {
          sum = Policy::combine(trees[bit], sum);
        } else {
          trees[bit] = sum;
        }
      }
    });
#pragma unroll
    for (int bit = 0; bit < kGroupBits; ++bit)
      if (count >> bit & 1) state = Policy::combine(trees[bit], state);
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
        store_word(to + w, kThere | words.word[w]);
      }
    }
  }

  // Loads a sum, if it is there, two words at a time where their number is even.
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
        words[0] = load_word(from + first);
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

// What comes before a tile: for each digit of its number, the sums of those that come before in its group. Who has the
// last tile of a group publishes the sum of the group, at once and of as many levels as end there.
//
// A warp does it; each lane has one sum of a group.
constexpr int kFewLevels = 3;  // sums of 2^15 tiles

template <class Policy>
class Before {
 public:
  using State = typename Policy::State;

  __device__ Before(const Parameters& p, int tile, int64_t column)
      : p(p), tile(tile), column(column), sums{p}, before(Policy::identity(p.options)), sum(before), ends(true) {}

  // The first tries of three levels overlap.
  __device__ __forceinline__ State find() {
    WordsOf<State> words[kFewLevels];
    bool there[kFewLevels];
#pragma unroll
    for (int level = 0; level < kFewLevels; ++level)
      if (level < p.levels) there[level] = load(level, words[level]);
#pragma unroll
    for (int level = 0; level < kFewLevels; ++level)
      if (level < p.levels) fold(level, words[level], there[level]);
    return p.levels <= kFewLevels ? before : of_more_levels(p, tile, column, before, sum, ends);
  }

 private:
  // A function of its own: few rows have so many tiles, and registers are scarce.
  __device__ __noinline__ static State of_more_levels(const Parameters& p, int tile, int64_t column, State before,
                                                      State sum, bool ends) {
    Before rest(p, tile, column);
    rest.before = before;
    rest.sum = sum;
    rest.ends = ends;
    for (int level = kFewLevels; level < p.levels; ++level) {
      WordsOf<State> words;
      const bool there = rest.load(level, words);
      rest.fold(level, words, there);
    }
    return rest.before;
  }

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
    const State all = scan_group<Policy>(mine);
    ends = ends && digit == kGroup - 1 && level + 1 < p.levels;
    if (ends) {
      sum = shuffle_from(all, kGroup - 1);
      if (lane == 0) sums.publish(level + 1, index / kGroup, column, sum);
    }
    if (digit != 0) before = Policy::combine(shuffle_from(all, digit - 1), before);
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
