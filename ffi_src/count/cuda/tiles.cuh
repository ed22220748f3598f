// The kernels of segments of rows whose ids ascend, or which are read in the order of their ids (order.cu, sort/). A
// tile is a fixed number of rows, however long the segments are, and belongs to a team of neighbouring threads: as many
// as a row has vectors of 16 bytes, of 8, or elements. Each lane reads its vector of the tile's rows in order, and
// keeps the current segment in registers. A segment within a tile is stored at once. If a segment crosses tiles, each
// tile stores a partial result, and a second kernel folds these in order. So there are no atomics, and the order of
// additions depends on the number of rows and the ids alone.
//
// Bytes moved: each row is read once, with 4 or 8 bytes of id and position; each segment is written once; and up to two
// partial results of each tile are written and read. Segments without rows are filled beside, so that nothing is
// written twice: a few by the tile that has the next row, and long gaps by blocks of their own, which search the ids
// for them.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/args.cuh"
#include "sort/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;
constexpr int kJoinThreads = 512;  // threads of a block of segment_join_kernel
// At most 2^kJoinBits of these threads share a row, so that a block adds up many rows at a time.
constexpr int kJoinBits = 3;
// Tiles fill gaps of up to so many segments. Cells are as long, so that a longer gap has the first segment of a cell.
constexpr int kGap = 32;
constexpr int kRows = 8;      // neighbouring rows that a lane has where a row is one element
constexpr int kTileRows = 4;  // rows that a lane loads before it folds them
// Blocks of tiles that a multiprocessor holds: more would leave a lane with many elements too few registers.
constexpr int tile_blocks(int count) { return count > 4 ? 3 : 4; }

// ---- Kernels --------------------------------------------------------------------------------------------------------

struct Args : SegmentArgs {
  const int32_t* positions;  // the row that each sorted id belongs to; null: the ids of the rows ascend as they are
  int64_t tails_at, rows, tiles;
  int64_t lanes = 0;    // of segment_tiles_kernel: threads that share a row
  int64_t fillers = 0;  // and its blocks that fill long gaps
  // The members below are for segment_join_kernel.
  int64_t chunks = 0;  // chunks that the columns are cut into; a team has one of them
  int team_bits = 0;
  int64_t shares = 0;  // the partial results of a segment are cut into so many shares; one team of a block folds each
  bool overlap;        // whether a kernel may start before the one before it ends

  // Finds the order of the ids first if they do not ascend.
  Args(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers,
       cudaError_t& status)
      : SegmentArgs(problem, buffers),
        positions(nullptr),
        tails_at(plan.tails),
        rows(plan.rows),
        tiles(plan.tiles),
        overlap(plan.overlap) {
    status = cudaSuccess;
    if (plan.algorithm == Segmenting::kOrdered && length > 0) {
      auto* const sorted = reinterpret_cast<int32_t*>(workspace);
      auto* const order = reinterpret_cast<int32_t*>(workspace + outer * plan.order.positions);
      status = plan.order.ranges > 0 ? launch_segment_order(stream, plan, problem, ids, sorted, order)
                                     : sort::launch_sort(stream, plan.order.sort, order_of(problem), ids, sorted, order,
                                                         workspace + outer * plan.order.workspace);
      ids = sorted;
      positions = order;
    }
    workspace += outer * plan.order.bytes;
    workspace_bytes = 2 * plan.tails;
  }

  // Where an id stands among the segments: -1 before all of them, the number of segments behind them.
  __device__ int64_t place_of(int32_t id) const {
    const int64_t place = positions ? static_cast<int64_t>(static_cast<uint32_t>(id)) : id;
    return max(int64_t{-1}, min(place, segments));
  }
};

// Where an outer index has its ids or its data. A function of its own, since the divisions are many instructions.
__device__ __noinline__ int64_t offset_of(const IndexMap& map, int64_t o) { return map(o); }

// kCount neighbouring elements, which are loaded and stored as one vector.
template <class Bits, int kCount>
struct alignas(kCount * sizeof(Bits)) Elements {
  Bits value[kCount];
};

