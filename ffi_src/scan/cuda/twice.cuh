// Scans of spans (spans.cuh), columns (columns.cuh) or rows (chunks.cuh) whose blocks share the axis. Each block has
// one tile; operands are read twice, and results are written once. The first kernel folds what comes before each thread
// within its tile, and the sums of tiles. The second kernel folds what comes before each tile; if tiles and columns are
// few, the last kernel does that instead. The last kernel makes the results. It takes tiles from the end, because the
// L2 cache still has what was read last. No block waits for another one.
#pragma once

#include "scan/cuda/chunks.cuh"
#include "scan/cuda/columns.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/spans.cuh"

namespace jaxgpuops::scan {

constexpr int kSumsThreads = 1024;  // the most threads of scan_twice_sums

// The sums of a column's tiles, or the folds of all before each.
template <class Policy>
__device__ __forceinline__ typename Policy::State* sums_of_column(const Parameters& p, int64_t column) {
  return reinterpret_cast<typename Policy::State*>(p.words) + column * p.tiles;
}

// State v of the fold of what comes before the thread within its tile; `tile` counts the tiles of all strips.
template <class Policy, class Work>
__device__ __forceinline__ typename Policy::State& before_thread(const Parameters& p, unsigned tile, int v) {
  return sums_of_column<Policy>(p, p.columns)[(int64_t{tile} * Work::kLaneStates + v) * p.threads + threadIdx.x];
}

template <class Policy, class Work>
__global__ void __launch_bounds__(kThreads, Policy::kOperands > 2 ? 3 : 4)
    scan_twice_folds(const __grid_constant__ Parameters p) {
  using State = typename Work::State;
  let_dependents_start();
  const Work work(p);
  const unsigned strip = blockIdx.x / p.tiles;
  const int t = static_cast<int>(blockIdx.x % p.tiles);
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  wait_for_async_copies<0>();
  work.put_extras(0, extra);
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  const auto folds = work.fold(place, span, tile, work.starts(place, span));
  work.publish_warp(0, folds);
  __syncthreads();
  State before[Work::kLaneStates];
  work.before_in_tile(0, folds, before);
  if (place.active)
#pragma unroll
    for (int v = 0; v < Work::kLaneStates; ++v) before_thread<Policy, Work>(p, blockIdx.x, v) = before[v];
  const int member = static_cast<int>(threadIdx.x);
  const int64_t column = work.column_of(strip, member);
  if (column < p.columns) sums_of_column<Policy>(p, column)[t] = work.tile_total(0, member);
}

// Replaces the sum of each of a column's tiles by the fold of all tiles before it, in the order that folds.cuh
// explains. A block has a column, and takes as many tiles at a time as it has threads. The lanes of a warp have the
// sums of a group: first of tiles, and then of the groups that warps have.
template <class Policy>
__global__ void __launch_bounds__(kSumsThreads) scan_twice_sums(const __grid_constant__ Parameters p) {
  using State = typename Policy::State;
  alignas(16) __shared__ unsigned char memory[kGroup * sizeof(State)];
  State* const groups = reinterpret_cast<State*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const State none = Policy::identity(p.options);
  State* const sums = sums_of_column<Policy>(p, blockIdx.x);
  Counter<Policy> counter(p);
  let_dependents_start();
  wait_for_predecessor();
  for (int round = 0; round * kSumsThreads < p.tiles; ++round) {
    const int t = round * kSumsThreads + static_cast<int>(threadIdx.x);
    State own = none, before = none, total = none;
    if (t < p.tiles) own = sums[t];
#pragma unroll 1
    for (bool of_groups = false;; of_groups = true) {
      const int digit = of_groups ? warp : lane;
      const State all = scan_group<Policy>(p.options, own), left = shuffle_from(all, max(digit - 1, 0));
      if (digit > 0) before = Policy::combine(left, before, p.options);
      total = shuffle_from(all, kGroup - 1);
      if (of_groups || p.tiles <= kGroup) break;
      if (lane == 0) groups[warp] = total;
      __syncthreads();
      own = lane < warps ? groups[lane] : none;
    }
    if (p.tiles > kSumsThreads) {
      before = counter.fold(round, before);
      counter.add(round, total);
      __syncthreads();
    }
    if (t < p.tiles) sums[t] = before;
  }
}

template <class Policy, class Work>
__global__ void __launch_bounds__(kThreads, 3) scan_twice_results(const __grid_constant__ Parameters p) {
  using State = typename Work::State;
  const Work work(p);
  const unsigned index = gridDim.x - 1 - blockIdx.x, strip = index / p.tiles;
  const int t = static_cast<int>(index % p.tiles);
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  wait_for_predecessor();
  State before[Work::kLaneStates], carry[Work::kLaneColumns];
#pragma unroll
  for (int v = 0; v < Work::kLaneStates; ++v)
    before[v] = place.active ? before_thread<Policy, Work>(p, index, v) : work.identity();
#pragma unroll
  for (int v = 0; v < Work::kLaneColumns; ++v) {
    carry[v] = work.initial(place.column + v);
    if (p.folded && t > 0 && place.active)
      carry[v] = Policy::combine(carry[v], sums_of_column<Policy>(p, place.column + v)[t], p.options);
  }
  if constexpr (Work::kFewColumns) {
    if (!p.folded && t > 0) {  // a warp folds the sums of at most kGroup tiles of a column
      const int lane = threadIdx.x % 32;
#pragma unroll 1
      for (int c = static_cast<int>(threadIdx.x) / 32; c < p.width; c += p.threads / 32) {
        const int64_t column = work.column_of(strip, c);
        if (column >= p.columns) break;
        State sum = work.identity();
        if (lane < t) sum = sums_of_column<Policy>(p, column)[lane];
        sum = shuffle_from(scan_group<Policy>(p.options, sum), t - 1);
        if (lane == 0) work.carry(0)[c] = Policy::combine(sum, work.identity(), p.options);
      }
      __syncthreads();
      if (place.active) carry[0] = Policy::combine(carry[0], work.carry_of_thread(0), p.options);
    }
  } else if (!p.folded && t > 0 && place.active) {
#pragma unroll 1
    for (int v = 0; v < Work::kLaneColumns; ++v) {
      const State* const sums = sums_of_column<Policy>(p, place.column + v);
      Counter<Policy> counter(p);
#pragma unroll 4
      for (int i = 0; i < t; ++i) counter.add(i, sums[i]);
      carry[v] = Policy::combine(carry[v], counter.fold(t), p.options);
    }
  }
  wait_for_async_copies<0>();
  work.put_extras(0, extra);
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  work.finish(place, span, tile, work.starts(place, span), carry, before);
}

}  // namespace jaxgpuops::scan
