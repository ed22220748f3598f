// Device functions that CUDA C++ lacks: loads and stores past the caches or without order, separate rounding, clusters
// and dependent launches.
#pragma once

#include <cstdint>

#include "common/cuda/element.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"

namespace jaxgpuops {

__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ uint4 jaxgpuops_shared_memory[];
  return reinterpret_cast<unsigned char*>(jaxgpuops_shared_memory);
}

// Loads or stores 16 bytes that are not used again soon, so that the caches evict them first.
template <class T>
__device__ __forceinline__ T load_once(const T* from) {
  static_assert(sizeof(T) == 16);
  return bits_as<T>(__ldcs(reinterpret_cast<const uint4*>(from)));
}
template <class T>
__device__ __forceinline__ void store_once(T* to, T value) {
  __stcs(reinterpret_cast<uint4*>(to), bits_as<uint4>(value));
}

// Returns the 32 bits that start at bit `bits` of the 64-bit number high:low.
__device__ __forceinline__ uint32_t funnel_right(uint32_t low, uint32_t high, int bits) {
  return __funnelshift_r(low, high, bits);
}

// 2^x with an error of at most 2 ulp. Results below the smallest normal number are 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

// Products and sums that are rounded separately: the compiler may not fuse them into a multiply-add.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double rounded_sum(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Returns the address within the shared memory window, for PTX instructions that do not take a generic address.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Relaxed loads and stores of a word by which blocks tell each other something while they run: the word is all that is
// told, and nothing else is ordered by it.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// ---- Dependent launches (Launch::overlap) ---------------------------------------------------------------------------

// Allows the next kernel to start early, if it was launched with Launch::overlap.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Clusters (Launch::cluster > 1) ---------------------------------------------------------------------------------

__device__ __forceinline__ void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Arrives at the cluster barrier without publishing earlier writes. (arrive_at_cluster_barrier() publishes them, and so
// waits for writes to global memory.) Barriers in shared memory are published by make_barriers_visible().
__device__ __forceinline__ void arrive_at_cluster_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Returns the number of the block in its cluster.
__device__ __forceinline__ int block_of_cluster() {
  unsigned block = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
#endif
  return static_cast<int>(block);
}

// Stores a value to the address `to` in the shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ void store_in_cluster(T* to, unsigned rank, T value) {
#if __CUDA_ARCH__ >= 900
  const auto words = bits_as<WordsOf<T>>(value);
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "r"(rank));
#pragma unroll
  for (int w = 0; w < static_cast<int>(sizeof(T) / 4); ++w)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address + 4 * w), "r"(words.word[w]) : "memory");
#endif
}

}  // namespace jaxgpuops
