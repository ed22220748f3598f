#include "scan/cuda/from_x.cuh"

#include "scan/cuda/cumulative.h"
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/short_from_x.cuh"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {
namespace {

template <class Forward, class W>
cudaError_t launch_of(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.algorithm != Algorithm::kShort && plan.algorithm != Algorithm::kPacks)
    return launch_tile_from_x<Tangent<W>, Forward>(stream, plan, problem, buffers);
  constexpr bool kSlow = kByParts<Forward> && sizeof(typename W::Element::Bits) > 4;
  if constexpr (!kSlow) return launch_short_from_x<Forward, W>(stream, problem, buffers);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_gradient_from_x(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                   const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto e) {
    using E = decltype(e);
    switch (problem.op) {
      case Op::kProd:
        return launch_of<Cumulative<Product<E>, false>, ProductWeights<E>>(stream, plan, problem, buffers);
      case Op::kMax:
      case Op::kMin: return launch_of<Cumulative<Extreme<E>, false>, ExtremeWeights<E>>(stream, plan, problem, buffers);
      case Op::kLogSumExp:
        return launch_of<Cumulative<LogSumExp<E>, false>, LogSumExpWeights<E>>(stream, plan, problem, buffers);
      case Op::kSum: break;
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxgpuops::scan
