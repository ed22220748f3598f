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
  constexpr uint32_t kVector = RowTile<T>::kVector, kVectors = RowTile<T>::kVectors;
  __shared__ uint32_t of_warps[kPartitionWarps], before_tile;
  T* const values = reinterpret_cast<T*>(dynamic_shared_memory());
  auto* const indices = reinterpret_cast<uint16_t*>(values + kPartitionTile);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  RowTile<T> tile(a);
  const uint32_t row = tile.row, start = tile.start;
  const uint32_t middle = a.head(row).chosen, chosen = middle - start;
  KeyOrder order = a.problem.order.ascending.order;  // there is no rule for NaNs and zeros
  order.flip ^= a.problem.order.invert;
  const T key = encode(tile.x[middle], order);
  // Marks what is wanted. Elements equal to the chosen one are wanted up to it.
  const uint32_t of_warp = tile.mark([&](T element, uint32_t at, uint32_t e) {
    const auto equals = static_cast<int32_t>(chosen - at);  // how many more elements count if equal
    const T its = encode(element, order);
    return its < key || (its == key && static_cast<int32_t>(e) <= equals);
  });
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  const uint32_t up_to = sum_up_to_lane(lane < kPartitionWarps ? of_warps[lane] : 0u);
  const uint32_t of_tile = shuffle_from(up_to, 31), before_warp = shuffle_from(up_to, warp) - of_warp;
  uint64_t* const told = a.tiles(row);
  if (threadIdx.x == 0) store_relaxed(told + tile.tile, (tile.tile ? kOfTile : kUpToTile) | of_tile);
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    uint32_t next = before_warp + tile.before[v];
    if ((tile.firsts >> (v * kVector) & ((1u << kVector) - 1)) == 0) continue;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      if (!(tile.firsts >> (v * kVector + e) & 1)) continue;
      values[next] = tile.vector[v].element[e];
      indices[next] = static_cast<uint16_t>(tile.own + v * 32 * kVector + e);
      ++next;
    }
  }
  if (warp == 0) {
    const uint32_t earlier = look_back(told, static_cast<int>(tile.tile), of_tile);
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
