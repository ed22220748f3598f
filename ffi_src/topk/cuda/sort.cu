// Top-k of rows of up to 8192 elements by sorting all of them, for large k and for 64-bit keys. A team of threads,
// which is a part of a warp or a block, sorts a row in registers. A thread has 8 or 16 elements, or 4 where
// whole rows are sorted that are short and few.
//
// Words of 32 bits are sorted. A word has as many bits of the key as fit above the element's index. Keys of up to 16
// bits fit whole. Of a wider key, the least key of the row is subtracted, and the top bits of the difference are taken.
// That orders most data except for a few neighbours, which then swap places according to their whole keys. If that
// takes more than a few rounds, the row is sorted by digits of the key instead, from the lowest digit, and each pass
// keeps the order of the one before. For results in the order of indices, the selected elements are sorted once more by
// index. Keys of 0, which padding has, lie beside the range of the others, and next to it in a word.
//
// If k is small, another kernel, which needs fewer registers, finds a threshold by bisections with counts, and sorts
// only the elements that reach it. For results in the order of indices, the threshold is mostly the k-th element
// itself, and then nothing is sorted. A third kernel does that for rows of up to 1024 elements with larger k, with a
// warp for each row, which searches in fewer steps.
//
// A block copies its rows to shared memory once, and results leave it in the order of memory. Bytes moved: the input
// once, and k results (value and index). Sources: bb_segsort (Hou et al., ICS 2017), Batcher's networks.
#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/quotient.cuh"
#include "topk/cuda/sort_rows.h"
#include "topk/cuda/sort_team.cuh"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {     // values or indices may be null
  SortOrder sort_order;  // words are sorted downwards, so keys of this order are inverted; Call::order is not used
  int64_t outer;
  uint32_t team, outers, width, pitch, order_pitch, tiles;  // see SortShape; tiles of an outer index
  uint32_t per_width, per_k;                                // reciprocals: the high word of i * per_width is i / width
  uint32_t most;                                            // see sort_selection(): if k, nothing is sorted
};

template <class Key>
// 64-bit keys need more rounds, since a word has fewer bits of their mantissa.
constexpr int kMendRounds = sizeof(Key) == 8 ? 12 : 6;
// What is sorted: all elements of a row, or few that are selected first (kHundreds: more than 256, by a warp).
enum class Picks { kAll, kFew, kHundreds };
// Blocks of a multiprocessor.
constexpr int sort_residents(int each) { return each == 8 ? 4 : each == 16 ? 3 : 2; }
constexpr int pick_residents(int each, size_t key_bytes) { return each < kPickEach ? 4 : key_bytes == 8 ? 2 : 3; }

template <class Key>
__device__ __forceinline__ void load_element(const Key* from, Key* to) {
  if constexpr (sizeof(Key) >= 4) {
    copy_async<sizeof(Key)>(to, from);
  } else {
    *to = *from;
  }
}

// Loads `rows` times `width` neighbouring elements into shared memory; only `there` of them exist. If rows follow each
// other, `to` is as far from a multiple of 16 bytes as `from`.
template <class Key>
__device__ __forceinline__ void load_tile(const Args& a, const Key* from, Key* to, uint32_t rows, uint32_t there) {
  const uint32_t count = rows * a.width;
  if (a.inner == 1) {
    constexpr uint32_t kBytes = sizeof(Key), kVector = 16 / kBytes;
    const uint32_t head = min(count, (0 - shared_address(to)) / kBytes % kVector), vectors = (count - head) / kVector;
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x)
      copy_async(to + head + v * kVector, from + head + v * kVector);
    for (uint32_t e = threadIdx.x; e < count - vectors * kVector; e += blockDim.x) {
      const uint32_t at = e < head ? e : e + vectors * kVector;
      load_element(from + at, to + at);
    }
  } else {
#pragma unroll 4
    for (uint32_t e = threadIdx.x; e < count; e += blockDim.x) {
      const uint32_t row = quotient(e, a.width, a.per_width), column = e - row * a.width;
      if (column < there) load_element(from + row * a.inner + column, to + row * a.pitch + column);
    }
  }
  commit_async_copies();
  wait_for_async_copies<0>();
}

