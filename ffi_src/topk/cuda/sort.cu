// Top-k of rows of up to 8192 elements by sorting all of them, for large k and for 64-bit keys. A team of threads,
// which is a part of a warp or a block, sorts a row in registers. A thread has 8 or 16 elements. Where whole
// rows are sorted, it has 4 if these are short and few, or 32, so that a warp holds one of many rows.
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
// itself, and then nothing is sorted.
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
  uint32_t most;                                            // see sort_selection()
};

template <class Key>
// 64-bit keys need more rounds, since a word has fewer bits of their mantissa.
constexpr int kMendRounds = sizeof(Key) == 8 ? 12 : 6;
constexpr int sort_residents(int each) { return each == 8 ? 4 : each == 16 ? 3 : 2; }  // blocks of a multiprocessor
constexpr int pick_residents(size_t key_bytes, int each) {
  return each == 16 ? 4 : key_bytes == 8 || each > 32 ? 2 : 3;
}

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
};

// Sorts neighbours whose words have the same key bits by their whole keys. Returns whether all elements are in order
// then.
template <class Key, int kEach, class Team>
__device__ __forceinline__ bool mend(const Row<Key>& row, uint32_t count, const Team& team, uint32_t (&index)[kEach]) {
  const uint32_t first = team.t * kEach;
  Key key[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) key[j] = first + j < count ? row.key(index[j]) : Key{0};
#pragma unroll 1
  for (int round = 0; round < kMendRounds<Key>; ++round) {
    bool swapped = false;
    const auto exchange = [&](int i, int j) {
      if (key[i] >= key[j]) return;
      const Key k = key[i];
      const uint32_t at = index[i];
      key[i] = key[j], index[i] = index[j];
      key[j] = k, index[j] = at;
      swapped = true;
    };
#pragma unroll
    for (int j = 0; j + 1 < kEach; j += 2) exchange(j, j + 1);
    const Key next = team.from(1, key[0]), before = team.from(-1, key[kEach - 1]);
    const uint32_t next_index = team.from(1, index[0]), index_before = team.from(-1, index[kEach - 1]);
#pragma unroll
    for (int j = 1; j + 1 < kEach; j += 2) exchange(j, j + 1);
    if (team.t + 1 < team.size && key[kEach - 1] < next)
      key[kEach - 1] = next, index[kEach - 1] = next_index, swapped = true;
    if (team.t > 0 && before < key[0]) key[0] = before, index[0] = index_before, swapped = true;
    if (!team.any(swapped)) return true;
  }
  return false;
}

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
__device__ __forceinline__ void sort_elements(const Args& a, const Row<Key>& row,
                                              const SortTeam<kEach, kBlock, kFirst>& team, uint32_t count, bool given,
                                              bool live) {
  constexpr bool kWide = sizeof(Key) > 2;
  const uint32_t first = team.t * kEach;
  const int digit_bits = 32 - row.index_bits;
  int shift = kWide ? max(0, row.range - digit_bits) : 0;
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
        if (has_ties(row, count, team, words) && !mend(row, count, team, index)) {
          digits = true;
          shift = 0;
          continue;
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

// Selects at least k elements of a row and at most a.most, among them the k best: those that reach a threshold, and of
// those that equal it the first ones, if there are too many. The team is half a warp, a warp or a block.
//
// The threshold is sought between the least and the largest key, where a line through the last two counts meets the
// wanted number; every fourth step halves the range, so that no data take long.
template <class Key, int kEach, bool kBlock>
struct Selection {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  using Bits = std::conditional_t<(kEach > 32), uint64_t, uint32_t>;  // one for each of the thread's elements
  static constexpr int kGroup = 4;  // slots that are skipped together, if no thread has an element there
  static constexpr uint32_t kLanes = kEach == 16 && !kBlock ? 16 : 32;

  const Args& a;
  const Row<Key>& row;
  const SortTeam<kEach, kBlock>& team;
  Word low = 0, largest = 0;  // the threshold, and the largest key of the row

  // Whether a condition that the threads of a team have in common holds for any team of the warp.
  __device__ __forceinline__ static bool any(bool b) { return kLanes == 32 ? b : __any_sync(kEveryLane, b); }
  __device__ __forceinline__ uint32_t at(int j) const { return team.t + j * (kBlock ? team.size : kLanes); }
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
#pragma unroll
    for (int g = 0; g < kEach; g += kGroup) {
      if (!kBlock && g * kLanes >= row.n) break;
#pragma unroll
      for (int j = g; j < g + kGroup; ++j) use(j);
    }
  }

  // Ranks the elements of the team that have a bit by their indices, and calls use(j, rank) for each of the thread's
  // slots, with the rank of the next such element where the thread has none. All threads call it together.
  template <class Use>
  __device__ __forceinline__ void rank(Bits bits, Use use) const {
    const uint32_t lane = threadIdx.x % 32, before = (1u << lane) - 1;
    if constexpr (!kBlock) {
      const uint32_t mates = kLanes == 32 ? kEveryLane : 0xffffu << (lane & 16);
      uint32_t to = 0;
#pragma unroll 4
      for (uint32_t j = 0; j * kLanes < row.n; ++j) {
        const uint32_t all = __ballot_sync(kEveryLane, bits >> j & 1) & mates;
        use(j, to + __popc(all & before));
        to += __popc(all);
      }
    } else {
      // How many of the j-th elements of each warp's threads have a bit. The counts stand behind those of sum(), which
      // other warps may still read.
      const uint32_t warp = team.t / 32, warps = team.size / 32;
      uint32_t* const counts = reinterpret_cast<uint32_t*>(team.buffer) + 128;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t all = __ballot_sync(kEveryLane, bits >> j & 1);
        if (lane == 0) counts[j * warps + warp] = __popc(all);
      }
      team.sync();
      if (warp == 0) {  // replaces each count by the sum of those before it
        static_assert(!kBlock || kEach % 32 == 16, "with an even number of warps, lanes have equally many");
        const uint32_t own = kEach * warps / 32;
        uint32_t sum = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < own; ++i) sum += counts[lane * own + i];
        uint32_t above = sum_up_to_lane(sum) - sum;
#pragma unroll 1
        for (uint32_t i = 0; i < own; ++i) {
          const uint32_t count = counts[lane * own + i];
          counts[lane * own + i] = above;
          above += count;
        }
      }
      team.sync();
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        use(j, counts[j * warps + warp] + __popc(__ballot_sync(kEveryLane, bits >> j & 1) & before));
      team.sync();
    }
  }

  // Lists the elements in the order of their indices, and returns how many there are.
  __device__ __forceinline__ uint32_t list(bool live) {
    Word keys[kEach], high = 0;
    low = static_cast<Key>(~Key{0});
    each([&](int j) {
      keys[j] = row.key(min(at(j), row.n - 1));
      low = smaller(low, keys[j]), high = larger(high, keys[j]);
      if (at(j) >= row.n) keys[j] = 0;
    });
    low = team.reduce(low, smaller<Word>);
    largest = high = team.reduce(high, larger<Word>);
    // `reached` elements reach `low`, `passed` exceed `high`.
    uint32_t reached = row.n, passed = 0;
    const float wanted = 0.5f * static_cast<float>(a.k + a.most);
#pragma unroll 1
    for (uint32_t step = 0; any(reached > a.most && low < high); ++step) {
      const Word range = high - low;
      float share = __fdividef(static_cast<float>(reached) - wanted, static_cast<float>(reached - passed));
      if (step % 4 == 3) share = 0.5f;
      const Word middle = low + larger(Word{1}, smaller(static_cast<Word>(share * static_cast<float>(range)), range));
      float counts[2] = {};
      each([&](int j) { count_reaching(counts[j % 2], keys[j], middle); });
      const uint32_t count = team.sum(static_cast<uint32_t>(counts[0] + counts[1]), step);
      if (reached <= a.most || low == high) continue;
      if (count >= a.k) {
        low = middle, reached = count;
      } else {
        high = middle - 1, passed = count;
      }
    }
    Bits taken = 0;
    each([&](int j) {
      if (keys[j] >= low && at(j) < row.n) taken |= Bits{1} << j;
    });
    const bool crowded = reached > a.most;  // all of them that do not equal the threshold, the k-th key, exceed it
    if (any(crowded)) {
      Bits ties = 0;
      each([&](int j) {
        if (crowded && keys[j] == low && at(j) < row.n) ties |= Bits{1} << j;
      });
      if (crowded) reached = a.k;
      rank(ties, [&](uint32_t j, uint32_t place) {
        if ((ties >> j & 1) && place >= a.k - passed) taken ^= Bits{1} << j;
      });
    }
    rank(taken, [&](uint32_t j, uint32_t place) {
      if (live && (taken >> j & 1)) row.order[sort_place(place)] = static_cast<uint16_t>(at(j));
    });
    team.sync();
    return reached;
  }
};

