// What counting sorts share: which of its equals an element is, in order, and sums of what threads have.
#pragma once

#include <cstdint>

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

__device__ __forceinline__ uint32_t lanes_below() { return (1u << (threadIdx.x & 31)) - 1; }

// How many elements with this key the warp has had before: in earlier calls, which `counters` of the warp know, and in
// lanes before this one. Keys of -1 are none. All lanes take part.
template <class Counter>
__device__ __forceinline__ Counter rank_in_warp(int32_t key, Counter* counters) {
  const unsigned same = __match_any_sync(kEveryLane, key), lower = same & lanes_below();
  const Counter before = key >= 0 ? counters[key] : 0;
  __syncwarp();
  if (key >= 0 && lower == 0) counters[key] = before + __popc(same);
  __syncwarp();
  return before + __popc(lower);
}

// The sum of values of the block's threads before this one; that of all in `total`. `sums` has room for each warp.
template <class T>
__device__ __forceinline__ T sum_before(T value, T* sums, int warps, T& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  T sum = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const T other = __shfl_up_sync(kEveryLane, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    before += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  __syncthreads();
  return before + sum - value;
}

}  // namespace jaxgpuops