// A row, and how the words that are sorted are made of its keys.
template <class Key>
struct Row {
  const Key* keys;  // the elements as they are in memory, `step` apart
  uint16_t* order;  // at each place of the result, the index of its element
  uint32_t step, n, turn;
  const SortOrder* key_order;
  Key low, high;   // one less than the least key, apart from 0, and the largest key
  int range;       // bits of their difference
  int index_bits;  // bits of a word that hold the index

  __device__ __forceinline__ Key key(uint32_t index) const { return sort_key(keys[index * step], *key_order); }
  // Returns the element that a slot has. Teams start at different elements, so that rows whose length is a multiple of
  // a cache line do not use the same banks.
  __device__ __forceinline__ uint32_t at_turn(uint32_t slot) const {
    return slot + turn >= n ? slot + turn - n : slot + turn;
  }
  __device__ __forceinline__ uint32_t mask() const { return (1u << index_bits) - 1; }
  __device__ __forceinline__ Key part(uint32_t index) const {
    const Key whole = key(index);
    return sizeof(Key) <= 2 ? whole : whole > low ? static_cast<Key>(whole - low) : Key{0};
  }
  __device__ __forceinline__ uint32_t word(uint32_t index, int shift, uint32_t place) const {
    return static_cast<uint32_t>(part(index) >> shift) << index_bits | (mask() - place);
  }
  __device__ __forceinline__ uint32_t place(uint32_t word) const { return mask() - (word & mask()); }
  // The last bits of a part that words lose.
  __device__ __forceinline__ int lost() const { return sizeof(Key) <= 2 ? 0 : max(0, range - (32 - index_bits)); }
  // Lowers `low` to a multiple of what words lose, so that they tell -0 from 0, whose keys are neighbours.
  __device__ __forceinline__ void align() {
    low = low >> lost() << lost();
    if (64 - __clzll(static_cast<uint64_t>(high - low)) <= range) return;
    ++range;
    low = low >> lost() << lost();
  }
};

// Whether neighbours have words with the same key bits, so that they may be in the wrong order.
template <class Key, int kEach, class Team>
__device__ __forceinline__ bool has_ties(const Row<Key>& row, uint32_t count, const Team& team,
                                         const uint32_t (&words)[kEach]) {
  const uint32_t first = team.t * kEach, next = team.from(1, words[0]);
  bool tied = false;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    tied |= first + j + 1 < count && (words[j] ^ (j + 1 < kEach ? words[(j + 1) % kEach] : next)) <= row.mask();
  return team.any(tied);
}

// Sorts `count` elements: all of the row, or those whose indices are in `order`. `live`: the team has a row, so that
// `order` may be written.
template <class Key, int kEach, bool kBlock, bool kFirst>
__device__ __forceinline__ void sort_elements(const Args& a, Row<Key> row, const SortTeam<kEach, kBlock, kFirst>& team,
                                              uint32_t count, bool given, bool live) {
  constexpr bool kWide = sizeof(Key) > 2;
  const uint32_t first = team.t * kEach;
  const int digit_bits = 32 - row.index_bits;
  if (kWide) row.align();
  int shift = row.lost();
  bool guesses = kWide && team.any(shift > 0);
  bool digits = false, by_index = false;  // `digits`: passes sort by digits of keys; `by_index`: by indices
  bool known = false;                     // `order` holds the order of the pass before
#pragma unroll 1
  for (;;) {
    uint32_t words[kEach], index[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t slot = team.t + j * team.size;
      words[j] = 0;
      if (by_index) {
        if (slot < a.k) words[j] = row.mask() - row.order[sort_place(slot)];
      } else if (slot < count) {
        const uint32_t at = known || given ? row.order[sort_place(slot)] : row.at_turn(slot);
        words[j] = row.word(at, shift, known ? slot : at);
      }
    }
    team.sort(words);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      index[j] = row.place(words[j]);
      if (digits && known && first + j < count) index[j] = row.order[sort_place(index[j])];
    }
    bool again = false;
    if constexpr (kWide) {
      if (guesses) {
        guesses = false;
        if (has_ties(row, count, team, words)) {
          Key key[kEach];
#pragma unroll
          for (int j = 0; j < kEach; ++j) key[j] = first + j < count ? row.key(index[j]) : Key{0};
          if (!mend<kMendRounds<Key>>(team, key, index)) {
            digits = true;
            shift = 0;
            continue;
          }
        }
      } else if (digits) {
        shift += digit_bits;
        again = team.any(shift < row.range);
      }
    }
    const bool rest = !again && !a.sorted && !by_index;  // the selected elements are listed already, in another order
    team.sync();
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (live && first + j < count) row.order[sort_place(first + j)] = static_cast<uint16_t>(index[j]);
    team.sync();
    if (!again && !rest) return;
    known = true;
    by_index = rest;
    if (by_index) digits = false;
  }
}

