// Copies from global to shared memory that run while the thread does other work. They need compute capability 8.0; on
// older devices they are ordinary copies. Each thread issues its own copies and waits for them. CUDA's __pipeline
// functions do not serve here: the compiler may move reads of the copied data before their wait, and the number of
// bytes that they clear must be a constant.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

// Copies 4, 8 or 16 bytes. The calling thread may read them after wait_for_async_copies().
template <int kBytes = 16>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "n"(kBytes)
                 : "memory");
  }
#else
  using Unit = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint64_t, uint32_t> >;
  *static_cast<Unit*>(to) = *static_cast<const Unit*>(from);
#endif
}

// Copies 16 bytes if `there`, else stores 16 zero bytes.
__device__ __forceinline__ void copy_async_or_clear(void* to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(to) = there ? *static_cast<const uint4*>(from) : uint4{};
#endif
}

__device__ __forceinline__ void commit_async_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Starts to copy `count` elements from global to shared memory, by all kThreads threads of a block: whole vectors, if
// both addresses are aligned to them, and single elements.
template <int kThreads, class T>
__device__ __forceinline__ void copy_tile_async(T* tile, const T* from, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  const uint32_t whole = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? count / kVector * kVector : 0;
#pragma unroll 1
  for (uint32_t e = threadIdx.x * kVector; e < whole; e += kThreads * kVector) copy_async(tile + e, from + e);
#pragma unroll 1
  for (uint32_t e = whole + threadIdx.x; e < count; e += kThreads) tile[e] = from[e];
}

// Waits for all copies of this thread except those of its last kLast commits.
template <int kLast>
__device__ __forceinline__ void wait_for_async_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
#endif
}

}  // namespace jaxgpuops