template <class Key, int kEach, bool kBlock, bool kPicks>
__device__ __forceinline__ void sort_row(const Args& a, Row<Key> row, const SortTeam<kEach, kBlock>& team, bool live) {
  if constexpr (kPicks) {
    constexpr uint32_t kLanes = Selection<Key, kEach, kBlock>::kLanes;
    Selection<Key, kEach, kBlock> selection{a, row, team};
    const uint32_t count = selection.list(live);
    if (selects_exactly(a.length, a.k, sizeof(Key), a.sorted)) return;
    // What is sorted is in a part of the row's range.
    row.low = static_cast<Key>(selection.low ? selection.low - 1 : 0);
    row.range = 64 - __clzll(static_cast<uint64_t>(selection.largest - row.low));
    const auto sort = [&](auto few, uint32_t threads) {
      constexpr int kFew = decltype(few)::value;
      sort_elements(a, row, SortTeam<kFew, kBlock, kBlock>{threads, team.t, team.buffer}, count, true, live);
    };
    if constexpr (kBlock) {
      if (team.t < a.most / kSortFew) sort(std::integral_constant<int, kSortFew>(), a.most / kSortFew);
      __syncthreads();
    } else if (a.most > kLanes * 4) {
      sort(std::integral_constant<int, 8>(), kLanes);
    } else if (kLanes == 16 || a.most > kLanes * 2) {
      sort(std::integral_constant<int, 4>(), kLanes);
    } else {
      sort(std::integral_constant<int, 2>(), kLanes);
    }
  } else {
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
      row.low = team.reduce(row.low, smaller<Key>);
      row.high = team.reduce(row.high, larger<Key>);
      if (row.high == 0) row.low = 0;  // all keys are 0
      row.range = 64 - __clzll(static_cast<uint64_t>(row.high - row.low));
    }
    sort_elements(a, row, team, row.n, false, live);
  }
}