// Selects at least k elements of a row and at most a.most, among them the k best, and puts their indices into the row's
// order: those that reach a threshold, which is found by bisections with counts.
template <class Key, int kEach, bool kBlock>
struct Selection {
  // Narrow keys are compared with their indices. Of wider ones, the first 32 bits of the range are; then, if too many
  // elements tie with the threshold's, their last 32 bits, and then their indices.
  static constexpr bool kNarrow = sizeof(Key) <= 2;
  static constexpr int kRounds = kNarrow ? 1 : sizeof(Key) == 4 ? 2 : 3;

  const Args& a;
  const Row<Key>& row;
  const SortTeam<kEach, kBlock>& team;
  const int shift = max(0, row.range - 32);
  uint32_t floor = 0;  // the threshold's first 32 bits
  uint32_t sums = 0;   // see SortTeam::sum()

  __device__ __forceinline__ uint32_t at(int j) const { return row.at_turn(team.t + j * team.size); }
  __device__ __forceinline__ uint32_t word(int round, uint32_t at) const {
    if (kNarrow) return row.word(at, 0, at);
    if (round == kRounds - 1) return row.mask() - at;
    return static_cast<uint32_t>(row.part(at) >> (round ? 0 : shift));
  }

  // Finds the threshold, and returns a bit for each of the thread's elements that reaches it.
  __device__ __forceinline__ uint32_t find() {
    // Of the elements that tie with the threshold so far: how many are needed, how many there is room for, and how many
    // reach the lower end of the present bisection.
    uint32_t need = a.k, room = a.most, reached = row.n;
    uint32_t ties = 0, taken = 0;  // a bit for each of the thread's elements
#pragma unroll
    for (int j = 0; j < kEach; ++j) ties |= static_cast<uint32_t>(team.t + j * team.size < reached) << j;
#pragma unroll 1
    for (int round = 0;; ++round) {
      uint32_t words[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) words[j] = ties >> j & 1 ? word(round, at(j)) : 0;
      uint32_t low = 0, high = ~0u >> (32 - max(1, min(32, kNarrow ? row.range + row.index_bits : row.range)));
      if (kRounds > 1 && round) {  // ties may be equal in all the bits that follow, as padding is
        high = 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j) high = max(high, words[j]);
        high = team.reduce(high, larger<uint32_t>);
      }
#pragma unroll 1
      while (team.agree(reached > room && low < high)) {
        const uint32_t middle = high - (high - low) / 2;
        float counts[2] = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j) count_reaching(counts[j % 2], words[j], middle);
        const uint32_t count = team.sum(static_cast<uint32_t>(counts[0] + counts[1]), sums++);
        if (reached <= room) continue;
        if (count >= need) {
          low = middle, reached = count;
        } else {
          high = middle - 1;
        }
      }
      if (round == 0) floor = low;
      uint32_t reach = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) reach |= static_cast<uint32_t>(words[j] >= low) << j;
      reach &= ties;
      if constexpr (kRounds == 1) {
        return reach;
      } else {
        const bool open = reached > room && round < kRounds - 1;  // the team has no threshold yet
        if (!team.agree(open)) return taken | reach;
        uint32_t above = 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j) above |= static_cast<uint32_t>(words[j] > low) << j;
        const uint32_t more = team.sum(__popc(above), sums++), tied = team.sum(__popc(reach & ~above), sums++);
        taken |= open ? above : reach;
        ties = open ? reach & ~above : 0;
        if (open) need -= more, room -= more, reached = tied;
      }
    }
  }

  // Lists the elements, and returns how many there are.
  __device__ __forceinline__ uint32_t list(bool live) {
    const uint32_t taken = find();
    if (a.most == a.k) {
      list_by_index(taken, live);
      return a.k;
    }
    uint32_t to = team.sum_before(__popc(taken));
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (live && taken >> j & 1) row.order[sort_place(to++)] = static_cast<uint16_t>(at(j));
    team.sync();
    return team.sum(__popc(taken), sums);
  }

  // Lists exactly k elements in the order of their indices. Row::turn must be 0, so that slots are in this order, too.
  __device__ __forceinline__ void list_by_index(uint32_t taken, bool live) {
    const uint32_t lane = threadIdx.x % 32, warp = team.t / 32, warps = team.size / 32;
    const uint32_t lanes = kBlock ? 32 : team.size, mates = (kEveryLane >> (32 - lanes)) << (lane & ~(lanes - 1));
    // How many of the j-th elements of each warp's threads are taken. The counts stand behind the last sum, which other
    // warps may still read.
    uint32_t* const counts = reinterpret_cast<uint32_t*>(team.buffer) + 128;
    uint32_t to = 0;
    if constexpr (kBlock) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t all = __ballot_sync(kEveryLane, taken >> j & 1);
        if (lane == 0) counts[j * warps + warp] = __popc(all);
      }
      team.sync();
      if (warp == 0) {  // replaces each count by the sum of those before it
        static_assert(kEach % 32 == 16, "with an even number of warps, lanes have equally many");
        const uint32_t each = kEach * warps / 32;
        uint32_t sum = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < each; ++i) sum += counts[lane * each + i];
        uint32_t before = sum_up_to_lane(sum) - sum;
