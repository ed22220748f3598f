// The part that the radix sorts share: where the elements of a block go in a stable sort by one digit of eight bits.
//
// Elements are in warp order: warp w has 32 * kItems neighbouring elements, of which lane l holds number l, l + 32 and
// so on. Slots past the end of the row come after all elements and get the last digit, so that every pass leaves them
// behind.
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

// Returns the lanes whose element has the same digit. One vote for each bit is faster than match.any. The loop is in
// assembly because the compiler would make twice as many instructions of it.
__device__ __forceinline__ uint32_t lanes_with(uint32_t digit) {
  uint32_t same = kEveryLane;
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit)
    asm volatile(
        "{\n.reg .pred set;\n.reg .b32 lanes;\nand.b32 lanes, %1, %2;\nsetp.ne.u32 set, lanes, 0;\n"
        "vote.sync.ballot.b32 lanes, set, 0xffffffff;\n@!set not.b32 lanes, lanes;\nand.b32 %0, %0, lanes;\n}"
        : "+r"(same)
        : "r"(digit), "r"(1u << bit));
  return same;
}

__device__ __forceinline__ uint32_t lanes_before() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}
__device__ __forceinline__ uint32_t lanes_after() {
  uint32_t mask;
  asm("mov.u32 %0, %%lanemask_gt;" : "=r"(mask));
  return mask;
}

// Ranks each element among those of its warp that have the same digit, and adds the rank to `digit` from bit 8 on.
// `counts` belongs to the warp; afterwards counts[d] is the number of its elements with digit d.
template <int kItems>
__device__ __forceinline__ void rank_in_warp(uint32_t (&digit)[kItems], uint32_t* counts) {
  for (int d = threadIdx.x % 32; d < kDigits; d += 32) counts[d] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    asm volatile("" ::: "memory");  // keeps the votes of later elements, and the registers they need, behind this point
    const uint32_t same = lanes_with(digit[i]), ahead = __popc(same & lanes_before());
    const uint32_t before = counts[digit[i]];
    __syncwarp();
    if ((same & lanes_after()) == 0) counts[digit[i]] = before + ahead + 1;
    __syncwarp();
    digit[i] |= (before + ahead) << kDigitBits;
  }
}

// Returns the position in the block of an element that rank_in_warp() has ranked. `counts` here holds the start of each
// digit in the element's warp, as begin_of_digits() leaves it.
__device__ __forceinline__ uint32_t place_of(uint32_t ranked, const uint32_t* counts) {
  return counts[ranked % kDigits] + (ranked >> kDigitBits);
}

// Returns the sum of `value` over all lower threads, for the first 256 threads. All threads of the block must call it.
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* warps) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t sum = sum_up_to_lane(value);
  if (lane == 31 && warp < kDigits / 32) warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
#pragma unroll
  for (int w = 0; w < kDigits / 32; ++w) before += w < warp ? warps[w] : 0;
  return before + sum - value;
}

// Replaces the counts of each warp and digit by the position in the block where those elements start. To thread d of
// the first 256 it returns the number of elements with digit d, and in `begin` where they start.
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
