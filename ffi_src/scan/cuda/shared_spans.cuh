// Spans (spans.cuh) of so few columns, so short, that all tiles are on the GPU at the same time: a block has a tile. It
// publishes the sums of its columns, waits until all blocks have (a cooperative launch), and folds those before it.
// Operands are read once, results written once, by one kernel. A sum is read by all later tiles, so that columns times
// the square of tiles limits what this is taken for.
#pragma once

#include <cooperative_groups.h>

#include "scan/cuda/spans.cuh"
#include "scan/cuda/sums.cuh"

namespace jaxgpuops::scan {

// Shared memory for the folds of groups of tiles.
template <class Policy>
size_t group_bytes(int tiles, int columns) {
  return (tiles / kGroup + 1) * columns * sizeof(typename Policy::State);
}

// The fold of all before tile t of a column, as Counter has it, by all threads of a block: warps fold the groups of few
// columns, and threads those of many. Threads from the number of columns on return nothing.
template <class Policy>
__device__ __forceinline__ typename Policy::State before_of_column(const Parameters& p, const Spans<Policy>& work,
                                                                   unsigned strip, int t) {
  using State = typename Policy::State;
  const Sums<Policy> sums{p};
  State* const groups = work.totals(1);
  const int columns = work.block_columns(), whole = t / kGroup, digit = t % kGroup;
  const int all = (whole + 1) * columns, warps = p.threads / 32, lane = threadIdx.x % 32;
  const State none = work.identity();
  const bool few = all <= 2 * kWarps;
#pragma unroll 1
  for (int i = static_cast<int>(few ? threadIdx.x / 32 : threadIdx.x); i < all; i += few ? warps : p.threads) {
    const int g = i / columns, count = g < whole ? kGroup : digit;
    const int64_t column = work.column_of(strip, i - g * columns);
    if (column >= p.columns) continue;
    State sum = none;
    if (few) {
      auto words = bits_as<WordsOf<State>>(none);
      if (lane < count)
        while (!Sums<Policy>::load(sums.at(0, g * kGroup + lane, column), words)) {
        }
      __syncwarp();
      sum = shuffle_from(scan_group<Policy>(p.options, bits_as<State>(words)), max(count - 1, 0));
    } else {
      if (count == kGroup) sums.each(0, g * kGroup + count - 1, 1, column, [&](int, State last) { sum = last; });
      sum = sums.fold(0, g * kGroup, min(count, kGroup - 1), column, sum);
    }
    groups[i] = sum;
  }
  __syncthreads();
  if (whole > 0) {  // warps fold the groups before the tile's
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x) / 32; c < columns; c += warps) {
      const State earlier = scan_group<Policy>(p.options, lane < whole ? groups[lane * columns + c] : none, whole);
      const State fold = shuffle_from(earlier, whole - 1);
      if (lane == 0) groups[c] = fold;
      __syncwarp();
    }
    __syncthreads();
  }
  if (threadIdx.x >= columns) return none;
  const State before = Policy::combine(groups[whole * columns + threadIdx.x], none, p.options);
  return whole == 0 ? before : Policy::combine(groups[threadIdx.x], before, p.options);
}

template <class Policy>
__global__ void __launch_bounds__(kThreads, kSpanBlocks) scan_span_resident(const __grid_constant__ Parameters p) {
  using Work = Spans<Policy>;
  using State = typename Work::State;
  const Work work(p);
  const int t = static_cast<int>(blockIdx.x);
  const unsigned strip = blockIdx.y;
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  wait_for_async_copies<0>();
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  work.publish_warp(0, folds);
  __syncthreads();
  const int member = static_cast<int>(threadIdx.x);
  const int64_t column = work.column_of(strip, member);
  if (column < p.columns) Sums<Policy>{p}.template publish<false>(0, t, column, work.tile_total(0, member));
  cooperative_groups::this_grid().sync();
  const State before = before_of_column<Policy>(p, work, strip, t);
  if (column < p.columns) {
    const State initial = work.initial(column);
    work.carry(0)[member] = t == 0 ? initial : Policy::combine(initial, before, p.options);
  }
  __syncthreads();
  State base[1];
  work.earlier_warps(0, base);
  work.finish(place, span, tile, starts, folds, base);
}

}  // namespace jaxgpuops::scan
