// Plans of counts, ranks, places in sorted rows and chosen places. Those of segments are in plan_segments.cc.
#include "count/plan.h"

#include <algorithm>

#include "common/rounding.h"

namespace jaxgpuops::count {
namespace {

// Plans tables of counters in shared memory. Blocks need `extra` more bytes of it.
void plan_tables(const Rows& rows, int64_t bins, int64_t ranges, int64_t extra, const Gpu& gpu, BincountPlan& plan) {
  plan.algorithm = Counting::kTables;
  plan.ranges = ranges;
  plan.range = ceil_div(bins, ranges);
  // Small tables let four blocks share a multiprocessor. Each slice adds a whole table to the result; where ids are not
  // very many, that costs too much, so there are fewer slices with larger blocks. A block has as many tables as fit,
  // but at most one for every two warps.
  const int64_t own = 4 * plan.range, quarter = gpu.multiprocessor_shared / 4 - 1024 - extra;
  const int64_t units = rows.outer * ranges;
  const bool small = own <= quarter, sliced = rows.length >= 4 * 4096;  // slices are another launch
  const bool some = rows.elements() >= 1 << 20 && rows.elements() < 1 << 25;
  const bool wide = !small || (sliced && some && 2 * units <= gpu.multiprocessors);
  plan.threads = wide ? 1024 : rows.length <= 2048 ? 128 : 512;
  const int64_t per_block = small ? quarter : gpu.shared_bytes - extra;
  plan.tables =
      static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(per_block, 32 << 10) / own, 1, plan.threads / 64));
  plan.shared_bytes = own * plan.tables + extra;
  int64_t wanted = ceil_div(gpu.multiprocessors * (some ? 2 : 4), units);
  if (wide) wanted = small ? gpu.multiprocessors / units : ceil_div(gpu.multiprocessors, units);
  if (sliced)
    plan.slices =
        std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, rows.length / std::max<int64_t>(4096, plan.range)));
  plan.overlap = gpu.dependent_launch && plan.slices > 1;
}

