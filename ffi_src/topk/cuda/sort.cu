// Top-k of rows of up to 8192 elements by sorting all of them, for large k and for 64-bit keys. A team of threads,
// which is a part of a warp or a block, sorts a row in registers. A thread has 8 or 16 elements.
//
// Words of 32 bits are sorted. A word has as many bits of the key as fit above the element's index. Keys of up to 16
// bits fit whole. Of a wider key, the least key of the row is subtracted, and the top bits of the difference are taken.
// That orders most data except for a few neighbours, which then swap places according to their whole keys. If that
// takes more than a few rounds, the row is sorted by digits of the key instead, from the lowest digit, and each pass
// keeps the order of the one before. For results in the order of indices, the selected elements are sorted once more by
// index. If k is small, a bisection by counts finds a threshold, and only the elements that reach it are sorted.
//
// A block copies its rows to shared memory once, and results leave it in the order of memory. Bytes moved: the input
// once, and k results (value and index). Sources: bb_segsort (Hou et al., ICS 2017), Batcher's networks.
#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "topk/cuda/sort_rows.h"
#include "topk/cuda/sort_team.cuh"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {     // values or indices may be null
  SortOrder sort_order;  // words are sorted downwards, so keys of this order are inverted; Call::order is not used
  int64_t outer;
  uint32_t team, outers, width, pitch, order_pitch, tiles;  // see SortShape; tiles of an outer index
  uint32_t per_width, per_k;                                // reciprocals: the high word of i * per_width is i / width
  uint32_t most;  // the most elements that are selected and sorted instead of the row; 0: rows are sorted whole
};

template <class Key>
// 64-bit keys need more rounds, since a word has fewer bits of their mantissa.
constexpr int kMendRounds = sizeof(Key) == 8 ? 12 : 6;
constexpr int kFew = 4;  // elements of a thread if a selection is sorted

