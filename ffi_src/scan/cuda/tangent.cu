#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_tangent(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const DType dtype = problem.dtype;
  if (problem.op == Op::kSum) return cudaErrorInvalidValue;
  // Rows of extremes have a kernel of their own, which takes an eighth less time. (One of logsumexps took no less.)
  if (dtype == DType::kFloat32 && plan.algorithm == Algorithm::kRows &&
      (problem.op == Op::kMax || problem.op == Op::kMin))
    return launch_rows<Tangent<ExtremeWeights<Float32>>>(stream, plan,
                                                         parameters_of(plan, problem, buffers, workspace));
  if (!is_complex(dtype))
    return with_float(dtype, [&](auto e) { return call.run<Tangent<AnyWeights<decltype(e)>>>(); });
  return with_complex(dtype, [&](auto e) { return call.run<Tangent<ProductWeights<decltype(e)>>>(); });
}

}  // namespace jaxgpuops::scan
