// Softmax, log_softmax and logsumexp of rows that are not whole vectors.
#include "softmax/cuda/loose_rows.cuh"

#include "softmax/cuda/single.h"

namespace jaxgpuops::softmax {

cudaError_t launch_loose(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) -> cudaError_t {
    using P = Softmax<decltype(element), false>;
    if constexpr (sizeof(typename P::Bits) > 4) {
      return cudaErrorInvalidValue;
    } else {
      return with_op(problem.op, [&](auto op) {
        return launch_loose_rows<P>(stream, plan, problem, buffers, given_op<P, decltype(op)::value>(problem, buffers));
      });
    }
  });
}

}  // namespace jaxgpuops::softmax
