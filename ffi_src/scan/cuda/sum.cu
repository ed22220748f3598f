#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_sum(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                       void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Cumulative<Sum<decltype(e)>, false>>(); };
  if (problem.dtype == DType::kComplex64) return run(Complex64{});
  return is_float(problem.dtype) ? with_float(problem.dtype, run) : with_wide_integer(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
