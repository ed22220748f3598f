// The algorithms of scans: which block takes which tiles, and how it learns the fold of what comes before a tile.
//
//   short                nothing comes before: a lane has the whole axis (spans.cuh)
//   packs                nothing comes before: a lane has whole rows, or few lanes share a row (packs.cuh)
//   small, lanes, pieces nothing comes before, and there are few elements (small.cu, pieces.cuh)
//   few                  nothing comes before, and there are few rows, or columns are short (few.cuh)
//   rows                 nothing comes before: the axis is one tile (loop.cuh)
//   walk, columns, spans the same block did the tiles before (loop.cuh)
//   resident             blocks share the axis, and all tiles are on the GPU at the same time (shared_rows.cuh,
//                        resident.cuh)
//   .._twice             blocks share the axis: first the sums of all tiles, then the results (twice.cuh)
//   .._look_ahead        blocks share the axis: warps read the sums of earlier tiles (look_ahead.cuh, shared_rows.cuh)
//
// Operands are read once (twice by .._twice), and results are written once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "scan/cuda/look_ahead.cuh"
#include "scan/cuda/loop.cuh"
#include "scan/cuda/packs.cuh"
#include "scan/plan.h"
#include "scan/cuda/resident.cuh"
#include "scan/cuda/shared_rows.cuh"
#include "scan/cuda/twice.cuh"

namespace jaxgpuops::scan {

// Lays out shared memory: `stages` tiles, other staging, and folds in `slots`. Returns the number of bytes.
template <class Policy>
size_t layout_shared(Parameters& p, int stages, size_t staging, int slots, size_t columns) {
  p.staging_at = static_cast<unsigned>(stages * p.stage_bytes);
  p.states_at = p.staging_at + static_cast<unsigned>(staging);
  return p.states_at + slots * (p.axis_warps + 1) * columns * sizeof(typename Policy::State);
}

// Sets where the words of each level begin, and clears all words.
template <class Policy>
cudaError_t clear_sums(cudaStream_t stream, const Plan& plan, Parameters& p) {
  unsigned tiles = 0;
  for (int level = 0; level < plan.levels; ++level) {
    p.level_at[level] = tiles;
    tiles += static_cast<unsigned>(((plan.tiles - 1) >> (kGroupBits * level)) + 1);
  }
  const int64_t words = tiles * p.columns * Sums<Policy>::kWords;
  const auto clearing = static_cast<unsigned>((words + 2047) / 2048);
  return launch(stream, {dim3(clearing), dim3(256)}, clear_workspace, p.counters_at, p.words, words);
}

// The number of blocks that run at the same time: more would find no tiles left.
inline cudaError_t most_blocks(size_t bytes, int of_multiprocessor, unsigned& blocks) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int fitting = static_cast<int>((size_t{227} << 10) / (bytes + 1024));
  blocks = multiprocessors * std::max(1, std::min(of_multiprocessor, fitting));
  return status;
}

template <class Policy, Layout layout>
constexpr bool kReadsOnce = reads_once(layout, Policy::kKind, Policy::kOp, Policy::kCut, Policy::Element::kDType);

template <class Policy, class Work>
cudaError_t launch_look_ahead(cudaStream_t stream, const Plan& plan, Parameters p, size_t columns) {
  cudaError_t status = clear_sums<Policy>(stream, plan, p);
  if (status != cudaSuccess) return status;
  const size_t bytes = layout_shared<Policy>(p, p.late + 2, 0, p.late + 2, columns) + kTickets * sizeof(unsigned);
  unsigned blocks = 0;
  if ((status = most_blocks(bytes, kSharedBlocks / plan.width(), blocks)) != cudaSuccess) return status;
  unsigned grid = std::min(blocks, p.strips * static_cast<unsigned>(p.tiles));
  const unsigned staying = blocks / p.strips * p.strips;  // the most blocks such that all strips get equally many
  const bool stay = !Work::kOneColumn && p.strips >= kManyStrips && p.strips <= kMostCounters &&
                    staying >= blocks / 4 * 3 && columns <= 32 * looker_warps<Work>(plan.threads());
  p.counters = stay ? p.strips : 1;
  if (stay) grid = std::min(staying, grid);
  Launch shape{dim3(grid), dim3(look_ahead_threads<Work>(plan.threads(), stay ? 1 : p.late + 1)), bytes};
  shape.overlap = plan.overlap;
  return launch(stream, shape, scan_look_ahead<Policy, Work>, p);
}

