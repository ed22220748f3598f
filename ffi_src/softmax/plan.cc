#include "softmax/plan.h"

#include <algorithm>
#include <cmath>

namespace jaxgpuops::softmax {
namespace {

constexpr int64_t kSmallElements = 1 << 17;  // the most elements of an array for which small_walk() is asked

// Gradients of rows that no cluster holds: the most units of a row; and units of a block that writes results, at most,
// if that leaves so many blocks per multiprocessor.
constexpr int64_t kMostUnits = 512, kMostMerged = 8, kResultBlocks = 4;
constexpr int64_t kMostBlockBytes = 16 * kGradientVectors * 32 * kMaxBlockWarps,
                  kMostClusterBytes = kMaxFlatSpans * 16 * kOnlyVectors * 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t row_bytes(const Problem& problem) { return problem.rows.length * bytes_of(problem.dtype); }

// These values must agree with the policies in cuda/policy.cuh: the plan runs where no CUDA code is compiled.
RowTraits traits_of(const Problem& problem) {
  const bool wide = problem.dtype == DType::kFloat64;
  const int acc_bytes = wide ? 8 : 4;
  RowTraits traits;
  traits.item_bytes = bytes_of(problem.dtype);
  traits.fast = traits.large = !wide;
  const int shift_numbers = traits.item_bytes == 2 ? 3 : 1;  // number of fields of the largest ExponentialSum::Shift
  switch (problem.op) {
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kLogSumExp:
      traits.masked = problem.general;
      traits.fast = traits.fast && !traits.masked;
      traits.output = problem.op != Op::kLogSumExp;
      traits.tiled = traits.output && !problem.general;
      traits.stat_bytes = 2 * acc_bytes;
      traits.final_bytes = (shift_numbers + 1) * acc_bytes;
      break;
    case Op::kCrossEntropy:
    case Op::kCrossEntropyGrad:
      traits.label = true;
      traits.output = problem.op == Op::kCrossEntropyGrad;
      traits.stat_bytes = 3 * acc_bytes;
      traits.final_bytes = (shift_numbers + 6) * acc_bytes;
      break;
    case Op::kSoftmaxJvp:
    case Op::kLogSoftmaxJvp:
      traits.masked = problem.general;
      traits.fast = traits.fast && !traits.masked;
      traits.large = false;
      traits.operands = 2;
      traits.tiled = !problem.general && !problem.of_logits;
      traits.stat_bytes = (traits.item_bytes > 2 ? 3 : 1) * acc_bytes;
      traits.final_bytes = 4 * acc_bytes;
      break;
  }
  traits.lean = traits.fast && !traits.output;
  return traits;
}

// A lane has one vector of x and one of the cotangent. Spans are those of other kernels of rows of two operands.
RowPlan plan_gradient(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  if (problem.rows.elements() == 0) return plan;
  plan.algorithm = RowAlgorithm::kRows;
  plan.spread = true;
  const int64_t vectors = ceil_div(row_bytes(problem), 16);
  plan.vectors = vectors <= 2 ? 2 : kOnlyVectors;
  while (plan.lane_bits < 5 && int64_t{plan.vectors} << plan.lane_bits < vectors) ++plan.lane_bits;
  const int64_t lanes = int64_t{plan.vectors} << plan.lane_bits;
  plan.spans = ceil_div(vectors, lanes);
  if (plan.spans > 1) {
    plan.block_warps = static_cast<int>(ceil_div(vectors, 32 * kGradientVectors));
    return plan;
  }
  const int64_t warps = ceil_div(problem.rows.outer * lanes, 32 * kGradientVectors);
  const int64_t least = std::max<int64_t>(1, lanes / (32 * kGradientVectors));
  plan.block_warps = kGradientWarps;
  while (plan.block_warps > least && ceil_div(warps, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
  return plan;
}

// The division into units depends on the length and the dtype alone, since sums do.
RowPlan plan_split_gradient(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  plan.traits.stat_bytes = 5 * 4;
  if (problem.rows.outer == 0) return plan;
  plan.algorithm = RowAlgorithm::kRowsSplit;
  plan.block_warps = kPartWarps;
  const int64_t turn = 32 * kPartWarps * kGradientEach;
  plan.part_length = ceil_div(ceil_div(problem.rows.length, turn), kMostUnits) * turn;
  plan.units = plan.blocks = ceil_div(problem.rows.length, plan.part_length);
  const int64_t merged = ceil_div(problem.rows.outer * plan.units, kResultBlocks * gpu.multiprocessors);
  plan.result_length = std::clamp<int64_t>(merged, 1, kMostMerged) * plan.part_length;
  plan.workspace_bytes = plan.units * plan.traits.stat_bytes;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

}  // namespace

bool is_general(Op op, double factor, bool scaled, bool biased, bool masked, bool transpose) {
  if (masked || op == Op::kSoftmaxJvp) return masked;
  if (op == Op::kLogSoftmaxJvp) return !transpose;
  return scaled || biased || !(factor > 0 && std::isfinite(factor));
}

bool takes_logits(const Problem& problem) {
  const bool derivative = problem.op == Op::kSoftmaxJvp || (problem.op == Op::kLogSoftmaxJvp && problem.transpose);
  if (!derivative || problem.general || problem.factor != 1 || problem.rows.inner != 1) return false;
  const int64_t bytes = row_bytes(problem);
  return problem.dtype != DType::kFloat64 && (bytes <= kMostBlockBytes || bytes > kMostClusterBytes);
}

RowPlan plan_softmax(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, const RowTuning& tuning) {
  if (problem.of_logits)
    return row_bytes(problem) > kMostClusterBytes ? plan_split_gradient(problem, gpu) : plan_gradient(problem, gpu);
  const RowPlan plan = plan_row_engine(problem.rows, traits_of(problem), gpu, workspace_bytes, tuning);
  const bool plain = problem.op == Op::kSoftmax || problem.op == Op::kLogSoftmax || problem.op == Op::kLogSumExp;
  return plain && !problem.general ? small_walk(plan, problem.rows, kSmallElements) : plan;
}

}  // namespace jaxgpuops::softmax
