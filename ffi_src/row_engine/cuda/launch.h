// Turns a plan into parameters and launches. This part is the same for all operations, so it is compiled once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/rows.h"
#include "row_engine/plan.h"

namespace jaxgpuops::row_engine {

enum class Phase { kWhole, kPartial, kFinish };

// Bytes of shared memory before the statistics of a row: the barrier at which the statistics of other blocks arrive.
constexpr int kRowsBarrierBytes = 16;

// The parameters that kernels of all operations have. What a kernel reads first stands first, since the first read of
// each cache line of parameters is slow.
struct RowParameters {
  const void* operands[2];
  void* out;                       // null: the call has no results of the full shape
  int64_t columns, length, inner;  // columns: outer * inner
  int spans, units;
  int lane_bits, vector_bits, blocks, block_bits, unit_warps, part;
  bool cluster;  // the blocks that share a row are a cluster
  bool aligned;  // every vector of every row is aligned; the last one of a row alone may be a part of a vector
  Phase phase;
  unsigned char* workspace;
  int64_t workspace_stride;  // workspace bytes of an outer index
  int64_t finals_at;         // where the finals begin in that workspace
  int column_lane_bits, column_warp_bits, axis_warps;
  int64_t part_length;  // along_kernel: positions of a block
  int64_t ahead;        // rows_kernel: see RowPlan
};

// What launches must know of an operation: its kernels for a plan and their shared memory. Each kernel takes one
// argument, its parameters.
struct RowKernels {
  const void* sweep = nullptr;
  const void* merge = nullptr;
  const void* merge_few = nullptr;  // null: the operation has no such kernel
  int64_t item_bytes = 0, stat_bytes = 0, final_bytes = 0;
  int64_t wide_shared_bytes = 0;  // shared memory of a block of wide_kernel
  bool swept = false;             // as in RowTraits
  bool ragged = false;            // kernels of rows that several warps share take a row alone that is not whole vectors
};

// Sets all parameters except for the operands, `out` and `phase`.
void set_parameters(RowParameters& p, const RowPlan& plan, const Rows& rows, const RowKernels& kernels,
                    void* workspace);

// Whether all arrays begin at multiples of 16 bytes.
bool is_aligned(const RowParameters& p);
// Whether all arrays of the call begin at the same distance from a multiple of 16 bytes.
bool is_alike(const RowParameters& p);

// Launches the kernel that merges the statistics of all columns.
cudaError_t merge(cudaStream_t stream, const RowPlan& plan, RowParameters& p, const RowKernels& kernels);

// Launches the kernel for rows or columns that a team, block or cluster holds, or the kernels for split ones.
cudaError_t run_sweeps(cudaStream_t stream, const RowPlan& plan, const Rows& rows, RowParameters& p,
                       const RowKernels& kernels);

}  // namespace jaxgpuops::row_engine
