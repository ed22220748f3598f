// Launches the kernels of the operation that a problem names.
#include "softmax/cuda/launch.h"

#include "softmax/cuda/kernels.h"
#include "softmax/cuda/single.h"

namespace jaxgpuops::softmax {

cudaError_t launch_softmax(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  if (problem.op == Op::kLogSumExpGrad) return launch_log_sum_exp_gradient(stream, plan, problem, buffers, workspace);
  if (problem.of_logits) return launch_gradient(stream, plan, problem, buffers, workspace);
  if (plan.algorithm == RowAlgorithm::kColumns && plan.single)
    return launch_held_columns(stream, plan, problem, buffers);
  const bool tiled_columns = plan.algorithm == RowAlgorithm::kRowsTiles && problem.rows.inner > 1;
  if (plan.algorithm == RowAlgorithm::kSmall || tiled_columns) return launch_small(stream, plan, problem, buffers);
  switch (problem.op) {
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kLogSumExp: {
      if (plan.single && plan.spread) return launch_loose(stream, plan, problem, buffers);
      if (!problem.general && (plan.spread || plan.wide)) return launch_short(stream, plan, problem, buffers);
      const auto launch = problem.general ? launch_general : launch_plain;
      return launch(stream, plan, problem, buffers, workspace);
    }
    case Op::kCrossEntropy:
    case Op::kCrossEntropyGrad: return launch_cross_entropy(stream, plan, problem, buffers, workspace);
    case Op::kSoftmaxJvp:
    case Op::kLogSoftmaxJvp: return launch_jvp(stream, plan, problem, buffers, workspace);
    case Op::kLogSumExpGrad: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::softmax
