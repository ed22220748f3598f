#include "moe/plan.h"

#include <algorithm>
#include <cmath>

#include "common/rounding.h"

namespace jaxgpuops::moe {
namespace {

// Up to so many assignments, one block takes less time than several that wait for each other.
constexpr int64_t kOneBlock = 1024;
constexpr int64_t kClusterMost = 1 << 15;  // up to so many assignments, a cluster takes less time than a grid
constexpr int64_t kClusterBlock = 512;     // assignments of a block of a cluster, unless the largest cluster needs more
// The same up to kSmallMost assignments to at most kInRegisters experts, whose counts lanes keep in registers: four
// warps then have little to add up.
constexpr int64_t kSmallBlock = 256;
constexpr int64_t kSmallMost = 2048;
constexpr int64_t kInRegisters = 128;
constexpr int kSmallWarps = 4;
// From so many assignments of a block on, it is faster to put them into order before they are written. In a cluster, it
// is so from fewer on if there are more than kStagedExperts experts. (14000 to 128 experts: 5.1 us, and 6.1.)
constexpr int64_t kStagedFrom = 1024, kClusterStagedFrom = 576, kStagedExperts = 64;
// Up to so many experts, it is not worth the time to put assignments into order first.
constexpr int64_t kUnstaged = 32;
constexpr int64_t kGridChunk = 96, kShortGridChunk = 64;  // assignments of a warp of a grid; with up to 32 experts
constexpr int kFewWarps = 8;                              // fewer warps have fewer counters to add up
// A grid has clusters of so many blocks, for more than kUnstaged and at most kMostTold experts, up to kMostTelling
// assignments. (179000 assignments to 64 experts took 11.4 us without them, and take 8.6; to 16 experts, 7.9 and 8.4.
// Of 700000, they took longer.)
constexpr int kGridCluster = 8;
constexpr int64_t kMostTold = 1024, kMostTelling = 1 << 18;
// How many blocks such a grid has: as many as wait for each other in the least time. (8 of 128 experts, 24524 tokens:
// 48 blocks 10.6 us, 64 8.7, 128 10.3.)
constexpr int64_t kGridBlocks = 64;
constexpr int64_t kManyGridBlocks = 96, kManyAssignments = 160'000;  // from so many assignments on
// With at most kFewTotals totals of blocks, each block of a grid adds up all of them. With more, blocks wait for each
// other twice, which takes less time. They then put their assignments into order, too, which saves time where these are
// many, so that kPerTotal assignments count as one total.
constexpr int64_t kFewTotals = 10 << 10, kPerTotal = 128;
constexpr int64_t kMostStaged = 1 << 16;  // assignments of a block that are put into order, so that 16 bits number them

// Up to so many assignments, it is faster if each warp looks at all of them, so that no warp waits for another. Fewer
// for few experts, whose counters in registers take little time, and with a capacity, since a warp then also counts the
// assignments of all earlier experts. None if the batch has many plans: the GPU is busy then, and the extra work
// counts.
int64_t warp_most(const PlanProblem& problem, const Gpu& gpu) {
  if (problem.experts <= 32 || problem.outer * problem.experts > 32 * 8 * gpu.multiprocessors) return -1;
  if (problem.capacity >= 0) return 32;
  return problem.experts <= 128 ? 64 : kWarpMost;
}

// Up to how many assignments one block is not slower than a cluster. Votes on more than 32 experts take longer.
int64_t one_block_most(const PlanProblem& problem) {
  return problem.experts > 32 && problem.experts <= kInRegisters ? kOneBlock / 2 : kOneBlock;
}

int64_t shared_bytes(const Plan& plan, const PlanProblem& problem) {
  const int64_t staged = plan.staged ? plan.warps * chunk_of(problem, plan.blocks * plan.warps) : 0;
  const int64_t rows = (plan.staged ? 3 : 2) + told_rows(plan) + plan.warps;
  return 4 * (rows * std::max<int64_t>(problem.experts, 1) + staged);
}

// The most dynamic shared memory of a block; the kernel declares some of a fixed size as well.
int64_t room_of(const Gpu& gpu) { return gpu.shared_bytes - (1 << 10); }

// Plans a cluster of at most `most` blocks. Returns false if no such cluster can hold the problem.
bool plan_cluster(const PlanProblem& problem, const Gpu& gpu, int64_t most, Plan& plan) {
  if (problem.assignments > kClusterMost) return false;
  plan.algorithm = Algorithm::kCluster;
  const bool small = problem.experts <= kInRegisters && problem.assignments <= std::min(kSmallMost, most * kSmallBlock);
  const int64_t each = small ? kSmallBlock : kClusterBlock;
  while (plan.blocks * each < problem.assignments && 2 * plan.blocks <= most) plan.blocks *= 2;
  plan.staged =
      problem.experts > kUnstaged &&
      problem.assignments > (problem.experts > kStagedExperts ? kClusterStagedFrom : kStagedFrom) * plan.blocks;
  const auto chunk = [&] { return chunk_of(problem, plan.blocks * plan.warps); };
  plan.warps = small ? kSmallWarps : problem.experts > 256 || plan.staged ? 2 * kFewWarps : kFewWarps;
  while (plan.warps < 32 && chunk() > kClusterHeld) plan.warps *= 2;
  plan.shared_bytes = shared_bytes(plan, problem);
  return plan.blocks > 1 && plan.shared_bytes <= room_of(gpu) && chunk() <= kClusterHeld;
}

}  // namespace

Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  const int64_t counters = 4 * std::max<int64_t>(problem.experts, 1);
  const int64_t share = std::max<int64_t>(gpu.multiprocessors / std::max<int64_t>(problem.outer, 1), 1);
  Plan plan;
  if (problem.align == 1 && problem.assignments <= warp_most(problem, gpu)) {
    plan.algorithm = Algorithm::kWarp;
    plan.blocks = ceil_div(problem.experts, 32);
    return plan;
  }
  if (problem.assignments > one_block_most(problem) &&
      plan_cluster(problem, gpu, std::min<int64_t>(gpu.max_cluster, share), plan))
    return plan;
  plan = {};
  // How many warps a block can have, at most `most`, so that their counters fit beside its other arrays.
  const auto room = [&](int64_t most) {
    const int64_t fit = room_of(gpu) / counters - 2 - told_rows(plan);
    int warps = 1;
    while (2 * warps <= std::min(most, fit)) warps *= 2;
    return warps;
  };
  if (problem.assignments > kOneBlock && share > 1) {
    // With more blocks, each counts fewer assignments but adds up more totals, unless blocks wait twice. This estimates
    // the number at which both take equally long.
    const auto balanced = std::max<int64_t>(std::sqrt(16.0 * problem.assignments / (counters / 4)), 2);
    int64_t most = share;
    if (workspace_bytes >= 0) most = std::min(most, workspace_bytes / counters - 1);
    plan.algorithm = Algorithm::kGrid;
    if (gpu.max_cluster >= kGridCluster && most >= 2 * kGridCluster && problem.experts > kUnstaged &&
        problem.experts <= kMostTold && problem.assignments <= kMostTelling)
      plan.cluster = kGridCluster;
    plan.warps = room(16);
    if (plan.cluster > 1) {
      plan.blocks = std::min(problem.assignments < kManyAssignments ? kGridBlocks : kManyGridBlocks,
                             most / kGridCluster * kGridCluster);
    } else {
      const int64_t chunk = problem.experts <= kUnstaged ? kShortGridChunk : kGridChunk;
      most = std::min(most, ceil_div(problem.assignments, plan.warps * chunk));
      plan.blocks = std::min(most, balanced);
      plan.twice =
          problem.experts > kUnstaged && plan.blocks * problem.experts + problem.assignments / kPerTotal > kFewTotals;
      if (plan.twice) plan.blocks = most;
    }
    if (plan.blocks > 1) {
      if (chunk_of(problem, plan.blocks * plan.warps) > kMostHeld) plan.warps = room(32);
      plan.workspace_bytes = counters * (plan.blocks + 1);
      const int64_t of_block = plan.warps * chunk_of(problem, plan.blocks * plan.warps);
      plan.staged = (plan.twice || plan.cluster > 1) && of_block > kStagedFrom &&
                    of_block <= std::min(kMostStaged, plan.warps * kMostHeld);
      plan.shared_bytes = shared_bytes(plan, problem);
      if (plan.shared_bytes > room_of(gpu)) plan.staged = false, plan.shared_bytes = shared_bytes(plan, problem);
      return plan;
    }
  }
  plan = {};
  // At least as many threads as experts, since a thread finds where an expert's group begins.
  const int64_t wanted = ceil_div(std::max(problem.assignments, problem.experts), 32);
  plan.warps = room(std::min<int64_t>(wanted, problem.assignments > kOneBlock ? 32 : kFewWarps));
  plan.shared_bytes = shared_bytes(plan, problem);
  return plan;
}

}  // namespace jaxgpuops::moe
