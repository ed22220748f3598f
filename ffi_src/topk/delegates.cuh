// What kernels share in which a few lanes, or threads that each hold a few elements, select: delegates, packed keys,
// words to rank by.
#pragma once

#include "topk/columns_shape.h"
#include "topk/composite.cuh"

namespace jaxgpuops::topk {

// count += a < b, in two instructions: by the carry of b + ~a.
__device__ __forceinline__ void count_less(uint32_t& count, uint32_t a, uint32_t b) {
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %2;\naddc.u32 %0, %0, 0;\n}" : "+r"(count) : "r"(~a), "r"(b));
}

// A lower bound, reached by at least k of a group's delegates (k <= 2 * kLanes) and by few more, of the k-th largest.
// Every lane's second delegate reaches the least of them; a bisection by ballots closes in from there.
template <int kLanes>
__device__ __forceinline__ uint32_t kth_of_group(const uint32_t (&v)[kParts], uint32_t k, uint32_t mates) {
  const uint32_t a = max(v[0], v[1]), b = min(v[0], v[1]), c = max(v[2], v[3]), d = min(v[2], v[3]);
  const uint32_t top = max(a, c), second = max(min(a, c), max(b, d));
  uint32_t low = k <= kLanes ? top : second, high = top;
#pragma unroll
  for (int lanes = kLanes / 2; lanes; lanes /= 2) {
    low = min(low, __shfl_xor_sync(kFullWarp, low, lanes));
    high = max(high, __shfl_xor_sync(kFullWarp, high, lanes));
  }
  const uint32_t slack = k + k / 16;
  for (int step = 0; step < 12; ++step) {
    const uint32_t middle = high - (high - low) / 2;
    uint32_t reached = 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) reached += __popc(__ballot_sync(kFullWarp, v[p] >= middle) & mates);
    if (reached >= k) {
      low = middle;
      if (reached <= slack) high = low;
    } else {
      high = middle - 1;
    }
    if (!__any_sync(kFullWarp, low < high)) break;
  }
  return low;
}

// The k-th largest of two keys a lane, k <= kTeam: a bitonic sort over the team.
template <int kTeam>
__device__ __forceinline__ uint32_t kth_of_pairs(uint32_t a, uint32_t b, uint32_t k) {
  const uint32_t lane = threadIdx.x & 31, t = lane & (kTeam - 1);
#pragma unroll
  for (uint32_t size = 1; size <= kTeam; size *= 2) {  // lanes whose pairs are sorted together
    const bool descending = (t & size) == 0;
#pragma unroll
    for (uint32_t lanes = size / 2; lanes; lanes /= 2) {
      const bool larger = ((t & lanes) == 0) == descending;
      const uint32_t other_a = __shfl_xor_sync(kFullWarp, a, lanes), other_b = __shfl_xor_sync(kFullWarp, b, lanes);
      a = larger ? max(a, other_a) : min(a, other_a);
      b = larger ? max(b, other_b) : min(b, other_b);
    }
    const uint32_t most = max(a, b), least = min(a, b);
    a = descending ? most : least;
    b = descending ? least : most;
  }
  const uint32_t from = lane - t + (k - 1) / 2;
  const uint32_t of_a = __shfl_sync(kFullWarp, a, from), of_b = __shfl_sync(kFullWarp, b, from);
  return k % 2 ? of_a : of_b;
}

// A 32-bit word as 1, 2 or 4 keys side by side.
template <class Key>
struct Lanes {
  static constexpr int kBits = 8 * sizeof(Key);
  uint32_t magnitude, flip;

  __device__ explicit Lanes(KeyOrder order)
      : magnitude(static_cast<Key>(order.magnitude)), flip(spread(static_cast<Key>(order.flip))) {}
  __device__ static uint32_t spread(uint32_t word) {
#pragma unroll
    for (int bits = kBits; bits < 32; bits *= 2) word |= word << bits;
    return word;
  }
  // A multiplication spreads each sign bit over the magnitude: it runs beside the integer pipe, which is the busy one.
  __device__ __forceinline__ uint32_t encode(uint32_t word) const {
    const uint32_t signs = kBits == 32 ? word >> 31 : (word >> (kBits - 1)) & spread(1);
    return word ^ (signs * magnitude) ^ flip;
  }
  __device__ static __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    return kBits == 32 ? (a > b ? a : b) : kBits == 16 ? __vmaxu2(a, b) : __vmaxu4(a, b);
  }
  __device__ static __forceinline__ uint32_t largest(uint32_t word) {
    if constexpr (kBits <= 16) word = max(word, word >> 16);
    if constexpr (kBits == 8) word = max(word, word >> 8);
    return static_cast<Key>(word);
  }
};

// What candidates are ranked by, in one word: a 32-bit key, with its index kept beside it, or a narrow key above its
// mirrored index, which makes all of them distinct if rows are shorter than 2^16 (kShort).
template <class Key, bool kShort = true>
struct Ranked {
  static constexpr bool kDistinct = sizeof(Key) < 4 && kShort;
  __device__ static uint32_t word(Key key, uint32_t index) {
    return kDistinct ? static_cast<uint32_t>(key) << 16 | (0xffffu - index) : key;
  }
  __device__ static Key key(uint32_t word) { return static_cast<Key>(kDistinct ? word >> 16 : word); }
  __device__ static uint32_t index(uint32_t word, uint32_t index) {
    return kDistinct ? 0xffffu - (word & 0xffffu) : index;
  }
};

}  // namespace jaxgpuops::topk
