// Launches the kernels that a plan names.
#include "reduce/cuda/launch.h"

#include "reduce/cuda/kernels.h"

namespace jaxgpuops::reduce {

cudaError_t launch_reduce(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  return plan.algorithm == RowAlgorithm::kSmall ? launch_small(stream, plan, problem, buffers)
                                                : launch_rows(stream, plan, problem, buffers, workspace);
}

}  // namespace jaxgpuops::reduce
