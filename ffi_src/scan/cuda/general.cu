#include "scan/cuda/cumulative.h"
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"

namespace jaxgpuops::scan {

cudaError_t launch_general(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Dispatch call{stream, plan, problem, buffers, workspace};
  const DType dtype = problem.dtype;
  if (is_any_operator(problem) &&
      (plan.layout == Layout::kAlong || plan.algorithm == Algorithm::kPacks || plan.algorithm == Algorithm::kShort)) {
    const Parameters p = parameters_of(plan, problem, buffers, workspace);
    return with_integer(dtype, [&](auto e) {
      using Policy = AnyOperator<decltype(e)>;
      switch (plan.algorithm) {
        case Algorithm::kShort: return launch_short<Policy>(stream, plan, p);
        case Algorithm::kPacks: return launch_packs<Policy>(stream, plan, p);
        case Algorithm::kRows: return launch_rows<Policy>(stream, plan, p);
        case Algorithm::kWalk: return launch_walk<Policy>(stream, p);
        case Algorithm::kResident:
          return plan.cluster > 1 ? launch_cluster<Policy, Chunks<Policy>>(stream, plan, p, 1)
                                  : launch_resident<Policy>(stream, plan, p);
        case Algorithm::kRowLookAhead: return launch_row_look_ahead<Policy>(stream, plan, p);
        default: return cudaErrorInvalidValue;
      }
    });
  }
  const auto run = [&](auto e) { return call.run<General<decltype(e)>>(); };
  if (dtype == DType::kBool) return run(Boolean{});
  if (is_complex(dtype)) return with_complex(dtype, run);
  if (is_float8(dtype)) return with_float8(dtype, run);
  return is_float(dtype) ? with_float(dtype, run) : with_integer(dtype, run);
}

}  // namespace jaxgpuops::scan
