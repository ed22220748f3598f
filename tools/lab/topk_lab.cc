// The top-k kernels behind a C interface, for topk_lab.py: the plan's choice of algorithm may be overridden.
#include "topk/cuda/launch.h"

using namespace jaxgpuops;
using namespace jaxgpuops::topk;

// chosen[0] is the algorithm to take, or negative; with a null x nothing runs and `chosen` receives {algorithm,
// threads, slices, lanes, bytes of workspace}. Returns a cudaError_t.
extern "C" int lab_topk(void* stream, const void* x, void* values, int32_t* indices, void* workspace, int64_t outer,
                        int64_t length, int64_t inner, int64_t k, int kind, int bits, bool largest, bool sorted,
                        int compute_capability, int64_t* chosen) {
  Problem problem;
  problem.rows = {outer, length, inner};
  problem.k = k;
  problem.key_bits = bits;
  problem.order = key_order(static_cast<KeyKind>(kind), bits, largest);
  problem.sorted = sorted;
  const Plan plan =
      plan_topk(problem.rows, k, bits, sorted, gpu_of(compute_capability), -1, static_cast<int>(chosen[0]));
  if (!x) {
    chosen[0] = static_cast<int64_t>(plan.algorithm);
    chosen[1] = plan.threads;
    chosen[2] = plan.slices;
    chosen[3] = plan.lanes;
    chosen[4] = plan.workspace_bytes * outer;
    return cudaSuccess;
  }
  return launch_topk(static_cast<cudaStream_t>(stream), plan, problem, x, values, indices, workspace);
}

extern "C" const char* lab_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
// "?" where there is none of that number: Python finds numbers by names.
extern "C" const char* lab_name(int algorithm) { return name(static_cast<Algorithm>(algorithm)); }
