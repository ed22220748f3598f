// The weights of the chosen elements.
#pragma once

#include "topk_softmax/cuda/selection.cuh"

namespace jaxgpuops::topk_softmax {

// The chosen elements that a lane has: one or two.
struct Chosen {
  bool has[2];
  float z[2] = {-INFINITY, -INFINITY}, w[2] = {};
  uint32_t index[2];
};

// The weights of the chosen. Scores that are divided by their sum are scaled first, so that they cannot all vanish.
template <int kTeam, bool kBiased, class S>
__device__ __forceinline__ void weigh(const Args& a, const S& selection, uint32_t lane, uint32_t t, Chosen& chosen) {
  const auto& z = chosen.z;
  auto& w = chosen.w;
  if (!a.normalize) {
    w[0] = selection.score(z[0]);
    if (chosen.has[1]) w[1] = selection.score(z[1]);
    return;
  }
  float top;
  if constexpr (kBiased) {
    top = max_of_team<kTeam>(fmaxf(z[0], z[1]));
  } else {
    top = __shfl_sync(kEveryLane, z[0], lane - t);
  }
  float shift = top, more = 0;
  if (a.score == Score::kSigmoid) shift = fminf(top, 0);
  if (a.score == Score::kSqrtSoftplus) {
    shift = top < kFar ? top : 0;
    more = top - top;  // NaN if the largest logit is infinite, as for softmax
  }
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    if (!chosen.has[s]) continue;
    if (a.score == Score::kSqrtSoftplus) {
      w[s] = sqrt_softplus(z[s], shift);
    } else {
      // Sigmoids are e^z / (1 + e^z) below 0, 1 / (1 + e^-z) above.
      w[s] = a.score == Score::kSigmoid && z[s] > 0 ? 1 : expf(z[s] - shift);
      if (a.score == Score::kSigmoid) w[s] /= 1 + expf(-fabsf(z[s]));
    }
  }
  const float sum = sum_of_lanes<kTeam>(w[0] + w[1]) + more;
  w[0] /= sum;
  if (chosen.has[1]) w[1] /= sum;
}

}  // namespace jaxgpuops::topk_softmax
