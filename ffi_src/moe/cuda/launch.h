// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "moe/plan.h"

namespace jaxgpuops::moe {

struct Routes {
  const int32_t* experts;
  int32_t* assignment_of_row;
  int32_t* row_of_assignment;
  int32_t* sizes;
  int32_t* offsets;
  int32_t* workspace;
};

cudaError_t launch_route(cudaStream_t stream, const Plan& plan, const PlanProblem& problem, const Routes& routes);

// `weights` may be null, which means that all are one.
cudaError_t launch_dispatch(cudaStream_t stream, const Gpu& gpu, const MoveProblem& problem, const void* x,
                            const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                            void* out);
cudaError_t launch_combine(cudaStream_t stream, const MoveProblem& problem, const void* y, const int32_t* index,
                           const void* weights, void* out);

cudaError_t launch_combine_vjp(cudaStream_t stream, const MoveProblem& problem, const void* y, const void* ct,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                               void* dy, void* dw);

}  // namespace jaxgpuops::moe