template <class Policy, OddRows kOdd = kOddRows<Policy>>
cudaError_t launch_row_look_ahead(cudaStream_t stream, const Plan& plan, Parameters p) {
  // With the code for odd rows in the same kernel, aligned rows of two operands would take up to a fifth longer.
  if constexpr (Policy::kOperands == 2 && kOdd != OddRows::kNone)
    if (p.aligned) return launch_row_look_ahead<Policy, OddRows::kNone>(stream, plan, p);
  cudaError_t status = clear_sums<Policy>(stream, plan, p);
  if (status != cudaSuccess) return status;
  const size_t bytes = layout_shared<Policy>(p, p.stages, RowLookAhead<Policy, kOdd>::kControlBytes, p.stages, 1);
  unsigned blocks = 0;
  if ((status = most_blocks(bytes, kRowBlocks<Policy>, blocks)) != cudaSuccess) return status;
  Launch shape{dim3(std::min(blocks, p.strips * static_cast<unsigned>(p.tiles))),
               dim3(2 * kThreads + 32 * std::min(kLookers<Policy>, p.stages)), bytes};
  shape.overlap = plan.overlap;
  return launch(stream, shape, scan_row_look_ahead<Policy, kOdd>, p);
}

// Launches the kernels of tiles that are read twice.
template <class Policy, class Work>
cudaError_t launch_twice(cudaStream_t stream, const Plan& plan, Parameters p, size_t columns) {
  Launch shape{dim3(p.strips * p.tiles), dim3(plan.threads())};
  shape.shared_bytes = layout_shared<Policy>(p, 1, 0, 1, columns);
  cudaError_t status = launch(stream, shape, scan_twice_folds<Policy, Work>, p);
  if (status != cudaSuccess) return status;
  p.folded = Work::kFewColumns ? p.tiles > kGroup || columns > kFewColumns : p.tiles * Work::kLaneColumns > kFewTiles;
  if (p.folded) {
    const int threads = std::min(kSumsThreads, (p.tiles + 31) / 32 * 32);
    Launch sums{dim3(static_cast<unsigned>(p.columns)), dim3(threads)};
    sums.overlap = plan.overlap;
    if ((status = launch(stream, sums, scan_twice_sums<Policy>, p)) != cudaSuccess) return status;
  }
  shape.overlap = plan.overlap;
  return launch(stream, shape, scan_twice_results<Policy, Work>, p);
}

// Launches the kernels in which blocks share rows.
template <class Policy>
cudaError_t launch_shared_rows(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  if constexpr (kRowBlocks<Policy> > 0) {
    return launch_row_look_ahead<Policy>(stream, plan, p);
  } else if constexpr (kReadsOnce<Policy, Layout::kAlong>) {
    return launch_look_ahead<Policy, Chunks<Policy>>(stream, plan, p, 1);
  } else {
    return launch_twice<Policy, Chunks<Policy>>(stream, plan, p, 1);
  }
}

// If the GPU has no room for all tiles at the same time, other kernels run instead, which give the same bits.
template <class Policy, OddRows kOdd = kOddRows<Policy>>
cudaError_t launch_resident(cudaStream_t stream, const Plan& plan, Parameters p) {
  // Aligned logsumexps have a kernel without the code for odd rows, which takes 4 % less.
  if constexpr (kByParts<Policy> && kOdd != OddRows::kNone)
    if (p.aligned) return launch_resident<Policy, OddRows::kNone>(stream, plan, p);
  static Residents of_kernel;
  const int teams = plan.strips * plan.tiles > kResidentTiles / kMostTeams ? kMostTeams : 1;
  Parameters q = p;
  Launch shape{dim3(static_cast<unsigned>((plan.tiles + teams - 1) / teams), p.strips), dim3(32 + teams * kThreads)};
  shape.shared_bytes = layout_shared<Policy>(q, teams, 0, teams, 1) + teams * kGroup * sizeof(typename Policy::State);
  shape.together = true;
  int fitting = 0;
  const void* const kernel = reinterpret_cast<const void*>(scan_resident<Policy, kOdd>);
  const cudaError_t status = of_kernel.count(kernel, shape, &fitting);
  if (status != cudaSuccess) return status;
  if (static_cast<int>(shape.grid.x * shape.grid.y) > fitting) return launch_shared_rows<Policy>(stream, plan, p);
  return launch(stream, shape, scan_resident<Policy, kOdd>, q);
}

