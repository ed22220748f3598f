#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_tangent(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const DType dtype = problem.dtype;
  if (problem.op == Op::kSum) return cudaErrorInvalidValue;
  if (!is_complex(dtype))
    return with_float(dtype, [&](auto e) { return call.run<Tangent<AnyWeights<decltype(e)>>>(); });
  return with_complex(dtype, [&](auto e) { return call.run<Tangent<ProductWeights<decltype(e)>>>(); });
}

}  // namespace jaxgpuops::scan