// Loads `rows` times `width` neighbouring elements into shared memory; only `there` of them exist.
template <class Key>
__device__ __forceinline__ void load_tile(const Args& a, const Key* from, Key* to, uint32_t rows, uint32_t there) {
  const uint32_t count = rows * a.width;
  uint32_t done = 0;
  if (a.inner == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    constexpr uint32_t kVector = 16 / sizeof(Key);
    for (uint32_t v = threadIdx.x; v < count / kVector; v += blockDim.x)
      copy_async(to + v * kVector, from + v * kVector);
    done = count / kVector * kVector;
  }
#pragma unroll 4
  for (uint32_t e = done + threadIdx.x; e < count; e += blockDim.x) {
    const uint32_t row = a.width == 1 ? e : __umulhi(e, a.per_width), column = e - row * a.width;
    const Key* source = from + row * a.inner + column;
    if (column >= there) continue;
    if constexpr (sizeof(Key) >= 4) {
      copy_async<sizeof(Key)>(to + row * a.pitch + column, source);
    } else {
      to[row * a.pitch + column] = *source;
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
  Key low;         // the least key
  int range;       // bits of the largest key less `low`
  int index_bits;  // bits of a word that hold the index

  __device__ __forceinline__ Key key(uint32_t index) const { return sort_key(keys[index * step], *key_order); }
  // Returns the element that a slot has. Teams start at different elements, so that rows whose length is a multiple of
  // a cache line do not use the same banks.
  __device__ __forceinline__ uint32_t at_turn(uint32_t slot) const {
    return slot + turn >= n ? slot + turn - n : slot + turn;
  }
  __device__ __forceinline__ uint32_t mask() const { return (1u << index_bits) - 1; }
  __device__ __forceinline__ uint32_t word(uint32_t index, int shift, uint32_t place) const {
    return static_cast<uint32_t>((key(index) - low) >> shift) << index_bits | (mask() - place);
  }
  __device__ __forceinline__ uint32_t place(uint32_t word) const { return mask() - (word & mask()); }
};

// Sorts neighbours whose words have the same key bits by their whole keys. Returns whether all elements are in order
// then.
template <class Key, int kEach, bool kBlock>
__device__ __forceinline__ bool mend(const Row<Key>& row, uint32_t count, const SortTeam<kEach, kBlock>& team,
                                     uint32_t (&index)[kEach]) {
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

// Sorts `count` elements: all of the row, or those whose indices are in `order`. `live`: the team has a row, so that
// `order` may be written.
template <class Key, int kEach, bool kBlock>
__device__ __forceinline__ void sort_elements(const Args& a, const Row<Key>& row, const SortTeam<kEach, kBlock>& team,
                                              uint32_t count, bool given, bool live) {
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
        if (!mend(row, count, team, index)) {
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

// Finds a threshold that k elements reach and at most `most`, and puts the indices of these into the row's order.
// Returns how many there are, or 0 if too many equal elements make that impossible.
template <class Key, int kEach, bool kBlock>
__device__ __forceinline__ uint32_t select(const Args& a, const Row<Key>& row, const SortTeam<kEach, kBlock>& team,
                                           bool live) {
  const int shift = max(0, row.range - (32 - row.index_bits));
  uint32_t words[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t slot = team.t + j * team.size, at = slot < row.n ? row.at_turn(slot) : 0;
    words[j] = slot < row.n ? row.word(at, shift, at) : 0;
  }
  // If words have all bits of the key, any word may be the threshold.
  const int granularity = shift ? row.index_bits : 0;
  const int bits = min(32, row.range + row.index_bits);
  uint32_t low = 0, high = ~0u >> (32 - bits) >> granularity, reached = row.n;
#pragma unroll 1
  for (bool open = true; team.any(open);) {
    const uint32_t middle = high - (high - low) / 2;
    uint32_t count = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) count += words[j] >= middle << granularity;
    count = team.reduce(count, [](uint32_t p, uint32_t q) { return p + q; });
    if (open && count >= a.k) {
      low = middle, reached = count;
    } else if (open) {
      high = middle - 1;
    }
    open = reached > a.most && low < high;
  }
  if (team.any(reached > a.most)) return 0;
  uint32_t mine = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) mine += words[j] >= low << granularity;
  uint32_t to = team.sum_before(mine);
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (live && words[j] >= low << granularity)
      row.order[sort_place(to++)] = static_cast<uint16_t>(row.place(words[j]));
  team.sync();
  return reached;
}

template <class Key, int kEach, bool kBlock>
__device__ __forceinline__ void sort_row(const Args& a, Row<Key> row, const SortTeam<kEach, kBlock>& team, bool live) {
  row.low = 0;
  row.range = 8 * sizeof(Key);
  if constexpr (sizeof(Key) > 2) {
    Key high = 0;
    row.low = static_cast<Key>(~Key{0});
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t slot = team.t + j * team.size;
      if (slot >= row.n) break;
      const Key key = row.key(row.at_turn(slot));
      row.low = smaller(row.low, key), high = larger(high, key);
    }
    row.low = team.reduce(row.low, [](Key p, Key q) { return smaller(p, q); });
    high = team.reduce(high, [](Key p, Key q) { return larger(p, q); });
    row.range = 64 - __clzll(static_cast<uint64_t>(high - row.low));
  }
  if constexpr (kEach > kFew) {
    if (a.most) {
      if (const uint32_t count = select(a, row, team, live)) {
        sort_elements(a, row, SortTeam<kFew, kBlock>{team.size, team.t, team.buffer}, count, true, live);
        return;
      }
    }
  }
  sort_elements(a, row, team, row.n, false, live);
}

template <class Key, int kEach, bool kBlock>
__global__ void __launch_bounds__(kBlock ? 512 : kSortBlock, kBlock       ? 1
                                                             : kEach == 8 ? 4
                                                                          : 3)
    sort_kernel(const __grid_constant__ Args a) {
  unsigned char* shared = dynamic_shared_memory();
  const SortTeam<kEach, kBlock> team{a.team, threadIdx.x & (a.team - 1), reinterpret_cast<uint4*>(shared)};
  if (kBlock) shared += sizeof(uint32_t) * kEach * blockDim.x;
  // The block's rows, and where they start.
  const bool whole = a.width == a.inner;
  const int64_t outer = whole ? int64_t{blockIdx.x} * a.outers : blockIdx.x / a.tiles;
  const uint32_t inner = whole ? 0 : blockIdx.x % a.tiles * a.width;
  const uint32_t outers = static_cast<uint32_t>(min(int64_t{a.outers}, a.outer - outer));
  const uint32_t there = static_cast<uint32_t>(min(int64_t{a.width}, a.inner - inner));
  Key* tile = reinterpret_cast<Key*>(shared);
  const uint32_t tile_bytes = (a.outers * a.length * a.pitch * static_cast<uint32_t>(sizeof(Key)) + 15) / 16 * 16;
  uint16_t* orders = reinterpret_cast<uint16_t*>(shared + tile_bytes);
  load_tile(a, static_cast<const Key*>(a.x) + outer * a.length * a.inner + inner, tile, outers * a.length, there);
  __syncthreads();

  const bool copies = a.k == a.length && !a.sorted;  // the result is the whole row as it is
  const uint32_t rows = outers * a.width, teams = blockDim.x / a.team;
  for (uint32_t start = 0; start < rows && !copies; start += teams) {
    const uint32_t mine = start + threadIdx.x / a.team, r = min(mine, rows - 1);
    if (!kBlock && !__any_sync(kEveryLane, mine < rows)) break;
    const uint32_t o = a.width == 1 ? r : __umulhi(r, a.per_width), column = r - o * a.width;
    Row<Key> row;
    const uint32_t at = o * a.length * a.pitch + (column < there ? column : 0);
    row.keys = tile + at;
    row.order = orders + r * a.order_pitch;
    row.step = a.pitch, row.n = a.length;
    row.turn = a.pitch == 1 ? at / static_cast<uint32_t>(128 / sizeof(Key)) * a.team % a.length : 0;
    row.key_order = &a.sort_order;
    row.index_bits = max(1, 32 - __clz(a.length - 1));
    sort_row(a, row, team, mine < rows);
  }
  __syncthreads();

  const int64_t base = outer * a.k * a.inner + inner;
#pragma unroll 4
  for (uint32_t e = threadIdx.x; e < rows * a.k; e += blockDim.x) {
    const uint32_t q = a.width == 1 ? e : __umulhi(e, a.per_width), column = e - q * a.width;
    const uint32_t o = a.k == 1 ? q : __umulhi(q, a.per_k), place = q - o * a.k;
    if (column >= there) continue;
    const uint32_t index = copies ? place : orders[(o * a.width + column) * a.order_pitch + sort_place(place)];
    const int64_t to = base + q * a.inner + column;
    if (a.values) static_cast<Key*>(a.values)[to] = tile[(o * a.length + index) * a.pitch + column];
    if (a.indices) a.indices[to] = static_cast<int32_t>(index);
  }
}

uint32_t reciprocal(int64_t divisor) { return static_cast<uint32_t>((int64_t{1} << 32) / divisor + 1); }

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
  a.per_width = a.width == 1 ? 0 : reciprocal(a.width);
  a.per_k = reciprocal(a.k);
  if (shape.each > kFew && 5 * a.k <= 4 * kFew * a.team) a.most = kFew * a.team;
  if (a.length <= 128 || 2 * a.most > a.length) a.most = 0;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if (shape.team > 32) return launch(stream, config, sort_kernel<Key, 16, true>, a);
    return launch(stream, config, shape.each == 8 ? sort_kernel<Key, 8, false> : sort_kernel<Key, 16, false>, a);
  });
}

}  // namespace jaxgpuops::topk
