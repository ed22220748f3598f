// How a plan becomes parameters and launches: what is the same for all operations, and so compiled once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/rows.h"
#include "row_engine/plan.h"

namespace jaxgpuops::row_engine {

enum class Phase { kWhole, kPartial, kFinish };

// In shared memory, before the statistics of a row: the barrier at which those of other blocks arrive.
constexpr int kRowsBarrierBytes = 16;

// The parameters of every kernel that do not depend on its operation. The members that every kernel reads first come
// first, side by side: the first read of a cache line of parameters is slow.
struct RowParameters {
  const void* operands[2];
  void* out;                       // null: results are numbers a row
  int64_t columns, length, inner;  // columns: outer * inner
  int spans, units;
  int lane_bits, vector_bits, blocks, block_bits, unit_warps, part;
  bool cluster;  // blocks that share a row are one
  bool aligned;  // every vector is, in every row
  Phase phase;
  unsigned char* workspace;
  int64_t workspace_stride;  // bytes an outer index
  int64_t finals_at;         // in them
  int column_lane_bits, column_warp_bits, axis_warps;
  int64_t part_length;  // along_kernel: positions of a block
  int64_t ahead;        // rows_kernel: see RowPlan
};

// What launches must know of an operation: its kernels for a plan, each of which takes its parameters as one argument,
// and bytes.
struct RowKernels {
  const void* sweep = nullptr;
  const void* merge = nullptr;
  const void* merge_few = nullptr;  // null: the operation has none
  int64_t item_bytes = 0, stat_bytes = 0, final_bytes = 0;
  int64_t wide_shared_bytes = 0;  // of a block of wide_kernel
  bool swept = false;             // as in RowTraits
};

// Sets all but operands, `out` and `phase`.
void set_parameters(RowParameters& p, const RowPlan& plan, const Rows& rows, const RowKernels& kernels,
                    void* workspace);

// Whether all arrays begin at multiples of 16 bytes.
bool is_aligned(const RowParameters& p);
// Whether all arrays that there are begin at the same distance from such a multiple.
bool is_alike(const RowParameters& p);

// Launches the merging of statistics of all columns.
cudaError_t merge(cudaStream_t stream, const RowPlan& plan, RowParameters& p, const RowKernels& kernels);

// Launches the kernels of rows and columns that a lane, block or cluster holds, or all those of split ones.
cudaError_t run_sweeps(cudaStream_t stream, const RowPlan& plan, const Rows& rows, RowParameters& p,
                       const RowKernels& kernels);

}  // namespace jaxgpuops::row_engine
