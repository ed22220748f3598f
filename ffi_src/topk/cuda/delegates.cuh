// Selection by a few lanes, or by threads that hold a few elements each: delegates, several keys packed in a word, and
// the words that candidates are ranked by.
#pragma once

#include "common/cuda/warp.cuh"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/composite.cuh"

namespace jaxgpuops::topk {

// count += a < b, in two instructions: by the carry of b + ~a.
__device__ __forceinline__ void count_less(uint32_t& count, uint32_t a, uint32_t b) {
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %2;\naddc.u32 %0, %0, 0;\n}" : "+r"(count) : "r"(~a), "r"(b));
}

// Adds 1 to count if `other` comes before `own`: it is larger, or equal with a lower index. Takes three instructions.
__device__ __forceinline__ void count_before(uint32_t& count, uint32_t own, uint32_t index, uint32_t other,
                                             uint32_t other_index) {
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %2;\naddc.cc.u32 t, %3, %4;\naddc.u32 %0, %0, 0;\n}"
      : "+r"(count)
      : "r"(index), "r"(~other_index), "r"(~own), "r"(other));
}

__device__ __forceinline__ void count_before(uint32_t& count, uint64_t own, uint32_t index, uint64_t other,
                                             uint32_t other_index) {
  const uint64_t flipped = ~own;
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %2;\naddc.cc.u32 t, %3, %5;\naddc.cc.u32 t, %4, %6;\naddc.u32 %0, %0, 0;\n}"
      : "+r"(count)
      : "r"(index), "r"(~other_index), "r"(static_cast<uint32_t>(flipped)), "r"(static_cast<uint32_t>(flipped >> 32)),
        "r"(static_cast<uint32_t>(other)), "r"(static_cast<uint32_t>(other >> 32)));
}

// count += a > b, or a >= b. The count is a float: its addition then runs in another execution unit than the
// comparison. For an integer count, the compiler uses three instructions of the comparison's unit.
__device__ __forceinline__ void count_above(float& count, uint32_t a, uint32_t b) {
  asm("{\n.reg .pred p;\nsetp.gt.u32 p, %1, %2;\n@p add.f32 %0, %0, 0f3F800000;\n}" : "+f"(count) : "r"(a), "r"(b));
}
__device__ __forceinline__ void count_above(float& count, uint64_t a, uint64_t b) {
  asm("{\n.reg .pred p;\nsetp.gt.u64 p, %1, %2;\n@p add.f32 %0, %0, 0f3F800000;\n}" : "+f"(count) : "l"(a), "l"(b));
}
__device__ __forceinline__ void count_reaching(float& count, uint32_t a, uint32_t b) {
  asm("{\n.reg .pred p;\nsetp.ge.u32 p, %1, %2;\n@p add.f32 %0, %0, 0f3F800000;\n}" : "+f"(count) : "r"(a), "r"(b));
}
__device__ __forceinline__ void count_reaching(float& count, uint64_t a, uint64_t b) {
  asm("{\n.reg .pred p;\nsetp.ge.u64 p, %1, %2;\n@p add.f32 %0, %0, 0f3F800000;\n}" : "+f"(count) : "l"(a), "l"(b));
}

// count += a comes before b: it is larger, or equal with a lower index.
__device__ __forceinline__ void count_before(float& count, uint32_t a, uint32_t a_index, uint32_t b, uint32_t b_index) {
  asm("{\n.reg .pred p;\nsetp.lt.u32 p, %2, %4;\nsetp.eq.and.u32 p, %1, %3, p;\nsetp.gt.or.u32 p, %1, %3, p;\n"
      "@p add.f32 %0, %0, 0f3F800000;\n}"
      : "+f"(count)
      : "r"(a), "r"(a_index), "r"(b), "r"(b_index));
}
__device__ __forceinline__ void count_before(float& count, uint64_t a, uint32_t a_index, uint64_t b, uint32_t b_index) {
  asm("{\n.reg .pred p;\nsetp.lt.u32 p, %2, %4;\nsetp.eq.and.u64 p, %1, %3, p;\nsetp.gt.or.u64 p, %1, %3, p;\n"
      "@p add.f32 %0, %0, 0f3F800000;\n}"
      : "+f"(count)
      : "l"(a), "r"(a_index), "l"(b), "r"(b_index));
}

// bits = 2 * bits + (above < word), in two instructions: by the carry of word + ~above.
__device__ __forceinline__ void push_reaches(uint32_t& bits, uint32_t word, uint32_t above) {
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %2;\naddc.u32 %0, %0, %0;\n}" : "+r"(bits) : "r"(~above), "r"(word));
}