// Plans kParts for long rows. Returns false if there are too many bins for it, or rows are not long enough.
bool plan_parts(const Bincount& problem, const Gpu& gpu, BincountPlan& plan) {
  const Rows& rows = problem.rows;
  plan.range = 16384;
  while (8 * plan.range <= std::min<int64_t>(gpu.shared_bytes, 128 << 10)) plan.range *= 2;
  plan.ranges = ceil_div(problem.bins, plan.range);
  if (rows.inner > 1 || problem.bytes < 4 || plan.ranges > kMostParts) return false;
  if (rows.length < 1 << 16 || rows.elements() < 1 << 21) return false;
  plan.algorithm = Counting::kParts;
  plan.threads = kPartThreads;  // of the first kernel
  plan.shared_bytes = 4 * plan.range;
  plan.tiles = ceil_div(rows.length, kPartTile);
  plan.workspace_bytes = aligned(plan.tiles * (2 * kPartPitch + 8 * kPartWarps + 2 * (plan.ranges + 1)));
  // A slice costs about as much as some tiles do, so it has at least 64 of them.
  plan.slices = std::clamp<int64_t>(gpu.multiprocessors / (rows.outer * plan.ranges), 1, ceil_div(plan.tiles, 64));
  plan.overlap = gpu.dependent_launch;
  return true;
}

}  // namespace

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu) {
  BincountPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.bins == 0) return plan;
  // Counts of at most 255 ids fit in bytes. If there are few rows, a block for each row is faster.
  const int64_t words = ceil_div(problem.bins, 4) | 1, row_warps = (48 << 10) / (128 * words);
  if (rows.inner == 1 && rows.length <= 255 && rows.outer >= std::max(64 * rows.length, 32 * problem.bins) &&
      128 * words <= 24 << 10) {
    plan.algorithm = Counting::kRows;
    plan.threads = 32 * static_cast<int>(std::min<int64_t>(row_warps, kMostRowWarps));
    plan.range = words;
    plan.shared_bytes = 4 * words * plan.threads;
    return plan;
  }
  // Each range of bins reads all ids again. Where there are many ranges, or few ids (`few`), atomics on the result cost
  // less: they rarely meet in a bin.
  const int64_t ranges = ceil_div(problem.bins, gpu.shared_bytes / 4);
  const bool few = rows.elements() <= kFewIds && problem.bins >= std::min(kFewBins, rows.length / 8) &&
                   rows.length <= 16 * problem.bins && rows.outer * ranges < gpu.multiprocessors / 2;
  if (ranges > 4 && plan_parts(problem, gpu, plan)) return plan;
  if (rows.inner > 1 || ranges > 4 || few) {
    // A block has at most 2048 ids. So few rows are being counted at any time that their counters stay in L2.
    plan.algorithm = Counting::kGlobal;
    plan.threads = 256;
    plan.range = 256 * std::clamp<int64_t>(ceil_div(rows.elements(), 256 * 8 * gpu.multiprocessors), 1, 8);
    plan.overlap = gpu.dependent_launch;
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

namespace {

// Whether columns are so few that the caches deliver them to warps as fast as rows.
bool reads_columns(const Rows& rows, int bits) {
  return rows.elements() <= (bits <= 16 ? int64_t{1} << 20 : (int64_t{1} << 22) / bits);
}

// Chooses the kernel for rows of up to kMostWarpSelect elements, or kNone where sorting them takes less time. If a
// kernel takes the whole batch, one must take every part of it, too: that part only has its part of the workspace.
Selecting plan_short_select(const Select& problem, const Gpu& gpu) {
  const Rows& rows = problem.rows;
  if (rows.length <= 8) return Selecting::kNone;
  // The largest tables of threads do not fit in the shared memory of every GPU.
  if (rows.length == kMostThreadSelect && problem.bits == 32 && gpu.shared_bytes <= 64 << 10) return Selecting::kNone;
  const bool few = rows.count() <= 2048;
  if (problem.bits <= 32 && rows.length <= kMostThreadSelect) {
    // A warp finishes a row sooner than a thread does, so warps take the rows if these are few. Not if there are many
    // ranks, which a warp finds one after another, nor if there are many columns, which a warp cannot read in place.
    const bool by_warp = rows.length > (problem.count > 3 ? 32 : 16) && few && rows.count() < 64 * rows.length &&
                         (rows.inner == 1 || reads_columns(rows, problem.bits));
    return by_warp ? Selecting::kWarp : Selecting::kThread;
  }
  if (problem.count > 3) return rows.length > 512 && problem.bits == 32 ? Selecting::kWarp : Selecting::kNone;
  return rows.length > 128 || few ? Selecting::kWarp : Selecting::kNone;
}

}  // namespace

SelectPlan plan_select(const Select& problem, const Gpu& gpu) {
  SelectPlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return plan;
  plan.algorithm = rows.length <= kMostWarpSelect ? plan_short_select(problem, gpu) : Selecting::kBlock;
  if (problem.count > kMostRanks || rows.count() >= int64_t{1} << 31) plan.algorithm = Selecting::kNone;
  if (plan.algorithm == Selecting::kNone) return plan;
  if (plan.algorithm == Selecting::kThread) {
    plan.threads = kShortSelectThreads;
    plan.pitch = rows.length | 1;  // threads read from different banks
    const int64_t words = kShortSelectThreads * plan.pitch;
    plan.table_at = problem.bits > 16 ? 4 * words : kShortSelectThreads * rows.length * problem.bits / 8;
    plan.shared_bytes = plan.table_at + 4 * words;
    return plan;
  }
  plan.turns = rows.inner > 1 && (plan.algorithm != Selecting::kWarp || !reads_columns(rows, problem.bits));
  if (plan.turns) plan.turned_bytes = aligned(rows.length * rows.inner * problem.bits / 8);
  plan.workspace_bytes = plan.turned_bytes;
  if (plan.algorithm == Selecting::kWarp) {
    plan.threads = kShortSelectThreads;
    plan.pitch = ceil_div(rows.length, kWarpSelectStep) * kWarpSelectStep;
    plan.shared_bytes = kShortSelectThreads / 32 * plan.pitch * (problem.bits == 64 ? 8 : 4);
    return plan;
  }
  constexpr int64_t kStatic = 3072;  // bytes of shared memory that the kernel declares itself
  const int64_t tables = problem.count * int64_t{4} << kSelectBinBits;
  // 32 more, since keys begin at the same distance from a multiple of 16 bytes as the elements.
  const int64_t bytes = aligned(rows.length * problem.bits / 8 + 32);
  if (bytes + tables + kStatic <= gpu.shared_bytes) {
    plan.threads = rows.length <= 2048    ? 64
                   : rows.length <= 4096  ? 128
                   : rows.length <= 8192  ? 256
                   : rows.length <= 16384 ? 384
                                          : 1024;
    // If rows are few, the GPU has room for more threads for each.
    if (rows.count() <= 2 * gpu.multiprocessors)
      plan.threads = std::max(plan.threads, problem.kth >= 0 ? 512 : std::min(2 * plan.threads, 512));
    else if (rows.count() <= 4 * gpu.multiprocessors && rows.length <= 4096)
      plan.threads *= 2;
    plan.table_at = bytes;
    plan.shared_bytes = plan.table_at + tables;
    return plan;
  }
  plan.algorithm = Selecting::kLong;
  plan.threads = kLongThreads;
  plan.bin_bits = problem.count <= 3 && gpu.multiprocessor_shared >= 160 << 10 ? 12 : problem.count <= 7 ? 11 : 10;
  const int64_t counts = problem.count * int64_t{4} << plan.bin_bits;
  plan.shared_bytes = std::max<int64_t>(counts, kLongFew * (4 + problem.bits / 8));
  const int64_t packs = rows.length * problem.bits / 128 + 2;
  plan.slices = std::clamp<int64_t>(2 * gpu.multiprocessors / rows.count(), 1, ceil_div(packs, 4 * kLongThreads));
  plan.slice_packs = ceil_div(packs, plan.slices);
  plan.table_at = kLongHeadBytes;
  plan.list_at = plan.table_at + counts;
  plan.list_size = std::max<int64_t>(kLongFew, plan.slices);
  plan.row_bytes = aligned(plan.list_at + problem.count * 4 * plan.list_size);
  plan.workspace_bytes += rows.inner * plan.row_bytes;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

namespace {

// Divides the queries of a row among about `blocks` blocks, at least `least` each.
void cut_rows(int64_t blocks, int64_t least, int64_t turn, SearchPlan& plan) {
  plan.chunk = ceil_div(std::max(ceil_div(plan.queries, blocks), least), turn) * turn;
  plan.blocks = ceil_div(plan.queries, plan.chunk);
}

// Plans kRows: a block has one or several short rows with all their queries, or one row with some of its queries.
void plan_search_rows(const Search& problem, int64_t blocks, SearchPlan& plan) {
  constexpr int64_t kLeast = 1024, kMost = 4096;  // queries of a block
  const int64_t bytes = (problem.length | 1) * problem.bits / 8, all = plan.rows * plan.queries;
  const int64_t wanted = std::clamp<int64_t>(all / blocks, kLeast, kMost);
  plan.algorithm = Searching::kRows;
  plan.group_rows =
      static_cast<int>(std::clamp<int64_t>(std::min(wanted / plan.queries, kMostSearchRows / bytes), 1, plan.rows));
  if (plan.group_rows > 4) plan.group_rows -= plan.group_rows % 4;  // queries and places begin at whole vectors
  plan.shared_bytes = plan.group_rows * bytes;
  if (plan.group_rows == 1) return cut_rows(std::max<int64_t>(1, blocks / plan.rows), kLeast, 256, plan);
  plan.chunk = plan.group_rows * plan.queries;
  plan.blocks = 1;
  plan.reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 31, plan.queries));
  if (problem.length % 2 == 0 && problem.length > 0)
    plan.length_reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 32, problem.length));
}

}  // namespace

