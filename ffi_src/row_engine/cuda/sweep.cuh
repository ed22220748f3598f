// Statistics of long rows (inner == 1), for operations and types without kernels for each number of vectors. A block,
// or a cluster if rows are few, takes all spans of a row; or each block takes some neighbouring spans, and merge_kernel
// merges the statistics of the blocks. The array is read once. A warp loads its next span while it computes on one.
//
// Spans, and the order in which their statistics are merged, follow from the length alone: at most kMaxFlatSpans spans
// are merged one after the other; of more, kPreferredWarps neighbouring spans are merged into a unit first.
#pragma once

#include "row_engine/cuda/in_registers.cuh"

namespace jaxgpuops::row_engine {

template <class P>
constexpr bool kSwept = !P::kFast && !P::kOutput && !P::kMasked;

template <class P, bool kAligned>
__global__ void __launch_bounds__(32 * kSweepWarps, P::kOperands == 1 ? 2 : 1)
    sweep_kernel(const __grid_constant__ Parameters<P> p) {
  using Bits = typename P::Element::Bits;
  using Lane = Held<P, kOnlyVectors, true>;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Span<P, kOnlyVectors, kAligned, true> span(5);
  const unsigned block = blockIdx.x % static_cast<unsigned>(p.blocks);
  const int64_t outer = blockIdx.x / static_cast<unsigned>(p.blocks);
  const int first = static_cast<int>(block) * p.part, count = min(p.part, p.spans - first);
  auto* const stats = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
  // The statistics of a cluster go to the shared memory of its first block.
  Stat<P>* const mine = p.cluster ? stats + first : stats;

  // Loads element by element: a vector has few elements, and neighbouring ones come from the L1 cache.
  const auto load_elements = [&](const Bits* from, int left, Bits pad, Pack(&units)[kOnlyVectors]) {
#pragma unroll
    for (int j = 0; j < kOnlyVectors; ++j)
#pragma unroll
      for (int i = 0; i < Lane::kWidth; ++i)
        set<Bits>(units[j], i, span.element(j) + i < left ? from[span.element(j) + i] : pad);
  };
  const auto load = [&](int s, Lane& lane) {
    const int64_t begin = int64_t{first + s} * span.size();
    const int left = s < count ? static_cast<int>(min(p.length - begin, int64_t{span.size()})) : 0;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* const from = static_cast<const Bits*>(p.operands[o]) + outer * p.length + begin;
      if constexpr (kAligned || sizeof(Bits) < 4) {
        span.load(from, left, outer + 1 == p.columns, P::pad(p.args, o), lane.raw[o]);
      } else {
        load_elements(from, left, P::pad(p.args, o), lane.raw[o]);
      }
    }
  };
  const auto measure = [&](int s, const Lane& lane) {
    Stat<P> stat;
    if constexpr (P::kPeak) stat.of[0] = merged_peak<P>(lane.peak(p.args), 0, 5);
#pragma unroll
    for (int k = 0; k < P::kSums; ++k)
      stat.sum(k) = merged_sum(lane.sum(p.args, k, typename P::Acc(0), 0, Lane::kWidth), 0, 5);
    if (threadIdx.x % 32 != 0 || s >= count) return;
    if (p.cluster) {
      store_in_cluster(mine + s, 0, stat);
    } else {
      mine[s] = stat;
    }
  };
  if (p.cluster) arrive_at_cluster_start();
  Lane next = {};
#pragma unroll 1
  for (int s = warp - warps; s < count; s += warps) {
    const Lane lane = next;
    load(s + warps, next);
    if (s < 0) {
      // The shared memory of a block does not exist until the block has begun.
      if (p.cluster) wait_at_cluster_barrier();
    } else {
      measure(s, lane);
    }
  }
  let_dependents_start();
  if (p.cluster) {
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    if (block != 0) return;
  } else {
    __syncthreads();
  }
  if (p.blocks == 1 || p.cluster) {
    if (warp != 0) return;
    const auto all = merge_by_warp<P>([&](int u) { return stats[u]; }, p.spans);
    const auto row = P::row(p.args, outer, 0, p.length, 1);
    if (threadIdx.x == 0) P::write_row(p.args, outer, row, P::finish(p.args, row, all));
  } else if (p.unit_warps == 1) {
    if (threadIdx.x < count) *stat_at(p, outer, first + threadIdx.x, 0) = stats[threadIdx.x];
  } else {
    const int from = warp * p.unit_warps;
    if (from >= count) return;
    const auto all = merge_by_warp<P>([&](int u) { return stats[from + u]; }, min(p.unit_warps, count - from));
    if (threadIdx.x % 32 == 0) *stat_at(p, outer, first / p.unit_warps + warp, 0) = all;
  }
}

}  // namespace jaxgpuops::row_engine
