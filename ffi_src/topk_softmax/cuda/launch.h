// The CUDA kernel, seen from its handler.
#pragma once

#include <cuda_runtime_api.h>

#include "topk_softmax/plan.h"
#include "topk_softmax/topk_softmax.h"

namespace jaxgpuops::topk_softmax {

cudaError_t launch_topk_softmax(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers);

}  // namespace jaxgpuops::topk_softmax
