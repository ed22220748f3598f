// A barrier of the blocks that share a row.
#pragma once

#include <cstdint>

namespace jaxgpuops::topk {

// A barrier for all blocks of a row, which run at the same time. `target` counts the arrivals, from the start on, after
// which the barrier opens.
__device__ __forceinline__ void meet(uint32_t* arrivals, uint32_t slices, uint32_t& target) {
  __syncthreads();
  if (slices == 1) return;
  target += slices;
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    while (*static_cast<volatile uint32_t*>(arrivals) < target) {
    }
    __threadfence();
  }
  __syncthreads();
}

}  // namespace jaxgpuops::topk