// Loads kRows neighbouring numbers as packs of 16 bytes.
template <class Bits, class T>
__device__ __forceinline__ void load_packs(T (&to)[kRows], const void* from) {
  constexpr int kPerPack = 16 / sizeof(Bits);
  static_assert(sizeof(T) == sizeof(Bits) && kRows % kPerPack == 0);
#pragma unroll
  for (int i = 0; i < kRows / kPerPack; ++i) {
    const Pack pack = static_cast<const Pack*>(from)[i];
#pragma unroll
    for (int e = 0; e < kPerPack; ++e) to[i * kPerPack + e] = bits_as<T>(get<Bits>(pack, e));
  }
}

// A partial result of kCount columns, aligned for the widest load that it fills. It has no padding, so partial results
// of neighbouring columns lie beside each other.
template <class Monoid, int kCount>
struct alignas(std::min<size_t>(16, kCount * sizeof(typename Monoid::Acc))) Partial {
  typename Monoid::Acc value[kCount];

  __device__ void clear() {
#pragma unroll
    for (auto& v : value) v = Monoid::identity();
  }
  __device__ void fold(const Partial& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Monoid::fold(value[i], other.value[i]);
  }
  __device__ void fold(const Elements<typename Monoid::Bits, kCount>& elements, const Keys& keys) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Monoid::fold(value[i], Monoid::load(elements.value[i], keys));
  }
  __device__ void store_result(void* out, int64_t at, const Keys& keys) const {
    using Result = typename Monoid::Result;
    Elements<Result, kCount> elements;
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements.value[i] = Monoid::store(value[i], keys);
    *reinterpret_cast<Elements<Result, kCount>*>(static_cast<Result*>(out) + at) = elements;
  }
  __device__ void store(typename Monoid::Acc* to) const { *reinterpret_cast<Partial*>(to) = *this; }
  __device__ void load(const typename Monoid::Acc* from) { *this = *reinterpret_cast<const Partial*>(from); }
};

