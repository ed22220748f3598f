// Loads from the shared memory of other blocks of a cluster; intrinsics.cuh has stores and barriers.
#pragma once

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

// Loads a word from the address `from` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t load_in_cluster(const uint32_t* from, unsigned rank) {
  uint32_t word = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg.u32 address; mapa.shared::cluster.u32 address, %1, %2; ld.shared::cluster.u32 %0, [address];}"
               : "=r"(word)
               : "r"(shared_address(from)), "r"(rank)
               : "memory");
#endif
  return word;
}

}  // namespace jaxgpuops
