// From a plan to its kernel.
#include "topk/cuda/launch.h"

#include "sort/cuda/kernels.h"
#include "sort/cuda/launch.h"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

// Sorts whole rows. A sort puts smaller keys first, so the order of top-k is inverted. The problem of the sort has no
// rule for NaNs and zeros, so floats are in their total order.
cudaError_t launch_whole(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  sort::Problem all;
  all.rows = problem.rows;
  all.k = problem.k;
  all.key_bits = problem.key_bits;
  all.order = {{problem.order}, ~uint64_t{0}};
  return sort::launch_sort(stream, plan.whole, all, buffers.x, buffers.values, buffers.indices, buffers.workspace);
}

// Whether columns are transposed to rows here. The kernels of sorts do that themselves, and kBuckets reads columns.
bool turns(const Plan& plan) {
  return plan.whole.turns && plan.algorithm != Algorithm::kBlock && plan.algorithm != Algorithm::kSweep &&
         plan.algorithm != Algorithm::kBuckets;
}

// So many results are transposed back by one launch, in which lanes read from different lines.
constexpr int64_t kMostTogether = 1 << 19;

// Columns become rows, and so do the results, which are transposed back.
cudaError_t launch_turned(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto [outer, length, inner] = problem.rows;
  const sort::TurnShape shape(problem.rows, problem.k, problem.key_bits / 8, true, true);
  auto* const bytes = static_cast<unsigned char*>(buffers.workspace);
  Problem turned = problem;
  turned.rows = {outer * inner, length, 1};
  Plan of_rows = plan;
  of_rows.whole.turns = false;
  auto* const indices = reinterpret_cast<int32_t*>(bytes + shape.indices);
  cudaError_t error = sort::launch_turn(stream, buffers.x, bytes, outer, length, inner, problem.key_bits);
  if (error == cudaSuccess)
    error = launch_topk(stream, of_rows, turned, bytes, bytes + shape.values, indices, bytes + shape.bytes);
  if (error == cudaSuccess && outer * inner * problem.k <= kMostTogether)
    return launch_turn_back(stream, problem, bytes + shape.values, indices, buffers);
  if (error == cudaSuccess)
    error = sort::launch_turn(stream, bytes + shape.values, buffers.values, outer, inner, problem.k, problem.key_bits);
  if (error == cudaSuccess) error = sort::launch_turn(stream, indices, buffers.indices, outer, inner, problem.k, 32);
  return error;
}

}  // namespace

cudaError_t launch_topk(cudaStream_t stream, const Plan& plan, const Problem& problem, const void* x, void* values,
                        int32_t* indices, void* workspace) {
  const Buffers buffers{x, values, indices, workspace};
  if (turns(plan)) return launch_turned(stream, plan, problem, buffers);
  switch (plan.algorithm) {
    case Algorithm::kEmpty: return cudaSuccess;
    case Algorithm::kArgmax:  // without a rule for NaN: top-1 follows the total order
      return launch_argmax_kernels(stream, plan, {problem.rows, problem.key_bits, {problem.order}}, buffers);
    case Algorithm::kRows: return launch_rows(stream, plan, problem, buffers);
    case Algorithm::kFew: return launch_few(stream, plan, problem, buffers);
    case Algorithm::kSort: return launch_sort(stream, plan, problem, buffers);
    case Algorithm::kCompare: return launch_compare(stream, plan, problem, buffers);
    case Algorithm::kHeld: return launch_held(stream, plan, problem, buffers);
    case Algorithm::kColumns: return launch_columns(stream, plan, problem, buffers);
    case Algorithm::kStream: return launch_stream(stream, plan, problem, buffers);
    case Algorithm::kSieve: {
      const cudaError_t status = launch_sieve(stream, plan, problem, buffers);
      return status != cudaSuccess || problem.sorted ? status : launch_reorder(stream, plan, problem, buffers);
    }
    case Algorithm::kWave: return launch_wave(stream, plan, problem, buffers);
    case Algorithm::kBuckets: {
      // A part of a GPU may be too small to run a block for each of the columns side by side at the same time.
      const cudaError_t status = launch_buckets(stream, plan, problem, buffers);
      if (status != cudaErrorCooperativeLaunchTooLarge || problem.rows.inner == 1) return status;
      Plan other = plan;
      other.algorithm = Algorithm::kRadix;
      return launch_topk(stream, other, problem, x, values, indices, workspace);
    }
    case Algorithm::kDigits: return launch_digits(stream, plan, problem, buffers);
    case Algorithm::kRadix: return launch_radix(stream, plan, problem, buffers);
    case Algorithm::kShort:
    case Algorithm::kBlock:
    case Algorithm::kSweep: return launch_whole(stream, plan, problem, buffers);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_argmax(cudaStream_t stream, const Plan& plan, const ArgProblem& problem, const void* x,
                          int32_t* indices, void* workspace) {
  if (plan.algorithm == Algorithm::kEmpty) return cudaSuccess;
  return launch_argmax_kernels(stream, plan, problem, {x, nullptr, indices, workspace});
}

}  // namespace jaxgpuops::topk
