// Which kernel a call takes, with which geometry and how much workspace: a pure function of the problem and the compute
// capability, so that Python can size the workspace and explain a call where there is no GPU. The handler calls it,
// too.
#pragma once

#include "row_engine/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// `workspace_bytes`: see plan_row_engine.
RowPlan plan_softmax(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1,
                     const RowTuning& tuning = {});

// What Problem::general says: whether logits are not just a positive multiple of x, or entries are masked; of
// derivatives, whether entries are masked.
bool is_general(Op op, double factor, bool scaled, bool biased, bool masked);

}  // namespace jaxgpuops::softmax
