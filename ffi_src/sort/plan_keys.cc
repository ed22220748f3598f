// Plans sorts by two keys.
#include "sort/keys.h"
#include "sort/plan.h"

namespace jaxgpuops::sort {
namespace {

constexpr int64_t kReserved = 1 << 10;  // shared memory for the system and for the static variables of kernels
constexpr int64_t kFew = 1 << 20;       // elements in all, whose tiles are small
// Passes of fewer elements wait for each other most of the time: two sorts, whose passes exchange counts, take less.
constexpr int64_t kLeast = 1 << 19;
constexpr int64_t kLeastLength = 8193;  // blocks sort shorter rows twice in less time
// If elements are more than this, rows must be longer: a gather in shorter ones takes less time than the passes here.
constexpr int64_t kMany = 1 << 23, kLeastOfMany = 20000;

}  // namespace

KeysPlan plan_keys(const KeysProblem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  const Rows& rows = problem.rows;
  KeysPlan plan;
  if (rows.inner != 1 || rows.length == 0 || rows.length > kMostKeys) return plan;
  // A part of a batch gets the kernel that the whole batch has been given the workspace of.
  const int64_t elements = rows.elements();
  if (workspace_bytes < 0 && (elements < kLeast || rows.length < kLeastLength)) return plan;
  if (workspace_bytes < 0 && !problem.one && elements > kMany && rows.length < kLeastOfMany) return plan;
  const bool large_fits = keys_shared_bytes(kManyWideKeys, true) <= gpu.shared_bytes - kReserved;
  const auto items_of = [&](int64_t elements) { return elements > kFew && large_fits ? kManyWideKeys : kFewKeys; };
  plan.taken = true;
  plan.items = items_of(elements);
  plan.blocks = rows.count() * ceil_div(rows.length, int64_t{kKeysThreads} * plan.items);
  // Enough for any number of rows: fewer may have small tiles, which need more bytes.
  plan.workspace_bytes = KeysShape(1, rows.length, items_of(rows.length)).bytes;
  const int64_t steps = elements / (2 * gpu.multiprocessors * kKeysCountStep) + 1;
  plan.counted = kKeysCountStep * (steps < 8 ? steps : 8);
  const int64_t resident = plan.items == kFewKeys ? 3 : 2;
  const int64_t fit = gpu.multiprocessor_shared / (keys_shared_bytes(plan.items, true) + 2 * kReserved);
  plan.tickets = plan.blocks > (fit < resident ? fit : resident) * gpu.multiprocessors;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

KeysPlan plan_keys(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  if (problem.key_bits < 64 || problem.values || problem.carries || problem.offsets > 0 || problem.kth >= 0 ||
      problem.k < problem.rows.length)
    return {};
  KeysProblem one;
  one.rows = problem.rows;
  one.one = true;
  KeysPlan plan = plan_keys(one, gpu);
  if (workspace_bytes < 0) return plan;
  // A part of a batch may have too little for other kernels, since the whole had these.
  if (!plan.taken && plan_sort(problem, gpu, workspace_bytes).workspace_bytes > workspace_bytes)
    plan = plan_keys(one, gpu, workspace_bytes);
  return plan.workspace_bytes <= workspace_bytes ? plan : KeysPlan{};
}

}  // namespace jaxgpuops::sort
