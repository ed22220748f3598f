#include "row_engine/plan.h"

#include <algorithm>

#include "common/rounding.h"
#include "row_engine/plan_parts.h"

namespace jaxgpuops {

int64_t split_bytes(const RowTraits& traits, int64_t inner, int64_t units) {
  const auto padded = [](int64_t bytes) { return ceil_div(bytes, 16) * 16; };
  return padded(inner * units * traits.stat_bytes) + padded(inner * int64_t{traits.final_bytes});
}

const char* name(RowAlgorithm algorithm) {
  switch (algorithm) {
    case RowAlgorithm::kEmpty: return "empty";
    case RowAlgorithm::kRows: return "rows";
    case RowAlgorithm::kRowsTiles: return "rows_tiles";
    case RowAlgorithm::kRowsStream: return "rows_stream";
    case RowAlgorithm::kRowsSplit: return "rows_split";
    case RowAlgorithm::kRowsTogether: return "rows_together";
    case RowAlgorithm::kColumns: return "columns";
    case RowAlgorithm::kColumnsStream: return "columns_stream";
    case RowAlgorithm::kColumnsSplit: return "columns_split";
    case RowAlgorithm::kColumnsWalk: return "columns_walk";
    case RowAlgorithm::kColumnsFlat: return "columns_flat";
    case RowAlgorithm::kSmall: return "small";
  }
  return "?";
}

RowPlan held_in_registers(RowPlan plan) {
  plan.workspace_bytes = 0;
  if (plan.algorithm == RowAlgorithm::kColumnsStream) {
    plan.algorithm = RowAlgorithm::kColumns;
    return plan;
  }
  plan.algorithm = RowAlgorithm::kRows;
  plan.blocks = 1;
  while (plan.blocks < kMaxCluster && ceil_div(plan.spans, plan.blocks) > kPreferredWarps) plan.blocks *= 2;
  plan.block_warps = static_cast<int>(ceil_div(plan.spans, plan.blocks));
  return plan;
}

RowPlan plan_row_engine(const Rows& rows, const RowTraits& traits, const Gpu& gpu, int64_t workspace_bytes,
                        const RowTuning& tuning) {
  RowPlan plan;
  plan.traits = traits;
  if (rows.count() == 0 || (rows.length == 0 && traits.output)) return plan;
  plan.overlap = gpu.dependent_launch;
  (rows.inner == 1 ? plan_rows : plan_columns)(plan, rows, gpu, tuning);
  if (workspace_bytes < 0) {
    if (rows.inner == 1) plan.workspace_bytes = std::max(plan.workspace_bytes, bytes_of_any_batch(plan, gpu));
  } else if (plan.workspace_bytes > workspace_bytes) {
    const bool too_long =
        plan.algorithm == RowAlgorithm::kColumnsSplit || plan.algorithm == RowAlgorithm::kColumnsFlat ||
        ((plan.algorithm == RowAlgorithm::kRowsSplit || plan.algorithm == RowAlgorithm::kRowsTogether) &&
         !is_streamable(plan, gpu));
    if (!too_long) return held_in_registers(plan);
  }
  return plan;
}

}  // namespace jaxgpuops
