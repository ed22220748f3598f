#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

cudaError_t launch_general(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  return with_float(problem.dtype, [&](auto element) {
    return launch_softmax_policy<Softmax<decltype(element), true>>(stream, plan, problem, buffers, workspace);
  });
}

}  // namespace jaxgpuops::softmax
