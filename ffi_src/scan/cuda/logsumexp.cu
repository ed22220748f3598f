#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_logsumexp(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                             void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto cut = [&](auto e) { return call.run<Cumulative<LogSumExp<decltype(e)>, true>>(); };
  const auto uncut = [&](auto e) { return call.run<Cumulative<LogSumExp<decltype(e)>, false>>(); };
  if (is_float8(problem.dtype)) return with_float8(problem.dtype, cut);
  return problem.segmented ? with_float(problem.dtype, cut) : with_float(problem.dtype, uncut);
}

}  // namespace jaxgpuops::scan
