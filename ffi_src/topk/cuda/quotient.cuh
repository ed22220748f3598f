// Division of the small numbers of a tile by a number that a launch knows, as one multiplication.
#pragma once

#include <cstdint>

namespace jaxgpuops::topk {

inline uint32_t reciprocal(int64_t divisor) { return static_cast<uint32_t>((int64_t{1} << 32) / divisor + 1); }

// Returns a / divisor, if a * divisor is less than 2^32.
__device__ __forceinline__ uint32_t quotient(uint32_t a, uint32_t divisor, uint32_t reciprocal) {
  return divisor == 1 ? a : __umulhi(a, reciprocal);
}

}  // namespace jaxgpuops::topk
