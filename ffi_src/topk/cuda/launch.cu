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

cudaError_t launch_kernels(cudaStream_t, const Plan&, const Problem&, const Buffers&);

// Whether the kernels write results of rows where those of columns stand. Of many results, it takes less time to
// transpose them.
bool writes_columns(const Plan& plan, const Problem& problem) {
  constexpr int64_t kMost = 1 << 17;
  if (problem.rows.count() * problem.k > kMost) return false;
  switch (plan.algorithm) {
    case Algorithm::kRows:
    case Algorithm::kHeld:
    case Algorithm::kStream:
    case Algorithm::kWave:
    case Algorithm::kSieve:
    case Algorithm::kDigits: return true;
    default: return false;
  }
}

// Columns become rows. If the kernels do not write results as columns, these are transposed back.
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
  if (error != cudaSuccess) return error;
  if (writes_columns(plan, problem))
    return launch_kernels(stream, of_rows, turned,
                          {bytes, buffers.values, buffers.indices, bytes + shape.bytes, inner});
  error = launch_kernels(stream, of_rows, turned, {bytes, bytes + shape.values, indices, bytes + shape.bytes});
  if (error == cudaSuccess)
    error = sort::launch_turn(stream, bytes + shape.values, buffers.values, outer, inner, problem.k, problem.key_bits);
  if (error == cudaSuccess) error = sort::launch_turn(stream, indices, buffers.indices, outer, inner, problem.k, 32);
  return error;
}

cudaError_t launch_kernels(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
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
      return launch_kernels(stream, other, problem, buffers);
    }
    case Algorithm::kDigits: return launch_digits(stream, plan, problem, buffers);
    case Algorithm::kRadix: return launch_radix(stream, plan, problem, buffers);
    case Algorithm::kShort:
    case Algorithm::kBlock:
    case Algorithm::kSweep: return launch_whole(stream, plan, problem, buffers);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_topk(cudaStream_t stream, const Plan& plan, const Problem& problem, const void* x, void* values,
                        int32_t* indices, void* workspace) {
  return launch_kernels(stream, plan, problem, {x, values, indices, workspace});
}

cudaError_t launch_argmax(cudaStream_t stream, const Plan& plan, const ArgProblem& problem, const void* x,
                          int32_t* indices, void* workspace) {
  if (plan.algorithm == Algorithm::kEmpty) return cudaSuccess;
  return launch_argmax_kernels(stream, plan, problem, {x, nullptr, indices, workspace});
}

}  // namespace jaxgpuops::topk
