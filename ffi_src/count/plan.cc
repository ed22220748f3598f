#include "count/plan.h"

#include <algorithm>
#include <cmath>

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

// Tables in shared memory, of blocks with `extra` more bytes of it. Fills the plan of a problem that has bins.
void plan_tables(const Rows& rows, int64_t bins, int64_t ranges, int64_t extra, const Gpu& gpu, BincountPlan& plan) {
  plan.algorithm = Counting::kTables;
  plan.ranges = ranges;
  plan.range = ceil_div(bins, ranges);
  // Small tables let four blocks share a multiprocessor. A block has as many tables as fit, but at most one for two
  // warps.
  const int64_t own = 4 * plan.range, quarter = gpu.multiprocessor_shared / 4 - 1024 - extra;
  plan.threads = own <= quarter ? 512 : 1024;
  if (rows.length <= 2048 && own <= quarter) plan.threads = 128;
  const int64_t per_block = own <= quarter ? quarter : gpu.shared_bytes - extra;
  plan.tables =
      static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(per_block, 32 << 10) / own, 1, plan.threads / 64));
  plan.shared_bytes = own * plan.tables + extra;
  const int64_t blocks = gpu.multiprocessors * (own <= quarter ? 4 : 1);
  const int64_t wanted = ceil_div(blocks, rows.outer * plan.ranges);
  plan.slices = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows.length / std::max<int64_t>(8192, plan.range)));
}

}  // namespace

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu) {
  BincountPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.bins == 0) return plan;
  // A count of so few ids is a byte. Few rows had better be read by a block each.
  const int64_t words = ceil_div(problem.bins, 4) | 1, row_warps = (48 << 10) / (128 * words);
  if (rows.inner == 1 && rows.length <= 255 && rows.outer >= 64 * rows.length && 128 * words <= 24 << 10) {
    plan.algorithm = Counting::kRows;
    plan.threads = 32 * static_cast<int>(std::min<int64_t>(row_warps, kMostRowWarps));
    plan.range = words;
    plan.shared_bytes = 4 * words * plan.threads;
    return plan;
  }
  // With many ranges, reading the ids again for each costs more than atomics, which collide rarely on so many bins.
  const int64_t ranges = ceil_div(problem.bins, gpu.shared_bytes / 4);
  if (rows.inner > 1 || ranges > 4) {
    plan.algorithm = Counting::kGlobal;
    plan.threads = 256;
    return plan;
  }
  plan_tables(rows, problem.bins, ranges, 0, gpu, plan);
  return plan;
}

BincountPlan plan_histogram(const Histogram& problem, const Gpu& gpu) {
  BincountPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.bins == 0) return plan;
  const int64_t edges = aligned((problem.bins + 2) * std::max(4, bytes_of(problem.dtype)));
  if (rows.inner > 1 || 4 * problem.bins + edges > gpu.multiprocessor_shared / 4) {
    plan.algorithm = Counting::kNone;
    return plan;
  }
  plan_tables(rows, problem.bins, 1, edges, gpu, plan);
  return plan;
}

