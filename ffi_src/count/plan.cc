#include "count/plan.h"

#include <algorithm>

namespace jaxgpuops::count {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// Bytes of the partial result of one element.
int64_t partial_bytes(const Segments& problem) {
  const int64_t bytes = bytes_of(problem.dtype);
  return problem.op == Op::kSum ? std::max<int64_t>(bytes, 4) : bytes;
}

OrderPlan plan_order(int64_t length, int64_t segments) {
  OrderPlan plan;
  int bits = 0;  // bits of the keys 0 to `segments`; an id out of range has the key `segments`
  while (segments >> bits) ++bits;
  plan.passes = static_cast<int>(std::max<int64_t>(1, ceil_div(bits, kMaxDigitBits)));
  plan.digit_bits = static_cast<int>(std::max<int64_t>(1, ceil_div(bits, plan.passes)));
  plan.tiles = ceil_div(length, kOrderTile);
  const int64_t own = aligned(length * 4);
  for (int i = 0; i < 2; ++i) {
    plan.keys[i] = plan.bytes;
    plan.positions[i] = plan.bytes + own;
    if (i < plan.passes) plan.bytes += 2 * own;
  }
  plan.counts = plan.bytes;
  plan.bytes += aligned((int64_t{4} << plan.digit_bits) * plan.tiles);
  plan.totals = plan.bytes;
  plan.bytes += aligned(int64_t{4} << plan.digit_bits);
  return plan;
}

}  // namespace

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu) {
  BincountPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.bins == 0) return plan;
  const int64_t most = gpu.shared_bytes / 4;  // the most bins of a table
  // With many ranges, reading the ids again for each costs more than atomics, which collide rarely on so many bins.
  plan.ranges = ceil_div(problem.bins, most);
  if (rows.inner > 1 || plan.ranges > 4) {
    plan.algorithm = Counting::kGlobal;
    plan.threads = 256;
    plan.ranges = 1;
    return plan;
  }
  plan.algorithm = Counting::kTables;
  plan.range = ceil_div(problem.bins, plan.ranges);
  // Small tables let four blocks share a multiprocessor. A block has as many tables as fit, but at most one for two
  // warps.
  const int64_t own = 4 * plan.range, quarter = gpu.multiprocessor_shared / 4 - 1024;
  plan.threads = own <= quarter ? 512 : 1024;
  if (rows.length <= 2048 && own <= quarter) plan.threads = 128;
  const int64_t per_block = own <= quarter ? quarter : gpu.shared_bytes;
  plan.tables =
      static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(per_block, 32 << 10) / own, 1, plan.threads / 64));
  plan.shared_bytes = own * plan.tables;
  const int64_t blocks = gpu.multiprocessors * (own <= quarter ? 4 : 1);
  const int64_t wanted = ceil_div(blocks, rows.outer * plan.ranges);
  plan.slices = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows.length / std::max<int64_t>(8192, plan.range)));
  return plan;
}

SelectPlan plan_select(const Select& problem, const Gpu& gpu) {
  SelectPlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return plan;
  const int64_t tables = (int64_t{4} << kSelectBits) + 4 * kSelectListed + 1024;  // and what the kernel has besides
  const int64_t bytes = aligned(rows.length * problem.bits / 8 + 16);  // keys begin where the elements do in 16 bytes
  // Shorter rows are sorted in registers. A block has a row of its own whatever else there is to do: where columns are
  // read, or memory is read again for each digit, a sort takes no longer.
  if (rows.inner > 1 || rows.length <= 1024 || bytes + tables > gpu.shared_bytes || problem.count > kMostRanks) {
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  plan.algorithm = Selecting::kBlock;
  plan.threads = rows.length <= 8192 ? 256 : rows.length <= 16384 ? 512 : 1024;
  plan.shared_bytes = bytes;
  return plan;
}

// What depends on the number of rows, or on the GPU, must not change the order in which parts are added.
SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu) {
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.segments == 0) return plan;
  const int64_t table = problem.segments * partial_bytes(problem);
  const int64_t most = kGpus[0].shared_bytes;  // that every GPU has
  const bool has_lanes = 32 * table <= most;
  if (!problem.sorted && rows.inner <= kMostTableColumns && (has_lanes || table * (kTableThreads / 32) <= 48 << 10)) {
    plan.algorithm = has_lanes ? Segmenting::kLanes : Segmenting::kTables;
    plan.columns = has_lanes && rows.inner % 2 == 0 && 64 * table <= most ? 2 : 1;
    const int64_t least = std::max<int64_t>(has_lanes ? 2048 : 8192, 8 * problem.segments * plan.columns);
    plan.tiles = std::clamp<int64_t>(rows.length / least, 1, has_lanes ? 1056 : 528);
    plan.rows = ceil_div(rows.length, plan.tiles);
    if (plan.tiles > 1) plan.workspace_bytes = aligned(plan.tiles * rows.inner * table);
    if (has_lanes) {
      const int64_t own = 32 * table * plan.columns;
      plan.warps = static_cast<int>(std::clamp<int64_t>(gpu.shared_bytes / own, 1, kMostLaneWarps));
      plan.shared_bytes = plan.warps * own;
    }
    return plan;
  }
  plan.algorithm = problem.sorted ? Segmenting::kSorted : Segmenting::kOrdered;
  if (!problem.sorted) plan.order = plan_order(rows.length, problem.segments);
  // Tiles are large enough that their lanes, with 16 bytes of each row, make no more than about 4096 warps.
  const int64_t bytes = rows.inner * bytes_of(problem.dtype);
  const int64_t lanes = rows.length * ceil_div(bytes, 16);
  int64_t tile = lanes < 1 << 20 ? 32 : 64;
  while (tile < 1024 && lanes / tile > 32 * 4096) tile *= 2;
  plan.rows = tile;
  plan.tiles = ceil_div(rows.length, tile);
  const int64_t part = aligned(plan.tiles * rows.inner * partial_bytes(problem));
  plan.heads = plan.order.bytes;
  plan.tails = plan.heads + part;
  plan.workspace_bytes = plan.order.bytes + (plan.tiles > 1 ? 2 * part : 0);
  return plan;
}

}  // namespace jaxgpuops::count
