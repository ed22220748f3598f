// Entry points of this family's CUDA kernels, a file for each group of operations; launch.cu chooses among them.
#pragma once

#include <cuda_runtime.h>

#include "row_engine/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// softmax, log_softmax, logsumexp: of positive multiples of x, and of all logits.
cudaError_t launch_plain(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_general(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_cross_entropy(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_jvp(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);

}  // namespace jaxgpuops::softmax
