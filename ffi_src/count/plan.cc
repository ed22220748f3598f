// Plans of counts, ranks, places in sorted rows and chosen places. Those of segments are in plan_segments.cc.
#include "count/plan.h"

#include <algorithm>

#include "common/rounding.h"
#include "count/firsts.h"

namespace jaxgpuops::count {
namespace {

// Returns how many slices rows are cut into, where ids are not very many. Multiprocessors have two blocks at most, so
// that all run at the same time, and the more even their shares are, the better. Costs are in ids, of which one counts
// six in a nanosecond: the launch that clears the result takes as long as 9000, adding a count to it a hundredth of
// one.
int64_t slices_of_some(const Rows& rows, int64_t units, int64_t range, const Gpu& gpu) {
  constexpr int64_t kLaunch = 9000, kCounts = 100;
  int64_t best = 1, least = ceil_div(units, gpu.multiprocessors) * rows.length;
  for (int64_t slices = 2; units * slices <= 2 * gpu.multiprocessors; ++slices) {
    const int64_t ids = ceil_div(units * slices, gpu.multiprocessors) * ceil_div(rows.length, slices);
    const int64_t cost = ids + kLaunch + units * slices * range / kCounts;
    if (cost < least) best = slices, least = cost;
  }
  return best;
}

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
  if (sliced) {
    const int64_t wanted = !small ? ceil_div(gpu.multiprocessors, units)
                           : some ? slices_of_some(rows, units, plan.range, gpu)
                                  : ceil_div(4 * gpu.multiprocessors, units);
    plan.slices = std::clamp<int64_t>(rows.length / std::max<int64_t>(4096, plan.range), 1, wanted);
  }
  const bool wide = !small || (sliced && some && units * plan.slices <= gpu.multiprocessors);
  plan.threads = wide ? 1024 : rows.length <= 2048 ? 128 : 512;
  // If rows are so few that each multiprocessor has one at most, a block is done sooner with more threads, and with one
  // table, unless it has many ids for each bin.
  const bool alone = extra == 0 && small && !sliced && units <= gpu.multiprocessors;
  if (alone) plan.threads = rows.length <= 2048 ? 256 : rows.length <= 8192 ? 512 : 1024;
  const int64_t most = alone ? std::max<int64_t>(1, rows.length / (128 * plan.range)) : plan.threads / 64;
  const int64_t per_block = small ? quarter : gpu.shared_bytes - extra;
  plan.tables = static_cast<int>(
      std::clamp<int64_t>(std::min<int64_t>(per_block, 32 << 10) / own, 1, std::min<int64_t>(most, plan.threads / 64)));
  plan.shared_bytes = own * plan.tables + extra;
  plan.overlap = gpu.dependent_launch && plan.slices > 1;
}

// Plans kParts for long rows. Returns false if there are too many bins for it, or rows are not long enough.
bool plan_parts(const Bincount& problem, const Gpu& gpu, BincountPlan& plan) {
  const Rows& rows = problem.rows;
  plan.range = 16384;
  while (8 * plan.range <= std::min<int64_t>(gpu.shared_bytes, 128 << 10)) plan.range *= 2;
  // Where the second kernel would have few blocks, parts are smaller.
  const auto parts = [&](int64_t range) { return ceil_div(problem.bins, range); };
  while (plan.range > 4096 && parts(plan.range / 2) <= kMostParts &&
         rows.outer * parts(plan.range / 2) <= gpu.multiprocessors)
    plan.range /= 2;
  plan.ranges = parts(plan.range);
  if (rows.inner > 1 || problem.bytes < 4 || plan.ranges > kMostParts) return false;
  if (rows.length < 1 << 16 || rows.elements() < 1 << 21) return false;
  plan.algorithm = Counting::kParts;
  plan.threads = kPartThreads;  // of the first kernel
  plan.shared_bytes = 4 * plan.range;
  plan.tiles = ceil_div(rows.length, kPartTile);
  // As for the most parts, because a part of a batch has its part of the workspace.
  plan.workspace_bytes = aligned(plan.tiles * (2 * kPartPitch + 8 * kPartWarps + 2 * (kMostParts + 1)));
  // A slice costs about as much as some tiles do, so it has at least 64 of them.
  plan.slices = std::clamp<int64_t>(gpu.multiprocessors / (rows.outer * plan.ranges), 1, ceil_div(plan.tiles, 64));
  plan.overlap = gpu.dependent_launch;
  return true;
}

// Plans kTables for clusters, each of which counts a range of bins in all ids of a row. Returns false if other kernels
// are faster: with fewer ids, atomics on the result; with more, blocks that read each id once.
bool plan_clusters(const Bincount& problem, const Gpu& gpu, BincountPlan& plan) {
  constexpr int64_t kClusters = 6;  // an H200 runs seven of 16 blocks with a multiprocessor each, but not eight
  constexpr int64_t kMostIds = 1 << 20, kLeastBins = 8192, kMostBins = 90'000;
  const Rows& rows = problem.rows;
  if (gpu.max_cluster < 16 || rows.inner > 1 || rows.outer > kClusters / 2) return false;
  if (rows.length <= kFewIds || rows.length > kMostIds) return false;
  if (problem.bins < (rows.elements() < 1 << 20 ? kLeastBins : 2 * kLeastBins) || problem.bins > kMostBins)
    return false;
  plan.algorithm = Counting::kTables;
  plan.threads = 1024;
  plan.tables = 1;
  plan.ranges = kClusters / rows.outer;
  plan.range = ceil_div(problem.bins, plan.ranges);
  plan.cluster = gpu.max_cluster;
  plan.slices = plan.cluster;
  plan.shared_bytes = 4 * plan.range;
  return true;
}

// Of up to kSparseIds ids in so many bins, and at most eight for each, atomics take less time than tables, too.
constexpr int64_t kManyBins = 1 << 16, kSparseIds = 5 << 18;

// For kWarps: the most ids of a row, the most bins, and the most bins for which each lane has its own counters.
constexpr int64_t kMostWarpIds = 4096, kMostWarpBins = 1536, kApartBins = 32;

// Whether warps, with a row each, take less time than blocks. A warp takes long for a long row, so there must be many
// of these. Of rows of more than 2048 ids, fewer are enough, since the blocks of kTables then have more threads, which
// wait.
bool takes_warps(const Bincount& problem) {
  const Rows& rows = problem.rows;
  const int64_t least = rows.length <= 2048 ? std::max<int64_t>(128, 4 * (rows.length - 256)) : 2048;
  return rows.inner == 1 && rows.length <= kMostWarpIds && rows.outer >= least &&
         problem.bins <= std::clamp<int64_t>(8 * rows.length, 64, kMostWarpBins);
}

// Whether warps take less time than kRows. With more bins, a multiprocessor has room for fewer lanes of kRows; with
// longer rows, L1 keeps less of the lines that these lanes read.
bool suits_warps(const Bincount& problem) {
  if (problem.bytes < 4) return false;
  const int64_t length = problem.rows.length;
  return problem.bins > 64 ? length > 40 : length > 208 || problem.bins * length > 6400;
}

}  // namespace

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu) {
  BincountPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.bins == 0) return plan;
  // Counts of at most 255 ids fit in bytes. If there are few rows, a warp or block for each row is faster.
  const int64_t words = ceil_div(problem.bins, 4) | 1, row_warps = (48 << 10) / (128 * words);
  const bool by_warp = takes_warps(problem);
  if (rows.inner == 1 && rows.length <= 255 && rows.outer >= std::max(64 * rows.length, 32 * problem.bins) &&
      128 * words <= 24 << 10 && !(by_warp && suits_warps(problem))) {
    plan.algorithm = Counting::kRows;
    plan.threads = 32 * static_cast<int>(std::min<int64_t>(row_warps, kMostRowWarps));
    plan.range = words;
    plan.shared_bytes = 4 * words * plan.threads;
    return plan;
  }
  if (by_warp) {
    plan.algorithm = Counting::kWarps;
    plan.threads = 32 * kMostRowWarps;
    plan.tables = rows.length >= 768 && problem.bins <= kApartBins ? 32 : 1;  // 32 tables take some time to add up
    plan.range = problem.bins * plan.tables;
    plan.shared_bytes = 4 * plan.range * kMostRowWarps;
    return plan;
  }
  // Each range of bins reads all ids again. Where there are many ranges, or few ids (`few`, `sparse`), atomics on the
  // result cost less: they rarely meet in a bin.
  const int64_t ranges = ceil_div(problem.bins, gpu.shared_bytes / 4);
  const bool few = rows.elements() <= kFewIds &&
                   problem.bins >= std::min(kFewBins, std::max(rows.length / 8, rows.elements() / 32)) &&
                   rows.length <= 16 * problem.bins && rows.outer * ranges < gpu.multiprocessors / 2;
  const bool sparse =
      problem.bins >= kManyBins && rows.outer <= 2 && rows.length <= 8 * problem.bins && rows.elements() <= kSparseIds;
  if (!sparse && plan_clusters(problem, gpu, plan)) return plan;
  if (ranges > 4 && plan_parts(problem, gpu, plan)) return plan;
  if (rows.inner > 1 || ranges > 4 || few || sparse || rows.outer * ranges > kMostBlocks) {
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
  if (rows.inner > 1 || 4 * problem.bins + edges > gpu.multiprocessor_shared / 4 || rows.outer > kMostBlocks) {
    plan.algorithm = Counting::kNone;
    return plan;
  }
  plan_tables(rows, problem.bins, 1, edges, gpu, plan);
  return plan;
}

