// Small calls of softmax, log_softmax and logsumexp: the kernels of row_engine/cuda/small.cuh.
#include "row_engine/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Softmax<decltype(element), false>;
    return row_engine::run_small<P>(stream, plan, problem.rows, softmax_parameters_of<P>(problem, buffers));
  });
}

}  // namespace jaxgpuops::softmax
