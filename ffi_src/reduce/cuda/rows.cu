// Sums, extremes and dot products by the row engine. They share a source file because their kernels are alike: the code
// of a file is compressed as a whole, which makes it a fifth smaller than that of three files.
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {

cudaError_t launch_rows(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                        void* workspace) {
  switch (problem.op) {
    case Op::kSum: return launch_reduction<Sum>(stream, plan, problem, buffers, workspace);
    case Op::kDot: return launch_reduction<Dot>(stream, plan, problem, buffers, workspace);
    case Op::kMax:
    case Op::kMin: return launch_reduction<Extreme>(stream, plan, problem, buffers, workspace);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::reduce