#pragma unroll 1
        for (uint32_t i = 0; i < each; ++i) {
          const uint32_t count = counts[lane * each + i];
          counts[lane * each + i] = before;
          before += count;
        }
      }
      team.sync();
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool take = taken >> j & 1;
      const uint32_t all = __ballot_sync(kEveryLane, take) & mates;
      if constexpr (kBlock) to = counts[j * warps + warp];
      const uint32_t place = to + __popc(all & ((1u << lane) - 1));
      if (live && take) row.order[sort_place(place)] = static_cast<uint16_t>(team.t + j * team.size);
      to += __popc(all);
    }
    team.sync();
  }
};

// Selects at least k elements of a row and at most a.most, among them the k best, by one warp; then sorts them, unless
// results are in the order of indices. A lane holds every 32nd element, so ballots give the order of indices.
//
// The threshold is sought between the least and the largest key, where a line through the last two counts meets the
// wanted number. Every fourth step halves the range, and later ones first narrow it to keys that occur, so that no data
// take long. Where too many elements equal the threshold, the first ones are taken.
template <class Key, int kEach, bool kMany>
__device__ __forceinline__ void pick(const Args& a, Row<Key>& row) {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  constexpr int kGroup = 4;  // slots of a lane that are skipped together, if no lane has an element there
  const uint32_t lane = threadIdx.x & 31;
  const auto each = [&](auto use) {
#pragma unroll
    for (int g = 0; g < kEach; g += kGroup) {
      if (g * 32 >= row.n) break;
#pragma unroll
      for (int j = g; j < g + kGroup; ++j) use(j);
    }
  };
  Word keys[kEach], low = static_cast<Key>(~Key{0}), high = 0;
  each([&](int j) {
    const uint32_t at = lane + j * 32;
    keys[j] = row.key(min(at, row.n - 1));
    low = smaller(low, keys[j]), high = larger(high, keys[j]);
    if (at >= row.n) keys[j] = 0;
  });
  const SortTeam<kEach, false> warp{32, lane, nullptr};
  low = warp.reduce(low, smaller<Word>);
  high = warp.reduce(high, larger<Word>);
  const Word largest = high;
  // `reached` elements reach `low`, `passed` exceed `high`.
  uint32_t reached = row.n, passed = 0;
  const float wanted = 0.5f * static_cast<float>(a.k + a.most);
#pragma unroll 1
  for (uint32_t step = 0; reached > a.most && low < high; ++step) {
    if (step >= 7 && step % 4 == 3) {
      Word least = static_cast<Key>(~Key{0}), most = 0;
      each([&](int j) {
        if (keys[j] >= low) least = smaller(least, keys[j]);
        if (keys[j] <= high) most = larger(most, keys[j]);
      });
      low = warp.reduce(least, smaller<Word>);
      high = warp.reduce(most, larger<Word>);
      if (low == high) break;
    }
    const Word range = high - low;
    float share = __fdividef(static_cast<float>(reached) - wanted, static_cast<float>(reached - passed));
    if (step % 4 == 3) share = 0.5f;
    const Word middle = low + larger(Word{1}, smaller(static_cast<Word>(share * static_cast<float>(range)), range));
    float counts[2] = {};
    each([&](int j) { count_reaching(counts[j % 2], keys[j], middle); });
    const uint32_t count = sum_of_warp(static_cast<uint32_t>(counts[0] + counts[1]));
    if (count >= a.k) {
      low = middle, reached = count;
    } else {
      high = middle - 1, passed = count;
    }
  }
  // A bit for each of the lane's elements that reach the threshold, or equal it.
  const auto bits_of = [&](auto is) {
    uint32_t bits = 0;
    each([&](int j) {
      if (is(keys[j]) && lane + j * 32 < row.n) bits |= 1u << j;
    });
    return bits;
  };
  uint32_t taken = bits_of([&](Word key) { return key >= low; });
  const uint32_t before = (1u << lane) - 1, slots = (row.n + 31) / 32;
  if (reached > a.most) {  // low == high
    const uint32_t ties = bits_of([&](Word key) { return key == low; });
    uint32_t left = a.k - passed;
#pragma unroll 1
    for (uint32_t j = 0; j < slots; ++j) {
      const bool tie = ties >> j & 1;
      const uint32_t all = __ballot_sync(kEveryLane, tie);
      if (tie && __popc(all & before) >= left) taken ^= 1u << j;
      left -= min(left, static_cast<uint32_t>(__popc(all)));
    }
    reached = a.k;
  }
  uint32_t to = 0;
#pragma unroll 4
  for (uint32_t j = 0; j < slots; ++j) {
    const bool take = taken >> j & 1;
    const uint32_t all = __ballot_sync(kEveryLane, take);
    if (take) row.order[sort_place(to + __popc(all & before))] = static_cast<uint16_t>(lane + j * 32);
    to += __popc(all);
  }
  __syncwarp();
  if (a.most == a.k) return;
  row.low = static_cast<Key>(low ? low - 1 : 0);
  row.high = static_cast<Key>(largest);
  row.range = 64 - __clzll(static_cast<uint64_t>(row.high - row.low));
  const auto sort = [&](auto few) {
    constexpr int kFew = decltype(few)::value;
    sort_elements<Key, kFew, false, false>(a, row, SortTeam<kFew, false>{32, lane, nullptr}, reached, true, true);
  };
  if constexpr (sizeof(Key) == 8)  // narrower keys with so small k mostly take other kernels
    if (a.most <= 64) return sort(std::integral_constant<int, 2>());
  if constexpr (kMany) {
    sort(std::integral_constant<int, 16>());
  } else if (a.most <= 128) {
    sort(std::integral_constant<int, 4>());
  } else {
    sort(std::integral_constant<int, 8>());
  }
}

