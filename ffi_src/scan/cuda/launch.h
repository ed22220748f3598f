// The function by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "scan/plan.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

// `workspace` holds plan.workspace_bytes for each outer index, and is never read before it is written.
cudaError_t launch_scan(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                        void* workspace);

}  // namespace jaxgpuops::scan