// Fills gaps of more than kGap segments. A thread of a block has a cell of kGap segments, and searches the ids for the
// gap at the front of it: a longer one that begins or ends in a cell reaches past it. Then warps fill the cells.
template <class Result>
__device__ __noinline__ void fill_gaps(const Args& a) {
  __shared__ uint8_t behind[kThreads + 1], before[kThreads + 1];  // segments of the gap on both sides of the front
  const int64_t blocks = (a.segments + kThreads * kGap - 1) / (kThreads * kGap), o = blockIdx.x / blocks;
  const int64_t first = (blockIdx.x - o * blocks) * kThreads * kGap;
  const int32_t* const ids = a.ids + offset_of(a.ids_at, o);
#pragma unroll 1
  for (int i = threadIdx.x; i <= kThreads; i += kThreads) {
    const int64_t front = min(first + int64_t{i} * kGap, a.segments);
    int64_t low = 0, high = a.length;
#pragma unroll 1
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (a.place_of(ids[middle]) < front) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t last = low > 0 ? a.place_of(ids[low - 1]) : -1;
    const int64_t next = low < a.length ? a.place_of(ids[low]) : a.segments;
    const bool is_long = next - last > kGap + 1;
    behind[i] = is_long ? static_cast<uint8_t>(min(next - front, int64_t{kGap})) : 0;
    before[i] = is_long ? static_cast<uint8_t>(min(front - 1 - last, int64_t{kGap})) : 0;
  }
  __syncthreads();
  const auto empty = static_cast<Result>(a.keys.empty);
  constexpr int kPerPack = 16 / sizeof(Result);
  Pack pack;
#pragma unroll
  for (int i = 0; i < kPerPack; ++i) set<Result>(pack, i, empty);
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int part = threadIdx.x / 32; part < 2 * kThreads; part += kThreads / 32) {
    const int cell = part / 2;
    const int64_t front = first + int64_t{cell} * kGap, end = min(front + kGap, a.segments);
    if (front >= a.segments) return;
    const int64_t middle = front + behind[cell], next = max(middle, end - before[cell + 1]);
    const int64_t from = part % 2 ? next : front, count = ((part % 2 ? end : middle) - from) * a.inner;
    Result* const to = static_cast<Result*>(a.out) + (o * a.segments + from) * a.inner;
    const bool packs = count % kPerPack == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
    const int64_t units = packs ? count / kPerPack : count;
#pragma unroll 1
    for (int64_t i = lane; i < units; i += 32) {
      if (packs) {
        reinterpret_cast<Pack*>(to)[i] = pack;
      } else {
        to[i] = empty;
      }
    }
  }
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kThreads, tile_blocks(kCount)) segment_tiles_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Result = typename Monoid::Result;
  static_assert(sizeof(Partial<Monoid, kCount>) == kCount * sizeof(Acc));
  wait_for_predecessor();  // which orders the ids
  let_dependents_start();  // segment_join_kernel
  if (blockIdx.x < a.fillers) return fill_gaps<Result>(a);
  const int64_t thread = (blockIdx.x - a.fillers) * kThreads + threadIdx.x;
  const int64_t team = thread / a.lanes, column = (thread - team * a.lanes) * kCount;
  const int64_t o = team / a.tiles, tile = team - o * a.tiles;
  if (o >= a.outer) return;

  const int64_t ids_at = offset_of(a.ids_at, o);
  const int32_t* ids = a.ids + ids_at;
  const int32_t* positions = a.positions ? a.positions + ids_at : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + offset_of(a.data_at, o) + column;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const int64_t begin = tile * a.rows;
  const auto length = static_cast<int>(min(a.rows, a.length - begin));
  ids += begin;
  if (positions) positions += begin;

  int32_t id = ids[0];
  bool begins = begin == 0 || ids[-1] != id;
  bool gaps = begins;  // whether segments may have no rows
  Partial<Monoid, kCount> sum;
  sum.clear();
  const auto flush = [&](bool ends) {
    if (!a.is_segment(id)) return;
    if (begins && ends) {
      sum.store_result(a.out, (o * a.segments + id) * a.inner + column, a.keys);
    } else {
      sum.store(reinterpret_cast<Acc*>(workspace + (begins ? a.tails_at : 0)) + tile * a.inner + column);
    }
  };
  // The ids and positions of the next rows are loaded together with the elements of the current rows.
  int32_t next[kTileRows], row[kTileRows];
  const auto load_ids = [&](int at) {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const bool has = at + r < length;
      next[r] = has ? ids[at + r] : -1;
      row[r] = has && positions ? positions[at + r] : static_cast<int32_t>(begin + at + r);
    }
  };
  load_ids(0);
  for (int at = 0; at < length; at += kTileRows) {
    int32_t own[kTileRows];
    Elements<Bits, kCount> elements[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      own[r] = next[r];
      if (a.is_segment(own[r])) elements[r] = *reinterpret_cast<const Elements<Bits, kCount>*>(data + row[r] * a.inner);
    }
    load_ids(at + kTileRows);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (at + r >= length) break;
      if (own[r] != id) {
        flush(true);
        gaps |= own[r] - id != 1;
        id = own[r];
        begins = true;
        sum.clear();
      }
      if (a.is_segment(id)) sum.fold(elements[r], a.keys);
    }
  }
  const bool is_last = begin + length == a.length;
  flush(is_last || ids[length] != id);
  if (!gaps && !is_last) return;
  // Fills the segments between those of neighbouring rows, if they are few.
  Elements<Result, kCount> empty;
#pragma unroll
  for (Result& value : empty.value) value = static_cast<Result>(a.keys.empty);
  int32_t last = begin == 0 ? 0 : ids[-1];
#pragma unroll 1
  for (int r = 0; r < length + is_last; ++r) {
    const bool at_front = begin + r == 0, at_back = r == length;
    const int32_t next = at_back ? 0 : ids[r];
    if (at_front || at_back || static_cast<uint32_t>(next) - static_cast<uint32_t>(last) > 1) {
      const int64_t from = at_front ? 0 : a.place_of(last) + 1, to = at_back ? a.segments : a.place_of(next);
#pragma unroll 1
      for (int64_t s = to - from > kGap ? to : from; s < to; ++s)
        *reinterpret_cast<Elements<Result, kCount>*>(static_cast<Result*>(a.out) + (o * a.segments + s) * a.inner +
                                                     column) = empty;
    }
    last = next;
  }
}

template <class T>
__device__ __forceinline__ T shuffled_up(T value, int lanes) {
  if constexpr (std::is_class_v<T>) {
    return bits_as<T>(shuffle_up(bits_as<uint64_t>(value), lanes));
  } else if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_up_sync(kEveryLane, static_cast<uint32_t>(value), lanes));
  } else {
    return shuffle_up(value, lanes);
  }
}

template <class T>
__device__ __forceinline__ T of_last_lane(T value) {
  if constexpr (std::is_class_v<T>) {
    return bits_as<T>(shuffle_from(bits_as<uint64_t>(value), 31));
  } else if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_sync(kEveryLane, static_cast<uint32_t>(value), 31));
  } else {
    return shuffle_from(value, 31);
  }
}

