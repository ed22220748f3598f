// Entry points of this family's CUDA kernels, each in a source file of its own; launch.cu selects among them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sort/plan.h"
#include "sort/cuda/shape.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

struct Buffers {
  const void* x;
  void* values;      // null if only indices are wanted
  int32_t* indices;  // null if only values are wanted
  void* workspace;
  const int32_t* offsets = nullptr;  // of segments, if there are any
  const int32_t* carried = nullptr;  // numbers that are moved instead of indices, if there are any
  const uint32_t* needed = nullptr;  // a word that is 0 if nothing need be sorted; null: sort in any case
};

// Transposes: to[o, c, r] = from[o, r, c]. Elements have 8, 16, 32 or 64 bits.
cudaError_t launch_turn(cudaStream_t, const void* from, void* to, int64_t outer, int64_t rows, int64_t columns,
                        int bits);

cudaError_t launch_short(cudaStream_t, const Problem&, const Buffers&);
// Sorts rows along any axis; longer ones than kMostWarpLength must be contiguous, and sorted without indices.
cudaError_t launch_network(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts contiguous rows: `inner` is 1.
cudaError_t launch_block(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts the segments of contiguous rows.
cudaError_t launch_segments(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// The same for rows that a few warps hold, if only values are wanted.
cudaError_t launch_network_segments(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_compare(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts rows along any axis, or the segments of contiguous rows if there are any. Their offsets must ascend.
cudaError_t launch_merge(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_sweep(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts rows along any axis, of 32 or 64 bits.
cudaError_t launch_splitters(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts those segments of contiguous rows that have up to plan.in_blocks elements. Their offsets must ascend.
cudaError_t launch_block_segments(cudaStream_t, const Plan&, const Problem&, const Buffers&);
// Sorts the segments of contiguous rows. Their offsets must ascend.
cudaError_t launch_sweep_segments(cudaStream_t, const Plan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::sort
