// What the radix sorts have in common: where the elements of a block go in a stable sort by one digit of eight bits.
//
// Elements are in warp order: warp w has a run of 32 * kItems, of which lane l holds places l, l + 32, and so on. Those
// that do not exist come after all others and have the last digit: they stay behind the others in every pass.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "sort/sort.h"

namespace jaxgpuops::sort {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

template <class Key>
__device__ __forceinline__ uint32_t digit_of(Key key, int shift) {
  return static_cast<uint32_t>(key >> shift) & (kDigits - 1);
}

// The lanes with the same digit. A vote for each bit is faster than match.any.
__device__ __forceinline__ uint32_t lanes_with(uint32_t digit) {
  uint32_t same = kEveryLane;
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const bool set = digit >> bit & 1;
    const uint32_t lanes = __ballot_sync(kEveryLane, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

__device__ __forceinline__ uint32_t lanes_before() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

// Adds to each digit, from bit 8 on, the rank of its element among those of its warp that have the digit. `counts` are
// the warp's, and become how many there are of each digit.
template <int kItems>
__device__ __forceinline__ void rank_in_warp(uint32_t (&digit)[kItems], uint32_t* counts) {
  for (int d = threadIdx.x % 32; d < kDigits; d += 32) counts[d] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    asm volatile("" ::: "memory");  // votes of later elements would take registers
    const uint32_t same = lanes_with(digit[i]), ahead = __popc(same & lanes_before());
    const uint32_t before = counts[digit[i]];
    __syncwarp();
    if (ahead == 0) counts[digit[i]] = before + __popc(same);
    __syncwarp();
    digit[i] |= (before + ahead) << kDigitBits;
  }
}

// Where such an element goes in the block, from where its digit and warp begin.
__device__ __forceinline__ uint32_t place_of(uint32_t ranked, const uint32_t* counts) {
  return counts[ranked % kDigits] + (ranked >> kDigitBits);
}

// The sum of what the first 256 threads give, over the threads before. All threads of the block come here.
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* warps) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint32_t up = __shfl_up_sync(kEveryLane, sum, lanes);
    if (lane >= lanes) sum += up;
  }
  if (lane == 31 && warp < kDigits / 32) warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
#pragma unroll
  for (int w = 0; w < kDigits / 32; ++w) before += w < warp ? warps[w] : 0;
  return before + sum - value;
}

// From the counts of all warps to where the elements of each digit and warp begin in the block. Returns, to thread d of
// the first 256, how many have digit d, and where these begin in `begin`.
template <int kWarps>
__device__ __forceinline__ uint32_t begin_of_digits(uint32_t* counts, uint32_t* warps, uint32_t& begin) {
  uint32_t total = 0;
  const bool has = threadIdx.x < kDigits;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += has ? counts[w * kDigits + threadIdx.x] : 0;
  uint32_t at = begin = sum_before(total, warps);
#pragma unroll 4
  for (int w = 0; w < kWarps && has; ++w) {
    uint32_t& count = counts[w * kDigits + threadIdx.x];
    at += count;
    count = at - count;
  }
  return total;
}

}  // namespace
}  // namespace jaxgpuops::sort
