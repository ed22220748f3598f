// For long.cu: what follows of a partition, when the element of rank kth has been chosen. A row is cut into tiles,
// with a block for each. A block reads its tile once, counts the elements that sort before the chosen one, and learns
// how many of these earlier tiles have. It puts the two parts of its tile in shared memory, and writes each as one run.
//
// After: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016).
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "select/cuda/blocks.cuh"
#include "select/cuda/held.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kPartitionThreads = 512, kPartitionWarps = kPartitionThreads / 32;
// What a tile publishes: its count with kOfTile, or that of all tiles up to it with kUpToTile.
constexpr uint64_t kOfTile = uint64_t{1} << 32, kUpToTile = uint64_t{2} << 32;

// Publishes the count of a tile, and returns the sum of those of earlier tiles. A warp calls this.
__device__ __forceinline__ uint32_t look_back(uint64_t* tiles, int tile, uint32_t count) {
  const int lane = threadIdx.x & 31;
  if (lane == 0) store_relaxed(tiles + tile, (tile ? kOfTile : kUpToTile) | count);
  uint32_t before = 0;
#pragma unroll 1
  for (int nearest = tile - 1; nearest >= 0; nearest -= 32) {
    const int at = nearest - lane;
    uint64_t told;
    do told = at >= 0 ? load_relaxed(tiles + at) : kUpToTile;
    while (__any_sync(kEveryLane, told < kOfTile));
    const unsigned whole = __ballot_sync(kEveryLane, told >= kUpToTile);
    const int last = whole ? __ffs(static_cast<int>(whole)) - 1 : 31;
    before += sum_of_warp(lane <= last ? static_cast<uint32_t>(told) : 0u);
    if (whole) break;
  }
  if (lane == 0 && tile) store_relaxed(tiles + tile, kUpToTile | (before + count));
  return before;
}

// A block's tile of a row, and the vectors that a thread has of it. Tiles begin at whole vectors, the first one before
// the row.
template <class T>
struct RowTile {
  static constexpr uint32_t kVector = 16 / sizeof(T), kVectors = kPartitionTile / kPartitionThreads / kVector;
  struct alignas(16) Vector {
    T element[kVector];
  };

  uint32_t row, tile;
  uint32_t start;       // the number of the tile's first element in the row, modulo 2^32
  uint32_t first, end;  // the row has the elements of the tile from `first` to `end`
  uint32_t own;         // the thread's first element of the tile
  const T* x;           // the row
  Vector vector[kVectors];
  uint32_t firsts;            // a bit for each of the thread's elements that is marked
  uint32_t before[kVectors];  // marked elements of the warp that stand before those of a vector

  __device__ __forceinline__ explicit RowTile(const Args<T>& a) {
    const auto length = static_cast<uint32_t>(a.problem.rows.length), tiles = static_cast<uint32_t>(a.plan.tiles);
    row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
    x = a.x + int64_t{row} * length;
    const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    start = tile * uint32_t{kPartitionTile} - past, first = tile == 0 ? past : 0;
    end = tile == 0        ? min(length + past, uint32_t{kPartitionTile})
          : start < length ? min(length - start, uint32_t{kPartitionTile})
                           : 0;
    own = (threadIdx.x / 32 * kVectors * 32 + (threadIdx.x & 31)) * kVector;
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint32_t at = own + v * 32 * kVector;
      if (at >= first && at + kVector <= end) {
        vector[v] = *reinterpret_cast<const Vector*>(x + static_cast<int32_t>(start + at));
      } else {
#pragma unroll
        for (uint32_t e = 0; e < kVector; ++e)
          vector[v].element[e] = at + e >= first && at + e < end ? x[start + at + e] : T{0};
      }
    }
  }

  // Marks elements of the row, and returns how many the warp has. is_first(element, at, e): whether an element is
  // marked, the e-th one of the vector that begins at `at`.
  template <class IsFirst>
  __device__ __forceinline__ uint32_t mark(const IsFirst& is_first) {
    constexpr uint32_t kWords = (kVectors + 1) / 2;
    uint32_t counts[kWords] = {};  // of each vector, then of those of lower lanes, too: of two vectors in a word
    firsts = 0;
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint32_t at = own + v * 32 * kVector;
      uint32_t set = 0;
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e)
        if (is_first(vector[v].element[e], at, e)) set |= 1u << e;
      if (at < first || at + kVector > end) {
#pragma unroll
        for (uint32_t e = 0; e < kVector; ++e)
          if (at + e < first || at + e >= end) set &= ~(1u << e);
      }
      firsts |= set << (v * kVector);
      counts[v / 2] += __popc(set) << (v % 2 * 16);
    }
    uint32_t of_warp = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint32_t up_to = sum_up_to_lane(counts[w]), all = shuffle_from(up_to, 31), lower = up_to - counts[w];
      before[2 * w] = of_warp + (lower & 0xffff), of_warp += all & 0xffff;
      if (2 * w + 1 < kVectors) before[2 * w + 1] = of_warp + (lower >> 16), of_warp += all >> 16;
    }
    return of_warp;
  }
};