// Launches the kernel for rows of one tile.
template <class Policy>
cudaError_t launch_rows(cudaStream_t stream, const Plan& plan, Parameters p) {
  p.states_at = static_cast<unsigned>(plan.threads() / 32 * Rows<Policy, false>::kBytesOfWarp);
  const size_t states = plan.axis_warps == 1 ? 0 : kWarps << p.column_bits;
  const size_t bytes = p.states_at + states * sizeof(typename Policy::State);
  const Launch shape{dim3(p.strips), dim3(plan.threads()), bytes};
  constexpr int kBytes = sizeof(typename Policy::Element::Bits);
  if constexpr (kBytes == 2)
    if (!p.aligned && p.run_bits < 5) return launch(stream, shape, scan_rows<Policy, true>, p);
  return launch(stream, shape, scan_rows<Policy, (kBytes == 1)>, p);
}

// Launches the kernel for the rows of a lane, or of a few.
template <class Policy>
cudaError_t launch_packs(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  const Launch shape{dim3(p.strips), dim3(plan.threads())};
  if constexpr (!Policy::kNeighbour)
    if (p.lanes_before > 0) return launch(stream, shape, scan_packs<Policy, true>, p);
  return launch(stream, shape, scan_packs<Policy, false>, p);
}

template <class Policy>
cudaError_t launch_walk(cudaStream_t stream, Parameters p) {
  const size_t bytes = layout_shared<Policy>(p, p.stages, 0, 2, 1);
  return launch(stream, {dim3(p.strips), dim3(kThreads), bytes}, scan_walk<Policy>, p);
}

// A block walks over the tiles of `columns` columns.
template <class Policy, class Work>
cudaError_t launch_columns(cudaStream_t stream, const Plan& plan, Parameters p, size_t columns) {
  const int slots = Work::kFoldsAll || plan.axis_warps > 1 ? kLoopSlots : 0;
  const size_t bytes = layout_shared<Policy>(p, p.stages, 0, slots, columns);
  int keepers = slots > 0 && p.tiles > 1 && columns <= kKeepers<Policy, Work> ? static_cast<int>(columns) : 0;
  if (keepers > 0 && Policy::kOperands > 1) {
    // Two blocks with keepers have too many registers for a multiprocessor (8 x 4096 x 2048 float32: 220 us, was 205).
    // With 4 bytes or more, blocks of twice the width keep memory busy without them (8 x 2048 x 1024 float32: 60 us,
    // was 56; but 4 x 4096 x 1024, in blocks of one width: 60, was 74).
    unsigned most = 0;
    if (const cudaError_t status = most_blocks(bytes, 1, most); status != cudaSuccess) return status;
    const bool busy = sizeof(typename Policy::Element::Bits) >= 4 && plan.width() > 1;
    if (busy || p.strips > most) keepers = 0;
  }
  return launch(stream, {dim3(p.strips), dim3(plan.threads() + keepers), bytes}, scan_columns<Policy, Work>, p);
}

// Each block of a cluster has one of the tiles of `columns` columns.
template <class Policy, class Work>
cudaError_t launch_cluster(cudaStream_t stream, const Plan& plan, Parameters p, size_t columns) {
  Launch shape{dim3(static_cast<unsigned>(plan.cluster), p.strips), dim3(plan.threads())};
  const size_t sums = plan.cluster * columns;
  shape.shared_bytes = layout_shared<Policy>(p, 1, 0, 1, columns) + sums * sizeof(typename Policy::State);
  shape.cluster = plan.cluster;
  shape.packed = plan.cluster > 8;  // few clusters of so many blocks would have a multiprocessor for each
  const auto kernel = scan_resident_cluster<Policy, Work>;
  const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), plan.cluster);
  return status == cudaSuccess ? launch(stream, shape, kernel, p) : status;
}

