// The geometry of the kernels of moe_plan: a pure function of sizes, so that Python can ask for it where there is no
// GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/gpu.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kMostExperts = 4096;  // with more, the counters of a block do not fit into its shared memory

constexpr int64_t kMostHeld = 512;  // the most assignments that the registers of a warp hold

constexpr int64_t kClusterHeld = 128;  // the same for a warp of a cluster

constexpr int64_t kWarpMost = 256;  // the most assignments of kWarp, where each warp looks at all of them

enum class Algorithm {
  kWarp,     // a warp for each 32 experts, which looks at all assignments
  kBlock,    // one block makes the plan
  kCluster,  // a cluster of blocks, which exchange their totals through shared memory
  kGrid,     // blocks that run at the same time and exchange their totals through the workspace
};
constexpr const char* kAlgorithmNames[] = {"warp", "block", "cluster", "grid"};

struct Plan {
  Algorithm algorithm = Algorithm::kBlock;
  int warps = 1;                // warps of a block; each has its own counters
  int64_t blocks = 1;           // blocks that share a plan; kGrid launches fewer if not all fit on the GPU at once
  bool staged = false;          // whether assignments are put into order in shared memory before they are written
  int cluster = 1;              // for kGrid: blocks of a cluster, which first add up their totals
  bool twice = false;           // for kGrid: whether blocks wait twice: for all totals, and for the sums of them
  int64_t shared_bytes = 0;     // shared memory of a block
  int64_t workspace_bytes = 0;  // workspace of one plan: the totals of the blocks of kGrid, and their sums
};

// How many assignments each of `warps` warps has: a multiple of 32.
inline int64_t chunk_of(const PlanProblem& problem, int64_t warps) {
  return std::max<int64_t>((problem.assignments + 32 * warps - 1) / (32 * warps) * 32, 32);
}

// How many rows of totals (one number for each expert) a block of a cluster receives.
inline int64_t told_rows(const Plan& plan) {
  return plan.algorithm == Algorithm::kCluster ? plan.blocks : plan.cluster > 1 ? plan.cluster : 0;
}

// `workspace_bytes` < 0 asks for the best plan; otherwise the caller has a workspace of that size, and the plan needs
// no more.
Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes = -1);

}  // namespace jaxgpuops::moe
