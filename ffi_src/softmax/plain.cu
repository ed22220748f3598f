#include "softmax/dispatch.cuh"

namespace jaxgpuops::softmax {

cudaError_t launch_plain(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                         void* workspace) {
  return with_element(problem.dtype, [&](auto element) {
    using E = decltype(element);
    if constexpr (sizeof(typename E::Bits) == 8) {
      return cudaErrorInvalidValue;  // as general
    } else {
      return launch_softmax_policy<Softmax<E, false>>(stream, plan, problem, buffers, workspace);
    }
  });
}

}  // namespace jaxgpuops::softmax
