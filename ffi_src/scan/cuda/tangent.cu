#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_tangent(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const DType dtype = problem.dtype;
  const auto product = [&](auto e) { return call.run<Tangent<ProductWeights<decltype(e)>>>(); };
  switch (problem.op) {
    case Op::kProd: return is_complex(dtype) ? with_complex(dtype, product) : with_float(dtype, product);
    case Op::kMax:
    case Op::kMin: return with_float(dtype, [&](auto e) { return call.run<Tangent<ExtremeWeights<decltype(e)>>>(); });
    case Op::kLogSumExp:
      return with_float(dtype, [&](auto e) { return call.run<Tangent<LogSumExpWeights<decltype(e)>>>(); });
    case Op::kSum: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::scan