// Like segment_tiles_kernel, for rows of one element. A warp has a tile, and each of its lanes takes kRows neighbouring
// rows at a time. A lane alone folds segments that begin and end in its rows; a scan over the lanes folds the others.
template <class Monoid>
__global__ void __launch_bounds__(kThreads) segment_scalars_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  wait_for_predecessor();  // segment_fill_all_kernel
  let_dependents_start();  // segment_join_kernel
  const int lane = threadIdx.x & 31;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t tile = warp % a.tiles, o = warp / a.tiles;
  if (o >= a.outer) return;
  const int64_t ids_at = offset_of(a.ids_at, o);
  const int32_t* ids = a.ids + ids_at;
  const int32_t* positions = a.positions ? a.positions + ids_at : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + offset_of(a.data_at, o);
  auto* out = static_cast<typename Monoid::Result*>(a.out) + o * a.segments;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const int64_t begin = tile * a.rows, end = min(a.length, begin + a.rows);

  const int32_t first_id = ids[begin];
  const bool first_begins = begin == 0 || ids[begin - 1] != first_id;
  const auto finish = [&](int32_t id, Acc sum, bool ends) {
    if (!a.is_segment(id)) return;
    const bool begins = id != first_id || first_begins;
    if (begins && ends) {
      out[id] = Monoid::store(sum, a.keys);
    } else {
      reinterpret_cast<Acc*>(workspace + (begins ? a.tails_at : 0))[tile] = sum;
    }
  };
  // The segment that the rows before end in, and its fold so far.
  int32_t open_id = 0;
  Acc open = Monoid::identity();
  bool has_open = false;
  for (int64_t start = begin; start < end; start += 32 * kRows) {
    const int64_t at = start + lane * kRows;
    int32_t id[kRows];
    Elements<Bits, 1> elements[kRows];
    bool loaded = false;
    if constexpr (sizeof(Bits) > 1) {
      const auto from = reinterpret_cast<uintptr_t>(ids + at) | reinterpret_cast<uintptr_t>(data + at);
      if (!positions && at + kRows <= end && from % 16 == 0) {
        load_packs<uint32_t>(id, ids + at);
        load_packs<Bits>(elements, data + at);
        loaded = true;
      }
    }
    if (!loaded) {
      constexpr int32_t kNone = 0x7fffffff;  // an id that no segment has
#pragma unroll
      for (int r = 0; r < kRows; ++r) id[r] = at + r < end ? ids[at + r] : kNone;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (a.is_segment(id[r])) elements[r].value[0] = data[positions ? positions[at + r] : at + r];
    }
    Acc value[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      value[r] = a.is_segment(id[r]) ? Monoid::load(elements[r].value[0], a.keys) : Monoid::identity();

    Acc head = value[0], sum = value[0];
    bool breaks = false;
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
      if (id[r] == id[r - 1]) {
        sum = Monoid::fold(sum, value[r]);
        continue;
      }
      if (breaks) {
        finish(id[r - 1], sum, true);
      } else {
        head = sum;
      }
      breaks = true;
      sum = value[r];
    }
    const int32_t last_id = id[kRows - 1];
    int32_t before_id = shuffle_up(last_id, 1);
    if (lane == 0) before_id = open_id;
    const bool joins = before_id == id[0] && (lane > 0 || has_open);
    bool starts = breaks || !joins;  // whether the lane's last segment begins in the lane
    if (lane == 0 && !starts) sum = Monoid::fold(open, sum);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const Acc other = shuffled_up(sum, lanes);
      const bool other_starts = __shfl_up_sync(kEveryLane, starts, lanes);
      if (lane < lanes || starts) continue;
      sum = Monoid::fold(other, sum);
      starts = other_starts;
    }
    Acc before = shuffled_up(sum, 1);
    if (lane == 0) before = open;
    if (!joins && (lane > 0 || has_open)) finish(before_id, before, true);
    if (breaks) finish(id[0], joins ? Monoid::fold(before, head) : head, true);
    open_id = __shfl_sync(kEveryLane, last_id, 31);
    open = of_last_lane(sum);
    has_open = true;
  }
  if (lane == 0) finish(open_id, open, end == a.length || ids[end] != open_id);
}

