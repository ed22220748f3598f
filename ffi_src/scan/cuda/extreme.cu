#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_extreme(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Cumulative<Extreme<decltype(e)>, false>>(); };
  return is_float(problem.dtype) ? with_float(problem.dtype, run) : with_wide_integer(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