template <class Key, int kEach, bool kBlock, Picks kPicks>
__device__ __forceinline__ void sort_row(const Args& a, Row<Key> row, const SortTeam<kEach, kBlock>& team, bool live) {
  if constexpr (kEach == kPickEach) return pick<Key, kEach, kPicks == Picks::kHundreds>(a, row);
  row.low = 0;
  row.range = 8 * sizeof(Key);
  if constexpr (sizeof(Key) > 2) {
    row.high = 0;
    row.low = static_cast<Key>(~Key{0});
#pragma unroll 8
    for (uint32_t slot = team.t; slot < row.n; slot += team.size) {
      const Key key = row.key(row.at_turn(slot));
      row.low = smaller(row.low, static_cast<Key>(key - 1)), row.high = larger(row.high, key);
    }
    row.low = team.reduce(row.low, [](Key p, Key q) { return smaller(p, q); });
    row.high = team.reduce(row.high, [](Key p, Key q) { return larger(p, q); });
    if (row.high == 0) row.low = 0;  // all keys are 0
    row.range = 64 - __clzll(static_cast<uint64_t>(row.high - row.low));
  }
  if constexpr (kPicks != Picks::kAll) {
    Selection<Key, kEach, kBlock> selection{a, row, team};
    const uint32_t count = selection.list(live);
    if (a.most == a.k) return;
    // What is sorted is in a part of the row's range.
    const auto least = static_cast<Key>(static_cast<Key>(selection.floor) << selection.shift);
    if (sizeof(Key) > 2 && least) {
      row.low = static_cast<Key>(row.low + least - 1);
      row.range = 64 - __clzll(static_cast<uint64_t>(row.high - row.low));
    }
    const SortTeam<kSortFew, kBlock, kBlock> few{kBlock ? a.most / kSortFew : team.size, team.t, team.buffer};
    if (!kBlock || team.t < few.size) sort_elements(a, row, few, count, true, live);
    if (kBlock) __syncthreads();
  } else {
    sort_elements(a, row, team, row.n, false, live);
  }
}

