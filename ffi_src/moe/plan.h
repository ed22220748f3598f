// The geometry of the kernels of moe_plan: a pure function of sizes, known where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gpu.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kMostExperts = 4096;  // beyond, the counters of a block do not fit its shared memory

struct Plan {
  int warps = 1;                // of a block; each has counters of its own
  int64_t chunk = 32;           // assignments of a warp
  int64_t blocks = 1;           // that share a plan; 1: one launch does everything
  int64_t shared_bytes = 0;     // counters, and the offsets of groups
  int64_t workspace_bytes = 0;  // per plan: counters of all warps, and the totals of experts
};

// `workspace_bytes` < 0 asks for the best plan; otherwise it is what the caller has, and the plan makes do with it.
Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::moe
