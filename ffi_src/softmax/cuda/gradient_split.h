// The kernels of gradient_split.cu and gradient_parts.cu, which gradient.cu launches.
#pragma once

#include <cuda_runtime.h>

#include "softmax/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

cudaError_t launch_gradient_split(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace);
cudaError_t launch_gradient_parts(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace);

}  // namespace jaxgpuops::softmax
