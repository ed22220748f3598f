// Entry points of this family's CUDA kernels, a file for each kind of element and operator; launch.cu chooses among
// them.
#pragma once

#include <cuda_runtime.h>

#include "scan/plan.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

cudaError_t launch_general(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_sum(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_product(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_extreme(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_logsumexp(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_linear(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_linear_vjp(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_small(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_lane_rows(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_tangent(cudaStream_t, const Plan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_tangent_pieces(cudaStream_t, const Plan&, const Problem&, const Buffers&);
cudaError_t launch_gradient_from_x(cudaStream_t, const Plan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::scan
