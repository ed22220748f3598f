// Launches the kernels of the operation that a problem names.
#include "reduce/cuda/launch.h"

#include "reduce/cuda/kernels.h"

namespace jaxgpuops::reduce {

cudaError_t launch_reduce(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  if (plan.algorithm == RowAlgorithm::kSmall) return launch_small(stream, plan, problem, buffers);
  switch (problem.op) {
    case Op::kSum: return launch_sum(stream, plan, problem, buffers, workspace);
    case Op::kDot: return launch_dot(stream, plan, problem, buffers, workspace);
    case Op::kMax:
    case Op::kMin: return launch_extreme(stream, plan, problem, buffers, workspace);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::reduce
