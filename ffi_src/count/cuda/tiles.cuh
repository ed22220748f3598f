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
// Tiles fill gaps of up to so many segments. Cells are as long, so that a longer gap has the first segment of a cell.
constexpr int kGap = 32;
constexpr int kMostCells = kThreads - 32;  // of a block that fills gaps
constexpr int kRows = 8;                   // neighbouring rows that a lane has where a row is one element
constexpr int kTileRows = 4;               // rows that a lane loads before it folds them
// Blocks of tiles that a multiprocessor holds: more would leave a lane with many elements too few registers.
constexpr int tile_blocks(int count) { return count > 4 ? 3 : 4; }

// ---- Kernels --------------------------------------------------------------------------------------------------------

struct Args : SegmentArgs {
  const int32_t* positions;  // the row that each sorted id belongs to; null: the ids of the rows ascend as they are
  int64_t tails_at, rows, tiles;
  int64_t lanes = 0;    // of segment_tiles_kernel: threads that share a row
  int64_t fillers = 0;  // and its blocks that fill long gaps, which have `cells` each
  int64_t cells = 0;
  // The members below are for segment_join_kernel.
  int64_t counters_at;
  int64_t chunks = 0;  // chunks that the columns are cut into; a team has one of them
  int team_bits;
  bool overlap;  // whether a kernel may start before the one before it ends

