// Which kernel a call takes, with which geometry and how much workspace: see softmax/plan.h.
#pragma once

#include "common/row_plan.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

// `masked`: the call has a `where`.
RowPlan plan_reduce(const Problem& problem, bool masked, int compute_capability, const RowTuning& tuning = {});

// Whether only the least set of kernels is compiled for the type.
bool is_rare(DType dtype);

}  // namespace jaxgpuops::reduce
