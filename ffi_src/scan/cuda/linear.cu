#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_linear(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                          void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Linear<decltype(e)>>(); };
  return is_complex(problem.dtype) ? with_complex(problem.dtype, run) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
