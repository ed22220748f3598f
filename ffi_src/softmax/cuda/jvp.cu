#include "softmax/cuda/dispatch.cuh"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {
namespace {

template <class P>
cudaError_t launch_tangent(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  auto p = parameters_of<P>(problem, buffers);
  p.args.scale = scale_of<typename P::Acc>(problem, buffers);
  p.args.transpose = problem.transpose;
  return row_engine::run<P>(stream, plan, problem.rows, p, workspace);
}

}  // namespace

cudaError_t launch_jvp(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                       void* workspace) {
  return with_float(problem.dtype, [&](auto element) {
    using E = decltype(element);
    if (problem.op == Op::kSoftmaxJvp)
      return launch_tangent<SoftmaxTangent<E>>(stream, plan, problem, buffers, workspace);
    return problem.general ? launch_tangent<LogSoftmaxTangent<E, true>>(stream, plan, problem, buffers, workspace)
                           : launch_tangent<LogSoftmaxTangent<E, false>>(stream, plan, problem, buffers, workspace);
  });
}

}  // namespace jaxgpuops::softmax