namespace {

// Whether columns are so few that the caches deliver them to warps as fast as rows.
bool reads_columns(const Rows& rows, int bits) {
  const int64_t most = bits <= 16 ? 1 << 20 : bits == 32 && rows.inner <= 4 ? 1 << 18 : (1 << 22) / bits;
  return rows.elements() <= most;
}

// Chooses the kernel for rows of up to kMostWarpSelect elements, or kNone where sorting them takes less time. If a
// kernel takes the whole batch, one must take every part of it, too: that part only has its part of the workspace.
Selecting plan_short_select(const Select& problem, const Gpu& gpu) {
  const Rows& rows = problem.rows;
  constexpr int64_t kMostTiny = 4096;  // rows of up to 8 elements, each of which a warp takes
  const bool reads = rows.inner == 1 || reads_columns(rows, problem.bits);
  // Threads select from rows of up to 8 elements, for three ranks only if the rows are not too many.
  const bool sorts = problem.bits == 64 || problem.count > 3 || (problem.count > 1 && rows.count() > 1 << 18);
  if (rows.length <= 8 && sorts) return rows.count() <= kMostTiny && reads ? Selecting::kWarp : Selecting::kNone;
  // The largest tables of threads do not fit in the shared memory of every GPU.
  if (rows.length == kMostThreadSelect && problem.bits == 32 && gpu.shared_bytes <= 64 << 10) return Selecting::kNone;
  const bool few = rows.count() <= 2048;
  if (problem.bits <= 32 && rows.length <= kMostThreadSelect) {
    // A warp finishes a row sooner than a thread does, so warps take the rows if these are few. Not if there are many
    // ranks, which a warp finds one after another, nor if there are many columns, which a warp cannot read in place.
    const bool many_ranks = problem.count > 3;
    const bool by_warp = rows.length <= 16 ? rows.count() <= 1024
                         : many_ranks      ? rows.length > 32 && few && rows.count() < 64 * rows.length
                                           : rows.count() <= 128 * rows.length;
    return by_warp && reads ? Selecting::kWarp : Selecting::kThread;
  }
  if (problem.count > 3) return rows.length > 512 && problem.bits == 32 ? Selecting::kWarp : Selecting::kNone;
  return rows.length > kMostThreadSelect || few ? Selecting::kWarp : Selecting::kNone;
}

// Chooses how a warp selects: it compares all elements of short rows, sorts rows of few bits or elements, bisects other
// rows, or goes by steps: of many long rows, or if ranks are many.
void plan_warp_select(const Select& problem, SelectPlan& plan) {
  const int64_t length = problem.rows.length, rows = problem.rows.count();
  const bool few_ranks = problem.count <= 3;
  if (length <= kMostThreadSelect) {
    plan.bisects = few_ranks && problem.bits <= 32 && (length > 50 || (length > 16 && rows > 1024));
    return;
  }
  if (few_ranks && problem.bits <= 32) {
    if (length <= 128 && rows <= 2048) return;
    if (length <= 256 && rows <= 1000 && problem.bits <= 16) return;
  }
  plan.bisects = few_ranks && (length <= 256 || rows <= 1000);
  if (plan.bisects) return;
  constexpr int64_t kStep = 128;  // elements that a warp takes at a time
  // Many columns come to shared memory together, with room between them, so that threads write to different banks.
  const bool together = problem.rows.inner * problem.bits > 128 && !reads_columns(problem.rows, problem.bits);
  plan.pitch = round_up(length, kStep) + (together ? 8 : 0);
  plan.shared_bytes = kShortSelectThreads / 32 * plan.pitch * (problem.bits == 64 ? 8 : 4);
}

// Plans a cluster of blocks for each row, or returns false if other kernels are faster: where a row has no room, and
// where blocks would have much of it each. `must`: whether a block has no room for a row. If a cluster takes the whole
// batch, one takes every part of it, too, or kernels that need no more workspace.
bool plan_select_cluster(const Select& problem, bool must, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kStatic = 8 << 10;         // bytes of shared memory that the kernel declares itself
  constexpr int64_t kLargePart = 104 << 10;    // bytes of a row in a block
  constexpr int64_t kMostElements = 25000;     // of a part, if a cluster has few ranks to find
  constexpr int64_t kMostQuantiles = 5 << 16;  // elements of a row with more ranks
  const Rows& rows = problem.rows;
  const bool parts = problem.kth >= 0, many = parts || problem.count > 3;
  // Shorter rows than these are faster in one block.
  const int64_t least = parts ? 16384 : problem.bits == 64 ? 12000 : 24000;
  if (!must && (rows.length < least || rows.count() * (parts ? 2 : 4) > gpu.multiprocessors)) return false;
  if (!parts && many && rows.length > kMostQuantiles) return false;
  const int64_t packs = rows.length * problem.bits / 128 + 2, tables = problem.count * int64_t{4} << kSelectBinBits;
  const int64_t most = gpu.shared_bytes - kStatic - tables;
  // Elements that a block should have at least.
  const int64_t least_part = parts ? 2000 : problem.bits == 64 ? 3000 : 6000;
  const auto part = [&](int64_t blocks) { return 16 * ceil_div(packs, blocks); };
  const auto alone = [&](int64_t blocks) { return blocks * rows.count() <= gpu.multiprocessors; };
  int64_t blocks = 2;
  while (blocks <= gpu.max_cluster && part(blocks) > most) blocks *= 2;
  if (blocks > gpu.max_cluster || rows.count() * gpu.max_cluster >= int64_t{1} << 31) return false;
  while (2 * blocks <= gpu.max_cluster &&
         (alone(2 * blocks) ? rows.length >= 2 * blocks * least_part : many && part(blocks) > kLargePart))
    blocks *= 2;
  const int64_t elements = ceil_div(rows.length, blocks);
  if (!many && (!alone(blocks) || elements > kMostElements)) return false;
  // All multiprocessors share a partition of longer rows.
  if (parts && problem.bits > 8 && rows.length * problem.bits >= 1 << 24) return false;
  plan.algorithm = Selecting::kCluster;
  plan.threads = alone(blocks) && elements > 19000 ? kMostClusterThreads : kMostClusterThreads / 2;
  plan.blocks = blocks;
  plan.table_at = part(blocks);
  plan.shared_bytes = plan.table_at + tables;
  return true;
}

// Whether blocks with a row in registers read columns in place: if the sectors of a line have few others, or if these
// columns are few.
bool registers_read_columns(const Rows& rows, int bits) {
  return rows.inner * bits <= 128 || rows.elements() <= (1 << 22) / bits;
}

// Plans a team of warps for each row, or returns false where other kernels are faster: where rows are few, since one
// row takes a team longer than it takes a block, and where few rows have room in a multiprocessor.
bool plan_select_teams(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kMostAlone = 32, kMostWarps = 24, kStatic = 6 << 10;
  const Rows& rows = problem.rows;
  const int64_t length = rows.length, count = rows.count();
  const bool is_long = problem.bits == 32, parts = problem.kth >= 0;
  if ((problem.bits != 32 && problem.bits != 16) || !gpu.bulk_copy) return false;
  if (rows.inner > 1 && registers_read_columns(rows, problem.bits)) return false;
  const int64_t some = 8 * gpu.multiprocessors, many = 16 * gpu.multiprocessors, most = 31 * gpu.multiprocessors;
  int64_t least = many;  // rows
  plan.team = 1;
  if (length <= kMostWarpSelect) {
    // Of shorter rows, warps have the elements in registers, or a sort takes less time.
    if (rows.inner > 1 || length <= 256 || (problem.count > 3 && (length <= 512 || !is_long))) return false;
    least = length <= 512 ? some : problem.count == 1 ? 2 * gpu.multiprocessors : 1;
  } else if (parts) {
    if (length > 4096) return false;
    if (!is_long) least = (length <= 2048 ? 1 : 4) * gpu.multiprocessors;
  } else if (problem.count > 3) {
    if (length > 2048) return false;
    least = most;
  } else if (length > 4096) {
    if (length > (is_long ? 6144 : 8192)) return false;
    least = is_long ? many : 2 * most;
    plan.team = 2;
  } else if (is_long && length > 3072) {
    if (problem.count == 1) return false;
    least = most;
  }
  // Rows may begin anywhere in 16 bytes.
  const int64_t room = round_up(length * problem.bits / 8, 16) + 16, own = room + (int64_t{4} << kSelectBinBits);
  const int64_t fitting = std::min((gpu.shared_bytes - kStatic) / own, plan.team == 1 ? kMostAlone : kMostWarps / 2);
  if (count < least || fitting < 6) return false;
  plan.algorithm = Selecting::kTeams;
  plan.blocks = std::min(count, gpu.multiprocessors);
  const int64_t teams = std::min(fitting, ceil_div(count, plan.blocks));
  plan.threads = 32 * plan.team * static_cast<int>(teams);
  plan.table_at = room;
  plan.shared_bytes = teams * own;
  return true;
}

// Plans the registers of a block for each row, or returns false where shared memory is faster.
bool plan_select_registers(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  const Rows& rows = problem.rows;
  const bool parts = problem.kth >= 0;
  // A block of fewer threads has parts with more elements in longer rows.
  constexpr int64_t kMostOfFew = kMostRegisterSelect / 2, kLong = kMostOfFew * 3 / 4;
  if ((problem.bits != 32 && problem.bits != 16) || rows.length > (parts ? kMostOfFew : kMostRegisterSelect))
    return false;
  const bool is_long = rows.length > kLong && rows.length <= kMostOfFew;
  if (parts) {
    // Whole vectors of the results are written.
    if (problem.bits != 32 || rows.length % 4 != 0 || (is_long && 2 * rows.count() < gpu.multiprocessors)) return false;
  } else if (is_long && problem.bits == 32 && problem.count <= 3 && rows.count() > 4 * gpu.multiprocessors) {
    return false;
  }
  plan.algorithm = Selecting::kRegisters;
  plan.threads = 64;
  while (rows.length > plan.threads * kRegisterSelect) plan.threads *= 2;
  // If rows are few, the GPU has room for more threads for each.
  const bool few = rows.count() <= gpu.multiprocessors;
  if (rows.count() <= 2 * gpu.multiprocessors) {
    const bool most = !parts && rows.length >= 4096 + !few;
    plan.threads = std::max(plan.threads, most ? 512 : few ? 256 : 128);
  }
  if (!parts && registers_read_columns(rows, problem.bits))
    plan.turns = false, plan.workspace_bytes = plan.turned_bytes = 0;
  plan.shared_bytes = parts ? rows.length * problem.bits / 8 : 0;  // of a partition, the results
  return true;
}

void plan_long(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kStatic = 3072;  // bytes of shared memory that the kernel declares itself
  const Rows& rows = problem.rows;
  plan.algorithm = Selecting::kLong;
  plan.threads = kLongThreads;
  const int64_t counts = problem.count * int64_t{4} << kLongBinBits;
  const int64_t packs = rows.length * problem.bits / 128 + 2;
  plan.slices = std::clamp<int64_t>(2 * gpu.multiprocessors / rows.count(), 1, ceil_div(packs, 4 * kLongThreads));
  plan.slice_packs = ceil_div(packs, plan.slices);
  // Two blocks share a multiprocessor. A thread keeps some elements, and 2 bytes for each of its steps, in which it
  // reads 16 elements (8 of 64 bits).
  const int64_t steps = ceil_div(plan.slice_packs * 16, kLongThreads * (problem.bits == 64 ? 64 : 2 * problem.bits));
  plan.kept_steps = static_cast<int>(std::min<int64_t>(steps, kMostKeptSteps));
  const int64_t declared = problem.bits == 64 ? 4096 : kStatic;
  const int64_t room = gpu.multiprocessor_shared / 2 - 1024 - declared - counts - kLongThreads * 2 * plan.kept_steps;
  const bool is_byte = problem.bits == 8;  // a block keeps its own counts of bytes
  if (room < 0 || is_byte) plan.kept_steps = 0;
  if (!is_byte) plan.kept = 32 * static_cast<int>(std::max<int64_t>(0, room) / (kLongThreads * problem.bits / 8));
  const int64_t kept_bytes = kLongThreads * (plan.kept / 32 * problem.bits / 8 + 2 * plan.kept_steps);
  // In the end a list and counts of its keys take the same place.
  plan.shared_bytes = std::max<int64_t>(counts + (is_byte ? counts : kept_bytes),
                                        kLongFew * (4 + problem.bits / 8) + (int64_t{4} << kLongBinBits));
  plan.table_at = kLongHeadBytes;
  plan.list_at = plan.table_at + kLongTables * counts;
  plan.list_size = std::max<int64_t>(kLongFew, plan.slices);
  if (problem.kth >= 0) plan.tiles = ceil_div(rows.length + 128 / problem.bits - 1, kPartitionTile);
  plan.list_bytes = plan.list_size * (4 + problem.bits / 8);
  plan.row_bytes = aligned(plan.list_at + problem.count * plan.list_bytes + 8 * plan.tiles);
  plan.workspace_bytes += rows.inner * plan.row_bytes;
  // A launch for the samples takes some microseconds. It pays where each block would take a sample for many ranks, or
  // where intervals must be narrow.
  const int64_t most_own = int64_t{1} << (problem.count > 3 ? 20 : 21);
  plan.apart = !is_byte && plan.slices > 1 && rows.elements() > most_own;
  plan.overlap = plan.apart && gpu.dependent_launch;
}

}  // namespace

