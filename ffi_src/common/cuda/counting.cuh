// A step of every counting sort: finds how many elements with the same key come before an element.
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"

namespace jaxgpuops {

__device__ __forceinline__ uint32_t lanes_below() { return (1u << (threadIdx.x & 31)) - 1; }

// How many elements with this key come before the lane's: those of earlier calls, which the warp's `counters` hold, and
// those of lower lanes. A key of -1 means that the lane has no element. All lanes must call it.
template <class Counter>
__device__ __forceinline__ Counter rank_in_warp(int32_t key, Counter* counters) {
  const unsigned same = __match_any_sync(kEveryLane, key), lower = same & lanes_below();
  const Counter before = key >= 0 ? counters[key] : 0;
  __syncwarp();
  if (key >= 0 && lower == 0) counters[key] = before + __popc(same);
  __syncwarp();
  return before + __popc(lower);
}

}  // namespace jaxgpuops