template <class Key, int kEach, bool kBlock, Picks kPicks>
__global__ void __launch_bounds__(kBlock ? 512 : kSortBlock, kBlock ? (kPicks == Picks::kAll ? 1 : 2)
                                                             : kPicks != Picks::kAll
                                                                 ? pick_residents(kEach, sizeof(Key))
                                                                 : sort_residents(kEach))
    sort_kernel(const __grid_constant__ Args a) {
  unsigned char* shared = dynamic_shared_memory();
  const SortTeam<kEach, kBlock> team{a.team, threadIdx.x & (a.team - 1), reinterpret_cast<uint4*>(shared)};
  if (kBlock) shared += sizeof(uint32_t) * (kPicks == Picks::kAll ? kEach : kSortFew) * blockDim.x;
  // The block's rows, and where they start.
  const bool whole = a.width == a.inner;
  const int64_t outer = whole ? int64_t{blockIdx.x} * a.outers : blockIdx.x / a.tiles;
  const uint32_t inner = whole ? 0 : blockIdx.x % a.tiles * a.width;
  const uint32_t outers = static_cast<uint32_t>(min(int64_t{a.outers}, a.outer - outer));
  const uint32_t there = static_cast<uint32_t>(min(int64_t{a.width}, a.inner - inner));
  const Key* const from = static_cast<const Key*>(a.x) + outer * a.length * a.inner + inner;
  const uint32_t ahead = a.inner == 1 ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % 16) : 0;
  Key* tile = reinterpret_cast<Key*>(shared + ahead);
  const auto tile_bytes = static_cast<uint32_t>(sort_tile_bytes(a.outers * a.length * a.pitch, sizeof(Key), a.inner));
  uint16_t* orders = reinterpret_cast<uint16_t*>(shared + tile_bytes);
  load_tile(a, from, tile, outers * a.length, there);
  __syncthreads();

  const bool copies = a.k == a.length && !a.sorted;  // the result is the whole row as it is
  const uint32_t rows = outers * a.width, teams = blockDim.x / a.team;
  for (uint32_t start = 0; start < rows && !copies; start += teams) {
    const uint32_t mine = start + threadIdx.x / a.team, r = min(mine, rows - 1);
    if (!kBlock && !__any_sync(kEveryLane, mine < rows)) break;
    const uint32_t o = quotient(r, a.width, a.per_width), column = r - o * a.width;
    Row<Key> row;
    const uint32_t at = o * a.length * a.pitch + (column < there ? column : 0);
    row.keys = tile + at;
    row.order = orders + r * a.order_pitch;
    row.step = a.pitch, row.n = a.length;
    const bool turns = a.pitch == 1 && !(kPicks != Picks::kAll && (kEach == kPickEach || a.most == a.k));
    row.turn = turns ? at / static_cast<uint32_t>(128 / sizeof(Key)) * a.team % a.length : 0;
    row.key_order = &a.sort_order;
    row.index_bits = max(1, 32 - __clz(a.length - 1));
    sort_row<Key, kEach, kBlock, kPicks>(a, row, team, mine < rows);
  }
  __syncthreads();

  const int64_t base = outer * a.k * a.inner + inner;
