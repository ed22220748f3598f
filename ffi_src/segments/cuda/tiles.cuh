// Segments of rows whose ids ascend, or which are read in the order of their ids (order.cu, sort/). A tile is a fixed
// number of rows, however long the segments are. It belongs to a team of neighbouring threads: as many as a row has
// vectors of 16, 8 or 4 bytes, or elements. A thread reads its columns of the tile's rows in order, and keeps the
// result of the current segment in registers. What this result is for depends on where the segment begins and ends:
//   if it begins and ends in the tile: the segment's result;
//   if it begins before the tile: the tile's head, a partial result in the workspace;
//   if it begins in the tile and ends behind it: the tile's tail, another partial result.
// A second kernel (tiles_join.cuh) folds each tail with the heads of the tiles behind it. There are no atomics on
// results, and the order of additions depends only on the plan's tiles and on the ids.
//
// Passes: one, and the join if there are several tiles. Bytes moved: each row is read once, with 4 bytes of id, and 4
// more of position where ids do not ascend; each segment is written once; a head and a tail of each tile, at most, are
// written and read. Segments without rows are filled as tiles_gaps.cuh says; rows of one element have a kernel of their
// own (tiles_scalars.cuh), and so have sums of rows of few vectors (tiles_teams.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/tiles_args.cuh"
#include "segments/cuda/tiles_gaps.cuh"
#include "segments/cuda/tiles_join.cuh"
#include "segments/cuda/tiles_scalars.cuh"
#include "segments/cuda/tiles_teams.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kTileRows = 4;  // rows that a lane loads before it folds them
// Blocks of tiles that a multiprocessor holds: more would leave a lane with many elements too few registers.
constexpr int tile_blocks(int count) { return count > 4 ? 3 : 4; }

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kThreads, tile_blocks(kCount)) segment_tiles_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Result = typename Monoid::Result;
  static_assert(sizeof(Partial<Monoid, kCount>) == kCount * sizeof(Acc));
  wait_for_predecessor();  // the kernel that orders the ids
  let_dependents_start();  // segment_join_kernel, which reads the ids at once, and so may not start before the wait
  if (blockIdx.x < a.fillers) return fill_gaps<Result>(a);
  const int64_t thread = (blockIdx.x - a.fillers) * kThreads + threadIdx.x;
  const int64_t team = thread / a.lanes, column = (thread - team * a.lanes) * kCount;
  const int64_t o = team / a.tiles, tile = team - o * a.tiles;
  if (o >= a.outer) return;

  const int64_t ids_at = offset_of(a.ids_at, o);
  const int32_t* ids = a.ids + ids_at;
  const int32_t* positions = a.positions ? a.positions + ids_at : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + offset_of(a.data_at, o) + column;
  const int64_t begin = tile * a.rows;
  const auto length = static_cast<int>(min(a.rows, a.length - begin));
  ids += begin;
  if (positions) positions += begin;
  Result* const out = static_cast<Result*>(a.out) + o * a.segments * a.inner + column;
  char* const workspace = a.workspace + o * a.workspace_bytes;
  char* const head = workspace + (tile * a.inner + column) * sizeof(Acc);
  a.clear_counter(workspace, tile, column);

  int32_t id = ids[0];
  bool begins = begin == 0 || ids[-1] != id;
  Partial<Monoid, kCount> sum;
  sum.clear();
  // Stores the result of the current segment. `ends`: no later tile has rows of it.
  const auto flush = [&](bool ends) {
    if (!a.is_segment(id)) return;
    if (begins && ends) {
      sum.store_result(out, id * a.inner, a.keys);
    } else {
      sum.store(reinterpret_cast<Acc*>(head + (begins ? a.tails_at : 0)));
    }
  };
  // Fills gaps of up to `gap` segments: those just before the rows from `at` up to, but not including, `to`. The row
  // behind the last one of all stands for the end of the segments.
  bool gaps = begins;  // whether there may be a gap before one of the rows at hand
  const auto fill = [&](int at, int to) {
    Elements<Result, kCount> empty;
#pragma unroll
    for (Result& value : empty.value) value = static_cast<Result>(a.keys.empty);
#pragma unroll 1
    for (int r = at; r < to; ++r) {
      const int64_t row = begin + r, from = row == 0 ? 0 : a.place_of(ids[r - 1]) + 1;
      const int64_t next = row == a.length ? a.segments : a.place_of(ids[r]);
#pragma unroll 1
      for (int64_t s = next - from > a.gap ? next : from; s < next; ++s)
        *reinterpret_cast<Elements<Result, kCount>*>(out + s * a.inner) = empty;
    }
  };
  // The ids and positions of the next kTileRows rows are loaded together with the elements of the current ones.
  int32_t next[kTileRows], row[kTileRows];
  const auto load_ids = [&](int at) {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const bool has = at + r < length;
      next[r] = has ? ids[at + r] : -1;
      row[r] = has && positions ? positions[at + r] : static_cast<int32_t>(begin + at + r);
    }
  };
  load_ids(0);
  for (int at = 0; at < length; at += kTileRows) {
    int32_t own[kTileRows];
    Elements<Bits, kCount> elements[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      own[r] = next[r];
      if (a.is_segment(own[r])) elements[r] = *reinterpret_cast<const Elements<Bits, kCount>*>(data + row[r] * a.inner);
    }
    load_ids(at + kTileRows);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (at + r >= length) break;
      if (own[r] != id) {
        flush(true);
        gaps |= static_cast<uint32_t>(own[r]) - static_cast<uint32_t>(id) != 1;
        id = own[r];
        begins = true;
        sum.clear();
      }
      if (a.is_segment(id)) sum.fold(elements[r], a.keys);
    }
    if (gaps) fill(at, min(at + kTileRows, length));
    gaps = false;
  }
  const bool is_last = begin + length == a.length;
  flush(is_last || ids[length] != id);
  if (is_last) fill(length, length + 1);
}

