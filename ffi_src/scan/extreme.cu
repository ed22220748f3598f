#include "scan/dispatch.cuh"
#include "scan/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_extreme(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.cumulative<Extreme, decltype(e)>(); };
  if (problem.dtype == DType::kBool) return run(Boolean{});
  if (is_float8(problem.dtype)) return with_float8(problem.dtype, run);
  return is_float(problem.dtype) ? with_float(problem.dtype, run) : with_integer(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
