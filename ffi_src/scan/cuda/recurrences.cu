// Linear recurrences: the scan, its gradient, and the tangents of cumulative operations, which are recurrences, too.
// One file, because code is compressed a file at a time: kernels that are alike shrink together.
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/recurrences.h"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {

cudaError_t launch_linear(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Linear<decltype(e)>>(); };
  return is_complex(problem.dtype) ? with_complex(problem.dtype, run) : with_float(problem.dtype, run);
}

cudaError_t launch_linear_vjp(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                              void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<LinearVjp<decltype(e)>>(); };
  return is_complex(problem.dtype) ? with_complex(problem.dtype, run) : with_float(problem.dtype, run);
}

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
