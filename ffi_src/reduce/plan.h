// Chooses the kernel of a call, its geometry and the size of its workspace. softmax/plan.h says who calls such a plan.
#pragma once

#include "row_engine/plan.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

// `workspace_bytes` has the meaning that plan_row_engine() gives it.
RowPlan plan_reduce(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1, const RowTuning& tuning = {});

// Whether the dtype is used so rarely that only a minimal set of kernels is compiled for it.
bool is_rare(DType dtype);

}  // namespace jaxgpuops::reduce