// Folds the partial results of each segment that begins in one tile and ends in another; a team has the segment that
// begins in its tile. If a segment has many partial results, all teams of the block fold a share of neighbouring ones.
template <class Monoid, int kCount>
__global__ void __launch_bounds__(kJoinThreads) segment_join_kernel(const __grid_constant__ Args a) {
  using Acc = typename Monoid::Acc;
  constexpr int kFew = 8;
  __shared__ Partial<Monoid, kCount> partials[kJoinThreads];
  __shared__ int32_t parts_of[kJoinThreads], id_of[kJoinThreads];  // of each tile: partial results in later ones
  __shared__ int16_t many[kJoinThreads];                           // tiles that have more than kFew of them
  __shared__ int count;
  const int lane = threadIdx.x & ((1 << a.team_bits) - 1), team = threadIdx.x >> a.team_bits;
  const int teams = kJoinThreads >> a.team_bits;
  const int64_t block = blockIdx.x / a.chunks, chunk = blockIdx.x - block * a.chunks;
  const int64_t blocks = (a.tiles + teams - 1) / teams, o = block / blocks, first = (block - o * blocks) * teams;
  const int32_t* ids = a.ids + offset_of(a.ids_at, o);
  if (threadIdx.x == 0) count = 0;
  __syncthreads();

  // The ids do not change while the kernel before this one runs, but its results do.
  const int64_t own = first + threadIdx.x;
  int parts = 0;
  if (threadIdx.x < teams && own + 1 < a.tiles) {
    const int64_t begin = own * a.rows, end = begin + a.rows;
    const int32_t id = ids[end - 1], next = ids[end], last = begin == 0 ? ~id : ids[begin - 1];
    const int32_t after = own + 2 < a.tiles ? ids[end + a.rows] : ~id;
    id_of[threadIdx.x] = id;
    if (a.is_segment(id) && last != id && next == id) {
      // Finds the last tile whose first id is that of the segment: most often the next one, so steps grow before they
      // shrink.
      int64_t low = own + 1;
      if (after == id) {
        int64_t step = 1;
#pragma unroll 1
        for (; low + step < a.tiles && ids[(low + step) * a.rows] == id; step *= 2) low += step;
        int64_t high = min(a.tiles - 1, low + step - 1);
#pragma unroll 1
        while (low < high) {
          const int64_t middle = (low + high + 1) / 2;
          if (ids[middle * a.rows] == id) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
      }
      parts = static_cast<int>(low - own);
      if (parts > kFew) many[atomicAdd(&count, 1)] = static_cast<int16_t>(threadIdx.x);
    }
  }
  parts_of[threadIdx.x] = parts;
  wait_for_predecessor();
  __syncthreads();

  const int64_t column = ((chunk << a.team_bits) + lane) * kCount;
  const bool live = column < a.inner;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const Acc* heads = reinterpret_cast<const Acc*>(workspace) + column;
  const Acc* tails = reinterpret_cast<const Acc*>(workspace + a.tails_at) + column;
  const auto fold_heads = [&](Partial<Monoid, kCount>& sum, int64_t begin, int64_t end) {
    Partial<Monoid, kCount> part;
#pragma unroll 8
    for (int64_t tile = begin; tile < end; ++tile) {
      part.load(heads + tile * a.inner);
      sum.fold(part);
    }
  };
  const auto store = [&](const Partial<Monoid, kCount>& sum, int t) {
    sum.store_result(a.out, (o * a.segments + id_of[t]) * a.inner + column, a.keys);
  };

  parts = parts_of[team];
  if (live && parts > 0 && parts <= kFew) {
    Partial<Monoid, kCount> sum;
    sum.load(tails + (first + team) * a.inner);
    fold_heads(sum, first + team + 1, first + team + 1 + parts);
    store(sum, team);
  }
  for (int i = 0; i < count; ++i) {
    const int t = many[i];
    const int64_t tile = first + t, all = parts_of[t];
    const int64_t share = (all + a.shares - 1) / a.shares, begin = min(all, team * share);
    Partial<Monoid, kCount> sum;
    sum.clear();
    if (live && team == 0) sum.load(tails + tile * a.inner);
    if (live) fold_heads(sum, tile + 1 + begin, tile + 1 + min(all, begin + share));
    partials[threadIdx.x] = sum;
    for (auto half = static_cast<int>(a.shares) / 2; half > 0; half /= 2) {
      __syncthreads();
      if (team < half) partials[threadIdx.x].fold(partials[threadIdx.x + (half << a.team_bits)]);
    }
    if (live && team == 0) store(partials[threadIdx.x], t);
    __syncthreads();
  }
}

// Fills all segments if a row is one element, before another kernel writes the segments that have rows: to find the
// segments without rows would take longer. It also runs if there are no rows at all.
template <class Bits>
__global__ void __launch_bounds__(kThreads) segment_fill_all_kernel(const __grid_constant__ Args a) {
  let_dependents_start();  // segment_scalars_kernel
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.outer * a.segments * a.inner;
       i += stride)
    static_cast<Bits*>(a.out)[i] = static_cast<Bits>(a.keys.empty);
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Monoid, int kCount>
cudaError_t run_join(cudaStream_t stream, Args a) {
  const int64_t lanes = (a.inner + kCount - 1) / kCount;
  while (a.team_bits < kJoinBits && lanes > 1 << a.team_bits) ++a.team_bits;
  // The number of shares is that of a block's teams if a lane had one element, even if it has more. So the order of
  // additions does not depend on alignment.
  for (a.shares = kJoinThreads; a.shares > kJoinThreads >> kJoinBits && a.inner * a.shares > kJoinThreads;)
    a.shares /= 2;
  a.chunks = (lanes + (1 << a.team_bits) - 1) >> a.team_bits;
  const int64_t teams = kJoinThreads >> a.team_bits;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(a.outer * ((a.tiles + teams - 1) / teams) * a.chunks));
  config.block = dim3(kJoinThreads);
  config.overlap = a.overlap;
  return launch(stream, config, segment_join_kernel<Monoid, kCount>, a);
}

