// The gate for k = 1, without a bias or groups: a team of lanes holds a row, as in gate_kernel, but only looks for its
// first largest element. So the code is short, and lanes need few registers.
#pragma once

#include "topk_softmax/cuda/load.cuh"
#include "topk_softmax/cuda/weigh.cuh"

namespace jaxgpuops::topk_softmax {

// The largest element of the team, as its key above the mirrored index. Of 16 bits, both fit into one number.
template <class Element, int kTeam, int kElements>
__device__ __forceinline__ uint64_t first_of_team(const typename Element::Bits (&bits)[kElements], uint32_t count,
                                                  uint32_t t) {
  if constexpr (sizeof(typename Element::Bits) == 2) {
    constexpr uint32_t kIndex = 0xffff, kMagnitude = 0x7fff0000;
    int32_t most = INT32_MIN;
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      const uint32_t word = static_cast<uint32_t>(bits[j]) << 16 | (kIndex - j);
      if (j < count) most = max(most, static_cast<int32_t>(word ^ (sign_mask(word) & kMagnitude)));
    }
    const uint32_t index = index_of<Element, kTeam>(kIndex - (most & kIndex), t);
    const auto mine = static_cast<int32_t>((most & ~kIndex) | (kIndex - index));
    const auto best = static_cast<uint32_t>(largest_of_lanes<kTeam>(count ? mine : INT32_MIN));
    return static_cast<uint64_t>((best ^ 0x80000000u) & ~kIndex) << 32 | ~(kIndex - (best & kIndex));
  } else {
    uint32_t most = 0, at = 0;
#pragma unroll
    for (int j = kElements - 1; j >= 0; --j) {  // backwards, so that of equal elements the first one stays
      const uint32_t key = key_of(bits[j]);
      if (j < static_cast<int>(count) && key >= most) most = key, at = j;
    }
    const uint64_t mine = static_cast<uint64_t>(most) << 32 | ~index_of<Element, kTeam>(at, t);
    return largest_of_lanes<kTeam>(count ? mine : 0);
  }
}

template <class Element, int kTeam, int kElements>
__global__ void __launch_bounds__(kBlock, kElements == 32 ? 8 : 10) gate_first_kernel(const __grid_constant__ Args a) {
  using Bits = typename Element::Bits;
  constexpr uint32_t kTeams = kBlock / kTeam;
  const uint32_t t = threadIdx.x % kTeam;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kTeam;
  const bool live = r < a.rows;
  const RowAt at = row_at(a, live ? r : 0);  // a team without a row reads the first one
  const auto* const row = static_cast<const Bits*>(a.logits) + at.logits;
  Bits bits[kElements];
  load<Element, kTeam>(a, row, t, bits);
  Selection<Element, false, false> selection{row, a.inner, nullptr, 0, 0, 1, a.score, 0, a.group_reciprocal};
  if (sums_rows(a)) {
    float v[kElements];
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) v[j] = Element::load(bits[j]);
    sum_up<kTeam>(v, selection, a.log_sums && live && t == 0 ? a.log_sums + r : nullptr);
  }
  const uint64_t first = first_of_team<Element, kTeam>(bits, count_of<Element, kTeam>(a.length, t), t);
  if (!live || t > 0) return;
  Chosen<1> chosen;
  chosen.has[0] = true;
  chosen.index[0] = ~static_cast<uint32_t>(first);
  chosen.z[0] = logit_of<Element>(static_cast<uint32_t>(first >> 32));
  weigh<1, false>(a, selection, 0, 0, chosen);
  static_cast<Bits*>(a.weights)[at.results] = Element::store(chosen.w[0] * a.scale);
  a.indices[at.results] = static_cast<int32_t>(chosen.index[0]);
}

}  // namespace jaxgpuops::topk_softmax
