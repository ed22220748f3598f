#include "moe/plan.h"

#include <algorithm>

namespace jaxgpuops::moe {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kChunk = 256;  // assignments of a warp, if blocks share a plan
// With at most so many assignments, one block takes less time than three launches.
constexpr int64_t kOneBlock = 16 << 10;

}  // namespace

Plan plan_route(const PlanProblem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  const int64_t counters = 4 * std::max<int64_t>(problem.experts, 1);
  const auto room = [&](int64_t most) {  // the most warps whose counters fit beside the offsets
    const int64_t fit = (gpu.shared_bytes - (4 << 10) - counters) / counters;
    int warps = 1;
    while (2 * warps <= std::min(most, fit)) warps *= 2;
    return warps;
  };
  const bool alone = problem.assignments <= kOneBlock || problem.outer >= gpu.multiprocessors;
  plan.warps = room(alone ? 32 : 8);
  if (!alone) {
    const int64_t blocks = ceil_div(problem.assignments, plan.warps * kChunk);
    const int64_t bytes = counters * (blocks * plan.warps + 1);
    if (workspace_bytes < 0 || bytes <= workspace_bytes) {
      plan.blocks = blocks;
      plan.workspace_bytes = bytes;
    } else {
      plan.warps = room(32);
    }
  }
  plan.chunk = ceil_div(ceil_div(problem.assignments, plan.blocks * plan.warps), 32) * 32;
  plan.shared_bytes = counters * (plan.warps + 1) + 4;
  return plan;
}

}  // namespace jaxgpuops::moe
