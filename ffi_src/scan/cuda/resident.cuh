// resident, of rows (chunks.cuh), columns (columns.cuh) or spans (spans.cuh) whose axis has two to eight tiles, from
// compute capability 9.0 on. The blocks of a cluster have a tile each, and send its sums to the shared memory of the
// blocks of later tiles. So operands are read once, results are written once, by one kernel that needs no workspace.
// (shared_rows.cuh has rows of more tiles, twice.cuh columns of more tiles.)
#pragma once

#include "scan/cuda/chunks.cuh"
#include "scan/cuda/columns.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/spans.cuh"

namespace jaxgpuops::scan {

// The positions of which fold() keeps what finish() would otherwise compute again: those of a run of rows.
template <class Work>
constexpr int kept_positions() {
  if constexpr (Work::kOneColumn) return Work::kRun;
  return 1;
}

template <class Policy, class Work>
__global__ void __launch_bounds__(kThreads, 3) scan_resident_cluster(const __grid_constant__ Parameters p) {
  using State = typename Work::State;
  arrive_at_cluster_start();
  const Work work(p);
  const int t = block_of_cluster(), member = static_cast<int>(threadIdx.x), columns = work.block_columns();
  const unsigned strip = blockIdx.y;
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  wait_for_async_copies<0>();
  work.put_extras(0, extra);
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  const auto starts = work.starts(place, span);
  typename Work::Folds folds;
  [[maybe_unused]] Kept<Policy, kept_positions<Work>()> kept;
  if constexpr (Work::kOneColumn) {
    folds = work.fold(place, span, tile, starts, kept);
  } else {
    folds = work.fold(place, span, tile, starts);
  }
  work.publish_warp(0, folds);
  __syncthreads();
  State* const sums = work.totals(1);  // of earlier tiles: [tiles][columns]
  const auto before = [&](int column, State initial) {
    const State all = fold_of_few<Policy>(p.options, t, [&](int i) { return sums[i * columns + column]; });
    return t == 0 ? initial : Policy::combine(initial, all, p.options);
  };
  State base[Work::kWidth];
  if constexpr (Work::kOneColumn) {  // every thread folds what comes before its
                                     // warp, and so waits for no other
    State sum = work.identity(), earlier = sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == member / 32) earlier = sum;
      sum = Policy::combine(sum, work.totals(0)[w], p.options);
    }
    wait_at_cluster_barrier();
    if (member > t && member < p.tiles) store_in_cluster(sums + t, member, sum);
    __syncwarp();
    arrive_at_cluster_barrier();
    const State initial = work.initial(strip);
    wait_at_cluster_barrier();
    base[0] = Policy::combine(before(0, initial), earlier, p.options);
  } else {
    const State initial = member < columns ? work.initial(work.column_of(strip, member)) : work.identity();
    wait_at_cluster_barrier();
    if (member < columns && t + 1 < p.tiles) {
      const State sum = work.tile_total(0, member);
      for (int later = t + 1; later < p.tiles; ++later) store_in_cluster(sums + t * columns + member, later, sum);
    }
    __syncwarp();
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    if (member < columns) work.carry(0)[member] = before(member, initial);
    __syncthreads();
    work.earlier_warps(0, base);
  }
  if constexpr (Work::kOneColumn) {
    work.finish(place, span, tile, starts, folds, base, kept);
  } else {
    work.finish(place, span, tile, starts, folds, base);
  }
}

}  // namespace jaxgpuops::scan