SearchPlan plan_search(const Search& problem, const Gpu& gpu) {
  SearchPlan plan;
  const Rows& rows = problem.rows;
  if (rows.elements() == 0) return plan;
  plan.algorithm = Searching::kEach;
  if (rows.inner > 1 || (problem.sorted.axis_stride != 1 && problem.length > 1)) return plan;
  plan.rows = rows.outer, plan.queries = rows.length;
  const IndexMap& outer = problem.sorted.outer;
  if (std::all_of(outer.stride, outer.stride + outer.groups, [](int64_t stride) { return stride == 0; }))
    plan.rows = 1, plan.queries = rows.elements();  // all queries share one row
  const bool whole = plan.rows == 1 || (outer.groups == 1 && outer.stride[0] == problem.length);  // or some share one
  const int64_t most_blocks = 8 * gpu.multiprocessors, bytes = problem.length * problem.bits / 8;
  // Searches read most of a row if it is not much longer than its queries, or has few sectors of 32 bytes.
  const int64_t all = plan.rows * plan.queries;
  const bool is_short = whole && bytes <= kMostSearchRow && (plan.queries >= 8 || all >= 16 << 10) &&
                        (problem.length <= 3 * plan.queries || bytes <= kFewBytes);
  if (problem.length <= 4 && all < 16 << 10) return plan;  // there is little to read and to do
  const int64_t least = all < 64 << 10 ? (is_short ? all + 1 : 4096) : is_short ? 2048 : 512;
  if (problem.bits == 8 && plan.queries >= least) {
    plan.algorithm = Searching::kTable;
    plan.threads = 256;
    cut_rows(std::max<int64_t>(std::max<int64_t>(1, most_blocks / plan.rows), plan.queries >> 14), 1024, 256, plan);
    return plan;
  }
  const int64_t few = std::max<int64_t>(1, gpu.multiprocessors / plan.rows);  // blocks of a row
  constexpr int64_t kTableBytes = 2 << 16, kLeastTable = 12288;
  if (problem.bits == 16 && problem.length >= 32 && problem.length < 1 << 16 && plan.queries >= kLeastTable * few &&
      gpu.shared_bytes >= kTableBytes + 1024) {
    plan.algorithm = Searching::kTable;
    plan.threads = 1024;
    plan.shared_bytes = kTableBytes;
    cut_rows(few, 1, 256, plan);
    return plan;
  }
  const bool trees = (problem.bits == 16 || problem.bits == 32) && plan.queries >= 1024 * few && problem.length >= 32;
  // In rows of nearly 256 words, the searches of many lanes read the same banks; trees do not.
  if (is_short && (!trees || problem.bits == 16 || bytes <= kMostSearchRow - 64)) {
    plan_search_rows(problem, most_blocks, plan);
    return plan;
  }
  // The tree's kernel is compiled for 16 and 32 bits only, to keep the binary small. Each block reads a tree of
  // 2^levels words, which is worth while for at least half as many queries.
  if (!trees) return plan;
  constexpr int kMostThreads = 1024;
  const int64_t word = problem.bits / 8, most_near = (kMostThreads / 32 * word) << kNearBits;
  const int64_t most = std::min<int64_t>(gpu.shared_bytes - most_near, 128 << 10) / word;
  while ((2 << plan.levels) <= std::min(most, 2 * plan.queries / few) && int64_t{1} << plan.levels < problem.length)
    ++plan.levels;
  // The last group needs no splitter.
  while (ceil_div(problem.length, int64_t{1} << plan.group_bits) > int64_t{1} << plan.levels) ++plan.group_bits;
  plan.algorithm = Searching::kTree;
  const int64_t tree = word << plan.levels, near = plan.group_bits ? most_near : 0;
  plan.threads = tree + near / 2 > gpu.multiprocessor_shared / 2 - 1024 ? kMostThreads : kMostThreads / 2;
  plan.shared_bytes = tree + near * plan.threads / kMostThreads;
  cut_rows(plan.threads == kMostThreads ? few : 2 * few, 1, kTreeTurn, plan);
  // A block looks whether its queries are in order if the elements between those of a turn fit, and if all blocks have
  // room, since that takes registers. Groups of 32 bits take as many anyway.
  const int64_t warps = plan.threads / 32, turn = std::clamp<int64_t>(plan.chunk / warps, kTreeTurn, kOrderTurn);
  const bool fit = 32 * plan.rows * plan.blocks * warps <= 1024 * gpu.multiprocessors;
  while ((word * warps << (plan.near_bits + 1)) <= plan.shared_bytes) ++plan.near_bits;
  if (problem.length > (plan.queries / turn) << plan.near_bits) plan.near_bits = 0;
  if (!fit && !(problem.bits == 32 && plan.group_bits > 0)) plan.near_bits = 0;
  return plan;
}

