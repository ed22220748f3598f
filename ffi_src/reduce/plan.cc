#include "reduce/plan.h"
#include "row_engine/small.h"

namespace jaxgpuops::reduce {

bool is_rare(DType dtype) { return dtype != DType::kFloat16 && dtype != DType::kBFloat16 && dtype != DType::kFloat32; }

RowPlan plan_reduce(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, const RowTuning& tuning) {
  RowTraits traits;
  traits.item_bytes = bytes_of(problem.dtype);
  traits.operands = problem.op == Op::kDot ? 2 : 1;
  traits.masked = problem.masked;
  traits.fast = !is_rare(problem.dtype) && !problem.masked;
  traits.large = traits.fast && traits.operands == 1;
  traits.output = false;
  traits.swept = is_rare(problem.dtype) && !problem.masked;
  traits.stat_bytes = traits.final_bytes = traits.item_bytes == 8 ? 8 : 4;
  const bool exact = traits.operands == 1 && !problem.masked && (!is_float(problem.dtype) || problem.op != Op::kSum);
  return or_small(plan_row_engine(problem.rows, traits, gpu, workspace_bytes, tuning), problem.rows, exact);
}

}  // namespace jaxgpuops::reduce
