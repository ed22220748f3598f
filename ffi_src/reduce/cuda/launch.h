// The function by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "reduce/plan.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

// `workspace` has plan.workspace_bytes for each outer index. The kernels write what they read from it, so it need not
// be initialised.
cudaError_t launch_reduce(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace);

}  // namespace jaxgpuops::reduce
