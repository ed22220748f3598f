#pragma once
#include "reduce/cuda/kernels.h"
namespace jaxgpuops::reduce {
cudaError_t launch_loose(cudaStream_t, const RowPlan&, const Problem&, const Buffers&, void* workspace);
}