// The blocks of all tiles of spans run at the same time. If the GPU has no room for them, other kernels run instead,
// which give the same bits.
template <class Policy>
cudaError_t launch_resident_spans(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  static Residents of_kernel;
  Parameters q = p;
  Launch shape{dim3(static_cast<unsigned>(plan.tiles), p.strips), dim3(32 + plan.threads())};
  const size_t groups = (p.tiles + kGroup - 1) / kGroup;
  shape.shared_bytes = layout_shared<Policy>(q, 1, 0, 1, p.width) + groups * p.width * sizeof(typename Policy::State);
  shape.together = true;
  int fitting = 0;
  const void* const kernel = reinterpret_cast<const void*>(scan_resident_spans<Policy>);
  const cudaError_t status = of_kernel.count(kernel, shape, &fitting);
  if (status != cudaSuccess) return status;
  if (static_cast<int>(shape.grid.x * shape.grid.y) > fitting)
    return launch_twice<Policy, Spans<Policy>>(stream, plan, p, p.width);
  return launch(stream, shape, scan_resident_spans<Policy>, q);
}

template <class Policy>
cudaError_t launch_short(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  const size_t bytes = p.staged ? p.stage_bytes : 0;
  return launch(stream, {dim3(p.strips), dim3(plan.threads()), bytes}, scan_short<Policy>, p);
}

// The parameters of a kernel; none depends on the policy.
Parameters parameters_of(const Plan& plan, const Problem& problem, const Buffers& buffers, void* workspace);

// The plan names only kernels that are compiled for the policy.
template <class Policy>
cudaError_t launch_policy(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const Parameters p = parameters_of(plan, problem, buffers, workspace);
  if constexpr (!kRare<Policy>) {
    if constexpr (!Policy::kCut)
      if (plan.algorithm == Algorithm::kPacks) return launch_packs<Policy>(stream, plan, p);
    const size_t columns = (32 << p.column_bits) * Columns<Policy>::kWidth;
    switch (plan.algorithm) {
      case Algorithm::kRows: return launch_rows<Policy>(stream, plan, p);
      case Algorithm::kWalk: return launch_walk<Policy>(stream, p);
      case Algorithm::kResident:
        if (plan.layout == Layout::kAlong && plan.cluster > 1)
          return launch_cluster<Policy, Chunks<Policy>>(stream, plan, p, 1);
        if (plan.layout == Layout::kAcross) return launch_cluster<Policy, Columns<Policy>>(stream, plan, p, columns);
        if constexpr (!Policy::kCut)
          if (plan.layout == Layout::kAlong) return launch_resident<Policy>(stream, plan, p);
        break;
      case Algorithm::kRowLookAhead:
      case Algorithm::kChunkLookAhead:
      case Algorithm::kChunkTwice: return launch_shared_rows<Policy>(stream, plan, p);
      case Algorithm::kColumns: return launch_columns<Policy, Columns<Policy>>(stream, plan, p, columns);
      case Algorithm::kColumnLookAhead:
        if constexpr (kReadsOnce<Policy, Layout::kAcross>)
          return launch_look_ahead<Policy, Columns<Policy, true>>(stream, plan, p, columns);
        break;
      case Algorithm::kColumnTwice: return launch_twice<Policy, Columns<Policy>>(stream, plan, p, columns);
      default: break;
    }
  }
  switch (plan.algorithm) {
    case Algorithm::kEmpty: return cudaSuccess;
    case Algorithm::kShort: return launch_short<Policy>(stream, plan, p);
    case Algorithm::kResident:
      if (plan.cluster > 1) return launch_cluster<Policy, Spans<Policy>>(stream, plan, p, p.width);
      if constexpr (!kRare<Policy>) return launch_resident_spans<Policy>(stream, plan, p);
      return cudaErrorInvalidValue;
    case Algorithm::kSpans: return launch_columns<Policy, Spans<Policy>>(stream, plan, p, p.width);
    case Algorithm::kSpanTwice: return launch_twice<Policy, Spans<Policy>>(stream, plan, p, p.width);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::scan
