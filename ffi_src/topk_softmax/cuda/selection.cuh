// The arguments of the gate's kernel, the scores of logits, and the keys by which they are selected.
#pragma once

#include "common/broadcast.h"
#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "common/ordered_key.h"
#include "topk_softmax/topk_softmax.h"

namespace jaxgpuops::topk_softmax {

struct Args {
  const void* logits;
  const float* bias;
  void* weights;
  int32_t* indices;
  float* log_sums;  // null: not asked for
  int64_t rows, inner;
  uint32_t length, k, groups, topk_groups, group_size;
  uint32_t group_reciprocal;  // 2^20 / (size of a group), rounded up; exact enough for all indices up to kMaxLength
  uint32_t one, minus_one;    // 1 and -1, hidden from the compiler
  Score score;
  bool normalize;
  float scale;
  bool vectors;       // rows are vectors of 16 bytes
  bool halves;        // rows of 16 bits are vectors of 8 bytes
  Broadcast bias_at;  // long, so it comes last: a call waits for each part of the arguments that it reads
};

// Where row r begins, and its results.
struct RowAt {
  int64_t logits, results, outer, inner;
};
__device__ __forceinline__ RowAt row_at(const Args& a, int64_t r) {
  if (a.inner == 1) return {r * a.length, r * a.k, r, 0};
  const int64_t outer = r / a.inner, inner = r % a.inner;
  return {outer * a.length * a.inner + inner, outer * a.k * a.inner + inner, outer, inner};
}

// Raw elements as unsigned keys whose order is the total order of the floats.
template <class Bits>
__device__ __forceinline__ uint32_t key_of(Bits bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << (32 - 8 * sizeof(Bits));
  return word ^ (sign_mask(word) | 0x80000000u);
}
__device__ __forceinline__ uint32_t key_of(float value) { return key_of(__float_as_uint(value)); }
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}
// The logit that has this key.
template <class Element>
__device__ __forceinline__ float logit_of(uint32_t key) {
  using Bits = typename Element::Bits;
  return Element::load(static_cast<Bits>(__float_as_uint(value_of(key)) >> (32 - 8 * sizeof(Bits))));
}

__device__ __forceinline__ float sigmoid(float z) { return 1 / (1 + expf(-z)); }
// sqrt(log(1 + e^z)); for z below kFar, it is divided by e^(shift / 2).
__device__ __forceinline__ float sqrt_softplus(float z, float shift) {
  return z < kFar ? expf(0.5f * (z - shift)) : sqrtf(fmaxf(z, 0) + log1pf(expf(-fabsf(z))));
}
// The scores of kCount logits. They are computed in functions that are not inlined, since code for each kind of score
// of each element would be longer than what a multiprocessor keeps. Softmax is e^(z - top) inverse.
template <int kCount>
struct Scores {
  float of[kCount];
};
template <int kCount>
__device__ __noinline__ Scores<kCount> scores_of(Scores<kCount> z, float top, float inverse, Score kind) {
  if (kind == Score::kSoftmax) {
#pragma unroll
    for (float& each : z.of) each = expf(each - top) * inverse;
  } else if (kind == Score::kSigmoid) {
#pragma unroll
    for (float& each : z.of) each = sigmoid(each);
  } else {
#pragma unroll
    for (float& each : z.of) each = sqrt_softplus(each, 0);
  }
  return z;
}
// Makes all NaNs the same, since experts are chosen by these bits.
__device__ __forceinline__ float canonical(float sum) { return sum == sum ? sum : __uint_as_float(0x7fc00000); }

// The numbers by which elements of a row are selected.
template <class Element, bool kBiased, bool kGrouped>
struct Selection {
  const typename Element::Bits* row;
  int64_t stride;
  const float* bias;
  int64_t bias_stride;
  float top, inverse;  // for scores_of
  Score kind;
  uint64_t groups;  // a bit for each chosen group
  uint32_t group_reciprocal;

  __device__ __forceinline__ float score(float z) const { return scores_of<1>({{z}}, top, inverse, kind).of[0]; }
  // Score and bias, rounded one after the other wherever it is computed.
  __device__ __forceinline__ float biased(float score, uint32_t index) const {
    return canonical(__fadd_rn(score, __ldg(bias + index * bias_stride)));
  }
  __device__ __forceinline__ uint32_t key(uint32_t index) const {
    const auto bits = __ldg(row + index * stride);
    if constexpr (kBiased) {
      return key_of(biased(score(Element::load(bits)), index));
    } else {
      return key_of(bits);
    }
  }
  __device__ __forceinline__ bool allows(uint32_t index) const {
    return !kGrouped || (groups >> (index * group_reciprocal >> 20) & 1);
  }
};

// The index of a lane's j-th element: lanes take vectors of 16 bytes in turn.
template <class Element, int kTeam>
__device__ __forceinline__ uint32_t index_of(uint32_t j, uint32_t t) {
  constexpr uint32_t kVector = 16 / sizeof(typename Element::Bits);
  return (j / kVector * kTeam + t) * kVector + j % kVector;
}

template <int kTeam>
__device__ __forceinline__ float max_of_team(float v) {
  return fold_lanes<kTeam>(v, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace jaxgpuops::topk_softmax