#pragma unroll 4
  for (uint32_t e = threadIdx.x; e < rows * a.k; e += blockDim.x) {
    const uint32_t q = quotient(e, a.width, a.per_width), column = e - q * a.width;
    const uint32_t o = quotient(q, a.k, a.per_k), place = q - o * a.k;
    if (column >= there) continue;
    const uint32_t index = copies ? place : orders[(o * a.width + column) * a.order_pitch + sort_place(place)];
    const int64_t to = base + q * a.inner + column;
    if (a.values) static_cast<Key*>(a.values)[to] = tile[(o * a.length + index) * a.pitch + column];
    if (a.indices) a.indices[to] = static_cast<int32_t>(index);
  }
}

}  // namespace

cudaError_t launch_sort(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  SortOrder order;
  order.ascending.order = problem.order;
  return launch_sort(stream, plan, problem, order, buffers);
}

cudaError_t launch_sort(cudaStream_t stream, const Plan& plan, const Problem& problem, const SortOrder& order,
                        const Buffers& buffers) {
  const SortShape& shape = plan.sort;
  Args a = {call_of(problem, buffers)};
  a.sort_order = order;
  a.outer = problem.rows.outer;
  a.team = static_cast<uint32_t>(shape.team);
  a.outers = static_cast<uint32_t>(shape.outers);
  a.width = static_cast<uint32_t>(shape.width);
  a.pitch = static_cast<uint32_t>(shape.pitch);
  a.order_pitch = static_cast<uint32_t>(shape.order);
  a.tiles = static_cast<uint32_t>((a.inner + shape.width - 1) / shape.width);
  a.per_width = reciprocal(a.width);
  a.per_k = reciprocal(a.k);
  const int key_bytes = problem.key_bits / 8;
  a.most = static_cast<uint32_t>(sort_selection(shape, problem.rows.length, problem.k, key_bytes, problem.sorted));
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    const bool picks = a.most > 0;
    constexpr Picks kAll = Picks::kAll, kFew = Picks::kFew;
    if constexpr (sizeof(Key) > 1 && sizeof(Key) < 8) {
      const bool sorts_hundreds = a.most > 256 && a.most != a.k;
      if (picks && shape.each == kPickEach && sorts_hundreds)
        return launch(stream, config, sort_kernel<Key, kPickEach, false, Picks::kHundreds>, a);
    }
    if constexpr (sizeof(Key) > 1)
      if (picks && shape.each == kPickEach) return launch(stream, config, sort_kernel<Key, kPickEach, false, kFew>, a);
    if (shape.each == 4) return launch(stream, config, sort_kernel<Key, 4, true, kAll>, a);
    if (shape.team > 32)
      return launch(stream, config, picks ? sort_kernel<Key, 16, true, kFew> : sort_kernel<Key, 16, true, kAll>, a);
    if (picks) return launch(stream, config, sort_kernel<Key, 16, false, kFew>, a);
    const auto kernel = shape.each == 8 ? sort_kernel<Key, 8, false, kAll> : sort_kernel<Key, 16, false, kAll>;
    return launch(stream, config, kernel, a);
  });
}

}  // namespace jaxgpuops::topk
