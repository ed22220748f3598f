// The function that launches the kernels of count/firsts.h.
#pragma once

#include "select/cuda/launch.h"
#include "select/firsts.h"

namespace jaxgpuops::select {

// `problem` is one of firsts_of(), with an order. The results of a row are k values and indices.
cudaError_t launch_firsts(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const SelectResults& results, void* workspace);

}  // namespace jaxgpuops::select
