// The gate's kernel behind a C interface, for gate_lab.py.
#include "topk_softmax/cuda/launch.h"

using namespace jaxgpuops;
using namespace jaxgpuops::topk_softmax;

// call = {dtype, outer, length, inner, k, score, normalize, groups, topk_groups}; a bias, if there is one, is one
// number an expert; log_sums may be null. Returns a cudaError_t.
extern "C" int lab_gate(void* stream, const int64_t* call, const void* logits, const float* bias, void* weights,
                        int32_t* indices, float* log_sums) {
  Problem problem;
  problem.dtype = static_cast<DType>(call[0]);
  problem.rows = {call[1], call[2], call[3]};
  problem.k = call[4];
  problem.score = static_cast<Score>(call[5]);
  problem.normalize = call[6];
  problem.groups = call[7];
  problem.topk_groups = call[8];
  problem.bias.axis_stride = 1;
  return launch_topk_softmax(static_cast<cudaStream_t>(stream),
                             plan_topk_softmax(problem.rows, problem.k, problem.groups, bias != nullptr,
                                               problem.sums_rows(bias != nullptr, log_sums != nullptr)),
                             problem, {logits, bias, weights, indices, log_sums});
}
