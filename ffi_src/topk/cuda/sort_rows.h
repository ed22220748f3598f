// The kernel of kSort for others than top-k: all elements of each row, in another order.
#pragma once

#include "common/sort_order.h"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {

// Larger keys come first. Values or indices may be null.
cudaError_t launch_sort(cudaStream_t, const Plan&, const Problem&, const SortOrder&, const Buffers&);

}  // namespace jaxgpuops::topk
