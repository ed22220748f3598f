// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "along_axis/along_axis.h"

namespace jaxgpuops::along_axis {

cudaError_t launch_take(cudaStream_t stream, const Problem& problem, const void* x, const int32_t* indices, void* out);
cudaError_t launch_put(cudaStream_t stream, const Problem& problem, const void* updates, const int32_t* indices,
                       void* out);

}  // namespace jaxgpuops::along_axis
