// The geometry of the kernels of moe_plan: a pure function of sizes, so that Python can ask for it where there is no
// GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gpu.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kMostExperts = 4096;  // with more, the counters of a block do not fit into its shared memory

struct Plan {
  int warps = 1;                // warps of a block, each of which has counters of its own
  int64_t chunk = 32;           // assignments that a warp takes
  int64_t blocks = 1;           // blocks that share a plan; if it is 1, one launch does everything
  int64_t shared_bytes = 0;     // shared memory for counters and for the offsets of groups
  int64_t workspace_bytes = 0;  // for each plan: counters of all warps, and the totals of experts
};

// `workspace_bytes` is what the caller has, and the plan makes do with it. A negative number asks for the best plan.
Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::moe
