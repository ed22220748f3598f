#include "softmax/plan.h"

#include <cmath>

namespace jaxgpuops::softmax {
namespace {

constexpr int64_t kSmallElements = 1 << 17;  // the most elements of an array for which small_form() is asked

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

}  // namespace

bool is_general(Op op, double factor, bool scaled, bool biased, bool masked, bool transpose) {
  if (masked || op == Op::kSoftmaxJvp) return masked;
  if (op == Op::kLogSoftmaxJvp) return !transpose;
  return scaled || biased || !(factor > 0 && std::isfinite(factor));
}

bool takes_logits(const Problem& problem) {
  const bool derivative = problem.op == Op::kSoftmaxJvp || (problem.op == Op::kLogSoftmaxJvp && problem.transpose);
  const int64_t bytes = problem.rows.length * bytes_of(problem.dtype);
  return derivative && !problem.general && problem.factor == 1 &&
         (problem.dtype == DType::kFloat32 || problem.dtype == DType::kBFloat16) && problem.rows.inner == 1 &&
         bytes > 2 * 16 && bytes <= 16 * kOnlyVectors * 32;
}

RowPlan plan_softmax(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, const RowTuning& tuning) {
  const RowPlan plan = plan_row_engine(problem.rows, traits_of(problem), gpu, workspace_bytes, tuning);
  const bool plain = problem.op == Op::kSoftmax || problem.op == Op::kLogSoftmax || problem.op == Op::kLogSumExp;
  return plain && !problem.general ? small_form(plan, problem.rows, kSmallElements) : plan;
}

}  // namespace jaxgpuops::softmax
