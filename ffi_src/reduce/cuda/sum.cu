#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {

cudaError_t launch_sum(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                       void* workspace) {
  return launch_reduction<Sum>(stream, plan, problem, buffers, workspace);
}

}  // namespace jaxgpuops::reduce
