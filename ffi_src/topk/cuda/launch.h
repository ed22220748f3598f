// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "topk/plan.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

// `workspace` holds plan.workspace_bytes for each outer index, and is never read before it is written.
cudaError_t launch_topk(cudaStream_t stream, const Plan& plan, const Problem& problem, const void* x, void* values,
                        int32_t* indices, void* workspace);
cudaError_t launch_argmax(cudaStream_t stream, const Plan& plan, const ArgProblem& problem, const void* x,
                          int32_t* indices, void* workspace);

}  // namespace jaxgpuops::topk
