// How the blocks that count the digits of a row put their counts together (sweep.cuh, keys.cu).
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"
#include "sort/cuda/digits.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kCountThreads = 512;  // of a block that counts

// Adds a block's counts, of kPasses digits, to those of its row. Returns whether this is the last of the row's blocks
// to do so; `counts` are then those of the row. `last` is in shared memory.
template <int kPasses>
__device__ __forceinline__ bool add_to_row(uint32_t* counts, uint32_t* all, uint32_t* counted, int64_t blocks,
                                           bool& last) {
  if (blocks == 1) return true;
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads)
    if (counts[c]) atomicAdd(all + c, counts[c]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counted, 1u) == blocks - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = __ldcg(all + c);
  return true;
}

// Writes to `all` how many elements of the row have a lower digit than each. Sets the bits in `active`, in shared
// memory, of the passes whose digits differ. The digits of pass p are in the order of d ^ turn_of(p).
template <int kPasses, class TurnOf>
__device__ __forceinline__ void sum_counts(const uint32_t* counts, uint32_t* all, int64_t length, uint32_t& active,
                                           const TurnOf& turn_of) {
  if (threadIdx.x == 0) active = 0;
  __syncthreads();
  // Each warp adds up the counts of a pass: each lane those of neighbouring digits.
  constexpr int kOfLane = kDigits / 32;
  static_assert(kPasses <= kCountThreads / 32);
  if (const uint32_t p = threadIdx.x / 32; p < kPasses) {
    const uint32_t turn = turn_of(p), first = threadIdx.x % 32 * kOfLane;
    uint32_t own[kOfLane], total = 0;
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      own[i] = counts[p * kDigits + ((first + i) ^ turn)];
      differ |= own[i] != 0 && own[i] != length;
      total += own[i];
    }
    uint32_t less = sum_up_to_lane(total) - total;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      all[p * kDigits + ((first + i) ^ turn)] = less;
      less += own[i];
    }
    if (differ) atomicOr(&active, 1u << p);
  }
  __syncthreads();
}

}  // namespace
}  // namespace jaxgpuops::sort
