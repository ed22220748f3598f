// The top-k kernels behind a C interface, for lab.py: the plan's choice may be overridden.
#include "topk/launch.h"

using namespace jaxgpuops;
using namespace jaxgpuops::topk;

// forced = {algorithm, threads, slices, lanes}; negative entries leave the plan's. Returns a cudaError_t. With a null x
// nothing runs and `forced` receives the plan.
extern "C" int lab_topk(void* stream, const void* x, void* values, int32_t* indices, void* workspace, int64_t outer,
                        int64_t length, int64_t inner, int64_t k, int kind, int bits, bool largest, bool sorted,
                        int compute_capability, int* forced) {
  Problem problem;
  problem.rows = {outer, length, inner};
  problem.k = k;
  problem.key_bits = bits;
  problem.order = key_order(static_cast<KeyKind>(kind), bits, largest);
  problem.sorted = sorted;
  Plan plan = plan_topk(problem.rows, k, bits, sorted, gpu_of(compute_capability));
  if (forced[0] >= 0) plan.algorithm = static_cast<Algorithm>(forced[0]);
  if (forced[1] >= 0) plan.threads = forced[1];
  if (forced[2] >= 0) plan.slices = forced[2];
  if (forced[3] >= 0) plan.lanes = forced[3];
  plan.overlap = gpu_of(compute_capability).dependent_launch;
  if (!x) {
    forced[0] = static_cast<int>(plan.algorithm);
    forced[1] = plan.threads;
    forced[2] = plan.slices;
    forced[3] = plan.lanes;
    return cudaSuccess;
  }
  return launch_topk(static_cast<cudaStream_t>(stream), plan, problem, x, values, indices, workspace);
}

extern "C" const char* lab_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
// "?" where there is none of that number: Python finds numbers by names.
extern "C" const char* lab_name(int algorithm) { return name(static_cast<Algorithm>(algorithm)); }
