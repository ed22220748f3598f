#include "moe/plan.h"

#include <algorithm>
#include <cmath>

namespace jaxgpuops::moe {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kChunk = 64;       // assignments of a warp where blocks share a plan
constexpr int64_t kOneBlock = 1024;  // assignments that a block does alone in less time than blocks wait for others

}  // namespace

Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  const int64_t counters = 4 * std::max<int64_t>(problem.experts, 1);
  const auto room = [&](int64_t most) {  // warps of a block whose counters fit beside the rest
    const int64_t fit = (gpu.shared_bytes - (4 << 10) - 2 * counters) / counters;
    int warps = 1;
    while (2 * warps <= std::min(most, fit)) warps *= 2;
    return warps;
  };
  // With more blocks each counts less, but sums up the totals of more: an estimate of where these take as long.
  const auto balanced = static_cast<int64_t>(std::sqrt(16.0 * problem.assignments / (counters / 4)));
  int64_t most = problem.assignments <= kOneBlock ? 1 : gpu.multiprocessors / std::max<int64_t>(problem.outer, 1);
  if (workspace_bytes >= 0) most = std::min(most, workspace_bytes / counters);
  plan.warps = room(16);
  plan.blocks = std::min({ceil_div(problem.assignments, plan.warps * kChunk), std::max<int64_t>(balanced, 2), most});
  if (plan.blocks > 1) {
    plan.workspace_bytes = counters * plan.blocks;
    if (chunk_of(problem, plan.blocks * plan.warps) > kMostHeld) plan.warps = room(32);
  } else {
    plan.blocks = 1;
    plan.warps = room(std::min<int64_t>(ceil_div(problem.assignments, 32), 32));
  }
  plan.shared_bytes = counters * (plan.warps + 2);
  return plan;
}

}  // namespace jaxgpuops::moe
