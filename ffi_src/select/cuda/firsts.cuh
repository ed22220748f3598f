// For long.cu: gathers the elements of each row up to the chosen one, in order of appearance. A row is cut into
// tiles, with a block for each, as for a partition (partition.cuh). A block reads its tile once, marks its
// elements, puts them in shared memory, learns how many elements earlier tiles have, and writes its own as one run.
#pragma once

#include "select/cuda/partition.cuh"

namespace jaxgpuops::select {
namespace {

template <class T>
__global__ void __launch_bounds__(kPartitionThreads, sizeof(T) > 4 ? 2 : 3)
    select_firsts_kernel(const __grid_constant__ Args<T> a) {
  constexpr uint32_t kVector = 16 / sizeof(T), kVectors = kPartitionTile / kPartitionThreads / kVector;
  struct alignas(16) Vector {
    T element[kVector];
  };
  __shared__ uint32_t of_warps[kPartitionWarps], before_tile;
  T* const values = reinterpret_cast<T*>(dynamic_shared_memory());
  auto* const indices = reinterpret_cast<uint16_t*>(values + kPartitionTile);
  const auto length = static_cast<uint32_t>(a.problem.rows.length), tiles = static_cast<uint32_t>(a.plan.tiles);
  const uint32_t row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const T* const x = a.x + int64_t{row} * length;
  // Tiles begin at whole vectors, the first one before the row. `start`: the number of a tile's first element, modulo
  // 2^32; its elements of the row are those from `first` to `end`.
  const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const uint32_t start = tile * uint32_t{kPartitionTile} - past, first = tile == 0 ? past : 0;
  const uint32_t end = tile == 0        ? min(length + past, uint32_t{kPartitionTile})
                       : start < length ? min(length - start, uint32_t{kPartitionTile})
                                        : 0;
  const uint32_t own = (warp * kVectors * 32 + lane) * kVector;  // the thread's first element of the tile
  Vector vector[kVectors];
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
  const uint32_t middle = a.head(row).chosen, chosen = middle - start;
  KeyOrder order = a.problem.order.ascending.order;  // there is no rule for NaNs and zeros
  order.flip ^= a.problem.order.invert;
  const T key = encode(x[middle], order);

  // A bit for each of the thread's elements that is wanted, and the number of these in each vector and in those of
  // lower lanes: of two vectors in a word. Elements equal to the chosen one are wanted up to it.
  constexpr uint32_t kWords = (kVectors + 1) / 2;
  uint32_t firsts = 0, counts[kWords] = {};
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const uint32_t at = own + v * 32 * kVector;
    const int32_t equals = static_cast<int32_t>(chosen - at);  // how many more elements count if equal
    uint32_t set = 0;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      const T its = encode(vector[v].element[e], order);
      if (its < key || (its == key && static_cast<int32_t>(e) <= equals)) set |= 1u << e;
    }
    if (at < first || at + kVector > end) {
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e)
        if (at + e < first || at + e >= end) set &= ~(1u << e);
    }
    firsts |= set << (v * kVector);
    counts[v / 2] += __popc(set) << (v % 2 * 16);
  }
  uint32_t before[kVectors], of_warp = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWords; ++w) {
    const uint32_t up_to = sum_up_to_lane(counts[w]), all = shuffle_from(up_to, 31), lower = up_to - counts[w];
    before[2 * w] = of_warp + (lower & 0xffff), of_warp += all & 0xffff;
    if (2 * w + 1 < kVectors) before[2 * w + 1] = of_warp + (lower >> 16), of_warp += all >> 16;
  }
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  const uint32_t up_to = sum_up_to_lane(lane < kPartitionWarps ? of_warps[lane] : 0u);
  const uint32_t of_tile = shuffle_from(up_to, 31), before_warp = shuffle_from(up_to, warp) - of_warp;
  uint64_t* const told = a.tiles(row);
  if (threadIdx.x == 0) store_relaxed(told + tile, (tile ? kOfTile : kUpToTile) | of_tile);
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    uint32_t next = before_warp + before[v];
    if ((firsts >> (v * kVector) & ((1u << kVector) - 1)) == 0) continue;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      if (!(firsts >> (v * kVector + e) & 1)) continue;
      values[next] = vector[v].element[e];
      indices[next] = static_cast<uint16_t>(own + v * 32 * kVector + e);
      ++next;
    }
  }
  if (warp == 0) {
    const uint32_t earlier = look_back(told, static_cast<int>(tile), of_tile);
    if (lane == 0) before_tile = earlier;
  }
  __syncthreads();
  const int64_t to = int64_t{row} * (a.problem.kth + 1) + before_tile;
#pragma unroll 2
  for (uint32_t i = threadIdx.x; i < of_tile; i += kPartitionThreads) {
    a.values[to + i] = values[i];
    a.indices[to + i] = static_cast<int32_t>(start + indices[i]);
  }
}

template <class T>
cudaError_t launch_gather(cudaStream_t stream, const Args<T>& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(a.problem.rows.count() * a.plan.tiles));
  config.block = dim3(kPartitionThreads);
  config.shared_bytes = kPartitionTile * (sizeof(T) + sizeof(uint16_t));
  return launch(stream, config, select_firsts_kernel<T>, a);
}

}  // namespace
}  // namespace jaxgpuops::select
