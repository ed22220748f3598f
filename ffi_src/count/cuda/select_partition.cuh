// For select_long: what follows of a partition, when the element of rank kth has been chosen. A row is cut into tiles,
// with a block for each. A block reads its tile once, counts the elements that sort before the chosen one, and learns
// how many of these earlier tiles have. It puts the two parts of its tile in shared memory, and writes each as one run.
//
// After: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016).
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/select_blocks.cuh"
#include "count/cuda/select_held.cuh"

namespace jaxgpuops::count {
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

template <class T>
__global__ void __launch_bounds__(kPartitionThreads, sizeof(T) == 8 ? 2 : 3)
    select_partition_kernel(const __grid_constant__ Args<T> a) {
  constexpr int kItems = kPartitionTile / kPartitionThreads;
  __shared__ uint32_t of_warps[kPartitionWarps], before_tile, middle_place;
  T* const values = reinterpret_cast<T*>(dynamic_shared_memory());
  auto* const indices = reinterpret_cast<uint16_t*>(dynamic_shared_memory());
  const auto length = static_cast<uint32_t>(a.problem.rows.length), tiles = static_cast<uint32_t>(a.plan.tiles);
  const uint32_t row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles, start = tile * uint32_t{kPartitionTile};
  const uint32_t own = min(length - start, uint32_t{kPartitionTile});
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const T* const x = a.x + int64_t{row} * length;
  const uint32_t begin = warp * kItems * 32 + lane;
  T element[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) element[i] = begin + i * 32 < own ? x[start + begin + i * 32] : T{0};
  const uint32_t middle = a.head(row).chosen, kth = static_cast<uint32_t>(a.problem.kth);
  const SortOrder order = one_flip<T>(a.problem.order);
  const IsBefore<T> is_before{sort_key(x[middle], order), middle};
  if (threadIdx.x == 0) middle_place = ~0u;

  uint32_t firsts = 0;  // a bit for each of the thread's elements that sorts before the chosen one
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t at = begin + i * 32;
    if (at < own && is_before(sort_key(element[i], order), start + at)) firsts |= 1u << i;
  }
  const uint32_t count = sum_of_warp(__popc(firsts));
  if (lane == 0) of_warps[warp] = count;
  __syncthreads();
  const uint32_t up_to = sum_up_to_lane(lane < kPartitionWarps ? of_warps[lane] : 0u);
  const uint32_t of_tile = shuffle_from(up_to, 31), before_warp = shuffle_from(up_to, warp) - count;
  if (warp == 0) {
    const uint32_t before = look_back(a.tiles(row), static_cast<int>(tile), of_tile);
    if (lane == 0) before_tile = before;
  }
#pragma unroll 1
  for (int result = 0; result < 2; ++result) {
    if (result == 0 ? a.values == nullptr : a.indices == nullptr) continue;
    uint32_t before = before_warp;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned lanes = __ballot_sync(kEveryLane, firsts >> i & 1);
      const uint32_t at = begin + i * 32, up_to_own = before + __popc(lanes & ((1u << lane) - 1));
      before += __popc(lanes);
      const uint32_t place = firsts >> i & 1 ? up_to_own : of_tile + at - up_to_own;
      if (at >= own) continue;
      if (result == 0)
        values[place] = element[i];
      else
        indices[place] = static_cast<uint16_t>(at);
      if (start + at == middle) middle_place = place - of_tile;
    }
    __syncthreads();
    // Where the first element of each part of the tile goes; of the second part, but for the chosen element.
    const uint32_t to = before_tile, others_to = kth + 1 + (start - to) - (middle < start), chosen = middle_place;
    const int64_t of_row = int64_t{row} * length;
    for (uint32_t i = threadIdx.x; i < own; i += kPartitionThreads) {
      const uint32_t other = i - of_tile;
      const uint32_t place = i < of_tile ? to + i : other == chosen ? kth : others_to + other - (other > chosen);
      if (result == 0)
        a.values[of_row + place] = values[i];
      else
        a.indices[of_row + place] = static_cast<int32_t>(start + indices[i]);
    }
    __syncthreads();
  }
}

template <class T>
cudaError_t launch_partition(cudaStream_t stream, const Args<T>& a) {
  const int64_t blocks = a.problem.rows.count() * a.plan.tiles;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kPartitionThreads);
  config.shared_bytes = kPartitionTile * (sizeof(T) > 2 ? sizeof(T) : 2);
  return launch(stream, config, select_partition_kernel<T>, a);
}

}  // namespace
}  // namespace jaxgpuops::count
