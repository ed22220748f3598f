// Spans (spans.cuh) of few columns: a block has one tile, and all tiles are read twice. One kernel folds the sums of
// tiles; where there are many, a second one folds what comes before each; the last one folds that, or takes it, and
// makes the results. So no block waits for another one, and the only limit is that of memory. The last kernel takes
// tiles from the end, as the level 2 cache still has those that came last.
#pragma once

#include "scan/cuda/folds.cuh"
#include "scan/cuda/spans.cuh"

namespace jaxgpuops::scan {

constexpr int kSpanBlocks = 3;       // blocks of a multiprocessor, for __launch_bounds__
constexpr int kSumsThreads = 1024;   // the most threads of scan_span_sums

// The sums of a column's tiles, or the folds of all before each.
template <class Policy>
__device__ __forceinline__ typename Policy::State* sums_of_column(const Parameters& p, int64_t column) {
  return reinterpret_cast<typename Policy::State*>(p.words) + column * p.tiles;
}

// p.pass: whether this is the first kernel, the second of two, or the last of three.
template <class Policy>
__global__ void __launch_bounds__(kThreads, kSpanBlocks) scan_span_tiles(const __grid_constant__ Parameters p) {
  using Work = Spans<Policy>;
  using State = typename Work::State;
  const bool sums = p.pass == Parameters::kSums;
  if (sums) let_dependents_start();
  const Work work(p);
  const unsigned index = sums ? blockIdx.x : gridDim.x - 1 - blockIdx.x, strip = index / p.tiles;
  const int t = static_cast<int>(index % p.tiles);
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  const int member = static_cast<int>(threadIdx.x), lane = member % 32;
  const int64_t column = work.column_of(strip, member);
  State* const carry = work.carry(0);
  if (!sums) {
    wait_for_predecessor();
    if (p.pass == Parameters::kResultsOfFolds) {
      if (column < p.columns) {
        const State initial = work.initial(column);
        carry[member] =
            t == 0 ? initial : Policy::combine(initial, sums_of_column<Policy>(p, column)[t], p.options);
      }
    } else {  // a warp folds the sums of at most kGroup tiles
#pragma unroll 1
      for (int c = member / 32; c < p.width; c += p.threads / 32) {
        const int64_t column = work.column_of(strip, c);
        if (column >= p.columns) break;
        State before = work.identity();
        if (lane < t) before = sums_of_column<Policy>(p, column)[lane];
        before = shuffle_from(scan_group<Policy>(p.options, before), max(t - 1, 0));
        before = Policy::combine(before, work.identity(), p.options);
        const State initial = work.initial(column);
        if (lane == 0) carry[c] = t == 0 ? initial : Policy::combine(initial, before, p.options);
      }
    }
  }
  wait_for_async_copies<0>();
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  work.publish_warp(0, folds);
  __syncthreads();
  if (sums) {
    if (column < p.columns) sums_of_column<Policy>(p, column)[t] = work.tile_total(0, member);
    return;
  }
  State base[1];
  work.earlier_warps(0, base);
  work.finish(place, span, tile, starts, folds, base);
}

// Replaces the sums of a column's tiles by the folds of all before each, in the order that folds.cuh explains. A block
// has a column, a thread a tile of as many as there are threads.
template <class Policy>
__global__ void __launch_bounds__(kSumsThreads) scan_span_sums(const __grid_constant__ Parameters p) {
  using State = typename Policy::State;
  alignas(16) __shared__ unsigned char memory[kGroup * sizeof(State)];
  State* const groups = reinterpret_cast<State*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const State none = Policy::identity(p.options);
  State* const sums = sums_of_column<Policy>(p, blockIdx.x);
  Digits<Policy> digits(p);
  let_dependents_start();
  wait_for_predecessor();
  for (int first = 0; first < p.tiles; first += kSumsThreads) {
    const int t = first + static_cast<int>(threadIdx.x);
    State sum = none;
    if (t < p.tiles) sum = sums[t];
    sum = scan_group<Policy>(p.options, sum);
    if (lane == kGroup - 1) groups[warp] = sum;
    __syncthreads();
    State before = none;
    const State left = shuffle_up(sum, 1);
    if (lane > 0) before = Policy::combine(left, before, p.options);
    if (p.tiles > kGroup) {
      State group = none;
      if (lane < static_cast<int>(blockDim.x) / 32) group = groups[lane];
      group = scan_group<Policy>(p.options, group);
      if (warp > 0) before = Policy::combine(shuffle_from(group, warp - 1), before, p.options);
      if (p.tiles > kSumsThreads) {
        before = digits.before(2, first, before);
        digits.add(2, first / kSumsThreads, shuffle_from(group, kGroup - 1));
        __syncthreads();
      }
    }
    if (t < p.tiles) sums[t] = before;
  }
}

}  // namespace jaxgpuops::scan