  // Finds the order of the ids first if they do not ascend.
  Args(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers,
       cudaError_t& status)
      : SegmentArgs(problem, buffers),
        positions(nullptr),
        tails_at(plan.tails),
        rows(plan.rows),
        tiles(plan.tiles),
        counters_at(plan.counters),
        team_bits(join_team_bits(inner)),
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
    workspace_bytes = plan.joined_bytes;
  }

  // Counts the blocks of segment_join_kernel that have folded their part of a segment; here is the counter of the block
  // that the segment begins in.
  __device__ uint32_t* counter(char* workspace, int64_t tile, int64_t column) const {
    const int64_t block = tile >> (kJoinTeamBits - team_bits), columns = ((inner - 1) >> team_bits) + 1;
    return reinterpret_cast<uint32_t*>(workspace + counters_at) + block * columns + (column >> team_bits);
  }
  // Clears the counters of the block that begins with the tile, if one does.
  __device__ void clear_counter(char* workspace, int64_t tile, int64_t column) const {
    if (tiles > 1 && tile % (kJoinThreads >> team_bits) == 0) *counter(workspace, tile, column) = 0;
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
  __shared__ uint8_t behind[kThreads], before[kThreads];  // segments of the gap on both sides of the front
  const int64_t blocks = a.fillers / a.outer, o = blockIdx.x / blocks;
  const int64_t first = (blockIdx.x - o * blocks) * a.cells * kGap;
  const int32_t* const ids = a.ids + offset_of(a.ids_at, o);
  if (threadIdx.x <= a.cells) {
    const int64_t front = min(first + int64_t{threadIdx.x} * kGap, a.segments);
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
    behind[threadIdx.x] = is_long ? static_cast<uint8_t>(min(next - front, int64_t{kGap})) : 0;
    before[threadIdx.x] = is_long ? static_cast<uint8_t>(min(front - 1 - last, int64_t{kGap})) : 0;
  }
  __syncthreads();
  const auto empty = static_cast<Result>(a.keys.empty);
  constexpr int kPerPack = 16 / sizeof(Result);
  Pack pack;
#pragma unroll
  for (int i = 0; i < kPerPack; ++i) set<Result>(pack, i, empty);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  constexpr int kWarps = kThreads / 32;
  const int of_lane = lane * kWarps + warp;  // a cell: most have nothing to fill
  const bool has_cell = of_lane < a.cells && first + int64_t{of_lane} * kGap < a.segments;
  unsigned cells = __ballot_sync(kEveryLane, has_cell && (behind[of_lane] | before[of_lane + 1]) != 0);
#pragma unroll 1
  for (; cells; cells &= cells - 1) {
    const int cell = (__ffs(cells) - 1) * kWarps + warp;
    const int64_t front = first + int64_t{cell} * kGap, end = min(front + kGap, a.segments);
    const int64_t middle = front + behind[cell], next = max(middle, end - before[cell + 1]);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const int64_t from = part ? next : front, count = ((part ? end : middle) - from) * a.inner;
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
  const int64_t begin = tile * a.rows;
  const auto length = static_cast<int>(min(a.rows, a.length - begin));
  ids += begin;
  if (positions) positions += begin;
  Result* const out = static_cast<Result*>(a.out) + o * a.segments * a.inner + column;
  char* const workspace = a.workspace + o * a.workspace_bytes;
  char* const head = workspace + (tile * a.inner + column) * sizeof(Acc);
  a.clear_counter(workspace, tile, column);

  int32_t id = ids[0];
  bool begins = begin == 0 || ids[-1] != id;
  Partial<Monoid, kCount> sum;
  sum.clear();
  const auto flush = [&](bool ends) {
    if (!a.is_segment(id)) return;
    if (begins && ends) {
      sum.store_result(out, id * a.inner, a.keys);
    } else {
      sum.store(reinterpret_cast<Acc*>(head + (begins ? a.tails_at : 0)));
    }
  };
  // Fills the segments before the rows from `at` to `to`, and behind the last row of all, if they are few.
  bool gaps = begins;  // whether there are any
  const auto fill = [&](int at, int to) {
    Elements<Result, kCount> empty;
#pragma unroll
    for (Result& value : empty.value) value = static_cast<Result>(a.keys.empty);
#pragma unroll 1
    for (int r = at; r < to; ++r) {
      const int64_t row = begin + r, from = row == 0 ? 0 : a.place_of(ids[r - 1]) + 1;
      const int64_t next = row == a.length ? a.segments : a.place_of(ids[r]);
#pragma unroll 1
      for (int64_t s = next - from > kGap ? next : from; s < next; ++s)
        *reinterpret_cast<Elements<Result, kCount>*>(out + s * a.inner) = empty;
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
        gaps |= static_cast<uint32_t>(own[r]) - static_cast<uint32_t>(id) != 1;
        id = own[r];
        begins = true;
        sum.clear();
      }
      if (a.is_segment(id)) sum.fold(elements[r], a.keys);
    }
    if (gaps) fill(at, min(at + kTileRows, length));
    gaps = false;
  }
  const bool is_last = begin + length == a.length;
  flush(is_last || ids[length] != id);
  if (is_last) fill(length, length + 1);
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
  if (lane == 0) a.clear_counter(workspace, tile, 0);

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

// Returns how many of the `most` tiles that lie next to `tile` in one direction begin with an id, too. Those are a run,
// and most often it is short: lanes of a warp probe at growing distances before they divide the interval that is left.
__device__ __noinline__ int64_t run_beside(const Args& a, const int32_t* ids, int64_t tile, int direction, int64_t most,
                                           int32_t id) {
  const int lane = threadIdx.x & 31;
  const auto lanes_in_run = [&](int64_t distance) {
    const bool is_in = distance <= most && ids[(tile + direction * distance) * a.rows] == id;
    return __popc(__ballot_sync(kEveryLane, is_in));
  };
  const int doublings = lanes_in_run(int64_t{1} << lane);
  if (doublings == 0) return 0;
  int64_t low = int64_t{1} << (doublings - 1), high = min(most, 2 * low - 1);
#pragma unroll 1
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, distance = low + (lane + 1) * step;
    low += lanes_in_run(distance <= high ? distance : most + 1) * step;
    high = min(high, low + step - 1);
  }
  return low;
}

