// Kernels in which one block has a whole axis: one tile, or many, one after the other. Operands are read once, results
// written once.
#pragma once

#include "scan/cuda/chunks.cuh"
#include "scan/cuda/columns.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/rows.cuh"
#include "scan/cuda/spans.cuh"

namespace jaxgpuops::scan {

// Blocks per multiprocessor for __launch_bounds__: other blocks hide the latency of memory.
template <class Policy>
constexpr int kLoopBlocks = Policy::kOperands > 1                 ? 3
                            : sizeof(typename Policy::State) <= 8 ? 5
                            : kByParts<Policy>                    ? 3
                                                                  : 4;

// Blocks per multiprocessor for __launch_bounds__, for rows of one tile: a block has one strip, and other blocks of the
// multiprocessor hide the latency of memory. (Persistent blocks that prefetch the next strip were slower.) With 16-bit
// types a lane has 32 elements, so fewer blocks fit.
template <class Policy>
constexpr int kWholeRowBlocks =
    sizeof(typename Policy::State) > 8           ? kLoopBlocks<Policy>
    : kByParts<Policy> || Policy::kOperands == 2 ? (sizeof(typename Policy::Element::Bits) == 2 ? 3 : 4)
    : Policy::kOperands == 1                     ? (kAnyOperator<Policy> && sizeof(typename Policy::State) == 4 ? 4 : 5)
                                                 : 4;

constexpr int kLoopSlots = 2;  // scan_columns: slots of folds in shared memory
// scan_columns: the most threads besides those that work on tiles, the keepers. Each keeps the fold of a column. (Their
// registers would cost spans, and gradients of recurrences, a block of each multiprocessor.)
template <class Policy, class Work>
constexpr int kKeepers = Work::kFoldsAll || Policy::kOperands > 2 ? 0 : 64;

template <class Policy, bool kByVectors>
__device__ __forceinline__ void scan_whole_rows(const Parameters& p) {
  using Work = Rows<Policy, kByVectors>;
  const Work work(p, blockIdx.x);
  typename Work::Tile tile;
  work.load(tile);
  const auto folds = work.fold(tile);
  work.finish(tile, folds, work.earlier_warps(folds));
}

template <class Policy, bool kByVectors>
__global__ void __launch_bounds__(kThreads, kWholeRowBlocks<Policy>) scan_rows(const __grid_constant__ Parameters p) {
  scan_whole_rows<Policy, kByVectors>(p);
}

// Columns or spans of one tile or more. While a block works on a tile, it loads the next p.stages - 1. If there are
// keepers, they fold the sums of a tile while the others write its results and fold the next tile.
template <class Policy, class Work>
__global__ void __launch_bounds__(Work::kThreadsAtMost + kKeepers<Policy, Work>, Work::kLoopBlocks)
    scan_columns(const __grid_constant__ Parameters p) {
  using State = typename Work::State;
  const Work work(p);
  if constexpr (kKeepers<Policy, Work> > 0) {
    if (const int member = static_cast<int>(threadIdx.x) - p.threads; member >= 0) {
      Counter<Policy> counter(p);
      const State initial = work.initial(work.column_of(blockIdx.x, member));
      work.carry(0)[member] = initial;
      for (int t = 0; t < p.tiles; ++t) {
        __syncthreads();
        if (t + 1 == p.tiles) return;
        counter.add(t, work.tile_total(t % 2, member));
        work.carry((t + 1) % 2)[member] = Policy::combine(initial, counter.fold(t + 1), p.options);
      }
    }
  }
  const auto place = work.place(blockIdx.x);
  const bool shared = Work::kFoldsAll || p.axis_warps > 1;
  bool keeps = shared && threadIdx.x < work.block_columns();
  if constexpr (kKeepers<Policy, Work> > 0) keeps = keeps && static_cast<int>(blockDim.x) == p.threads;
  Counter<Policy> counter(p);
  const State initial = keeps ? work.initial(work.column_of(blockIdx.x, threadIdx.x)) : work.identity();
  if (keeps) work.carry(0)[threadIdx.x] = initial;
  typename Work::Extra extra[1];
  const auto fetch = [&](int t) {
    if (t < p.tiles) work.fetch(t % p.stages, place, work.span(t), extra);
    commit_async_copies();
  };
  for (int t = 0; t < p.stages - 1; ++t) fetch(t);
  for (int t = 0; t < p.tiles; ++t) {
    fetch(t + p.stages - 1);
    if (p.stages == 3) {
      wait_for_async_copies<2>();
    } else if (p.stages == 2) {
      wait_for_async_copies<1>();
    } else {
      wait_for_async_copies<0>();
    }
    const auto span = work.span(t);
    typename Work::Tile tile;
    work.take(t % p.stages, place, span, tile);
    const auto starts = work.starts(place, span);
    typename Work::Folds folds;
    State base[Work::kWidth];
    if (shared) {
      folds = work.fold(place, span, tile, starts);
      work.publish_warp(t % 2, folds);
      __syncthreads();
      work.earlier_warps(t % 2, base);
      if (t + 1 < p.tiles && keeps) {
        counter.add(t, work.tile_total(t % 2, threadIdx.x));
        work.carry((t + 1) % 2)[threadIdx.x] = Policy::combine(initial, counter.fold(t + 1), p.options);
      }
    } else {
#pragma unroll
      for (int v = 0; v < Work::kWidth; ++v) base[v] = work.initial(place.column + v);
    }
    work.finish(place, span, tile, starts, folds, base);
  }
}

// For long axes with inner = 1. While a block works on a tile, it loads the next one if shared memory has room for two.
template <class Policy>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<Policy>) scan_walk(const __grid_constant__ Parameters p) {
  using Work = Chunks<Policy>;
  using State = typename Work::State;
  const Work work(p);
  const auto place = work.place(blockIdx.x);
  typename Work::Extra extra[1];
  work.fetch(0, place, work.span(0), extra);
  commit_async_copies();
  work.put_extras(0, extra);
  Digits<Policy> digits(p);  // only the first warp uses it
  const State initial = work.initial(blockIdx.x);
  if (threadIdx.x == 0) work.carry(0)[0] = initial;
  for (int t = 0; t < p.tiles; ++t) {
    const bool more = t + 1 < p.tiles;
    if (p.stages == 1) {
      wait_for_async_copies<0>();
    } else {
      if (more) work.fetch((t + 1) % 2, place, work.span(t + 1), extra);
      commit_async_copies();
      wait_for_async_copies<1>();
    }
    const auto span = work.span(t);
    typename Work::Tile tile;
    work.take(t % p.stages, place, span, tile);
    const auto starts = work.starts(place, span);
    Kept<Policy, Work::kRun> kept;
    typename Work::Folds folds;
    if constexpr (kKeepsWeights<Policy, Work::kRun>) {
      folds = work.fold(place, span, tile, starts, kept);
    } else {
      folds = work.fold(place, span, tile, starts);
    }
    work.publish_warp(t % 2, folds);
    __syncthreads();
    State base[1];
    work.earlier_warps(t % 2, base);
    if (more && threadIdx.x < 32) {
      digits.add(0, t, work.tile_total(t % 2, 0));
      const State next = Policy::combine(initial, digits.before(0, t + 1, work.identity()), p.options);
      if (threadIdx.x == 0) work.carry((t + 1) % 2)[0] = next;
    }
    if constexpr (kKeepsWeights<Policy, Work::kRun>) {
      work.finish(place, span, tile, starts, folds, base, kept);
    } else {
      work.finish(place, span, tile, starts, folds, base);
    }
    if (!more) continue;
    if (p.stages == 1) {
      __syncwarp();  // only this warp uses its part of the stage, so no other barrier is needed
      work.fetch(0, place, work.span(t + 1), extra);
      commit_async_copies();
    }
    work.put_extras((t + 1) % p.stages, extra);
  }
}

}  // namespace jaxgpuops::scan
