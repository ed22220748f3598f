// How teams of lanes load their rows, and what scores need of whole rows.
#pragma once

#include "topk_softmax/cuda/selection.cuh"

namespace jaxgpuops::topk_softmax {

// A lane's elements. Elements that do not exist are -inf.
template <class Element, int kTeam, int kElements>
__device__ __forceinline__ void load(const Args& a, const typename Element::Bits* row, uint32_t t,
                                     typename Element::Bits (&bits)[kElements]) {
  using Bits = typename Element::Bits;
  constexpr uint32_t kVector = 16 / sizeof(Bits), kLoads = kElements / kVector;
  const Bits lowest = Element::store(-INFINITY);
  if (a.vectors || a.halves) {
    constexpr int kPerWord = 4 / sizeof(Bits);
    const uint32_t filler = kPerWord == 1 ? lowest : lowest * 0x10001u;
    uint4 loaded[kLoads];
    if (a.halves) {
      const int pairs = static_cast<int>(a.length / (kVector / 2)) - 2 * static_cast<int>(t);
      const auto* const mine = reinterpret_cast<const uint2*>(row) + 2 * t;
#pragma unroll
      for (int u = 0; u < static_cast<int>(kLoads); ++u) {
        uint2 pair[2] = {make_uint2(filler, filler), make_uint2(filler, filler)};
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (2 * u * kTeam + h < pairs) pair[h] = __ldg(mine + 2 * u * kTeam + h);
        loaded[u] = make_uint4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
      }
    } else {
      const int vectors = static_cast<int>(a.length / kVector) - static_cast<int>(t);
      const auto* const mine = reinterpret_cast<const uint4*>(row) + t;
      if (a.length == kTeam * kElements) {
#pragma unroll
        for (uint32_t u = 0; u < kLoads; ++u) loaded[u] = __ldg(mine + u * kTeam);
      } else {
#pragma unroll
        for (int u = 0; u < static_cast<int>(kLoads); ++u) {
          loaded[u] = make_uint4(filler, filler, filler, filler);
          if (u * kTeam < vectors) loaded[u] = __ldg(mine + u * kTeam);
        }
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint32_t words[4] = {loaded[u].x, loaded[u].y, loaded[u].z, loaded[u].w};
#pragma unroll
      for (uint32_t c = 0; c < kVector; ++c)
        bits[u * kVector + c] = static_cast<Bits>(words[c / kPerWord] >> (8 * sizeof(Bits) * (c % kPerWord)));
    }
  } else {
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      const uint32_t index = index_of<Element, kTeam>(j, t);
      bits[j] = index < a.length ? __ldg(row + index * a.inner) : lowest;
    }
  }
}

// How many of a lane's elements exist; they are its first ones.
template <class Element, int kTeam>
__device__ __forceinline__ uint32_t count_of(uint32_t length, uint32_t t) {
  constexpr uint32_t kVector = 16 / sizeof(typename Element::Bits);
  const uint32_t part = length % (kTeam * kVector);
  const uint32_t some = part > t * kVector ? min(part - t * kVector, kVector) : 0;
  return length / (kTeam * kVector) * kVector + some;
}

// Computes the maximum and the inverse sum of exponentials of the whole row, and the logarithm of the sum if it is
// asked for.
template <int kTeam, int kElements, class S>
__device__ __forceinline__ void sum_up(const float (&v)[kElements], S& selection, float* log_sum) {
  float top = v[0];
#pragma unroll
  for (uint32_t j = 1; j < kElements; ++j) top = fmaxf(top, v[j]);
  top = max_of_team<kTeam>(top);
  const float base = isinf(top) ? 0 : top;  // with an infinite base, e^(inf - inf) would be NaN
  float sums[4] = {};
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) sums[j % 4] += fast_exp2(rounded_product(v[j] - base, 1.44269504f));
  const float sum = sum_of_lanes<kTeam>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  selection.top = top;
  selection.inverse = base == top ? 1 / sum : NAN;
  if (log_sum) *log_sum = base + logf(sum);
}

// Whether scores, or a result, need the sum of a whole row. (With a bias, those of softmax do.)
__device__ __forceinline__ bool sums_rows(const Args& a) {
  return a.log_sums || (a.score == Score::kSoftmax && !a.normalize);
}

}  // namespace jaxgpuops::topk_softmax