// Up to so many elements (of a mask; of other arrays), each block counts everything before its own tile. Reading that
// takes less time than a second launch.
constexpr int64_t kMostRecount = 128 << 10, kMostRecountStarts = 32 << 10;

namespace {

// Cuts rows of `units` into tiles for kLookBack: such that blocks have few turns, with little left over in the last
// one.
void cut_units(int64_t outer, int64_t units, bool starts, const Gpu& gpu, ChoosePlan& plan) {
  constexpr int64_t kWarps = kMostChooseThreads / 32, kListBytes = kWarps * kChooseList * 2, kUnitBytes = 4 * 32 + 4;
  constexpr int64_t kTurn = 3;  // a turn waits about as long as for three units of each warp
  const int64_t each = starts ? kStartsBlocks : kMaskBlocks;
  const int64_t shared = std::min(gpu.shared_bytes, gpu.multiprocessor_shared / each) - 2048;
  const int64_t most = std::min<int64_t>((shared - kListBytes) / kUnitBytes, kMostChooseThreads);
  const int64_t blocks = each * gpu.multiprocessors;
  const int64_t least = ceil_div(outer * ceil_div(units, most), blocks);
  int64_t best = 0;
  for (int64_t turns = least; turns < least + 8; ++turns) {
    const int64_t tiles = turns * blocks / outer;
    const int64_t own = std::min(std::max(ceil_div(units, std::max<int64_t>(tiles, 1)), kWarps), most);
    const int64_t cost = ceil_div(outer * ceil_div(units, own), blocks) * (ceil_div(own, kWarps) + kTurn);
    if (turns > least && cost >= best) continue;
    best = cost;
    plan.units = own;
  }
  plan.tiles = ceil_div(units, plan.units);
  plan.shared_bytes = plan.units * kUnitBytes + kListBytes;
}

}  // namespace

ChoosePlan plan_choose(const Choose& problem, const Gpu& gpu) {
  ChoosePlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.size == 0) return plan;
  if (rows.inner > 1 || (rows.length < 128 && rows.outer > 2048)) {  // a block has one row at least
    plan.algorithm = Choosing::kNone;
    return plan;
  }
  // A row begins anywhere in its first vector of 16 bytes.
  const int64_t words = (rows.length + 15) / 32 + 1, units = ceil_div(words, 32);
  const int64_t wanted = std::max(words, problem.size / 8);  // so that each has few results to fill
  plan.threads = static_cast<int>(std::min<int64_t>(kMostChooseThreads, ceil_div(wanted, int64_t{32}) * 32));
  plan.parts = ceil_div(problem.size, int64_t{kChooseFill});
  plan.units = plan.threads / 32;
  plan.tiles = ceil_div(units, plan.units);
  // A part of a batch, with the same workspace, may have other tiles, or be small enough for the other algorithm.
  if (plan.tiles > 1) plan.workspace_bytes = aligned(4 * plan.tiles);
  const bool few = rows.elements() <= (problem.starts ? kMostRecountStarts : kMostRecount);
  plan.algorithm = plan.tiles == 1 || few ? Choosing::kRecount : Choosing::kLookBack;
  plan.shared_bytes = plan.threads / 32 * kChooseList * 2;
  if (plan.algorithm == Choosing::kLookBack) {
    cut_units(rows.outer, units, problem.starts, gpu, plan);
    plan.overlap = gpu.dependent_launch;
  }
  plan.blocks = rows.outer * (plan.tiles + plan.parts - 1);
  return plan;
}

