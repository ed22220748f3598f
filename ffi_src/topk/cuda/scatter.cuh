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

// The i-th of so many places below `range`, which is not smaller than `count`, a power of two. They are distinct: each
// is somewhere in its own part of the range.
__device__ __forceinline__ uint32_t scatter_apart(uint32_t i, uint32_t count, uint32_t range) {
  const uint32_t begin = static_cast<uint32_t>(uint64_t{i} * range / count);
  return begin + scatter(i, static_cast<uint32_t>(uint64_t{i + 1} * range / count) - begin);
}

}  // namespace jaxgpuops::topk
