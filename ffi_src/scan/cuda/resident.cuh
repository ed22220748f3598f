// resident, of rows (chunks.cuh), columns (columns.cuh) or spans (spans.cuh) whose axis has two to sixteen tiles, from
// compute capability 9.0 on. The blocks of a cluster have a tile each, and send its sums to the shared memory of the
// blocks of later tiles. So operands are read once, results are written once, by one kernel that needs no workspace.
// (shared_rows.cuh has rows of more tiles, twice.cuh columns of more tiles.)
//
// A block of rows waits for the sums of earlier tiles alone, which signal a barrier in its shared memory. Sums of
// columns are many, and all blocks wait for all of them: signals were no faster in the mean, and slower for large
// arrays.
//
// Spans of more tiles, if all are on the GPU at the same time: each block publishes its tile's sums in global memory
// and reads those of earlier tiles, as in shared_rows.cuh.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda/bulk_copy.cuh"
#include "scan/cuda/chunks.cuh"
#include "scan/cuda/columns.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/spans.cuh"
#include "scan/cuda/sums.cuh"

namespace jaxgpuops::scan {

// The positions of which fold() keeps what finish() would otherwise compute again: those of a run of rows.
template <class Work>
constexpr int kept_positions() {
  if constexpr (Work::kOneColumn) return Work::kRun;
  return 1;
}

// Blocks per multiprocessor. Rows of pairs of 16 bits have registers for two: three would have to keep values in
// memory.
template <class Policy, class Work>
constexpr int kClusterResidents =
    Work::kOneColumn && Policy::kOperands == 2 && sizeof(typename Policy::Element::Bits) == 2 ? 2 : 3;

template <class Policy, class Work>
__global__ void __launch_bounds__(kThreads, (kClusterResidents<Policy, Work>))
    scan_resident_cluster(const __grid_constant__ Parameters p) {
  using State = typename Work::State;
  __shared__ uint64_t sums_there;  // of rows
  if (Work::kOneColumn && threadIdx.x == 0) {
    make_copy_barrier(&sums_there);
    make_barriers_visible_to_cluster();
  }
  arrive_at_cluster_start();
  const int t = block_of_cluster(), member = static_cast<int>(threadIdx.x);
  const Work work(p);
  const int columns = work.block_columns();
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
  // Every thread folds what comes before it in the tile, and the tiles before, and so waits for no other.
  if constexpr (Work::kOneColumn) {
    State sum = work.identity(), earlier = sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == member / 32) earlier = sum;
      sum = Policy::combine(sum, work.totals(0)[w], p.options);
    }
    if (member == 0) expect_copies(&sums_there, t * static_cast<int>(sizeof(State)));
    wait_at_cluster_barrier();
    if (member > t && member < p.tiles) copy_to_block(sums + t, &sums_there, member, sum);
    const State initial = work.initial(strip);
    wait_for_copies(&sums_there, 0);
    const State base[1] = {Policy::combine(before(0, initial), earlier, p.options)};
    work.finish(place, span, tile, starts, folds, base, kept);
  } else {
    State sum = work.identity(), in_tile[Work::kLaneStates], carry[Work::kLaneColumns];
    if (member < columns && t + 1 < p.tiles) sum = work.tile_total(0, member);
    work.before_in_tile(0, folds, in_tile);
    wait_at_cluster_barrier();
    if (member < columns)
      for (int later = t + 1; later < p.tiles; ++later) store_in_cluster(sums + t * columns + member, later, sum);
    __syncwarp();
    arrive_at_cluster_barrier();
#pragma unroll
    for (int v = 0; v < Work::kLaneColumns; ++v)
      carry[v] = place.active ? work.initial(place.column + v) : work.identity();
    wait_at_cluster_barrier();
    if (place.active)
#pragma unroll
      for (int v = 0; v < Work::kLaneColumns; ++v) carry[v] = before(work.own_column() + v, carry[v]);
    work.finish(place, span, tile, starts, carry, in_tile);
  }
}

