// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "count/plan.h"

namespace jaxgpuops::count {

cudaError_t launch_bincount(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                            int32_t* counts, char* workspace, int64_t workspace_bytes);

// The form of launch_bincount for long rows in many bins, if the result was set to 0 before in case of several slices.
cudaError_t launch_bincount_parts(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                  int32_t* counts, char* workspace, int64_t workspace_bytes);

cudaError_t launch_histogram(cudaStream_t stream, const BincountPlan& plan, const Histogram& problem, const void* x,
                             const void* edges, int32_t* counts);

// The form of launch_bincount for many short rows.
cudaError_t launch_bincount_rows(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                 int32_t* counts);

}  // namespace jaxgpuops::count
