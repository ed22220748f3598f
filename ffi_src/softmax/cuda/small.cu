// Small calls of softmax, log_softmax and logsumexp: the kernels of row_engine/cuda/small.cuh.
#include "row_engine/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

template <class P>
Parameters<P> softmax_parameters_of(const Problem& problem, const Buffers& buffers) {
  auto p = parameters_of<P>(problem, buffers);
  p.args.scale = scale_of<typename P::Acc>(problem, buffers);
  p.args.op = problem.op;
  p.args.lse = static_cast<typename P::Bits*>(buffers.lse);
  p.args.maximum = static_cast<typename P::Acc*>(buffers.maximum);
  p.args.log_sum = static_cast<typename P::Acc*>(buffers.log_sum);
  return p;
}


cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Softmax<decltype(element), false>;
    return row_engine::run_small<P>(stream, plan, problem.rows, softmax_parameters_of<P>(problem, buffers));
  });
}

}  // namespace jaxgpuops::softmax
