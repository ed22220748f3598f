// Small sums, maxima and minima: the kernels of row_engine/cuda/small.cuh.
#include "row_engine/cuda/small.cuh"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {

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
