#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_product(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Cumulative<Product<decltype(e)>, false>>(); };
  return problem.dtype == DType::kComplex64 ? run(Complex64{}) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::scan
