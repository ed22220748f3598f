// Gradients of softmax and log_softmax from x and the cotangent, as in gradient.cu, of rows of more than 2 KiB: a warp
// has what a warp of rows_kernel has in the forward pass, eight vectors in a lane (four of float64), and a block or a
// cluster has a row. Both arrays are read once, and the gradient is written once.
//
// Each lane has sixteen loads in flight, so few warps keep the memory busy. (In gradient_wide.cuh lanes have four, and
// blocks of so many warps that one or two of them fill a multiprocessor: they all wait for memory at the same time.)
#pragma once

#include "common/cuda/bulk_copy.cuh"
#include "softmax/cuda/dispatch.cuh"
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/cuda/gradient_spread.cuh"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {

// The statistics of all spans of a row, which the blocks of a cluster send each other.
template <class P, class Q>
struct RowExchange {
  static constexpr int kMostSpans = kMaxFlatSpans / 2;
  uint64_t forward_there, backward_there;
  Stat<P> of_forward[kMostSpans];
  Stat<Q> of_backward[2 * kMostSpans];
};

template <class P>
__device__ __forceinline__ Stat<P> merge_spans(const Stat<P>* stats, int count) {
  const auto get = [&](int s) { return stats[s]; };
  if (sizeof(typename P::Acc) == 8 && count <= 32) return row_engine::merge_by_team<P>(get, count);  // has fewer steps
  return row_engine::merge_by_warp<P>(get, count);
}

template <class P, class Q, Op op, bool kAligned>
__global__ void __launch_bounds__(32 * kRowWarps) rows_gradient_kernel(const __grid_constant__ GradientParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  // The derivative adds up what `kOfHalf` vectors of a lane have, as its own kernel would.
  constexpr int kWidth = 16 / sizeof(Bits), kVectors = row_vectors(sizeof(Bits)), kOfHalf = kOnlyVectors,
                kHalves = kVectors / kOfHalf, kOfWarp = 32 * kVectors * kWidth;
  __shared__ RowExchange<P, Q> shared;
  const int blocks = p.blocks, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
  const int block = blockIdx.x % static_cast<unsigned>(blocks);
  const int number = block * (blockDim.x / 32) + threadIdx.x / 32;  // of the span that the warp has
  const int left = max(0, p.length - number * kOfWarp);
  const int spans = (p.length + kOfWarp - 1) / kOfWarp,
            halves = (p.length + kOfWarp / kHalves - 1) / (kOfWarp / kHalves);
  const int64_t at = row * p.length + number * kOfWarp;
  const bool last = row + 1 == p.rows, cluster = blocks > 1;
  constexpr bool kOneShift = sizeof(Bits) == 2;
  const row_engine::Span<P, kVectors, kAligned, true, false, false, kOneShift> span(5);
  const row_engine::Span<P, kVectors, kAligned, true, false, row_engine::kByElements<P>, kOneShift> loaded(5);

  const auto args = forward_args<P>(op);
  row_engine::Held<P, kVectors, true> forward;
  row_engine::Held<Q, kOfHalf, true> backward[kHalves];  // the cotangent, and the forward result
  Pack packs[kVectors];
  loaded.load(static_cast<const Bits*>(p.x) + at, left, last, P::pad(args, 0), forward.raw[0]);
  loaded.load(static_cast<const Bits*>(p.cotangent) + at, left, last, Bits{}, packs);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) backward[j / kOfHalf].raw[0][j % kOfHalf] = packs[j];
  if (cluster) {
    if (threadIdx.x == 0) {
      make_copy_barrier(&shared.forward_there);
      make_copy_barrier(&shared.backward_there);
      make_barriers_visible_to_cluster();
      expect_copies(&shared.forward_there, spans * static_cast<int>(sizeof(Stat<P>)));
      expect_copies(&shared.backward_there, halves * static_cast<int>(sizeof(Stat<Q>)));
    }
    arrive_at_cluster_start();
  }

  Stat<P> stat;
  const Acc peak = row_engine::peak_of_warp<P>(forward.peak(args));
  stat.of[0] = peak;
  stat.sum(0) = row_engine::merged_sum(row_engine::sum_and_keep<P>(args, 0, forward, peak), 0, 5);
  if (cluster) {
    wait_at_cluster_barrier();
    if (number < spans && lane < blocks) copy_to_block(&shared.of_forward[number], &shared.forward_there, lane, stat);
    wait_for_copies(&shared.forward_there, 0);
  } else if (spans > 1) {
    if (lane == 0) shared.of_forward[number] = stat;
    __syncthreads();
  }
  if (spans > 1) stat = merge_spans<P>(shared.of_forward, spans);
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, stat);
  const Acc factor = row_engine::factor_of<P>(final, peak);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    Acc values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = row_engine::result_of<P>(args, plain, final, factor, forward, j, i);
    backward[j / kOfHalf].raw[1][j % kOfHalf] = row_engine::packed<Element>(values);
  }

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
    // Only rows with a likely element (see Tangent) need the sums after the first. Of float64, they take long. (The
    // blocks of a cluster do not ask each other.)
    bool likely = Q::kTails;
    if (sizeof(Bits) == 8 && !cluster)
      likely = __syncthreads_or(any_likely<Q>(known, backward[0]) || any_likely<Q>(known, backward[kHalves - 1]));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Stat<Q> sums = {};
      const auto sum_of_warp = [&](int k) {
        return row_engine::merged_sum(backward[half].sum(known, k, Acc(0), 0, kWidth), 0, 5);
      };
      sums.sum(0) = sum_of_warp(0);
      if (likely) {
#pragma unroll
        for (int k = 1; k < Q::kSums; ++k) sums.sum(k) = sum_of_warp(k);
      }
      const int own = kHalves * number + half;
      if (!cluster) {
        if (lane == 0) shared.of_backward[own] = sums;
      } else if (own < halves && lane < blocks) {
        copy_to_block(&shared.of_backward[own], &shared.backward_there, lane, sums);
      }
    }
    if (cluster) {
      wait_for_copies(&shared.backward_there, 0);
    } else {
      __syncthreads();
    }
    const auto total = Q::finish(known, unscaled, merge_spans<Q>(shared.of_backward, halves));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      Acc values[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto& half = backward[j / kOfHalf];
        values[i] = Q::output(known, unscaled, total, half.x(known, j % kOfHalf, i), half.y(j % kOfHalf, i));
      }
      packs[j] = row_engine::packed<Element>(values);
    }
  });
  if (left > 0) span.store(static_cast<Bits*>(p.out) + at, left, packs);
}

}  // namespace jaxgpuops::softmax
