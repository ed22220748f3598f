// Where the elements of a sample are.
#pragma once

#include <cstdint>

namespace jaxgpuops::topk {

// Some number that depends on i as if by chance, below `range`.
__device__ __forceinline__ uint32_t scatter(uint32_t i, uint32_t range) {
  i *= 0x9e3779b1u;
  i ^= i >> 15;
  i *= 0x85ebca77u;
  i ^= i >> 13;
  return __umulhi(i * 0xc2b2ae3du, range);
}

}  // namespace jaxgpuops::topk
