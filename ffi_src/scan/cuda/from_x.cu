#include "scan/cuda/from_x.cuh"

#include "scan/cuda/cumulative.h"
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {
namespace {

template <class E>
cudaError_t launch_of(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  using Policy = Tangent<AnyWeights<E>>;
  switch (problem.op) {
    case Op::kProd: return launch_from_x<Policy, Cumulative<Product<E>, false>>(stream, plan, problem, buffers);
    case Op::kMax:
    case Op::kMin: return launch_from_x<Policy, Cumulative<Extreme<E>, false>>(stream, plan, problem, buffers);
    case Op::kLogSumExp: return launch_from_x<Policy, Cumulative<LogSumExp<E>, false>>(stream, plan, problem, buffers);
    case Op::kSum: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_gradient_from_x(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                   const Buffers& buffers) {
  switch (problem.dtype) {
    case DType::kFloat16: return launch_of<Float16>(stream, plan, problem, buffers);
    case DType::kBFloat16: return launch_of<BFloat16>(stream, plan, problem, buffers);
    case DType::kFloat32: return launch_of<Float32>(stream, plan, problem, buffers);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::scan