// Whether segment_teams_kernel has the fold, which are sums.
template <class Monoid>
constexpr bool has_teams = !is_extreme<Monoid>;
template <class E>
constexpr bool has_teams<Exponentials<E>> = false;

// Launches the kernels of tiles, but for the join: threads have vectors of kCount elements.
template <class Monoid, int kCount>
cudaError_t run_tiles(cudaStream_t stream, Args a) {
  using Result = typename Monoid::Result;
  a.lanes = a.inner / kCount;
  Launch config;
  config.block = dim3(kThreads);
  config.overlap = a.overlap && a.positions;
  const bool scalars = a.inner == 1;
  if (scalars || a.tiles == 0) {
    const int64_t filling = a.outer * ((a.segments * a.inner + kThreads - 1) / kThreads);
    const Launch all = {dim3(static_cast<unsigned>(std::min<int64_t>(filling, 132 * 16))), dim3(kThreads)};
    const cudaError_t status = launch(stream, all, segment_fill_all_kernel<Result>, a);
    if (status != cudaSuccess || a.tiles == 0) return status;
    config.overlap = a.overlap;
  } else {
    const int64_t row_bytes = a.inner * static_cast<int64_t>(sizeof(Result));
    a.gap = std::clamp<int64_t>(kGapBytes / row_bytes, 1, kGap);
    const int64_t cells = (a.segments - 1) / a.gap + 1;
    // Many blocks share the gaps of wide rows: each writes at most 1 MiB, or 8 segments of the widest; of narrow rows,
    // 2 MiB. When 18 blocks wrote them all, the gradient of take for Zipf ids (65536 x 4096 into 128256) took three
    // times as long on an H200.
    const int64_t most = ((a.gap < kGap ? 1 : 2) << 20) / (a.gap * row_bytes);
    a.cells = std::clamp<int64_t>((cells - 1) / 16 + 1, 8, std::clamp<int64_t>(most, 8, kMostCells));
    a.fillers = a.outer * ((cells - 1) / a.cells + 1);
  }
  if constexpr (has_teams<Monoid>) {
    if (a.shares > 1) {
      a.pieces = (a.lanes + kThreads - 1) / kThreads;
      a.lanes = (a.lanes + a.pieces - 1) / a.pieces;
      a.teams = static_cast<int>(std::min<int64_t>(kThreads / a.lanes, a.shares));
      config.grid = dim3(static_cast<unsigned>(a.fillers + a.outer * a.tiles * a.pieces));
      config.shared_bytes = a.lists_bytes() + 2 * a.shares * a.lanes * sizeof(Partial<Monoid, kCount>);
      return launch(stream, config, segment_teams_kernel<Monoid, kCount>, a);
    }
  }
  const int64_t threads = a.outer * a.tiles * (scalars ? 32 : a.lanes);
  config.grid = dim3(static_cast<unsigned>(a.fillers + (threads + kThreads - 1) / kThreads));
  if constexpr (kCount == 1) {
    return launch(stream, config, scalars ? segment_scalars_kernel<Monoid> : segment_tiles_kernel<Monoid, 1>, a);
  } else {
    return launch(stream, config, segment_tiles_kernel<Monoid, kCount>, a);
  }
}

// Launches the kernels for the widest vectors that rows are made of.
template <class Monoid>
cudaError_t run(cudaStream_t stream, const Args& a) {
  constexpr int kBytes = sizeof(typename Monoid::Bits);
  constexpr int kWide = std::min<int>(kBytes == 1 ? 8 : 16 / kBytes, kMostVectorPart / sizeof(typename Monoid::Acc));
  constexpr int kJoined = std::min<int>(8, 16 / sizeof(typename Monoid::Acc));
  const bool aligned = (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(a.out)) % 16 == 0;
  const auto has = [&](int count) { return aligned && a.inner % count == 0; };
  cudaError_t status;
  if (has(kWide)) {
    status = run_tiles<Monoid, kWide>(stream, a);
  } else if (kBytes > 1 && has(8 / kBytes)) {
    status = run_tiles<Monoid, kBytes == 1 ? 1 : 8 / kBytes>(stream, a);
  } else if (kBytes < 4 && has(4 / kBytes)) {
    status = run_tiles < Monoid, kBytes<4 ? 4 / kBytes : 1>(stream, a);
  } else {
    status = run_tiles<Monoid, 1>(stream, a);
  }
  if (status != cudaSuccess || a.tiles <= 1) return status;
  return has(kJoined) ? run_join<Monoid, kJoined>(stream, a) : run_join<Monoid, 1>(stream, a);
}

}  // namespace
}  // namespace jaxgpuops::segments
