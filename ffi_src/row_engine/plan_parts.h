// The parts of plan_row_engine(): plans of rows (plan_rows.cc) and of columns (plan_columns.cc).
#pragma once

#include <cstdint>

#include "row_engine/plan.h"

namespace jaxgpuops {

constexpr int kTeamWarps = 4;        // warps of a block if each warp has its own rows
constexpr int kPreferredWarps = 16;  // warps of a block that holds a row, or a part of one

void plan_rows(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning);
void plan_columns(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning);

// Bytes per outer index for the statistics and finals of split rows or columns.
int64_t split_bytes(const RowTraits& traits, int64_t inner, int64_t units);

// Whether kRowsStream can take rows of this many spans, provided there are enough rows.
bool is_streamable(const RowPlan& plan, const Gpu& gpu);

// The largest workspace that any number of such rows needs: a part of a batch may have another algorithm than the
// whole.
int64_t bytes_of_any_batch(const RowPlan& plan, const Gpu& gpu);

}  // namespace jaxgpuops
