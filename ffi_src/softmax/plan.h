// Which kernel a call takes, with which geometry and how much workspace: a pure function of the problem and the compute
// capability, so that Python can size the workspace and explain a call where there is no GPU. The handler calls it,
// too.
#pragma once

#include "common/row_plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// `general`: the call has more than logits and a positive factor (see is_general), which other kernels are compiled
// for. Where no buffers are known, the larger workspace of the two suffices.
RowPlan plan_softmax(const Problem& problem, bool general, int compute_capability, const RowTuning& tuning = {});

// Whether logits are not just a positive multiple of x; of log_softmax_jvp, whether entries are masked.
bool is_general(const Problem& problem, const Buffers& buffers);

}  // namespace jaxgpuops::softmax