// Plans a table of all segments for each lane. Returns false if there are too many segments for that.
bool plan_lanes(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  const int64_t most = kGpus[0].shared_bytes;  // the shared memory that every GPU has
  // The larger the tables, the fewer warps a multiprocessor holds. Sums of few columns have no faster kernel, so their
  // tables may be largest. Extremes of few columns have kTables or kAtomics instead, and rows of many columns kOrdered,
  // which beat large tables.
  const bool narrow = rows.inner <= kMostTableColumns;
  const int64_t bound = !narrow ? most / 4 : problem.op == Op::kSum ? most : most / 8;
  const int64_t warp_bytes = 32 * problem.segments * partial_bytes(problem);
  if (problem.byte_ids && !takes_byte_ids(problem.op, bytes_of(problem.dtype))) return false;
  if (warp_bytes > bound || rows.inner >= 1 << 26) return false;  // offsets within a row must fit in 32 bits
  plan.algorithm = Segmenting::kLanes;
  plan.columns = rows.inner % 2 == 0 && 2 * warp_bytes <= std::max(bound, most / 2) ? 2 : 1;
  // The steps of a warp wait for each other, and three or four warps, which is what tables of two columns would leave a
  // multiprocessor, cannot hide that. So lanes have one column then, and each warp a slice of its own.
  const bool alone = plan.columns == 2 && 2 * warp_bytes > 48 << 10;
  if (alone) plan.columns = 1;
  while (plan.team_bits < 5 && rows.inner > plan.columns << plan.team_bits) ++plan.team_bits;
  const int64_t teams = 32 >> plan.team_bits, chunks = ceil_div(rows.inner, plan.columns << plan.team_bits);
  const int64_t own = warp_bytes * plan.columns;
  const int64_t most_parts = alone ? 1 : most / own;
  plan.parts =
      static_cast<int>(std::clamp<int64_t>(std::min(most_parts, ceil_div(rows.length, 8 * teams)), 1, kMostLaneWarps));
  const int64_t least = teams * plan.parts * std::max<int64_t>(64, problem.segments * plan.columns / 4);
  const int64_t slices = (alone ? 528 : 1056 * std::min(plan.parts, 2) / plan.parts) / chunks;
  plan.tiles = std::clamp<int64_t>(rows.length / least, 1, std::max<int64_t>(1, slices));
  plan.rows = ceil_div(rows.length, plan.tiles);
  // Warps have whole batches of loads, where that makes slices hardly larger.
  const int64_t batch = teams * plan.parts * kLaneBatch;
  if (plan.rows >= 8 * batch) {
    plan.rows = ceil_div(plan.rows, batch) * batch;
    plan.tiles = ceil_div(rows.length, plan.rows);
  }
  if (plan.tiles > 1)
    plan.workspace_bytes = aligned(plan.tiles * rows.inner * problem.segments * partial_bytes(problem));
  const int64_t most_units = alone ? kMostLaneWarps : std::max(1, 4 / plan.parts);
  const int64_t units = std::clamp<int64_t>(gpu.shared_bytes / (own * plan.parts), 1, most_units);
  plan.warps = static_cast<int>(units * plan.parts);
  plan.shared_bytes = plan.warps * own;
  return true;
}

// Chooses the widths so that no accumulator of a sum overflows, even if one segment has all rows.
ExactShape exact_of(DType dtype, int64_t length) {
  ExactShape shape;
  int bits = 0;
  while (int64_t{1} << bits < length) ++bits;
  const int mantissa = mantissa_bits(dtype), places = dtype == DType::kFloat16 ? 30 : 254;
  shape.width = std::min(63 - mantissa - bits, 52 - mantissa);
  shape.bins = (places + shape.width - 1) / shape.width;
  shape.reciprocal = static_cast<uint32_t>((65536 + shape.width - 1) / shape.width);
  shape.step = std::ldexp(1.0, shape.width);
  return shape;
}

// Plans a table for each lane of a warp, as plan_lanes does, but of the segments of a block's range. `cell_bytes`: the
// bytes of an accumulator. The order of additions follows from the geometry, so this may not depend on the GPU: tables
// and lists fit in the shared memory that every GPU has.
// Where `may_cut`, ranges may be shorter than enough blocks would need: small tables take less time to clear, and a
// multiprocessor has many of them.
void plan_few(const Rows& rows, int64_t segments, int64_t cell_bytes, bool may_cut, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 132, kLeastRange = 8;
  plan.algorithm = Segmenting::kFew;
  while (plan.team_bits < 5 && rows.inner > 1 << plan.team_bits) ++plan.team_bits;
  const auto chunks = [&] { return ceil_div(rows.inner, 1 << plan.team_bits); };
  // Where there would be few blocks, each has fewer columns, but sectors of 32 bytes of float32.
  while (plan.team_bits > 3 && chunks() * ceil_div(segments, 16) < kBlocks && segments <= 128) --plan.team_bits;
  const int64_t teams = 32 >> plan.team_bits;
  // Every block reads all ids. So there are several ranges only if there is enough to do, and blocks enough for the GPU
  // have tables as large as possible, if need be of fewer warps.
  const int64_t most = std::max<int64_t>(1, kBlocks / chunks());
  const int64_t wanted = std::clamp<int64_t>(rows.length * segments >> 12, 1, most);
  int64_t range = std::min(segments, std::max(kLeastRange, ceil_div(segments, wanted)));
  int64_t most_shared = 60 << 10;
  const int64_t cut = segments > 256 ? 24 : 16;
  const bool many = chunks() * ceil_div(segments, cut) >= 2 * kBlocks;
  const bool pays = !many || (segments > 64 && (chunks() < kBlocks || rows.length > 512));
  if (may_cut && segments > 32 && range > cut && pays) {
    range = cut;
    if (many) most_shared = 20 << 10;
  }
  int64_t warps = std::clamp<int64_t>(ceil_div(rows.length, 4 * teams), 1, kMostFewWarps);
  const int64_t row = 32 * cell_bytes;  // bytes of a segment in the table of a warp
  const auto bytes_of_warp = [&] { return row * (range + 1) + (range < segments ? 4 * kFewList : 0); };
  const int64_t least = std::min<int64_t>(warps, rows.length > kFewRows ? 8 : 4);
  while (warps > least && warps * bytes_of_warp() > most_shared) warps = std::max(least, warps / 2);
  if (warps * bytes_of_warp() > most_shared) range = (most_shared / warps - 4 * kFewList) / row - 1;
  plan.warps = static_cast<int>(warps);
  plan.rows = range;
  plan.tiles = ceil_div(segments, range);
  plan.shared_bytes = warps * bytes_of_warp();
}

