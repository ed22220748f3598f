// The kernels of segments of rows whose ids ascend, or which are read in the order of their ids (sort/). A tile is a
// fixed number of rows, however long the segments are, and belongs to a team of lanes. Each lane has 16 bytes of every
// row of its tile (8 where elements are bytes; one element if rows are not whole vectors), reads the rows in order and
// keeps the current segment in registers. A segment within a tile is stored at once. If a segment crosses tiles, each
// tile stores a partial result, and a second kernel folds these in order. So there are no atomics, and the order of
// additions depends on the number of rows and the ids alone.
//
// Bytes moved: each row is read once, with 4 or 8 bytes of id and position; each segment is written once; and up to two
// partial results of each tile are written and read. Blocks of their own find segments without rows, by a search of the
// ids, and fill them, so that nothing is written twice.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/args.cuh"
#include "sort/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;
constexpr int kJoinThreads = 512, kTilesOfBlock = 32;  // threads and tiles of a block of segment_join_kernel
// At most 2^kJoinBits of these threads share a row, so that a block adds up many rows at a time.
constexpr int kJoinBits = 3;
constexpr int kRows = 8;      // neighbouring rows that a lane has where a row is one element
constexpr int kTileRows = 4;  // rows that a lane loads before it folds them
// Blocks of tiles that a multiprocessor holds: more would leave a lane with many elements too few registers.
constexpr int tile_blocks(int count) { return count > 4 ? 3 : 4; }

// ---- Kernels --------------------------------------------------------------------------------------------------------

struct Args : SegmentArgs {
  const int32_t* positions;  // the row that each sorted id belongs to; null: the ids of the rows ascend as they are
  int64_t tails_at, rows, tiles;
  int64_t chunks;  // chunks that the columns are cut into; a team has one of them
  int team_bits = 0;
  int64_t shares;  // the partial results of a segment are cut into so many shares; one team of a block adds up each
  int64_t fillers = 0;  // blocks of segment_tiles_kernel that fill segments without rows

  // Sorts the ids first if they do not ascend.
  Args(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers,
       cudaError_t& status)
      : SegmentArgs(problem, buffers), positions(nullptr), tails_at(plan.tails), rows(plan.rows), tiles(plan.tiles) {
    status = cudaSuccess;
    if (plan.algorithm == Segmenting::kOrdered && length > 0) {
      auto* const sorted = reinterpret_cast<int32_t*>(workspace);
      auto* const order = reinterpret_cast<int32_t*>(workspace + outer * plan.order.positions);
      status = sort::launch_sort(stream, plan.order.sort, order_of(problem), ids, sorted, order,
                                 workspace + outer * plan.order.workspace);
      ids = sorted;
      positions = order;
    }
    workspace += outer * plan.order.bytes;
    workspace_bytes = 2 * plan.tails;
  }
};

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

