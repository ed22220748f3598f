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

}  // namespace jaxgpuops::count