// Folds the sums of all tiles before tile t, by all threads of the tile, and leaves the fold of the digits of the
// tile's number in `folds`, [columns][t / kGroup + 1]. `words` are those of the strip's first column. A warp takes
// several groups of tiles at a time, so that it waits for memory once for all of them.
template <class Policy>
__device__ __forceinline__ void fold_earlier(const Parameters& p, const uint64_t* words, int columns, int t, int thread,
                                             typename Policy::State* folds) {
  using State = typename Policy::State;
  using Words = WordsOf<State>;
  constexpr int kWords = Sums<Policy>::kWords, kAtOnce = kWords > 2 ? 2 : 4;
  const int lane = thread % 32, warp = thread / 32, warps = p.threads / 32, of_column = t / kGroup + 1;
  const State none = Policy::identity(p.options);
#pragma unroll 1
  for (int first = warp; first < columns * of_column; first += kAtOnce * warps) {
    Words sums[kAtOnce];
    const uint64_t* from[kAtOnce];
    bool there[kAtOnce], all;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int task = first + i * warps, column = task / of_column, tile = task % of_column * kGroup + lane;
      sums[i] = bits_as<Words>(none);
      from[i] = words + (int64_t{column} * p.tiles + tile) * kWords;
      there[i] = column >= columns || tile >= t;
    }
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!there[i]) there[i] = Sums<Policy>::load(from[i], sums[i]);
        all = all && there[i];
      }
    } while (!all);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int task = first + i * warps, left = t - task % of_column * kGroup;
      const State fold =
          shuffle_from(scan_group<Policy>(p.options, bits_as<State>(sums[i])), max(min(left, kGroup) - 1, 0));
      if (lane == 0 && task < columns * of_column) folds[task] = fold;
    }
  }
}

constexpr int kResidentSpanThreads = 32 + kThreads;

template <class Policy>
__global__ void __launch_bounds__(kResidentSpanThreads, sizeof(typename Policy::State) > 8 ? 2 : 3)
    scan_resident_spans(const __grid_constant__ Parameters p) {
  using Work = Spans<Policy>;
  using State = typename Work::State;
  constexpr int kWords = Sums<Policy>::kWords;
  const auto grid = cooperative_groups::this_grid();
  const int t = static_cast<int>(blockIdx.x);
  const unsigned strip = blockIdx.y;
  const Work work(p, threadIdx.x - 32);
  const int64_t first = work.column_of(strip, 0);
  const int columns = static_cast<int>(min(int64_t{p.width}, p.inner - work.first_of(strip)));
  uint64_t* const words = p.words + first * p.tiles * kWords;
  const auto words_of = [&](int column) { return words + (int64_t{column} * p.tiles + t) * kWords; };
  if (threadIdx.x < 32) {  // this warp clears the words while the others load the tile
    for (int c = static_cast<int>(threadIdx.x); c < columns; c += 32)
#pragma unroll
      for (int w = 0; w < kWords; ++w) store_relaxed(words_of(c) + w, 0);
    grid.barrier_wait(grid.barrier_arrive());
    return;
  }
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const auto place = work.place(strip);
  const auto span = work.span(t);
  typename Work::Extra extra[1];
  work.fetch(0, place, span, extra);
  commit_async_copies();
  auto arrived = grid.barrier_arrive();
  wait_for_async_copies<0>();
  typename Work::Tile tile;
  work.take(0, place, span, tile);
  const auto starts = work.starts(place, span);
  const auto folds = work.fold(place, span, tile, starts);
  work.publish_warp(0, folds);
  work.wait();
  if (thread < columns && t + 1 < p.tiles) Sums<Policy>::set(words_of(thread), work.tile_total(0, thread));
  State initial = work.identity();
  if (thread < columns) initial = work.initial(first + thread);
  grid.barrier_wait(std::move(arrived));
  State* const earlier = work.totals(1);
  if (t > 0) {
    fold_earlier<Policy>(p, words, columns, t, thread, earlier);
    work.wait();
  }
  if (thread < columns) {
    State carry = initial;
    if (t > 0) {
      const int groups = t / kGroup;
      const State* const own = earlier + thread * (groups + 1);
      State before = work.identity();
      if (t % kGroup != 0) before = Policy::combine(own[groups], before, p.options);
      if (groups > 0)
        before =
            Policy::combine(fold_of_few<Policy>(p.options, groups, [&](int i) { return own[i]; }), before, p.options);
      carry = Policy::combine(initial, before, p.options);
    }
    work.carry(0)[thread] = carry;
  }
  work.wait();
  State base[Work::kWidth];
  work.earlier_warps(0, base);
  work.finish(place, span, tile, starts, folds, base);
}

}  // namespace jaxgpuops::scan
