// Other kernels for plans of columns (plan_columns.cc), for operations on one array, without masks and labels. Results
// keep their bits.
#pragma once

#include <cstdint>

#include "row_engine/plan.h"

namespace jaxgpuops {

constexpr int kTiledWarps = 8;  // the most warps of a block of column_tiles_kernel

// Replaces a plan that gives a flat row to a block by RowAlgorithm::kSmall, in which a cluster of `blocks` shares it,
// if flat rows are few and long enough; else returns `plan`.
RowPlan shared_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu);

// Replaces a plan that walks along columns by RowAlgorithm::kRowsTiles, if few columns lie side by side; else returns
// `plan`. A block has `part_length` outer indices, and `axis_warps` threads share a column.
RowPlan tiled_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu);

}  // namespace jaxgpuops
