#include "sort/plan.h"

#include <algorithm>

#include "count/plan.h"
#include "sort/cuda/shape.h"

namespace jaxgpuops::sort {
namespace {

constexpr int64_t kMaxTeamLength = 1024;
constexpr int64_t kMostExchanging = 32;  // tiles of a row
constexpr int64_t kReserved = 1 << 10;   // shared memory for the system and for the static variables of kernels

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kShort: return "short";
    case Algorithm::kTeam: return "team";
    case Algorithm::kPart: return "part";
    case Algorithm::kBlock: return "block";
    case Algorithm::kSweep: return "sweep";
  }
  return "?";
}

Plan plan_sort(const Problem& problem, const Gpu& gpu) {
  Plan plan;
  const Rows& rows = problem.rows;
  const int key_bytes = problem.key_bits / 8;
  const int64_t shared_limit = gpu.shared_bytes - kReserved;
  if (rows.elements() == 0) return plan;
  // If rows go by columns and inner is small, the loads of a warp use only parts of memory sectors.
  if (rows.length <= kMaxShortLength && (short_tile_outers(rows) > 0 || rows.inner >= kLeastShortColumns)) {
    plan.algorithm = Algorithm::kShort;
    plan.threads = kShortThreads;
    plan.blocks = short_blocks(rows);
    return plan;
  }
  if (rows.length <= kMaxTeamLength) {
    plan.algorithm = Algorithm::kTeam;
    plan.team = topk::sort_shape(rows, key_bytes, gpu.multiprocessors, shared_limit);
    plan.threads = plan.team.threads;
    plan.blocks = plan.team.blocks;
    plan.shared_bytes = static_cast<int64_t>(plan.team.shared_bytes);
    return plan;
  }
  // The workspace below is sized for one outer index. A call with n outer indices gets n times as much, which is enough
  // for all its rows together.
  plan.turns = rows.inner > 1;
  const Rows own{1, rows.length, rows.inner};
  if (plan.turns) plan.workspace_bytes = TurnShape(own, problem.k, key_bytes, problem.values, problem.indices).bytes;
  if (problem.kth >= 0) {
    count::Select one;
    one.rows = {rows.outer * rows.inner, rows.length, 1};
    one.count = 1;
    one.bits = problem.key_bits;
    if (const auto select = count::plan_select(one, gpu); select.algorithm == count::Selecting::kBlock) {
      plan.algorithm = Algorithm::kPart;
      plan.threads = select.threads;
      plan.blocks = rows.count();
      plan.shared_bytes = select.shared_bytes;
      plan.table_at = select.table_at;
      return plan;
    }
  }
  for (const int threads : {256, 512, 1024}) {
    if (rows.length > threads * block_items(key_bytes) || block_shared_bytes(key_bytes, threads) > shared_limit)
      continue;
    plan.algorithm = Algorithm::kBlock;
    plan.threads = threads;
    plan.blocks = rows.count();
    plan.shared_bytes = block_shared_bytes(key_bytes, threads);
    return plan;
  }
  plan.algorithm = Algorithm::kSweep;
  plan.threads = kSweepThreads;
  const bool large_fits = sweep_shared_bytes(key_bytes, false, problem.indices) <= shared_limit;
  plan.small = sweeps_small(rows.elements()) || !large_fits;
  // The same workspace must do for a call with fewer rows (a part of the batch), which may use small tiles; these need
  // more.
  const SweepShape shape(rows.inner, rows.length, problem.k, key_bytes, problem.values, problem.indices,
                         sweeps_small(own.elements()) || !large_fits);
  plan.blocks = rows.count() * ((rows.length - 1) / sweep_tile(key_bytes, plan.small, problem.indices) + 1);
  plan.shared_bytes = sweep_shared_bytes(key_bytes, plan.small, problem.indices);
  plan.workspace_bytes += shape.bytes;
  plan.counted = count_elements(rows.elements(), gpu.multiprocessors);
  const int64_t fit = std::min<int64_t>(sweep_blocks(key_bytes, plan.small, problem.indices),
                                        gpu.multiprocessor_shared / (plan.shared_bytes + 2 * kReserved));
  plan.tickets = plan.blocks > fit * gpu.multiprocessors;
  plan.exchanges =
      (plan.small || key_bytes == 1) && plan.blocks <= std::min(gpu.multiprocessors, rows.count() * kMostExchanging);
  plan.overlap = gpu.dependent_launch;
  return plan;
}

}  // namespace jaxgpuops::sort