SelectPlan plan_select(const Select& problem, const Gpu& gpu) {
  SelectPlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return plan;
  if (rows.length <= 1024 || problem.count > kMostRanks) {  // shorter rows are sorted in registers
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  plan.turns = rows.inner > 1;
  if (plan.turns) plan.turned_bytes = aligned(rows.length * rows.inner * problem.bits / 8);
  plan.workspace_bytes = plan.turned_bytes;
  constexpr int64_t kStatic = 3072;  // shared memory that the kernel has besides
  const int64_t tables = problem.count * int64_t{4} * kSelectBins;
  const int64_t bytes = aligned(rows.length * problem.bits / 8 + 32);  // keys begin where the elements do in 16 bytes
  if (bytes + tables + kStatic <= gpu.shared_bytes) {
    plan.algorithm = Selecting::kBlock;
    plan.threads = rows.length <= 2048 ? 128 : rows.length <= 8192 ? 256 : rows.length <= 16384 ? 512 : 1024;
    plan.table_at = bytes;
    plan.shared_bytes = bytes + tables;
    return plan;
  }
  plan.shared_bytes = problem.count * int64_t{4} * kLongBins;
  if (plan.shared_bytes + kStatic > gpu.shared_bytes) {
    plan = {};
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  plan.algorithm = Selecting::kLong;
  plan.threads = kLongThreads;
  const int64_t packs = rows.length * problem.bits / 128 + 2;
  const int64_t wanted = ceil_div(4 * gpu.multiprocessors, rows.count());
  plan.slices = std::clamp<int64_t>(wanted, 1, ceil_div(packs, 4 * kLongThreads));
  plan.slice_packs = ceil_div(packs, plan.slices);
  constexpr int kBits = 12;  // a step makes an interval shorter by so many
  plan.steps = 1 + static_cast<int>(ceil_div(problem.bits, kBits));
  plan.table_at = kLongHeadBytes;
  plan.list_at = plan.table_at + plan.shared_bytes;
  plan.list_size = std::max<int64_t>(kLongFew, plan.slices);
  plan.row_bytes = aligned(plan.list_at + problem.count * 4 * plan.list_size);
  plan.workspace_bytes += rows.inner * plan.row_bytes;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

// A table of each lane holds every segment. Returns false where there are too many.
bool plan_lanes(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  const int64_t most = kGpus[0].shared_bytes;  // that every GPU has
  // Rows of many columns can be read in order of the ids as well, and larger tables leave a multiprocessor few warps.
  const int64_t bound = rows.inner <= kMostTableColumns ? most : most / 4;
  const int64_t warp_bytes = 32 * problem.segments * partial_bytes(problem);
  if (warp_bytes > bound) return false;
  plan.algorithm = Segmenting::kLanes;
  plan.columns = rows.inner % 2 == 0 && 2 * warp_bytes <= bound ? 2 : 1;
  while (plan.team_bits < 5 && rows.inner > plan.columns << plan.team_bits) ++plan.team_bits;
  const int64_t teams = 32 >> plan.team_bits, chunks = ceil_div(rows.inner, plan.columns << plan.team_bits);
  const int64_t own = warp_bytes * plan.columns;
  plan.parts =
      static_cast<int>(std::clamp<int64_t>(std::min(most / own, ceil_div(rows.length, 8 * teams)), 1, kMostLaneWarps));
  const int64_t least = teams * plan.parts * std::max<int64_t>(64, problem.segments * plan.columns / 4);
  const int64_t slices = 1056 * std::min(plan.parts, 2) / plan.parts / chunks;
  plan.tiles = std::clamp<int64_t>(rows.length / least, 1, std::max<int64_t>(1, slices));
  plan.rows = ceil_div(rows.length, plan.tiles);
  if (plan.tiles > 1)
    plan.workspace_bytes = aligned(plan.tiles * rows.inner * problem.segments * partial_bytes(problem));
  const int64_t units = std::clamp<int64_t>(gpu.shared_bytes / (own * plan.parts), 1, std::max(1, 4 / plan.parts));
  plan.warps = static_cast<int>(units * plan.parts);
  plan.shared_bytes = plan.warps * own;
  return true;
}

// The accumulators of a sum must not overflow, whichever rows it has.
ExactShape exact_of(DType dtype, int64_t length) {
  ExactShape shape;
  int bits = 0;
  while (int64_t{1} << bits < length) ++bits;
  const int mantissa = ExactShape::mantissa(dtype), places = dtype == DType::kFloat16 ? 30 : 254;
  shape.width = std::min(63 - mantissa - bits, 52 - mantissa);
  shape.bins = (places + shape.width - 1) / shape.width;
  shape.reciprocal = static_cast<uint32_t>((65536 + shape.width - 1) / shape.width);
  shape.unit = std::ldexp(1.0, dtype == DType::kFloat32 ? -149 : dtype == DType::kFloat16 ? -24 : -133);
  shape.step = std::ldexp(1.0, shape.width);
  return shape;
}

// Atomics on integers. Returns false for columns of many, whose rows are better read whole, and for sums of floats
// where too many accumulators would be empty.
bool plan_atomics(const Segments& problem, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  if (rows.inner > kMostTableColumns) return false;
  const int64_t cells = problem.segments * rows.inner;
  if (problem.op == Op::kSum && is_float(problem.dtype)) {
    if (problem.dtype == DType::kFloat64) return false;
    plan.exact = exact_of(problem.dtype, rows.length);
    const int64_t bytes = ExactShape::kHeadBytes + aligned(8 * (plan.exact.bins + 1) * cells);
    if (bytes > std::max<int64_t>(16 << 20, 16 * rows.length * rows.inner)) return false;
    plan.workspace_bytes = bytes;
  } else if (bytes_of(problem.dtype) < 4) {
    plan.workspace_bytes = aligned(4 * cells);
  }
  plan.algorithm = Segmenting::kAtomics;
  plan.rows = std::clamp<int64_t>(ceil_div(rows.length * rows.inner, 32 * 4224) * 32, 256, 2048);
  plan.tiles = ceil_div(rows.length, plan.rows);
  return true;
}

// What depends on the number of rows, or on the GPU, must not change the order in which parts are added.
SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu) {
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.segments == 0) return plan;
  // Tables of lanes are cleared and added up, which should not take longer than the rows do.
  const bool few = rows.length <= kFewRows, dense = rows.length >= 32 * problem.segments || problem.segments <= 64;
  if ((few || !problem.sorted) && dense && plan_lanes(problem, gpu, plan)) return plan;
  if (few) {
    plan.algorithm = Segmenting::kFew;
    while (plan.team_bits < 5 && rows.inner > 1 << plan.team_bits) ++plan.team_bits;
    plan.tiles = ceil_div(problem.segments, kFewSegments);
    plan.rows = ceil_div(problem.segments, plan.tiles);
    return plan;
  }
  const int64_t table = problem.segments * partial_bytes(problem);
  const bool has_tables =
      !problem.sorted && rows.inner <= kMostTableColumns && table * (kTableThreads / 32) <= 48 << 10;
  if (!(has_tables && dense) && !problem.sorted && (plan_atomics(problem, plan) || plan_lanes(problem, gpu, plan)))
    return plan;
  if (has_tables) {
    plan.algorithm = Segmenting::kTables;
    plan.tiles = std::clamp<int64_t>(rows.length / std::max<int64_t>(8192, 8 * problem.segments), 1, 528);
    plan.rows = ceil_div(rows.length, plan.tiles);
    plan.workspace_bytes = plan.tiles > 1 ? aligned(plan.tiles * rows.inner * table) : 0;
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