template <class T>
__global__ void __launch_bounds__(kPartitionThreads, sizeof(T) > 2 ? 2 : 3)
    select_partition_kernel(const __grid_constant__ Args<T> a) {
  using Vector = typename RowTile<T>::Vector;
  constexpr uint32_t kVector = RowTile<T>::kVector, kVectors = RowTile<T>::kVectors;
  __shared__ uint32_t of_warps[kPartitionWarps], before_tile;
  T* const values = reinterpret_cast<T*>(dynamic_shared_memory());
  auto* const indices = reinterpret_cast<uint16_t*>(dynamic_shared_memory());
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  RowTile<T> tile(a);
  const uint32_t row = tile.row, start = tile.start, first = tile.first, end = tile.end;
  const uint32_t middle = a.head(row).chosen, kth = static_cast<uint32_t>(a.problem.kth), chosen = middle - start;
  const SortOrder order = one_flip<T>(a.problem.order);
  const T key = sort_key(tile.x[middle], order);
  // Marks what sorts before the chosen element.
  const uint32_t of_warp = tile.mark([&](T element, uint32_t at, uint32_t e) {
    const T its = sort_key(element, order);
    return its < key || (its == key && static_cast<int32_t>(at + e - chosen) < 0);
  });
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  const uint32_t up_to = sum_up_to_lane(lane < kPartitionWarps ? of_warps[lane] : 0u);
  const uint32_t of_tile = shuffle_from(up_to, 31), before_warp = shuffle_from(up_to, warp) - of_warp;
  if (warp == 0) {
    const uint32_t before = look_back(a.tiles(row), static_cast<int>(tile.tile), of_tile);
    if (lane == 0) before_tile = before;
  }
  __syncthreads();
  // Where the two parts of the tile go in the row, the second one without the chosen element; and in shared memory, at
  // the same distance from a whole vector.
  const bool has_chosen = chosen >= first && chosen < end;
  const uint32_t to = before_tile, begin = start + first, others_to = kth + 1 + (begin - to) - (middle < begin);
  const uint32_t others = end > first ? end - first - of_tile - has_chosen : 0;
  const int64_t of_row = int64_t{row} * length;
  const auto past_vector = [&](uint32_t place) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(a.values + of_row + place) % 16 / sizeof(T));
  };
  const uint32_t firsts_at = past_vector(to);
  const uint32_t others_at = (firsts_at + of_tile + kVector - 1) / kVector * kVector + past_vector(others_to);
#pragma unroll 1
  for (int result = 0; result < 2; ++result) {
    if (result == 0 ? a.values == nullptr : a.indices == nullptr) continue;
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      uint32_t next = before_warp + tile.before[v];
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) {
        const uint32_t at = tile.own + v * 32 * kVector + e;
        const bool is_first = tile.firsts >> (v * kVector + e) & 1;
        const uint32_t other = at - first - next - (has_chosen && at > chosen);
        const uint32_t place = is_first ? firsts_at + next : others_at + other;
        next += is_first;
        if (at < first || at >= end) continue;
        if (at == chosen) {
          if (result == 0)
            a.values[of_row + kth] = tile.vector[v].element[e];
          else
            a.indices[of_row + kth] = static_cast<int32_t>(middle);
        } else if (result == 0) {
          values[place] = tile.vector[v].element[e];
        } else {
          indices[place] = static_cast<uint16_t>(at);
        }
      }
    }
    __syncthreads();
    const auto copy = [&](uint32_t from, uint32_t count, uint32_t to) {
      if (result == 0) {
        T* const out = a.values + of_row + to - from % kVector;
        const uint32_t skipped = from % kVector;
        const T* const in = values + from - skipped;
        for (uint32_t i = threadIdx.x * kVector; i < skipped + count; i += kPartitionThreads * kVector) {
          if (i >= skipped && i + kVector <= skipped + count) {
            *reinterpret_cast<Vector*>(out + i) = *reinterpret_cast<const Vector*>(in + i);
          } else {
            for (uint32_t e = max(i, skipped); e < min(i + kVector, skipped + count); ++e) out[e] = in[e];
          }
        }
      } else {
        for (uint32_t i = threadIdx.x; i < count; i += kPartitionThreads)
          a.indices[of_row + to + i] = static_cast<int32_t>(start + indices[from + i]);
      }
    };
    copy(firsts_at, of_tile, to);
    copy(others_at, others, others_to);
    __syncthreads();
  }
}

template <class T>
cudaError_t launch_partition(cudaStream_t stream, const Args<T>& a) {
  const int64_t blocks = a.problem.rows.count() * a.plan.tiles;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kPartitionThreads);
  config.shared_bytes = (kPartitionTile + 48 / sizeof(T)) * std::max(sizeof(T), sizeof(uint16_t));
  return launch(stream, config, select_partition_kernel<T>, a);
}

}  // namespace
}  // namespace jaxgpuops::select