// Launches the kernel of tiles for vectors of kCount elements.
template <class Monoid, int kCount>
cudaError_t run_tiles(cudaStream_t stream, Args a) {
  using Result = typename Monoid::Result;
  a.lanes = a.inner / kCount;
  Launch config;
  config.block = dim3(kThreads);
  config.overlap = a.overlap && a.positions;
  const bool scalars = a.inner == 1;
  if (scalars || a.tiles == 0) {
    const int64_t filling = a.outer * ((a.segments * a.inner + kThreads - 1) / kThreads);
    const Launch all = {dim3(static_cast<unsigned>(std::min<int64_t>(filling, 132 * 16))), dim3(kThreads)};
    const cudaError_t status = launch(stream, all, segment_fill_all_kernel<Result>, a);
    if (status != cudaSuccess || a.tiles == 0) return status;
    config.overlap = a.overlap;
  } else {
    a.fillers = a.outer * ((a.segments + kThreads * kGap - 1) / (kThreads * kGap));
  }
  const int64_t threads = a.outer * a.tiles * (scalars ? 32 : a.lanes);
  config.grid = dim3(static_cast<unsigned>(a.fillers + (threads + kThreads - 1) / kThreads));
  if constexpr (kCount == 1) {
    return launch(stream, config, scalars ? segment_scalars_kernel<Monoid> : segment_tiles_kernel<Monoid, 1>, a);
  } else {
    return launch(stream, config, segment_tiles_kernel<Monoid, kCount>, a);
  }
}

// Launches the kernels for the widest vectors that rows are made of.
template <class Monoid>
cudaError_t run(cudaStream_t stream, const Args& a) {
  constexpr int kBytes = sizeof(typename Monoid::Bits), kWide = kBytes == 1 ? 8 : 16 / kBytes;
  constexpr int kJoined = std::min<int>(8, 16 / sizeof(typename Monoid::Acc));
  const bool aligned = (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(a.out)) % 16 == 0;
  const auto has = [&](int count) { return aligned && a.inner % count == 0; };
  cudaError_t status;
  if (has(kWide)) {
    status = run_tiles<Monoid, kWide>(stream, a);
  } else if (kBytes > 1 && has(8 / kBytes)) {
    status = run_tiles<Monoid, kBytes == 1 ? 1 : 8 / kBytes>(stream, a);
  } else {
    status = run_tiles<Monoid, 1>(stream, a);
  }
  if (status != cudaSuccess || a.tiles <= 1) return status;
  return has(kJoined) ? run_join<Monoid, kJoined>(stream, a) : run_join<Monoid, 1>(stream, a);
}

}  // namespace
}  // namespace jaxgpuops::count
