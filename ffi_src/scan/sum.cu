#include "scan/dispatch.cuh"
#include "scan/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_sum(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                       void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  return with_any(problem.dtype, [&](auto e) { return call.cumulative<Sum, decltype(e)>(); });
}

}  // namespace jaxgpuops::scan
