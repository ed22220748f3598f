// The geometry of the kernels of moe_plan: a pure function of sizes, so that Python can ask for it where there is no
// GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gpu.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kMostExperts = 4096;  // with more, the counters of a block do not fit into its shared memory

constexpr int64_t kMostHeld = 512;  // assignments of a warp that its registers hold

enum class Algorithm {
  kBlock,    // one block makes the plan
  kCluster,  // a cluster of blocks: what one tells the others goes through shared memory
  kGrid,     // blocks that run at the same time: what one tells the others goes through the workspace
};
constexpr const char* kAlgorithmNames[] = {"block", "cluster", "grid"};

struct Plan {
  Algorithm algorithm = Algorithm::kBlock;
  int warps = 1;                // of a block; each has counters of its own
  int64_t blocks = 1;           // that share a plan; of a grid fewer, where the device has no room for all at once
  bool staged = false;          // whether assignments are put into order in shared memory before they are written
  int64_t shared_bytes = 0;     // of a block
  int64_t workspace_bytes = 0;  // per plan: the totals of the blocks of a grid
};

// Assignments of each of so many warps: a multiple of 32.
inline int64_t chunk_of(const PlanProblem& problem, int64_t warps) {
  return std::max<int64_t>((problem.assignments + 32 * warps - 1) / (32 * warps) * 32, 32);
}

// Rows of a number for each expert that the blocks of a cluster tell each other.
inline int64_t told_rows(const Plan& plan) { return plan.algorithm == Algorithm::kCluster ? plan.blocks : 0; }

// `workspace_bytes` < 0 asks for the best plan; otherwise it is what the caller has, and the plan makes do with it.
Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::moe