// Fills segments without rows. Each thread of a block finds the first row of a segment, and warps fill the segments
// that have none.
template <class Bits>
__device__ __forceinline__ void fill_segments(const Args& a) {
  __shared__ int64_t starts[kThreads + 1];
  const int64_t blocks = (a.segments + kThreads - 1) / kThreads;
  const int64_t o = blockIdx.x / blocks, first = blockIdx.x % blocks * kThreads;
  const int32_t* ids = a.ids + a.ids_at(o);
  for (int i = threadIdx.x; i <= kThreads; i += kThreads) {
    int64_t low = 0, high = a.length;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int32_t id = ids[middle];
      if (a.positions ? static_cast<uint32_t>(id) < first + i : id < first + i) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    starts[i] = low;
  }
  __syncthreads();
  const auto empty = static_cast<Bits>(a.keys.empty);
  const bool is_empty = first + threadIdx.x < a.segments && starts[threadIdx.x] == starts[threadIdx.x + 1];
  Bits* out = static_cast<Bits*>(a.out) + (o * a.segments + first + (threadIdx.x & ~31u)) * a.inner;
  const int lane = threadIdx.x & 31;
  if (a.inner <= 4) {
    for (int64_t i = 0; is_empty && i < a.inner; ++i) out[lane * a.inner + i] = empty;
    return;
  }
  constexpr int kPerPack = 16 / sizeof(Bits);
  Pack pack;
#pragma unroll
  for (int i = 0; i < kPerPack; ++i) set<Bits>(pack, i, empty);
  const bool packs = a.inner % kPerPack == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0;
  for (unsigned left = __ballot_sync(kEveryLane, is_empty); left; left &= left - 1) {
    Bits* to = out + static_cast<int64_t>(__ffs(left) - 1) * a.inner;
    if (packs) {
      for (int64_t i = lane; i < a.inner / kPerPack; i += 32) reinterpret_cast<Pack*>(to)[i] = pack;
    } else {
      for (int64_t i = lane; i < a.inner; i += 32) to[i] = empty;
    }
  }
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kThreads, tile_blocks(kCount)) segment_tiles_kernel(Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  static_assert(sizeof(Partial<Monoid, kCount>) == kCount * sizeof(Acc));
  if (blockIdx.x < a.fillers) return fill_segments<typename Monoid::Result>(a);
  const int64_t thread = (blockIdx.x - a.fillers) * kThreads + threadIdx.x;
  const int64_t team = thread >> a.team_bits;
  const int64_t chunk = team % a.chunks, tile = team / a.chunks % a.tiles, o = team / a.chunks / a.tiles;
  const int64_t column = ((chunk << a.team_bits) + (thread & ((1 << a.team_bits) - 1))) * kCount;
  if (o >= a.outer || column >= a.inner) return;

  const int32_t* ids = a.ids + a.ids_at(o);
  const int32_t* positions = a.positions ? a.positions + a.ids_at(o) : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const int64_t begin = tile * a.rows;
  const auto length = static_cast<int>(min(a.rows, a.length - begin));
  ids += begin;
  if (positions) positions += begin;

  int32_t id = ids[0];
  bool begins = begin == 0 || ids[-1] != id;
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
        id = own[r];
        begins = true;
        sum.clear();
      }
      if (a.is_segment(id)) sum.fold(elements[r], a.keys);
    }
  }
  flush(begin + length == a.length || ids[length] != id);
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
__global__ void __launch_bounds__(kThreads) segment_scalars_kernel(Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  const int lane = threadIdx.x & 31;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t tile = warp % a.tiles, o = warp / a.tiles;
  if (o >= a.outer) return;
  const int32_t* ids = a.ids + a.ids_at(o);
  const int32_t* positions = a.positions ? a.positions + a.ids_at(o) : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o);
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

// Folds the partial results of each segment that begins in one tile and ends in another; a block has the segments that
// begin in its tiles. If a segment has few partial results, one team adds them up; if it has many, all teams of the
// block do, each a share of neighbouring ones.
template <class Monoid, int kCount>
__global__ void __launch_bounds__(kJoinThreads) segment_join_kernel(Args a) {
  using Acc = typename Monoid::Acc;
  constexpr int64_t kFew = 8;
  __shared__ Partial<Monoid, kCount> partials[kJoinThreads];
  __shared__ int64_t lasts[kTilesOfBlock];  // for each tile, the last tile of the segment that crosses its end
  const int64_t chunk = blockIdx.x % a.chunks, blocks = (a.tiles + kTilesOfBlock - 1) / kTilesOfBlock;
  const int64_t first = blockIdx.x / a.chunks % blocks * kTilesOfBlock, o = blockIdx.x / a.chunks / blocks;
  const int32_t* ids = a.ids + a.ids_at(o);
  const auto id_at_end = [&](int64_t tile) { return ids[min(a.length, (tile + 1) * a.rows) - 1]; };

  if (threadIdx.x < kTilesOfBlock) {
    const int64_t tile = first + threadIdx.x, begin = tile * a.rows;
    int64_t last = tile;  // stays the tile itself if there is nothing to join
    if (tile + 1 < a.tiles) {
      const int32_t id = id_at_end(tile);
      const bool begins = begin == 0 || ids[begin - 1] != id;
      if (a.is_segment(id) && begins && ids[begin + a.rows] == id) {
        // Finds the last tile whose first id is that of the segment. Most often that is the next tile, so steps grow
        // before they shrink.
        int64_t low = tile + 1, step = 1;
        for (; low + step < a.tiles && ids[(low + step) * a.rows] == id; step *= 2) low += step;
        int64_t high = min(a.tiles - 1, low + step - 1);
        while (low < high) {
          const int64_t middle = (low + high + 1) / 2;
          if (ids[middle * a.rows] == id) {
            low = middle;
          } else {
            high = middle - 1;
          }
        }
        last = low;
      }
    }
    lasts[threadIdx.x] = last;
  }
  __syncthreads();

  const int lane = threadIdx.x & ((1 << a.team_bits) - 1), team = threadIdx.x >> a.team_bits;
  const int teams = kJoinThreads >> a.team_bits;
  const int64_t column = ((chunk << a.team_bits) + lane) * kCount;
  const bool live = column < a.inner;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const Acc* heads = reinterpret_cast<const Acc*>(workspace) + column;
  const Acc* tails = reinterpret_cast<const Acc*>(workspace + a.tails_at) + column;
  const auto add_heads = [&](Partial<Monoid, kCount>& sum, int64_t begin, int64_t end) {
    Partial<Monoid, kCount> part;
#pragma unroll 8
    for (int64_t tile = begin; tile < end; ++tile) {
      part.load(heads + tile * a.inner);
      sum.fold(part);
    }
  };
  const auto store = [&](const Partial<Monoid, kCount>& sum, int64_t tile) {
    sum.store_result(a.out, (o * a.segments + id_at_end(tile)) * a.inner + column, a.keys);
  };

  for (int t = team; t < kTilesOfBlock; t += teams) {
    const int64_t tile = first + t, parts = lasts[t] - tile;
    if (!live || parts == 0 || parts > kFew) continue;
    Partial<Monoid, kCount> sum;
    sum.load(tails + tile * a.inner);
    add_heads(sum, tile + 1, lasts[t] + 1);
    store(sum, tile);
  }
  for (int t = 0; t < kTilesOfBlock; ++t) {
    const int64_t tile = first + t, parts = lasts[t] - tile;
    if (parts <= kFew) continue;
    const int64_t share = (parts + a.shares - 1) / a.shares, begin = min(parts, team * share);
    Partial<Monoid, kCount> sum;
    sum.clear();
    if (live && team == 0) sum.load(tails + tile * a.inner);
    if (live) add_heads(sum, tile + 1 + begin, tile + 1 + min(parts, begin + share));
    partials[threadIdx.x] = sum;
    __syncthreads();
    if (live && team == 0) {
      for (int other = 1; other < a.shares; ++other) sum.fold(partials[(other << a.team_bits) + lane]);
      store(sum, tile);
    }
    __syncthreads();
  }
}

