// The CUDA kernels of the family, seen from their handlers.
#pragma once

#include <cuda_runtime_api.h>

#include "softmax/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// `workspace` holds plan.workspace_bytes for each outer index, and is never read before it is written.
cudaError_t launch_softmax(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace);

}  // namespace jaxgpuops::softmax
