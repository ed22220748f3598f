// Small calls of softmax, log_softmax and logsumexp, and those of few columns side by side: the kernels of
// row_engine/cuda/small.cuh and columns_tiles.cuh.
#include "row_engine/cuda/columns_tiles.cuh"
#include "row_engine/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {
namespace {

// What the arguments of a known operation without a scale are made of. It is short, so that a kernel waits for few
// lines of parameters, and the kernel has the code of one operation.
template <class P, Op kOp>
struct Given {
  typename P::Acc factor;
  typename P::Bits* lse;
  typename P::Acc *maximum, *log_sum;

  __device__ operator typename P::Args() const {
    typename P::Args args = {};
    args.op = kOp;
    args.scale.factor = factor;
    args.lse = lse;
    args.maximum = maximum;
    args.log_sum = log_sum;
    return args;
  }
};

}  // namespace

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Softmax<decltype(element), false>;
    const auto p = softmax_parameters_of<P>(problem, buffers);
    const auto run = [&](auto op) {
      const Given<P, decltype(op)::value> given = {p.args.scale.factor, p.args.lse, p.args.maximum, p.args.log_sum};
      if (plan.algorithm == RowAlgorithm::kRowsTiles)
        return row_engine::run_column_tiles<P>(stream, plan, problem.rows, p.operands[0], p.out, given);
      return row_engine::run_small<P>(stream, plan, problem.rows, p.operands[0], p.out, given);
    };
    switch (problem.op) {
      case Op::kSoftmax: return run(std::integral_constant<Op, Op::kSoftmax>());
      case Op::kLogSoftmax: return run(std::integral_constant<Op, Op::kLogSoftmax>());
      default: return run(std::integral_constant<Op, Op::kLogSumExp>());
    }
  });
}

}  // namespace jaxgpuops::softmax
