// Entry points of this family's CUDA kernels, each in a source file of its own; launch.cu selects one.
#pragma once

#include <cuda_runtime.h>

#include "row_engine/plan.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

cudaError_t launch_rows(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
// For sums of few floats.
cudaError_t launch_small(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
// For sums of few rows that a block has.
cudaError_t launch_short(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
// For sums of rows of 8 or 16 bytes of 16-bit floats.
cudaError_t launch_packed(cudaStream_t, const Problem&, const Buffers&);
// For sums of rows that are not whole vectors.
cudaError_t launch_loose(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
// For sums of long columns of 16-bit floats whose lines are not whole vectors.
cudaError_t launch_loose_columns(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);

}  // namespace jaxgpuops::reduce
