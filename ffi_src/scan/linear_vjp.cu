#include "scan/dispatch.cuh"
#include "scan/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_linear_vjp(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                              void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<LinearVjp<decltype(e)>>(); };
  if (is_complex(problem.dtype)) return with_complex(problem.dtype, run);
  return is_float8(problem.dtype) ? with_float8(problem.dtype, run) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
