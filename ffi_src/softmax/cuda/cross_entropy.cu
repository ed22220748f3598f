#include "softmax/cuda/cross_entropy.cuh"

namespace jaxgpuops::softmax {

cudaError_t launch_cross_entropy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                 const Buffers& buffers, void* workspace) {
  if (is_plain_entropy(plan, problem)) return launch_plain_cross_entropy(stream, plan, problem, buffers);
  return with_float(problem.dtype, [&](auto element) {
    using P = CrossEntropy<decltype(element)>;
    using Acc = typename P::Acc;
    auto p = entropy_parameters_of<P>(problem, buffers);
    p.args.where_at = problem.row_where;
    p.args.cotangent_at = problem.cotangent;
    p.args.label_smoothing = static_cast<Acc>(problem.label_smoothing);
    p.args.z_loss = static_cast<Acc>(problem.z_loss);
    p.args.length = static_cast<Acc>(problem.rows.length);
    p.args.maximum = static_cast<Acc*>(buffers.maximum);
    p.args.log_sum = static_cast<Acc*>(buffers.log_sum);
    return row_engine::run<P>(stream, plan, problem.rows, p, workspace);
  });
}

}  // namespace jaxgpuops::softmax
