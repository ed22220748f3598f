// Entry points of this family's CUDA kernels. Each group of operations is a source file of its own; launch.cu selects
// one.
#pragma once

#include <cuda_runtime.h>

#include "row_engine/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// softmax, log_softmax and logsumexp: launch_plain for logits that are a positive multiple of x and not masked,
// launch_general for all others, launch_small for those of launch_plain with few elements, and launch_short for those
// whose short rows the plan spreads over more lanes or gives a block each. launch_gradient is for derivatives with
// of_logits, launch_jvp for the others.
cudaError_t launch_plain(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_general(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_small(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
cudaError_t launch_short(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
cudaError_t launch_cross_entropy(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_log_sum_exp_gradient(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_gradient(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
cudaError_t launch_jvp(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);

}  // namespace jaxgpuops::softmax
