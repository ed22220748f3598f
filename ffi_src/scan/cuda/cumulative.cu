// Cumulative operations. One file, because code is compressed a file at a time: kernels that are alike shrink together.
#include "scan/cuda/cumulative.h"
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

cudaError_t launch_product(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Cumulative<Product<decltype(e)>, false>>(); };
  return problem.dtype == DType::kComplex64 ? run(Complex64{}) : with_float(problem.dtype, run);
}

cudaError_t launch_extreme(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto run = [&](auto e) { return call.run<Cumulative<Extreme<decltype(e)>, false>>(); };
  return is_float(problem.dtype) ? with_float(problem.dtype, run) : with_wide_integer(problem.dtype, run);
}

cudaError_t launch_logsumexp(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                             void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const auto cut = [&](auto e) { return call.run<Cumulative<LogSumExp<decltype(e)>, true>>(); };
  const auto uncut = [&](auto e) { return call.run<Cumulative<LogSumExp<decltype(e)>, false>>(); };
  if (is_float8(problem.dtype)) return with_float8(problem.dtype, cut);
  return problem.segmented ? with_float(problem.dtype, cut) : with_float(problem.dtype, uncut);
}

}  // namespace jaxgpuops::scan
