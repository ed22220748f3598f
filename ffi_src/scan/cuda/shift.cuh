// Rows that need not begin at a multiple of 16 bytes, and the vectors of memory that hold them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/between.cuh"

namespace jaxgpuops::scan {

// How many bytes an address is after a multiple of 16.
__device__ __forceinline__ unsigned misaligned(const void* address) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address)) & 15;
}

// The 16 aligned bytes that hold the element.
template <class T>
__device__ __forceinline__ auto* vector_of(T* element) {
  using Vector = std::conditional_t<std::is_const_v<T>, const Pack, Pack>;
  return reinterpret_cast<Vector*>(reinterpret_cast<uintptr_t>(element) - misaligned(element));
}

// Copies the first `count` (at most 16) bytes of 16 that are aligned, as copy_async() does, and clears the rest.
__device__ __forceinline__ void copy_async_part(void* to, const void* from, int count) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(count)
               : "memory");
#else
#pragma unroll 1
  for (int i = 0; i < 16; ++i)
    static_cast<unsigned char*>(to)[i] = i < count ? static_cast<const unsigned char*>(from)[i] : 0;
#endif
}

// Starts to copy what a row from `begin` to `end` has of 16 aligned bytes, and clears what comes after the row. (What
// came before it is copied.)
template <class T>
__device__ __forceinline__ void copy_row_part(Pack* to, const Pack* from, const T* begin, const T* end) {
  const auto bytes = [&](const T* element) {
    return reinterpret_cast<const unsigned char*>(element) - reinterpret_cast<const unsigned char*>(from);
  };
  const int64_t before = bytes(begin), left = bytes(end);
  copy_async_part(to, from, before < 16 ? static_cast<int>(max(int64_t{0}, min(left, int64_t{16}))) : 0);
}

}  // namespace jaxgpuops::scan
