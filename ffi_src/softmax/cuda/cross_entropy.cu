#include "softmax/cuda/cross_entropy.cuh"

namespace jaxgpuops::softmax {

cudaError_t launch_cross_entropy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                 const Buffers& buffers, void* workspace) {
  if (plan.single && plan.spread) return launch_loose_entropy(stream, plan, problem, buffers);
  if (is_plain_entropy(plan, problem)) return launch_plain_cross_entropy(stream, plan, problem, buffers);
  return with_float(problem.dtype, [&](auto element) {
    using P = CrossEntropy<decltype(element)>;
    auto p = parameters_of<P>(problem, buffers);
    p.args = entropy_args_of<P>(problem, buffers);
    return row_engine::run<P>(stream, plan, problem.rows, p, workspace);
  });
}

}  // namespace jaxgpuops::softmax
