// Steps of kernels that count equal keys.
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

// Whether all elements of a vector are equal. T is that of its elements, of 8 or 16 bits.
template <class T, class Vector>
__device__ __forceinline__ bool all_equal(const Vector& vector) {
  static_assert(sizeof(T) < 4);
  const auto words = bits_as<WordsOf<Vector>>(vector);
  const uint32_t first = words.word[0];
  uint32_t differ = first ^ __funnelshift_l(first, first, 8 * sizeof(T));
#pragma unroll
  for (const uint32_t word : words.word) differ |= word ^ first;
  return differ == 0;
}

}  // namespace jaxgpuops
