// Launches the kernels that a plan names.
#include "reduce/cuda/launch.h"

#include "reduce/cuda/kernels.h"

namespace jaxgpuops::reduce {

cudaError_t launch_reduce(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const bool tiled_columns = plan.algorithm == RowAlgorithm::kRowsTiles && problem.rows.inner > 1;
  if (plan.algorithm == RowAlgorithm::kSmall || tiled_columns) return launch_small(stream, plan, problem, buffers);
  if (plan.algorithm == RowAlgorithm::kRows && plan.single)
    return problem.rows.length > 8 ? launch_loose(stream, plan, problem, buffers, workspace)
                                   : launch_packed(stream, problem, buffers);
  if (plan.algorithm == RowAlgorithm::kColumnsFlat && plan.single)
    return launch_loose_columns(stream, plan, problem, buffers, workspace);
  if (plan.wide) return launch_short(stream, plan, problem, buffers);
  return launch_rows(stream, plan, problem, buffers, workspace);
}

}  // namespace jaxgpuops::reduce
