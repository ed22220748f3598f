// The gate of many short rows: a lane has a row, and sorts its logits by a network, with their mirrored indices below
// their keys. No lane waits for another one, except where the results of a block are put in order in shared memory.
//
// Bytes moved: as by the other kernels, whose results have the same bits: the weights are added as by eight lanes
// there.
#pragma once

#include "common/cuda/element.h"
#include "topk_softmax/cuda/selection.cuh"
#include "topk_softmax/cuda/weigh.cuh"
#include "topk_softmax/plan.h"

namespace jaxgpuops::topk_softmax {

// Sorts downwards by Batcher's odd-even merges.
template <uint32_t kCount>
__device__ __forceinline__ void sort_in_lane(uint64_t (&v)[kCount]) {
#pragma unroll
  for (uint32_t part = 1; part < kCount; part *= 2)
#pragma unroll
    for (uint32_t apart = part; apart; apart /= 2)
#pragma unroll
      for (uint32_t i = 0; i + apart < kCount; ++i) {
        const uint32_t from = apart == part ? 0 : apart;
        if (i < from || (i - from) / apart % 2 || i / (2 * part) != (i + apart) / (2 * part)) continue;
        const uint64_t a = v[i], b = v[i + apart];
        v[i] = a > b ? a : b;
        v[i + apart] = a > b ? b : a;
      }
}

template <class Element, uint32_t kElements>
__global__ void __launch_bounds__(kBlock) gate_short_kernel(const __grid_constant__ Args a) {
  using Bits = typename Element::Bits;
  constexpr uint32_t kVector = 16 / sizeof(Bits);
  __shared__ Bits weights[kBlock * kShortK];
  __shared__ int32_t indices[kBlock * kShortK];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kBlock, r = start + threadIdx.x;
  const uint32_t here = static_cast<uint32_t>(a.rows - start < kBlock ? a.rows - start : kBlock);  // rows of the block
  if (threadIdx.x < here) {
    const Bits* const row = static_cast<const Bits*>(a.logits) + row_at(a, r).logits;
    alignas(16) Bits bits[kElements];
    if (a.vectors) {
#pragma unroll
      for (uint32_t j = 0; j < kElements; j += kVector)
        if (j < a.length) *reinterpret_cast<uint4*>(bits + j) = __ldg(reinterpret_cast<const uint4*>(row + j));
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kElements; ++j)
        if (j < a.length) bits[j] = __ldg(row + j * a.inner);
    }
    uint64_t sorted[kElements];
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j)
      sorted[j] = j < a.length ? static_cast<uint64_t>(key_of(bits[j])) << 32 | ~j : 0;
    sort_in_lane(sorted);
    Chosen<kShortK> chosen;
#pragma unroll
    for (uint32_t s = 0; s < kShortK; ++s) {
      chosen.has[s] = s < a.k;
      chosen.index[s] = ~static_cast<uint32_t>(sorted[s]);
      if (s < a.k) chosen.z[s] = logit_of<Element>(static_cast<uint32_t>(sorted[s] >> 32));
    }
    const Selection<Element, false, false> selection{row, a.inner, nullptr, 0, 0, 1, a.score, 0, 0};
    weigh<1, false>(a, selection, threadIdx.x % 32, 0, chosen);
#pragma unroll
    for (uint32_t s = 0; s < kShortK; ++s) {
      if (s >= a.k) break;
      const uint32_t at = threadIdx.x * a.k + s;
      weights[at] = Element::store(chosen.w[s] * a.scale);
      indices[at] = static_cast<int32_t>(chosen.index[s]);
    }
  }
  __syncthreads();
  const uint32_t reciprocal = (1u << 16) / a.k + 1;  // exact enough for all results of a block
  for (uint32_t i = threadIdx.x; i < here * a.k; i += kBlock) {
    int64_t at = start * a.k + i;
    if (a.inner > 1) {
      const uint32_t of = i * reciprocal >> 16;
      at = row_at(a, start + of).results + (i - of * a.k) * a.inner;
    }
    static_cast<Bits*>(a.weights)[at] = weights[i];
    a.indices[at] = indices[i];
  }
}

}  // namespace jaxgpuops::topk_softmax
