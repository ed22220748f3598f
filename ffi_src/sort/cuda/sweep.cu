// Radix sort of rows of any length, in passes over memory: sweep.cuh says how.
//
// If all blocks of a pass run at the same time, no kernel counts before the passes, and no block looks back: each block
// waits for the digit counts of all tiles of its row, most of which neighbouring tiles have added up to sums. No pass
// is skipped then.
//
// Integers of 8 bits that are sorted without indices need no pass: the counts say which elements a row has, and a
// second kernel writes them.
#include "sort/cuda/sweep.cuh"

#include "common/cuda/residents.cuh"
#include "common/cuda/set_words.h"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

// ---- Integers of 8 bits ---------------------------------------------------------------------------------------------

cudaError_t run_bytes(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  const SweepShape shape(rows, length, problem.k, 1, true, false, kLargeTiles);
  auto* const counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  cudaError_t error = launch_set_words(stream, reinterpret_cast<uint32_t*>(workspace), shape.status / 4, 0, 0);
  if (error != cudaSuccess) return error;
  Launch config;
  config.overlap = plan.overlap;
  config.block = dim3(kCountThreads);
  config.grid = dim3(static_cast<unsigned>(rows * ((length + plan.counted - 1) / plan.counted)));
  error = launch(stream, config, count_kernel<uint8_t, false>,
                 CountArgs{buffers.x, reinterpret_cast<RowHead*>(workspace), counts, nullptr, nullptr, buffers.needed,
                           rows, length, 0, plan.counted, 1, problem.order});
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<uint32_t>((problem.k + 15) / (16 * kFillThreads) + 1);
  config.block = dim3(kFillThreads);
  config.grid = dim3(static_cast<unsigned>(rows * blocks));
  return launch(stream, config, fill_kernel<false>,
                FillArgs{static_cast<const uint8_t*>(buffers.x), static_cast<uint8_t*>(buffers.values), counts, nullptr,
                         length, problem.k, 0, blocks, problem.order});
}

// ---- Launches -------------------------------------------------------------------------------------------------------

template <class Key, bool kIndices>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const int64_t tiny = ceil_div(length, sweep_tile(sizeof(Key), kTinyTiles, kIndices));
  const SweepTiles size = plan.threads > kSweepThreads ? kHugeTiles
                          : !plan.small                ? kLargeTiles
                          : plan.blocks == rows * tiny ? kTinyTiles
                                                       : kSmallTiles;
  const SweepShape shape(rows, length, problem.k, sizeof(Key), buffers.values != nullptr, kIndices, size);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  PassArgs a = pass_args(shape, plan, problem, buffers);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(rows * shape.tiles));
  config.block = dim3(sweep_threads(size));
  config.shared_bytes = sweep_shared_bytes(sizeof(Key), size, kIndices);
  // Large tiles have a kernel that cannot exchange counts, since what it takes to do so costs registers.
  constexpr bool kCan = sizeof(Key) <= 4, kAlways = sizeof(Key) == 1;
  constexpr SweepTiles kHuge = sizeof(Key) == 2 || sizeof(Key) == 4 ? kHugeTiles : kLargeTiles;
  constexpr SweepTiles kSmall = kAlways ? kLargeTiles : kSmallTiles, kTiny = kAlways ? kLargeTiles : kTinyTiles;
  const auto kernel = size == kHugeTiles    ? pass_kernel<Key, kIndices, kHuge, kCan>
                      : size == kTinyTiles  ? pass_kernel<Key, kIndices, kTiny, true>
                      : size == kSmallTiles ? pass_kernel<Key, kIndices, kSmall, true>
                      : plan.exchanges      ? pass_kernel<Key, kIndices, kLargeTiles, kCan>
                                            : pass_kernel<Key, kIndices, kLargeTiles, kAlways>;
  cudaError_t error = cudaSuccess;
  if (plan.exchanges) {
    static Residents residents;
    int fitting = 0;
    error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
    if (error != cudaSuccess) return error;
    a.exchanges = config.together = rows * shape.tiles <= fitting;
  }
  // A kernel clears the workspace instead of a memset, since the next kernel may start before this one ends.
  error = launch_set_words(stream, reinterpret_cast<uint32_t*>(workspace),
                           (a.exchanges ? shape.keys : shape.status) / 4, 0, 0);
  if (error != cudaSuccess) return error;
  config.overlap = plan.overlap;
  const int64_t blocks = (length + plan.counted - 1) / plan.counted;
  if (!a.exchanges) {
    Launch count;
    count.grid = dim3(static_cast<unsigned>(rows * blocks));
    count.block = dim3(kCountThreads);
    count.overlap = plan.overlap;
    error = launch(stream, count, a.inner > 1 ? count_kernel<Key, false, true> : count_kernel<Key, false>,
                   CountArgs{buffers.x, a.heads, a.counts, a.status, nullptr, buffers.needed, rows, length, shape.tiles,
                             plan.counted, problem.rows.inner, problem.order});
  }
  for (a.pass = 0; a.pass < shape.passes && error == cudaSuccess; ++a.pass) error = launch(stream, config, kernel, a);
  return error;
}

}  // namespace

cudaError_t launch_sweep(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if constexpr (sizeof(Key) == 1)
      if (!plan.exchanges && counts_bytes(problem, buffers)) return run_bytes(stream, plan, problem, buffers);
    return buffers.indices ? run<Key, true>(stream, plan, problem, buffers)
                           : run<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