SelectPlan plan_select(const Select& problem, const Gpu& gpu) {
  SelectPlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return plan;
  plan.algorithm = rows.length <= kMostWarpSelect ? plan_short_select(problem, gpu) : Selecting::kBlock;
  if (problem.count > kMostRanks || rows.count() >= int64_t{1} << 31) {
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  if (rows.length <= kMostWarpSelect && plan_select_teams(problem, gpu, plan)) return plan;
  if (plan.algorithm == Selecting::kNone) return plan;
  if (plan.algorithm == Selecting::kThread) {
    plan.threads = kShortSelectThreads;
    plan.pitch = rows.length | 1;  // threads read from different banks
    const int64_t words = kShortSelectThreads * plan.pitch;
    plan.table_at = problem.bits > 16 ? 4 * words : kShortSelectThreads * rows.length * problem.bits / 8;
    plan.shared_bytes = plan.table_at + 4 * words;
    return plan;
  }
  // Warps read columns in place, but for many short ones of 64 bits.
  const bool in_place = rows.length > kMostThreadSelect || reads_columns(rows, problem.bits);
  plan.turns = rows.inner > 1 && !(plan.algorithm == Selecting::kWarp && in_place);
  if (plan.turns) plan.turned_bytes = aligned(rows.length * rows.inner * problem.bits / 8);
  plan.workspace_bytes = plan.turned_bytes;
  if (plan.algorithm == Selecting::kWarp) {
    plan.threads = kShortSelectThreads;
    plan_warp_select(problem, plan);
    return plan;
  }
  if (plan_select_teams(problem, gpu, plan) || plan_select_registers(problem, gpu, plan)) return plan;
  constexpr int64_t kStatic = 3072;  // bytes of shared memory that the kernel declares itself
  const int64_t tables = problem.count * int64_t{4} << kSelectBinBits;
  // 32 more, since keys begin at the same distance from a multiple of 16 bytes as the elements.
  const int64_t bytes = aligned(rows.length * problem.bits / 8 + 32);
  if (bytes + tables + kStatic <= gpu.shared_bytes) {
    if (plan_select_cluster(problem, false, gpu, plan)) return plan;
    const int64_t own = ceil_div(rows.count(), gpu.multiprocessors);  // rows of a multiprocessor
    plan.threads = rows.length <= 2048    ? (problem.count > 3 || own <= 9 ? 128 : 64)
                   : rows.length <= 4096  ? 128
                   : rows.length <= 8192  ? 256
                   : rows.length <= 16384 ? 384
                                          : 1024;
    // If rows are few, the GPU has room for more threads for each.
    if (own <= 2)
      plan.threads = std::max(plan.threads, problem.kth >= 0 ? 512 : std::min(2 * plan.threads, 512));
    else if (own <= 4 && rows.length > 2048 && rows.length <= 4096)
      plan.threads *= 2;
    plan.table_at = bytes;
    plan.shared_bytes = plan.table_at + tables;
    return plan;
  }
  if (plan_select_cluster(problem, true, gpu, plan)) return plan;
  if (problem.quantiles) {  // to tell the last block would take as long as a launch
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  plan_long(problem, gpu, plan);
  return plan;
}

SelectPlan plan_firsts(const Rows& rows, int64_t k, int bits, const Gpu& gpu) {
  SelectPlan plan;
  plan_long(firsts_of(rows, k, bits), gpu, plan);
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
  constexpr int64_t kMost = 4096;  // queries of a block
  const int64_t bytes = (problem.length | 1) * problem.bits / 8, all = plan.rows * plan.queries;
  // Few queries have a thread each.
  const int64_t least = 8 * all <= 256 * blocks ? 256 : 1024;
  const int64_t wanted = std::clamp<int64_t>(all / blocks, least, kMost);
  plan.algorithm = Searching::kRows;
  plan.group_rows =
      static_cast<int>(std::clamp<int64_t>(std::min(wanted / plan.queries, kMostSearchRows / bytes), 1, plan.rows));
  if (plan.group_rows > 4) plan.group_rows -= plan.group_rows % 4;  // queries and places begin at whole vectors
  plan.shared_bytes = plan.group_rows * bytes;
  if (plan.group_rows == 1) return cut_rows(std::max<int64_t>(1, blocks / plan.rows), least, 256, plan);
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
  if (rows.elements() <= kMostTeamSearch && problem.length >= kLeastTeamSearch) plan.team = 32;
  if (rows.inner > 1 || (problem.sorted.axis_stride != 1 && problem.length > 1)) return plan;
  plan.rows = rows.outer, plan.queries = rows.length;
  const IndexMap& outer = problem.sorted.outer;
  if (std::all_of(outer.stride, outer.stride + outer.groups, [](int64_t stride) { return stride == 0; }))
    plan.rows = 1, plan.queries = rows.elements();  // all queries share one row
  const bool whole = plan.rows == 1 || (outer.groups == 1 && outer.stride[0] == problem.length);  // or some share one
  const int64_t most_blocks = 8 * gpu.multiprocessors, bytes = problem.length * problem.bits / 8;
  // If a row does not have many more elements than queries, searches read most of it. If a row has fewer than 8
  // queries, blocks need many rows, and rows must be still shorter.
  const int64_t all = plan.rows * plan.queries;
  const bool some = plan.queries >= 8, few_queries = plan.queries >= 2 && all >= 1 << 18;
  const int64_t most_for_two = some ? 6 : problem.bits == 64 ? 4 : 3;  // elements of a row for two of its queries
  const bool is_byte =
      whole && bytes <= kMostSearchRow && (some || few_queries) && 2 * problem.length <= most_for_two * plan.queries;
  if (problem.length <= 4 && all < 16 << 10) return plan;  // there is little to read and to do
  const int64_t least = all < 64 << 10 ? (is_byte ? all + 1 : 4096) : is_byte ? 2048 : 512;
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
  const bool trees = problem.bits > 8 && plan.queries >= 1024 * few && problem.length >= 32;
  // In rows of nearly 256 words, the searches of many lanes read the same banks; trees do not.
  if (is_byte && (!trees || problem.bits != 32 || bytes <= kMostSearchRow - 64)) {
    plan_search_rows(problem, most_blocks, plan);
    return plan;
  }
  constexpr int kMostWideGroup = 4;  // elements of 64 bits in larger groups come from too many sectors
  // Each block reads a tree of 2^levels words, which is worth while for at least half as many queries.
  if (!trees) return plan;
  constexpr int kMostThreads = 1024;
  const int64_t word = problem.bits / 8, most_near = (kMostThreads / 32 * word) << kNearBits;
  const int64_t most = std::min<int64_t>(gpu.shared_bytes - most_near, 128 << 10) / word;
  while ((2 << plan.levels) <= std::min(most, 2 * plan.queries / few) && int64_t{1} << plan.levels < problem.length)
    ++plan.levels;
  // The last group needs no splitter.
  while (ceil_div(problem.length, int64_t{1} << plan.group_bits) > int64_t{1} << plan.levels) ++plan.group_bits;
  if (problem.bits == 64 && plan.group_bits > kMostWideGroup) return plan;
  plan.algorithm = Searching::kTree;
  const int64_t tree = word << plan.levels, near = plan.group_bits ? most_near : 0;
  plan.threads = tree + near / 2 > gpu.multiprocessor_shared / 2 - 1024 ? kMostThreads : kMostThreads / 2;
  plan.shared_bytes = tree + near * plan.threads / kMostThreads;
  cut_rows(plan.threads == kMostThreads ? few : 2 * few, 1, kTreeTurn, plan);
  // Blocks check whether their queries are in order if the elements between the queries of a turn fit in shared memory,
  // and if there is room for all blocks in spite of the registers that the check takes. (Groups of 32 bits take as many
  // registers anyway.) Warps with few queries gain too little.
  const int64_t warps = plan.threads / 32;
  if (problem.bits == 64) return plan;  // the check and its windows would take too many registers
  const bool fit = 32 * plan.rows * plan.blocks * warps <= 1024 * gpu.multiprocessors;
  if (plan.chunk < kOrderTurn * warps || !(fit || (problem.bits == 32 && plan.group_bits > 0))) return plan;
  while ((word * warps << (plan.near_bits + 1)) <= plan.shared_bytes) ++plan.near_bits;
  if (plan.near_bits < 5 || problem.length > (plan.queries / kOrderTurn) << plan.near_bits) plan.near_bits = 0;
  return plan;
}

// Up to so many elements (of a mask; of other arrays), each block counts everything before its own tile. Reading that
// takes less time than a second launch.
constexpr int64_t kMostRecount = 64 << 10, kMostRecountStarts = 16 << 10;

namespace {

// Cuts rows of `units` into tiles for kLookBack, so that blocks have few turns, and the last turn leaves few of them
// idle.
void cut_units(int64_t outer, int64_t units, bool starts, const Gpu& gpu, ChoosePlan& plan) {
  constexpr int64_t kWarps = kMostChooseThreads / 32, kListBytes = kWarps * kChooseList * 2;
  const int64_t unit_bytes = 4 * 32 + (starts ? 8 : 4);
  constexpr int64_t kTurn = 3;  // the waits of a turn take about as long as three units of each warp
  const int64_t each = starts ? kStartsBlocks : kMaskBlocks;
  const int64_t shared = std::min(gpu.shared_bytes, gpu.multiprocessor_shared / each) - 2048;
  const int64_t most = std::min<int64_t>((shared - kListBytes) / unit_bytes, kMostChooseThreads);
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
  // Warps with several units list places while they read, so that less work is left when other blocks have told their
  // counts. A third of the memory is left to L1, through which all elements pass.
  const int64_t bytes = plan.units * unit_bytes, own = gpu.multiprocessor_shared * 7 / 10 / each - 1024;
  const int64_t room = std::max<int64_t>(kChooseList, (own - bytes) / (2 * kWarps));
  const int64_t useful = ceil_div(plan.units, kWarps);
  plan.list = std::min(room, useful * kChooseList) / 2 * 2;
  plan.early = plan.units > kWarps;
  plan.shared_bytes = bytes + 2 * kWarps * plan.list;
}

}  // namespace

ChoosePlan plan_choose(const Choose& problem, const Gpu& gpu) {
  ChoosePlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.size == 0) return plan;
  // A block has one row at least.
  if (rows.inner > 1 || (rows.length < 128 && rows.outer > 2048) || rows.outer > kMostBlocks) {
    plan.algorithm = Choosing::kNone;
    return plan;
  }
  // A row begins anywhere in its first vector of 16 bytes.
  const int64_t words = (rows.length + 15) / 32 + 1, units = ceil_div(words, 32);
  const int64_t wanted = std::max(words, problem.size / 8);  // enough threads that each fills few results
  plan.threads = static_cast<int>(std::min<int64_t>(kMostChooseThreads, ceil_div(wanted, int64_t{32}) * 32));
  plan.units = plan.threads / 32;
  plan.tiles = ceil_div(units, plan.units);
  // A part of a batch, with the same workspace, may have other tiles, or be small enough for the other algorithm.
  if (plan.tiles > 1) plan.workspace_bytes = aligned((problem.starts ? 8 : 4) * plan.tiles);
  const bool few = rows.elements() <= (problem.starts ? kMostRecountStarts : kMostRecount);
  plan.algorithm = plan.tiles == 1 || few ? Choosing::kRecount : Choosing::kLookBack;
  plan.shared_bytes = plan.threads / 32 * kRecountList * 2;
  if (plan.algorithm == Choosing::kLookBack) {
    cut_units(rows.outer, units, problem.starts, gpu, plan);
    plan.overlap = gpu.dependent_launch;
  }
  // Two blocks share a multiprocessor. All parts are filled at the same time, since a block first finds out where the
  // fills begin.
  const int64_t together = std::max(2 * gpu.multiprocessors - rows.outer * plan.tiles, int64_t{gpu.multiprocessors});
  plan.fill = std::max(kChooseFill, aligned(ceil_div(rows.outer * problem.size, together)));
  plan.parts = ceil_div(problem.size, plan.fill);
  plan.blocks = rows.outer * (plan.tiles + plan.parts - 1);
  return plan;
}

}  // namespace jaxgpuops::count
