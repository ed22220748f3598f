// Plans of bincount and histogram.
#include "count/plan.h"

#include <algorithm>

#include "common/rounding.h"

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
  // One more slice costs about as much as a few tiles, so each slice has at least 64 tiles.
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
  if (gpu.max_cluster < 16 || rows.inner > 1 || rows.outer > kClusters) return false;
  if (rows.length < kFewIds || rows.length > kMostIds) return false;
  if (problem.bins < (rows.elements() < 1 << 20 ? kLeastBins : 2 * kLeastBins) || problem.bins > kMostBins)
    return false;
  plan.algorithm = Counting::kTables;
  plan.threads = 1024;
  plan.tables = 1;
  plan.ranges = kClusters / rows.outer;
  plan.range = ceil_div(problem.bins, plan.ranges);
  if (4 * plan.range > gpu.shared_bytes - 1024) return false;
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
  // Once rows have that many ids for each bin together, a block with a table for each row takes less time.
  constexpr int64_t kOfBin = 32, kFixedBins = 600, kMostWhole = 8192;
  const bool dense = rows.length <= kMostWhole && rows.elements() >= kOfBin * (problem.bins + kFixedBins);
  const bool few = !dense && rows.elements() <= kFewIds &&
                   problem.bins >= std::min(kFewBins, std::max(rows.length / 8, rows.elements() / 32)) &&
                   rows.length <= 16 * problem.bins && rows.outer * ranges < gpu.multiprocessors / 2;
  // Slices of a few longer rows would have few ids for each bin, too. (Clusters count three to six such rows.)
  constexpr int64_t kLeastBins = 1 << 15, kMostOfRows = 7 << 18, kMostCounters = 1 << 21;
  const bool sparse =
      rows.length <= 8 * problem.bins &&
      (rows.outer <= 2 ? problem.bins >= kManyBins && rows.elements() <= kSparseIds
                       : rows.outer > 3 && problem.bins >= kLeastBins && rows.elements() <= kMostOfRows &&
                             rows.outer * problem.bins <= kMostCounters);
  if ((!sparse || rows.outer > 2) && plan_clusters(problem, gpu, plan)) return plan;
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

}  // namespace jaxgpuops::count