template <class Key, int kEach, bool kBlock, bool kPicks>
__global__ void __launch_bounds__(kBlock ? 512 : kSortBlock, kBlock   ? kPicks + 1
                                                             : kPicks ? pick_residents(sizeof(Key), kEach)
                                                                      : sort_residents(kEach))
    sort_kernel(const __grid_constant__ Args a) {
  unsigned char* shared = dynamic_shared_memory();
  const SortTeam<kEach, kBlock> team{a.team, threadIdx.x & (a.team - 1), reinterpret_cast<uint4*>(shared)};
  if (kBlock) shared += sizeof(uint32_t) * (kPicks ? kSortFew : kEach) * blockDim.x;
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
    const bool turns = a.pitch == 1 && !kPicks;
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
    if constexpr (sizeof(Key) <= kMostManyBytes)
      if (shape.each == kMostPickEach) return launch(stream, config, sort_kernel<Key, kMostPickEach, false, true>, a);
    if (picks && shape.each == 16 && shape.team <= 32)
      return launch(stream, config, sort_kernel<Key, 16, false, true>, a);
    if (picks && shape.each == kManyEach) return launch(stream, config, sort_kernel<Key, kManyEach, false, true>, a);
    if constexpr (sizeof(Key) <= kMostManyBytes)
      if (shape.each == kManyEach) return launch(stream, config, sort_kernel<Key, kManyEach, false, false>, a);
    if (shape.each == 4) return launch(stream, config, sort_kernel<Key, 4, true, false>, a);
    if (shape.team > 32)
      return launch(stream, config, picks ? sort_kernel<Key, 16, true, true> : sort_kernel<Key, 16, true, false>, a);
    const auto kernel = shape.each == 8 ? sort_kernel<Key, 8, false, false> : sort_kernel<Key, 16, false, false>;
    return launch(stream, config, kernel, a);
  });
}

}  // namespace jaxgpuops::topk