// Folds the partial results of each segment that begins in one tile and ends in another. A block has as many tiles as
// teams of threads. A tile whose first rows belong to a segment that began before has a head; a tile whose last rows
// belong to a segment that begins in it and goes on has a tail. All runs of heads are folded at once, each as a tree,
// and the team of the tail adds its own. If a segment has more than kFew tiles behind the block that it begins in, each
// block leaves the fold of its tiles in the workspace, and the last one to do so folds these, in order.
template <class Monoid, int kCount>
__global__ void __launch_bounds__(kJoinThreads) segment_join_kernel(const __grid_constant__ Args a) {
  using Acc = typename Monoid::Acc;
  constexpr int kFew = 8;
  constexpr int32_t kNone = -1;
  __shared__ Partial<Monoid, kCount> partials[kJoinThreads];
  __shared__ int32_t head_of[kJoinThreads], tail_of[kJoinThreads];  // ids, or kNone
  __shared__ uint32_t starts[kJoinThreads / 32];                    // a bit for each tile whose head is not in a run
  // The segment that comes from a block before, and the one that goes on in the next: their first and last tiles.
  __shared__ int64_t in_first, in_last, out_first, out_last;
  __shared__ bool is_last_block;
  const int lane = threadIdx.x & ((1 << a.team_bits) - 1), team = threadIdx.x >> a.team_bits;
  const int teams = kJoinThreads >> a.team_bits;
  const int64_t block = blockIdx.x / a.chunks, chunk = blockIdx.x - block * a.chunks;
  const int64_t blocks = (a.tiles + teams - 1) / teams, o = block / blocks, first = (block - o * blocks) * teams;
  const int32_t* ids = a.ids + offset_of(a.ids_at, o);

  // The ids do not change while the kernel before this one runs, but its results do.
  const int64_t behind = first + teams;       // the first tile behind the block's
  const auto id_across = [&](int64_t tile) {  // of the segment that rows on both sides of the tile's front belong to
    if (tile == 0 || tile >= a.tiles) return kNone;
    const int32_t id = ids[tile * a.rows];
    return a.is_segment(id) && ids[tile * a.rows - 1] == id ? id : kNone;
  };
  const int32_t in_id = id_across(first), out_id = id_across(behind);
  int32_t head = kNone;
  if (threadIdx.x < teams) {
    const int64_t tile = first + threadIdx.x;
    head = id_across(tile);
    const int32_t tail = id_across(tile + 1);
    head_of[threadIdx.x] = head;
    // If both are of one segment, the tile has a head only.
    tail_of[threadIdx.x] = tail != head ? tail : kNone;
    if (tail != kNone && tail != head && tail == out_id) out_first = tile;
  }
  if (threadIdx.x / 32 == 0) {
    int64_t begin = -1, end = -1;
    if (in_id != kNone) {
      end = first + run_beside(a, ids, first, 1, a.tiles - 1 - first, in_id);
      begin = first - run_beside(a, ids, first, -1, first, in_id);
      if (id_across(begin) != kNone) --begin;
    }
    if (threadIdx.x == 0) in_first = begin, in_last = end;
  } else if (threadIdx.x / 32 == 1) {
    const int64_t end = out_id != kNone ? behind + run_beside(a, ids, behind, 1, a.tiles - 1 - behind, out_id) : -1;
    if (threadIdx.x == 32) out_last = end;
  }
  __syncthreads();
  const bool starts_run = head == kNone || threadIdx.x == 0 || head_of[threadIdx.x - 1] != head;
  if (threadIdx.x < teams) {
    const uint32_t bits = __ballot_sync(kEveryLane, starts_run);
    if (threadIdx.x % 32 == 0) starts[threadIdx.x / 32] = bits;
  }
  wait_for_predecessor();
  __syncthreads();

  const int64_t column = ((chunk << a.team_bits) + lane) * kCount;
  const bool live = column < a.inner;
  char* workspace = a.workspace + o * a.workspace_bytes;
  Acc* const heads = reinterpret_cast<Acc*>(workspace) + column;
  Acc* const tails = reinterpret_cast<Acc*>(workspace + a.tails_at) + column;
  const auto store = [&](const Partial<Monoid, kCount>& sum, int32_t id) {
    sum.store_result(a.out, (o * a.segments + id) * a.inner + column, a.keys);
  };

  Partial<Monoid, kCount> own, tail;
  own.clear();
  if (live && head_of[team] != kNone) own.load(heads + (first + team) * a.inner);
  if (live && tail_of[team] != kNone) tail.load(tails + (first + team) * a.inner);
  partials[threadIdx.x] = own;
  // The run that the team's tile is in: its place, and how many tiles of it follow.
  int word = team / 32;
  uint32_t bits = starts[word] & (2u << team % 32) - 1;
  while (bits == 0) bits = starts[--word];
  const int place = team - (32 * word + 31 - __clz(bits));
  word = team / 32;
  bits = starts[word] & ~((2u << team % 32) - 1);
  while (bits == 0 && 32 * (word + 1) < teams) bits = starts[++word];
  const int follow = (bits ? 32 * word + __ffs(bits) - 1 : teams) - 1 - team;
#pragma unroll 1
  for (int half = 1; __syncthreads_or(half <= follow); half *= 2)
    if (half <= follow && place % (2 * half) == 0)
      partials[threadIdx.x].fold(partials[threadIdx.x + (half << a.team_bits)]);

  const bool is_few = out_last - behind < kFew;
  if (live && tail_of[team] != kNone) {
    const int32_t id = tail_of[team];
    if (team + 1 < teams) tail.fold(partials[threadIdx.x + (1 << a.team_bits)]);
    if (id != out_id) {
      store(tail, id);
    } else if (is_few) {
      for (int64_t tile = behind; tile <= out_last; ++tile) {
        own.load(heads + tile * a.inner);
        tail.fold(own);
      }
      store(tail, id);
    } else {
      tail.store(tails + (first + team) * a.inner);
    }
  }
  // Whether the segment is long, seen from the block that it comes to.
  const bool comes = in_id != kNone && (in_first < first - teams || in_last - first >= kFew);
  if (comes && live && team == 0) partials[threadIdx.x].store(heads + first * a.inner);
  const bool goes = out_id != kNone && out_id != in_id && !is_few;
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    if (!(side == 0 ? comes : goes)) continue;
    const int64_t begin = side == 0 ? in_first : out_first, end = side == 0 ? in_last : out_last;
    const int64_t begin_block = begin / teams, parts = end / teams - begin_block + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      is_last_block = atomicAdd(a.counter(workspace, begin, column), 1u) == parts - 1;
      __threadfence();
    }
    __syncthreads();
    if (!is_last_block) continue;
    const int64_t share = (parts + teams - 1) / teams;
    Partial<Monoid, kCount> sum;
    sum.clear();
#pragma unroll 4
    for (int64_t part = team * share; part < min(parts, (team + 1) * share); ++part) {
      if (!live) break;
      own.load(part == 0 ? tails + begin * a.inner : heads + (begin_block + part) * teams * a.inner);
      sum.fold(own);
    }
    partials[threadIdx.x] = sum;
    for (int half = teams / 2; half > 0; half /= 2) {
      __syncthreads();
      if (team < half) partials[threadIdx.x].fold(partials[threadIdx.x + (half << a.team_bits)]);
    }
    if (live && team == 0) store(partials[threadIdx.x], side == 0 ? in_id : out_id);
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
  const int64_t lanes = (a.inner + kCount - 1) / kCount, teams = kJoinThreads >> a.team_bits;
  a.chunks = ((lanes - 1) >> a.team_bits) + 1;
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
    const int64_t cells = (a.segments - 1) / kGap + 1;
    a.cells = std::clamp<int64_t>((cells - 1) / 16 + 1, 8, kMostCells);
    a.fillers = a.outer * ((cells - 1) / a.cells + 1);
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
