// The weights of the chosen elements.
#pragma once

#include "topk_softmax/cuda/selection.cuh"

namespace jaxgpuops::topk_softmax {

// The chosen elements that a lane has: one or two of those of a team, or all of a row that it has alone.
template <uint32_t kMost = 2>
struct Chosen {
  bool has[kMost];
  float z[kMost], w[kMost] = {};
  uint32_t index[kMost];

  __device__ __forceinline__ Chosen() {
#pragma unroll
    for (float& each : z) each = -INFINITY;
  }
};

// The weights of the chosen. Scores that are divided by their sum are scaled first, so that they cannot all vanish.
template <int kTeam, bool kBiased, class S, uint32_t kMost>
__device__ __forceinline__ void weigh(const Args& a, const S& selection, uint32_t lane, uint32_t t,
                                      Chosen<kMost>& chosen) {
  const auto& z = chosen.z;
  auto& w = chosen.w;
  const auto set = [&](auto weight) {
#pragma unroll
    for (uint32_t s = 0; s < kMost; ++s)
      if (chosen.has[s]) w[s] = weight(z[s]);
  };
  if (!a.normalize) return set([&](float z) { return selection.score(z); });
  float top;
  if constexpr (kBiased) {
    top = max_of_team<kTeam>(fmaxf(z[0], z[1]));
  } else if constexpr (kTeam == 1) {
    top = z[0];
  } else {
    top = __shfl_sync(kEveryLane, z[0], lane - t);
  }
  float more = 0;
  if (a.score == Score::kSqrtSoftplus) {
    const float shift = top < kFar ? top : 0;
    more = top - top;  // NaN if the largest logit is infinite, as for softmax
    set([&](float z) { return sqrt_softplus(z, shift); });
  } else if (a.score == Score::kSigmoid) {
    // Sigmoids are e^z / (1 + e^z) below 0, 1 / (1 + e^-z) above.
    const float shift = fminf(top, 0);
    set([&](float z) { return (z > 0 ? 1 : expf(z - shift)) / (1 + expf(-fabsf(z))); });
  } else {
    set([&](float z) { return expf(z - top); });
  }
  float sums[kMost];
#pragma unroll
  for (uint32_t s = 0; s < kMost; ++s) sums[s] = w[s];
#pragma unroll
  for (uint32_t apart = kMost / 2; apart; apart /= 2)
#pragma unroll
    for (uint32_t s = 0; s < apart; ++s) sums[s] += sums[s + apart];
  const float sum = sum_of_lanes<kTeam>(sums[0]) + more;
#pragma unroll
  for (uint32_t s = 0; s < kMost; ++s)
    if (chosen.has[s]) w[s] /= sum;
}

}  // namespace jaxgpuops::topk_softmax
