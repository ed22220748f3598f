// The gate of rows of up to 64 logits, without a bias or groups: a team of lanes has a row, one or two logits a lane,
// and compares all with all, so that each one knows its place.
//
// Bytes moved: as by the other kernels, whose results have the same bits: sums over the k chosen are added in one order
// there, however many lanes a team has.
#pragma once

#include "common/cuda/element.h"
#include "topk/cuda/ranks.cuh"
#include "topk_softmax/cuda/selection.cuh"
#include "topk_softmax/cuda/weigh.cuh"
#include "topk_softmax/plan.h"

namespace jaxgpuops::topk_softmax {

template <class Element, int kLanes, int kEach>
__global__ void __launch_bounds__(kBlock) gate_ranked_kernel(const __grid_constant__ Args a) {
  using Bits = typename Element::Bits;
  using Order = topk::Ranked<Bits>;
  constexpr uint32_t kTeams = kBlock / kLanes, kPlaces = kLanes * kEach;
  __shared__ alignas(16) uint32_t words[kTeams][kPlaces];
  __shared__ Bits best[kTeams][kPlaces];
  __shared__ uint8_t places[kTeams][kPlaces];
  const uint32_t lane = threadIdx.x % 32, team = threadIdx.x / kLanes, t = threadIdx.x % kLanes;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTeams + team;
  const bool live = r < a.rows;
  const RowAt at = row_at(a, live ? r : 0);  // a team without a row reads the first one
  const Bits* const row = static_cast<const Bits*>(a.logits) + at.logits;
  Bits bits[kEach];
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    bits[e] = i < a.length ? __ldg(row + i * a.inner) : Bits{0};
  }
  uint32_t own[kEach], before[kEach];
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    own[e] = i < a.length ? Order::word(static_cast<Bits>(key_of(bits[e]) >> (32 - 8 * sizeof(Bits))), i) : 0;
  }
  topk::rank_in_team<Order, kLanes, kEach>(words[team], own, t, a.length, before);
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    if (i < a.length && before[e] < a.k)
      best[team][before[e]] = bits[e], places[team][before[e]] = static_cast<uint8_t>(i);
  }
  __syncwarp();
  Chosen<> chosen;
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    const uint32_t rank = t + s * kLanes;
    chosen.has[s] = s < kEach && (s == 0 || a.k > kLanes);
    if (!chosen.has[s] || rank >= a.k) continue;
    chosen.z[s] = Element::load(best[team][rank]);
    chosen.index[s] = places[team][rank];
  }
  const Selection<Element, false, false> selection{row, a.inner, nullptr, 0, 0, 1, a.score, 0, 0};
  weigh<kLanes, false>(a, selection, lane, t, chosen);
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    const uint32_t rank = t + s * kLanes;
    if (!chosen.has[s] || !live || rank >= a.k) continue;
    static_cast<Bits*>(a.weights)[at.results + rank * a.inner] = Element::store(chosen.w[s] * a.scale);
    a.indices[at.results + rank * a.inner] = static_cast<int32_t>(chosen.index[s]);
  }
}

}  // namespace jaxgpuops::topk_softmax
