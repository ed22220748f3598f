// What counting sorts share: which of its equals an element is, in order.
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"

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

}  // namespace jaxgpuops
