// The kernels of loose_rows.cu, loose_gradient.cu and held_columns.cu, which launch.cu and gradient.cu launch where
// RowPlan::single says so.
#pragma once

#include <cuda_runtime.h>

#include "row_engine/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

cudaError_t launch_loose(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
cudaError_t launch_loose_gradient(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
cudaError_t launch_held_columns(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::softmax
