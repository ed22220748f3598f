// Small sums, maxima and minima: the kernels of row_engine/cuda/small.cuh.
#include "row_engine/cuda/small.cuh"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {

template <class P>
row_engine::Parameters<P> parameters_of(const Problem& problem, const Buffers& buffers) {
  using Bits = typename P::Bits;
  row_engine::Parameters<P> p = {};
  p.operands[0] = buffers.x;
  p.operands[1] = buffers.y;
  p.args.out = buffers.out;
  p.args.wide = problem.wide_result;
  if (problem.op == Op::kMax || problem.op == Op::kMin) {
    const bool smaller = problem.op == Op::kMin;
    p.args.mask = static_cast<Bits>(order_mask(problem.dtype, smaller));
    if constexpr (std::is_floating_point_v<typename P::Acc>) {
      using Limits = std::numeric_limits<typename P::Acc>;
      const auto largest = problem.dtype == DType::kFloat8E4M3FN ? typename P::Acc(448) : Limits::infinity();
      p.args.none = P::Element::store(smaller ? largest : -largest);
    } else {
      p.args.none = p.args.mask;
    }
  }
  p.extras.where = buffers.where;
  p.extras.where_at = problem.where;
  return p;
}


cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_element(problem.dtype, [&](auto element) {
    using E = decltype(element);
    const auto run = [&](auto policy) {
      using P = decltype(policy);
      return row_engine::run_small<P>(stream, plan, problem.rows, parameters_of<P>(problem, buffers));
    };
    return problem.op == Op::kSum ? run(Sum<E, false>{}) : run(Extreme<E, false>{});
  });
}

}  // namespace jaxgpuops::reduce
