// Which kernel a call takes, with which geometry and how much workspace: see softmax/plan.h.
#pragma once

#include "row_engine/plan.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

// `workspace_bytes`: see plan_row_engine.
RowPlan plan_reduce(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1, const RowTuning& tuning = {});

// Whether only the least set of kernels is compiled for the type.
bool is_rare(DType dtype);

}  // namespace jaxgpuops::reduce
