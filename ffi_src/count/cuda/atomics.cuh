// Atomics that fold integers, in global or shared memory.
#pragma once

#include <cstdint>

namespace jaxgpuops::count {

// Adds the value to a word, or replaces the word by the value if that is larger. Most values are not larger, and a load
// tells that sooner than an atomic. If the load reads an old word, the atomic is only needless, never wrong.
template <bool kLargest>
__device__ __forceinline__ void atomic_fold(uint32_t* to, uint32_t value) {
  if constexpr (kLargest) {
    if (*to < value) atomicMax(to, value);
  } else {
    atomicAdd(to, value);
  }
}
template <bool kLargest>
__device__ __forceinline__ void atomic_fold(uint64_t* to, uint64_t value) {
  auto* const word = reinterpret_cast<unsigned long long*>(to);
  if constexpr (kLargest) {
    if (*to < value) atomicMax(word, static_cast<unsigned long long>(value));
  } else {
    atomicAdd(word, static_cast<unsigned long long>(value));
  }
}

// Adds the value to a sum of 64 bits of which the halves are in two words. Shared memory has no such atomic.
__device__ __forceinline__ void add_halves(uint32_t* low, uint32_t* high, uint64_t value) {
  const auto part = static_cast<uint32_t>(value);
  const uint32_t sum = part ? atomicAdd(low, part) + part : 0;
  const uint32_t up = static_cast<uint32_t>(value >> 32) + (sum < part);
  if (up) atomicAdd(high, up);
}

}  // namespace jaxgpuops::count