// Returns a lower bound of the k-th largest of a group's delegates, of which a lane has kCount: at least k delegates
// reach it, and few more. 4 delegates: k <= 2 * kLanes; more: k <= kCount / 4 * kLanes. The least of the lanes' larger
// delegates (of the smaller ones if k > kLanes; of the largest of each four) is such a bound, and a bisection with
// ballots improves it.
template <int kLanes, class V, int kCount>
__device__ __forceinline__ V kth_of_group(const V (&v)[kCount], uint32_t k, uint32_t mates) {
  V low = 0, high = 0;
#pragma unroll
  for (int p = 0; p < kCount; p += 4) {
    const V a = max(v[p], v[p + 1]), b = min(v[p], v[p + 1]), c = max(v[p + 2], v[p + 3]), d = min(v[p + 2], v[p + 3]);
    const V top = max(a, c), second = max(min(a, c), max(b, d)), bound = kCount > 4 || k <= kLanes ? top : second;
    low = p ? min(low, bound) : bound, high = max(high, top);
  }
  low = fold_lanes<kLanes>(low, [](V x, V y) { return min(x, y); });
  high = largest_of_lanes<kLanes>(high);
  const uint32_t slack = k + k / 16 + 3;  // a few more candidates take less time than another step
  for (int step = 0; step < 12; ++step) {
    const V middle = high - (high - low) / 2;
    uint32_t reached = 0;
#pragma unroll
    for (int p = 0; p < kCount; ++p) reached += __popc(__ballot_sync(kEveryLane, v[p] >= middle) & mates);
    if (reached >= k) {
      low = middle;
      if (reached <= slack) high = low;
    } else {
      high = middle - 1;
    }
    if (!__any_sync(kEveryLane, low < high)) break;
  }
  return low;
}

// Sorts keys or floats (no NaNs) of lanes downwards over each team, by bitonic sorts of several values in step. Of two
// keys, a lane keeps the larger or the lesser, depending on the lane. Floats change their sign instead, so that every
// lane keeps the larger: that is a multiplication, which runs on another pipe than comparisons.
template <int kTeam, class V, int kCount>
__device__ __forceinline__ void sort_over_team(V (&v)[kCount]) {
  const uint32_t t = threadIdx.x & (kTeam - 1);
#pragma unroll
  for (uint32_t size = 2; size <= kTeam; size *= 2) {
#pragma unroll
    for (uint32_t lanes = size / 2; lanes; lanes /= 2) {
      const bool larger = ((t & lanes) == 0) == ((t & size) == 0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const V other = __shfl_xor_sync(kEveryLane, v[i], lanes);
        v[i] = larger ? max(v[i], other) : min(v[i], other);
      }
    }
  }
}

template <int kTeam, int kCount>
__device__ __forceinline__ void sort_over_team(float (&v)[kCount]) {
  const uint32_t t = threadIdx.x & (kTeam - 1);
  const auto turn = [&](uint32_t bits) {  // the float 1, or -1 if exactly one of these two bits of the lane is set
    const uint32_t low = bits & -bits, high = bits ^ low, top = 1u << 31;
    return __uint_as_float((((t * (top / low)) ^ (high ? t * (top / high) : 0)) & top) | 0x3f800000);
  };
  uint32_t turned = 0;
#pragma unroll
  for (uint32_t size = 2; size <= kTeam; size *= 2) {
#pragma unroll
    for (uint32_t lanes = size / 2; lanes; lanes /= 2) {
      const float sign = turn(turned ^ lanes ^ size);
      turned = lanes ^ size;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[i] *= sign;
        v[i] = fmaxf(v[i], -__shfl_xor_sync(kEveryLane, v[i], lanes));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] *= turn(turned);
}

// Returns the k-th largest of the values of a team, of which each lane has two (a and b); k <= kTeam. Both a and b are
// sorted over the team. If i of the k largest values are from a and k - i from b, the k-th largest is the lesser of a's
// i-th and b's (k - i)-th. The right i gives the largest such number, so no search for i is needed.
template <int kTeam, class V>
__device__ __forceinline__ V kth_of_pairs(V a, V b, uint32_t k) {
  V v[2] = {a, b};
  sort_over_team<kTeam>(v);
  const uint32_t lane = threadIdx.x & 31, t = lane & (kTeam - 1);
  const V other = __shfl_sync(kEveryLane, v[1], lane - t + ((k - 2 - t) & (kTeam - 1)));
  V kth = t + 1 == k ? max(v[0], v[1]) : min(v[0], other);
  return fold_lanes<kTeam>(kth, [](V x, V y) { return max(x, y); });
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
  // A multiplication spreads each sign bit over the magnitude. It runs on another pipe than integer instructions, which
  // are the bottleneck.
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

// The word by which candidates are ranked: a key of 32 or 64 bits, with its index beside it; or a narrow key above its
// mirrored index. If rows are shorter than 2^16 (kShort), the latter words are all distinct.
template <class Key, bool kShort = true>
struct Ranked {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;
  static constexpr bool kDistinct = sizeof(Key) < 4 && kShort;
  __device__ static Word word(Key key, uint32_t index) {
    return kDistinct ? static_cast<uint32_t>(key) << 16 | (0xffffu - index) : key;
  }
  __device__ static Key key(Word word) { return static_cast<Key>(kDistinct ? word >> 16 : word); }
  __device__ static uint32_t index(Word word, uint32_t index) {
    return kDistinct ? 0xffffu - (static_cast<uint32_t>(word) & 0xffffu) : index;
  }
};

}  // namespace jaxgpuops::topk
