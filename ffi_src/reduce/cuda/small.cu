// Small sums of floats: the kernel of row_engine/cuda/small.cuh.
#include "row_engine/cuda/small.cuh"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto run = [&](auto element) {
    using P = Sum<decltype(element), false>;
    const auto p = parameters_of<P>(problem, buffers);
    return row_engine::run_small<P>(stream, plan, problem.rows, p.operands[0], p.out, p.args);
  };
  return is_float8(problem.dtype) ? with_float8(problem.dtype, run) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::reduce
