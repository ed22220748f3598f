// DEV
#pragma once
#include "row_engine/plan.h"
namespace jaxgpuops {
constexpr int kSmallWarps = 16;      // of a block of small_kernel, at most,
constexpr int kSmallStep = 4;        // .. positions it adds without a question in between,
constexpr int kSmallBeside = 8;      // .. and columns of a warp, at most
RowPlan or_small(RowPlan plan, const Rows& rows, bool exact);
inline bool is_small(const RowPlan& plan) { return plan.algorithm == RowAlgorithm::kColumnsWalk && plan.deep == 0; }
}