// Whether kFew takes rows, after plan_few. Of more than kFewRows it does where other kernels would take several
// launches, if its blocks read not too many ids, a team folds few rows, and not too many if one segment has all of
// them.
bool takes_few(const Segments& problem, const SegmentsPlan& plan, bool several) {
  const Rows& rows = problem.rows;
  if (rows.inner >= int64_t{1} << 31) return false;  // offsets within a row must fit in 32 bits
  if (rows.length <= kFewRows) return true;
  if (problem.sorted ? rows.length * rows.inner > 8 << 10 : !several) return false;
  const int64_t blocks = plan.tiles * ceil_div(rows.inner, 1 << plan.team_bits);
  const int64_t of_team = rows.length / (plan.warps * (32 >> plan.team_bits));
  const int64_t most_ids = rows.inner <= kMostTableColumns ? 3 << 20 : 5 << 20;
  return blocks * rows.length <= most_ids && of_team <= 128 && of_team * plan.rows <= 64 * problem.segments;
}

// Plans atomics on integers. Returns false if rows have many columns, because reading them in order is faster, and for
// sums of floats whose accumulators would take far more memory than the data.
bool plan_atomics(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  const int64_t cells = problem.segments * rows.inner;
  if (rows.inner > kMostAtomicColumns) return false;
  if (problem.op == Op::kSum && is_float(problem.dtype)) {
    if (rows.inner > kMostTableColumns || problem.dtype == DType::kFloat64) return false;
    plan.exact = exact_of(problem.dtype, rows.length);
    const int64_t bytes = ExactShape::kHeadBytes + aligned(8 * (plan.exact.bins + 1) * cells);
    if (bytes > std::max<int64_t>(16 << 20, 16 * rows.length * rows.inner)) return false;
    plan.workspace_bytes = bytes;
    // A table of the accumulators of most numbers, if it takes much less time to add it up than to read the numbers.
    plan.blocks = std::max<int64_t>(1, gpu.multiprocessors / rows.outer);
    int64_t bins = std::min<int64_t>({2, plan.exact.bins, (gpu.shared_bytes - 1024) / (8 * cells)});
    while (bins > 0 && rows.length * rows.inner < 4 * plan.blocks * cells * bins) --bins;
    plan.table_bins = static_cast<int>(bins);
    plan.shared_bytes = 8 * cells * bins;
  } else if (bytes_of(problem.dtype) < 4) {
    plan.workspace_bytes = aligned(4 * cells);
  }
  plan.algorithm = Segmenting::kAtomics;
  while (plan.team_bits < 5 && rows.inner > 1 << plan.team_bits) ++plan.team_bits;
  plan.overlap = gpu.dependent_launch;
  // Most numbers are not larger than those before if a segment has many. One atomic instruction takes eight columns.
  plan.looks = rows.length >= (rows.inner == 1 || rows.inner >= 8 ? 32 : 8) * problem.segments;
  // A warp takes `step` rows at a time: for sums twice, or eight times if that leaves a block for each multiprocessor.
  // For extremes up to sixteen times: a warp folds the rows of one segment that many of its rows have.
  const bool long_runs = problem.op == Op::kSum || (rows.inner >= 8 && !plan.looks);
  const int64_t step = 32 >> plan.team_bits, steps = ceil_div(rows.length, step);
  plan.rows =
      step * (long_runs ? std::clamp<int64_t>(ceil_div(steps, 4224), std::clamp<int64_t>(steps / 1056, 2, 8), 64)
                        : std::clamp<int64_t>(ceil_div(steps, 8448), 1, 16));
  plan.tiles = ceil_div(rows.length, plan.rows);
  return true;
}

// Ids are sorted as unsigned numbers, so that negative ids, which are no segments, come last.
sort::Problem order_of(const Segments& problem) {
  sort::Problem ids;
  ids.rows = {problem.id_rows, problem.rows.length, 1};
  ids.k = problem.rows.length;
  return ids;
}

OrderPlan plan_order(const Segments& problem, const Gpu& gpu) {
  OrderPlan plan;
  plan.sort = sort::plan_sort(order_of(problem), gpu);
  plan.positions = aligned(4 * problem.rows.length);
  plan.workspace = 2 * plan.positions;
  plan.bytes = plan.workspace + aligned(plan.sort.workspace_bytes);
  return plan;
}

