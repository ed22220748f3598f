// Builds a vector that does not begin at a multiple of 16 bytes from the two aligned vectors that contain it.
#pragma once

#include <cstdint>

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

// Returns the 16 bytes that begin at byte `at` (0 to kMost) of the 32 bytes of a and b.
template <int kItemBytes, int kMost>
__device__ __forceinline__ Pack between(const Pack& a, const Pack& b, int at) {
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = kMost == 16 && at & 16 ? b.word[i] : a.word[i];
    word[i + 4] = b.word[i];
  }
  if constexpr (kItemBytes <= 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) word[i] = at & 8 ? word[i + 2] : word[i];
  }
  if constexpr (kItemBytes <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = at & 4 ? word[i + 1] : word[i];
  }
  Pack pack;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pack.word[i] = kItemBytes < 4 ? funnel_right(word[i], word[i + 1], 8 * (at & 3)) : word[i];
  return pack;
}

}  // namespace jaxgpuops
