// The function by which the handler launches this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sort/plan.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

// `values` and `indices` are null where that result is not wanted; `offsets` is null if there are no segments, and
// `carried` if indices are moved. `needed`: null, or a word of the GPU, which is 0 if nothing need be sorted: then
// sorts by kSweep end at once.
cudaError_t launch_sort(cudaStream_t stream, const Plan& plan, const Problem& problem, const void* x, void* values,
                        int32_t* indices, void* workspace, const int32_t* offsets = nullptr,
                        const int32_t* carried = nullptr, const uint32_t* needed = nullptr);

}  // namespace jaxgpuops::sort