// Plans tiles of rows in the order of their ids. `part_bytes`: the bytes of one column of a partial result.
void plan_tiles(const Segments& problem, int64_t part_bytes, const Gpu& gpu, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  plan.algorithm = problem.sorted ? Segmenting::kSorted : Segmenting::kOrdered;
  if (!problem.sorted) plan.order = plan_order(problem, gpu);
  // Tiles are large enough that their lanes, with 16 bytes of each row, make no more than about 4096 warps.
  const int64_t bytes = rows.inner * bytes_of(problem.dtype);
  const int64_t lanes = rows.length * ceil_div(bytes, 16);
  int64_t tile = lanes < 1 << 20 ? 32 : 64;
  while (tile < 1024 && lanes / tile > 32 * 4096) tile *= 2;
  // Here a tile is a warp's, which takes 256 rows at a time.
  if (rows.inner == 1) tile = rows.length < 1 << 20 ? 256 : 1024;
  plan.rows = tile;
  plan.tiles = ceil_div(rows.length, tile);
  const int64_t part = aligned(plan.tiles * rows.inner * part_bytes);
  plan.tails = part;
  plan.workspace_bytes = plan.order.bytes + (plan.tiles > 1 ? 2 * part : 0);
}

// Choices that depend on the number of outer indices or on the GPU must not change the order of additions.
SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu) {
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.segments == 0) return plan;
  // Clearing and adding up the tables of lanes must not take longer than reading the rows. Ids of 8 bits have no other
  // kernel.
  const bool few = rows.length <= kFewRows, dense = rows.length >= 32 * problem.segments || problem.segments <= 64;
  const bool has_lanes =
      few ? problem.byte_ids && problem.segments <= 64 && (rows.inner < 4 || rows.length * rows.inner > 1 << 18)
          : dense && !problem.sorted &&
                (problem.op == Op::kSum || rows.inner <= kMostTableColumns || rows.inner > kMostAtomicColumns);
  // Atomics are fastest for few numbers whose fold is the same in any order, and that one instruction takes.
  const bool sums_floats = problem.op == Op::kSum && is_float(problem.dtype);
  if (!few && !problem.sorted && !problem.byte_ids && !sums_floats && bytes_of(problem.dtype) >= 4 &&
      rows.elements() <= kFewNumbers && plan_atomics(problem, gpu, plan))
    return plan;
  if (has_lanes && plan_lanes(problem, gpu, plan)) return plan;
  if (problem.byte_ids) {
    plan.algorithm = Segmenting::kNone;
    return plan;
  }
  plan_few(rows, problem.segments, partial_bytes(problem), few, plan);
  // Atomics on the results themselves are two short launches, those on keys of fewer bits three.
  const bool on_keys = bytes_of(problem.dtype) < 4 && rows.length * rows.inner <= 4 << 10;
  if (takes_few(problem, plan, sums_floats || on_keys || rows.inner > kMostAtomicColumns)) return plan;
  plan = {};
  const int64_t table = problem.segments * partial_bytes(problem);
  const bool sums_ints = has_block_table(problem.op, is_float(problem.dtype), bytes_of(problem.dtype));
  // A block has one table of extremes, or of integers' sums. Larger ones must have many rows, or atomics are faster.
  const bool extremes = problem.op != Op::kSum, one = (extremes || sums_ints) && rows.length >= 256 * problem.segments;
  const int64_t shared =
      one ? std::max<int64_t>(4, partial_bytes(problem)) * problem.segments : table * kTableThreads / 32;
  const bool has_tables = !problem.sorted && rows.inner <= kMostTableColumns && shared <= 48 << 10;
  if (!(has_tables && dense) && !problem.sorted && (plan_atomics(problem, gpu, plan) || plan_lanes(problem, gpu, plan)))
    return plan;
  if (has_tables) {
    plan.algorithm = Segmenting::kTables;
    // Extremes are the same however rows are cut, so these may be cut into more slices where blocks would be few.
    const auto slices = [&](int64_t part) {
      return std::clamp<int64_t>(rows.length / (part * std::max<int64_t>(1024, problem.segments)), 1, kMostTables);
    };
    const int64_t usual = slices(sums_ints && rows.inner == 1 ? 4 : 8), most = extremes ? slices(2) : usual;
    plan.tiles = std::clamp(kMostTables / rows.count(), usual, most);
    plan.rows = ceil_div(rows.length, plan.tiles);
    plan.workspace_bytes = most > 1 ? aligned(most * rows.inner * table) : 0;
    return plan;
  }
  plan_tiles(problem, partial_bytes(problem), gpu, plan);
  return plan;
}

constexpr int64_t kMostCellBytes = 226 << 10;  // in shared memory; GPUs that have less have the cells in the workspace

// The most rows of which a block has all.
int64_t most_whole_rows(const Segments& problem) {
  return problem.dtype == DType::kFloat64 ? kMostWideRows : 4 * kMostCellThreads;
}
bool has_few_cells(const Segments& problem) {
  return problem.rows.length <= most_whole_rows(problem) && problem.segments * kBlockCellBytes <= kMostCellBytes;
}