// Fills all segments if a row is one element, before another kernel writes the segments that have rows: to find the
// segments without rows would take longer. It also runs if there are no rows at all.
template <class Bits>
__global__ void __launch_bounds__(kThreads) segment_fill_all_kernel(Args a) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.outer * a.segments * a.inner;
       i += stride)
    static_cast<Bits*>(a.out)[i] = static_cast<Bits>(a.keys.empty);
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Monoid, int kCount>
cudaError_t run_tiles(cudaStream_t stream, Args a) {
  const int64_t lanes = (a.inner + kCount - 1) / kCount;
  while (a.team_bits < 5 && lanes > 1 << a.team_bits) ++a.team_bits;
  // The number of shares is that of a block's teams if a lane had one element, even if it has more. So the order of
  // additions does not depend on alignment.
  for (a.shares = kJoinThreads; a.shares > kJoinThreads >> kJoinBits && a.inner * a.shares > kJoinThreads;)
    a.shares /= 2;
  a.chunks = (lanes + (1 << a.team_bits) - 1) >> a.team_bits;
  Launch config;
  config.block = dim3(kThreads);
  const bool scalars = a.inner == 1;
  const int64_t filling = a.outer * ((a.segments + kThreads - 1) / kThreads);
  if (scalars || a.tiles == 0) {
    config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(filling, 132 * 16)));
    const cudaError_t status = launch(stream, config, segment_fill_all_kernel<typename Monoid::Result>, a);
    if (status != cudaSuccess || a.tiles == 0) return status;
  } else {
    a.fillers = filling;
  }
  const int64_t threads = scalars ? a.outer * a.tiles * 32 : (a.outer * a.tiles * a.chunks) << a.team_bits;
  config.grid = dim3(static_cast<unsigned>(a.fillers + (threads + kThreads - 1) / kThreads));
  cudaError_t status = cudaSuccess;
  if constexpr (kCount == 1) {
    status = launch(stream, config, scalars ? segment_scalars_kernel<Monoid> : segment_tiles_kernel<Monoid, 1>, a);
  } else {
    status = launch(stream, config, segment_tiles_kernel<Monoid, kCount>, a);
  }
  if (status != cudaSuccess || a.tiles == 1) return status;
  a.team_bits = std::min(a.team_bits, kJoinBits);
  a.chunks = (lanes + (1 << a.team_bits) - 1) >> a.team_bits;
  config.grid = dim3(static_cast<unsigned>(a.outer * ((a.tiles + kTilesOfBlock - 1) / kTilesOfBlock) * a.chunks));
  config.block = dim3(kJoinThreads);
  return launch(stream, config, segment_join_kernel<Monoid, kCount>, a);
}

// Launches the kernels for vectors of kCount elements, where rows are whole vectors.
template <class Monoid, int kCount>
cudaError_t run(cudaStream_t stream, const Args& a) {
  const bool aligned = (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(a.out)) % 16 == 0;
  if (aligned && a.inner % kCount == 0) return run_tiles<Monoid, kCount>(stream, a);
  return run_tiles<Monoid, 1>(stream, a);
}

}  // namespace
}  // namespace jaxgpuops::count