// Plans cells of softmax for blocks that have all rows of some columns: a sector of 32 bytes, or fewer where blocks
// would be few. Returns false if there are too many rows or segments, which may not depend on the number of outer
// indices, because a part of a batch may be planned with the workspace of the whole.
bool plan_whole_cells(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 128, kFewElements = 64;
  const auto [outer, length, inner] = problem.rows;
  const bool wide = problem.dtype == DType::kFloat64;
  const int64_t most_elements = most_whole_rows(problem);
  const int64_t bytes = problem.segments * (wide ? 16 : kBlockCellBytes);  // of the cells of a column
  const int64_t most = (wide ? kGpus[0] : gpu).shared_bytes - 1024;
  if (!has_few_cells(problem) || bytes > most) return false;
  int64_t columns = 8;
  while (columns > 1 && (columns > inner || length * columns > most_elements || bytes * columns > most ||
                         (length * columns > kFewElements && ceil_div(inner, columns) * outer < kBlocks)))
    columns /= 2;
  plan.algorithm = Segmenting::kCells;
  plan.columns = static_cast<int>(columns);
  plan.rows = length;
  plan.tiles = 1;
  const int64_t elements = length * columns;
  const int64_t threads = elements <= kMostCellThreads ? elements : ceil_div(elements, 4);
  plan.warps = static_cast<int>(ceil_div(threads, 32));
  plan.shared_bytes = bytes * columns;
  return true;
}

// Plans cells for blocks that share the rows. Returns false if other kernels are faster, which may not depend on the
// GPU.
bool plan_shared_cells(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kFew = 3 << 19;  // numbers
  const auto [outer, length, inner] = problem.rows;
  const int64_t segments = problem.segments, numbers = length * inner;
  const bool must = has_few_cells(problem);
  // The cells must not take too much memory.
  if (!must && segments * inner > std::max<int64_t>(4 << 20, 4 * numbers)) return false;
  const auto blocks = [&, outer = outer, inner = inner](int64_t of_gpu) {
    return std::max<int64_t>(1, of_gpu / ceil_div(inner, plan.columns) / outer);
  };
  // Blocks have cells in shared memory, if that leaves each many rows: of up to 32 columns if a multiprocessor holds
  // two such blocks, else of 8 at least.
  const int64_t most = gpu.shared_bytes - 1024, half = kMostCellBytes / 2 - 1024;
  plan.columns = static_cast<int>(std::min<int64_t>(inner, 32));
  const auto bytes = [&] { return segments * plan.columns * kBlockCellBytes; };
  while (plan.columns > 8 && bytes() > half) plan.columns /= 2;
  const bool has_table = bytes() <= kMostCellBytes && length >= 8 * segments;
  if (has_table && bytes() <= most) {
    plan.shared_bytes = bytes();
    plan.warps = bytes() <= half ? 16 : 32;
    const int64_t most_tiles = blocks(gpu.multiprocessors * 32 / plan.warps);
    plan.tiles = std::clamp<int64_t>(length / std::max<int64_t>(64, segments), 1, most_tiles);
  } else if (must || has_table || inner < 4 || numbers <= kFew) {
    plan.columns = static_cast<int>(std::min<int64_t>(inner, 32));
    plan.warps = 8;
    const int64_t batch = 8 * (32 * plan.warps / plan.columns);
    plan.tiles = std::min(ceil_div(length, batch), blocks(32 * gpu.multiprocessors));
  } else {
    return false;
  }
  plan.algorithm = Segmenting::kCells;
  plan.rows = ceil_div(length, plan.tiles);
  plan.tiles = ceil_div(length, plan.rows);
  plan.workspace_bytes = aligned(segments * inner * kCellBytes);
  plan.overlap = gpu.dependent_launch;
  return plan.rows < int64_t{1} << 31;
}

// Whether kLanes finds both the largest numbers and the sums of many rows: then it takes less time than cells.
bool prefers_lanes(const Segments& problem) {
  const Rows& rows = problem.rows;
  const bool narrow = rows.inner <= kMostTableColumns;
  return rows.length * rows.inner > 2 << 20 && problem.segments <= (narrow ? 64 : 128) &&
         (narrow || rows.inner > kMostAtomicColumns);
}

SegmentsPlan plan_segment_softmax(const Segments& problem, const Gpu& gpu) {
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  plan.algorithm = Segmenting::kNone;
  if (rows.elements() == 0 || problem.segments == 0) return plan;
  // Ids that ascend are read in order, unless rows are few. Sums of float64 need more bits than those of many rows
  // leave.
  const bool wide = problem.dtype == DType::kFloat64;
  const bool few = rows.length <= kFewRows || rows.length * rows.inner <= 8 << 10;
  if (wide || !problem.sorted || few) {
    if (plan_whole_cells(problem, gpu, plan)) return plan;
    if (!wide && !has_few_cells(problem) && prefers_lanes(problem)) return plan;
    if (!wide && plan_shared_cells(problem, gpu, plan)) return plan;
    plan = {};
  }
  if (wide) {
    plan.algorithm = Segmenting::kNone;
    return plan;
  }
  plan_tiles(problem, kPairBytes, gpu, plan);
  plan.pairs = plan.workspace_bytes;
  plan.workspace_bytes += aligned(problem.segments * rows.inner * kPairBytes);
  return plan;
}

}  // namespace jaxgpuops::count
