#include "reduce/plan.h"

#include <algorithm>
#include <numeric>

#include "common/rounding.h"
#include "row_engine/plan.h"

namespace jaxgpuops::reduce {
namespace {

// The most elements of an array whose floats the small kernel adds up: if a lane could hold a column, and if columns
// are longer.
constexpr int64_t kSmallHeld = 1 << 13, kSmallWalked = 1 << 16;
constexpr int64_t kFlatBlocks = 4;           // the most flat rows per multiprocessor that flat_sums_kernel adds up
constexpr int64_t kPackedLength = 96;        // the shortest axis of 32-bit integers whose columns are read in vectors
constexpr int64_t kWarpBytes = 8 * 32 * 16;  // the longest row that a warp holds
// Sums whose warps have a span each: the least spans of aligned rows, the longest row, and the most warps per
// multiprocessor.
constexpr int64_t kLeastHeldSpans = 4, kLongestHeld = 96 << 10, kHeldResident = 32;

// Sums of few rows of several spans are fastest if a block has a row, a warp a span, and a lane all that it has of the
// span in other kernels (short_rows.cu). Rows of less than 64 bits that are not aligned take a lane too much to load.
bool holds_spans(const RowPlan& plan, const Problem& problem, const Gpu& gpu) {
  const int64_t row_bytes = problem.rows.length * plan.traits.item_bytes;
  const bool has_kernel = problem.op == Op::kSum && is_float(problem.dtype) && plan.traits.item_bytes > 1;
  const bool several =
      plan.traits.item_bytes == 8 ? plan.spans > 1 : row_bytes % 16 == 0 && plan.spans >= kLeastHeldSpans;
  return has_kernel && !problem.masked && plan.algorithm == RowAlgorithm::kRows && several &&
         plan.spans <= kMaxBlockWarps && row_bytes <= kLongestHeld &&
         problem.rows.outer * plan.spans <= kHeldResident * gpu.multiprocessors;
}

// Sums of rows that are not whole vectors (cuda/loose_rows.cu), if they are so long that this is faster for few rows,
// too, and also for many. A warp has at most kLooseWords words of a row. Longer rows are cut into parts of kLoosePart
// bytes, of which kLoosePartWarps warps have one each.
constexpr int64_t kShortestLoose = 704, kLooseWords = 36 * 32, kMostLooseWarps = 16;
constexpr int64_t kLoosePart = 16 << 10, kLongestLoose = 128 * kLoosePart;
constexpr int kLoosePartWarps = 8;
constexpr int kLooseBlockWarps = 4;  // rows of a block whose warps have a row each
// Few rows: kMostLooseGroups groups of that many warps have a row, or as many as a block has warps for, if that makes
// at most so many warps per multiprocessor.
constexpr int64_t kMostLooseGroups = 8, kLooseResident = 16;

bool is_loose(const Problem& problem, int64_t item_bytes) {
  const int64_t row_bytes = problem.rows.length * item_bytes;
  return problem.op == Op::kSum && !problem.masked && !is_rare(problem.dtype) && problem.rows.inner == 1 &&
         problem.rows.outer > 0 && row_bytes % 16 != 0 && row_bytes > kShortestLoose && row_bytes <= kLongestLoose;
}

// The number of warps that share a row (`spans`, a power of two) follows from its length, since it decides the order of
// additions. `wide` is the number of groups of that many warps, or 0 if a warp has a row alone.
void plan_loose(RowPlan& plan, const Problem& problem, const Gpu& gpu) {
  const int64_t outer = problem.rows.outer, words = problem.rows.length * plan.traits.item_bytes / 4;
  plan.lane_bits = 5;
  if (words > kLooseWords * kMostLooseWarps) {
    plan.spans = plan.block_warps = kLoosePartWarps;
    plan.wide = 1;
    plan.split = true;
    plan.part_length = kLoosePart / plan.traits.item_bytes;
    plan.blocks = plan.units = ceil_div(problem.rows.length, plan.part_length);
    plan.workspace_bytes = ceil_div(plan.blocks * plan.traits.stat_bytes, 16) * 16;
    return;
  }
  plan.spans = 1;
  while (words > kLooseWords * plan.spans) plan.spans *= 2;
  const int64_t groups = std::min<int64_t>(kMostLooseGroups, kMaxBlockWarps / plan.spans);
  const bool few = outer * groups * plan.spans <= kLooseResident * gpu.multiprocessors;
  plan.wide = few ? static_cast<int>(groups) : plan.spans > 1 ? 1 : 0;
  plan.block_warps = static_cast<int>(std::max(plan.wide, 1) * plan.spans);
  if (plan.wide) return;
  plan.block_warps = kLooseBlockWarps;
  while (plan.block_warps > 1 && ceil_div(outer, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
}

// Flat rows of middle length that are no whole vectors (chain_sums_kernel of cuda/small.cu): the most elements and
// columns; the least chains; the most elements of a chain, if there could be more chains.
constexpr int64_t kLongestChained = 1 << 14, kMostChainedColumns = 32, kLeastChains = 128, kLongChain = 16;
constexpr int64_t kMostChains = 32 * kSmallFlatWarps;

bool is_chained(const RowPlan& plan, const Rows& rows) {
  const bool whole =
      (plan.algorithm == RowAlgorithm::kColumnsFlat && plan.blocks == 1 && !plan.split && plan.slices == 1);
  const int64_t elements = rows.length * rows.inner;
  return whole && elements <= kLongestChained && elements * plan.traits.item_bytes % 16 != 0 &&
         rows.inner <= kMostChainedColumns;
}

void plan_chains(RowPlan& plan, const Rows& rows) {
  int64_t chains = kLeastChains;
  while (chains < kMostChains && kLongChain * chains < rows.length * rows.inner) chains *= 2;
  plan.algorithm = RowAlgorithm::kSmall;
  plan.flat = plan.single = true;
  plan.part_length = chains / rows.inner * rows.inner;
  plan.block_warps = static_cast<int>(chains / 32);
  plan.lane_bits = 5;
  while (rows.inner << plan.lane_bits > chains) --plan.lane_bits;
}

constexpr int kPackedWarps = 8;  // of a block

// Sums of rows of which a vector of 16-bit floats has one or two (cuda/packed_rows.cu).
bool is_packed(const Problem& problem, int64_t item_bytes) {
  return problem.op == Op::kSum && !problem.masked && !is_rare(problem.dtype) && item_bytes == 2 &&
         problem.rows.inner == 1 && problem.rows.outer > 0 && (problem.rows.length == 4 || problem.rows.length == 8);
}

// Long columns whose lines are not whole vectors (cuda/loose_columns.cu): the most bytes of a line whose columns a
// block has; about the bytes of a strip of longer ones; about the threads of a block; the least windows of a record of
// short lines; about the windows that a thread has, at least.
constexpr int64_t kWholeLine = 512, kStripBytes = 256, kLooseThreads = 256, kRecordWindows = 24, kLooseWindows = 8;
// The most blocks that share columns; about the most that share an outer index, unless each has a few windows; the most
// parts that are made longer, so that a cluster has them; the most blocks per multiprocessor that are clusters.
constexpr int64_t kMostLooseParts = 256, kLooseBlocks = 528, kFewLooseParts = 24, kLooseClusters = 4;

// The most bytes of an outer index whose lines are odd. (Of longer ones flat_kernel reads a single one faster.)
constexpr int64_t kLongestOdd = 2 << 20;

bool is_loose_columns(const RowPlan& plan, const Problem& problem) {
  const Rows& rows = problem.rows;
  const int64_t bytes = 2 * rows.length * rows.inner;
  if (problem.op != Op::kSum || problem.masked || is_rare(problem.dtype) || plan.traits.item_bytes != 2) return false;
  if (plan.algorithm != RowAlgorithm::kColumnsFlat || !(plan.blocks > 1 || plan.split)) return false;
  return plan.slices > 1 || (rows.inner % 2 != 0 && bytes % 16 != 0 && bytes <= kLongestOdd);
}

RowPlan loose_columns(const RowPlan& flat, const Rows& rows, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = flat.traits;
  plan.overlap = flat.overlap;
  plan.algorithm = RowAlgorithm::kColumnsFlat;
  plan.single = true;
  const int64_t item = plan.traits.item_bytes, width = 16 / item, shared = std::gcd(rows.inner, width);
  // After so many lines, whole vectors begin again at the same columns; they are so many vectors.
  const int64_t turns = width / shared, period = rows.inner / shared;
  if (rows.inner * item <= kWholeLine) {
    const int64_t periods = ceil_div(kRecordWindows, period);
    plan.turns = static_cast<int>(turns * periods);
    plan.across = static_cast<int>(rows.inner);
    plan.period = static_cast<int>(periods * period + 1);
    plan.deep = static_cast<int>(std::max<int64_t>(1, kLooseThreads / plan.period));
  } else {
    plan.slices = static_cast<int>(ceil_div(rows.inner * item, kStripBytes));
    plan.across = static_cast<int>(ceil_div(rows.inner, plan.slices));
    plan.period = static_cast<int>(ceil_div(plan.across + width - 1, width));
    plan.deep = static_cast<int>(std::max<int64_t>(1, kLooseThreads / (plan.period * turns)) * turns);
  }
  plan.block_warps = static_cast<int>(ceil_div(int64_t{plan.period} * plan.deep, 32));
  const int64_t records = ceil_div(rows.length, plan.turns);
  int64_t parts = ceil_div(records, plan.deep * kLooseWindows);
  if (parts <= kFewLooseParts) parts = int64_t{1} << std::min(4, bits_for(parts + 1) - 1);
  parts = std::min(parts, std::clamp<int64_t>(kLooseBlocks / plan.slices, 8, kMostLooseParts));
  const int64_t part = ceil_div(records, parts);
  plan.part_length = part * plan.turns;
  plan.blocks = plan.units = ceil_div(records, part);
  const bool cluster = (plan.blocks & (plan.blocks - 1)) == 0 &&
                       plan.blocks <= std::min<int64_t>(16, gpu.max_cluster) &&
                       rows.outer * plan.slices * plan.blocks <= kLooseClusters * gpu.multiprocessors;
  plan.split = plan.blocks > 1 && !cluster;
  // For clusters, too, since a batch of another size may need the workspace.
  if (plan.blocks > 1)
    plan.workspace_bytes = ceil_div(int64_t{plan.slices} * plan.across * plan.blocks * plan.traits.stat_bytes, 16) * 16;
  return plan;
}

}  // namespace

bool is_rare(DType dtype) { return dtype != DType::kFloat16 && dtype != DType::kBFloat16 && dtype != DType::kFloat32; }

RowPlan plan_reduce(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, const RowTuning& tuning) {
  RowTraits traits;
  traits.item_bytes = bytes_of(problem.dtype);
  traits.operands = problem.op == Op::kDot ? 2 : 1;
  traits.masked = problem.masked;
  traits.fast = !is_rare(problem.dtype) && !problem.masked;
  traits.large = traits.fast && traits.operands == 1;
  traits.output = false;
  traits.lean = traits.staged = traits.wide = traits.fast && problem.op == Op::kSum;
  // A warp is as fast alone if it holds a row.
  traits.wide_statistics = problem.rows.length * traits.item_bytes > kWarpBytes ? 50 : 0;
  traits.strips =
      traits.item_bytes < 4 && traits.operands == 1 && !problem.masked && (traits.fast || !is_float(problem.dtype));
  // Along long axes. (The maximum of 3 x 70 x 100004 takes 27 us where lanes have columns one by one, and would
  // take 29.)
  traits.packs = traits.item_bytes == 4 && !is_float(problem.dtype) && !problem.masked &&
                 (problem.op == Op::kMax || problem.op == Op::kMin) && problem.rows.length >= kPackedLength;
  traits.swept = is_rare(problem.dtype) && !problem.masked;
  traits.stat_bytes = traits.final_bytes = traits.item_bytes == 8 ? 8 : 4;
  const bool tuned = tuning.vectors || tuning.cluster || tuning.block_warps || tuning.split;
  const bool packed = is_packed(problem, traits.item_bytes);
  if (!tuned && (packed || is_loose(problem, traits.item_bytes))) {
    RowPlan plan;
    plan.traits = traits;
    plan.algorithm = RowAlgorithm::kRows;
    plan.single = true;
    plan.overlap = gpu.dependent_launch;
    if (packed) {
      plan.block_warps = kPackedWarps;
    } else {
      plan_loose(plan, problem, gpu);
    }
    return plan;
  }
  RowPlan plan = plan_row_engine(problem.rows, traits, gpu, workspace_bytes, tuning);
  if (!tuned && holds_spans(plan, problem, gpu)) {
    plan.wide = plan.vectors;
    plan.blocks = 1;
    plan.block_warps = static_cast<int>(plan.spans);
    return plan;
  }
  if (!tuned && is_loose_columns(plan, problem)) return loose_columns(plan, problem.rows, gpu);
  if (problem.op != Op::kSum || !is_float(problem.dtype) || problem.masked) return plan;
  if (plan.algorithm == RowAlgorithm::kColumnsFlat) {
    if (is_chained(plan, problem.rows)) {
      plan_chains(plan, problem.rows);
      return plan;
    }
    const bool whole = plan.blocks == 1 && !plan.split && plan.slices == 1;
    if (!whole || problem.rows.outer > kFlatBlocks * gpu.multiprocessors) return plan;
    plan.algorithm = RowAlgorithm::kSmall;
    plan.flat = true;
    return plan;
  }
  const int64_t most = problem.rows.length <= held_positions(1) ? kSmallHeld : kSmallWalked;
  return tiled_form(small_form(plan, problem.rows, most), problem.rows, gpu);
}

}  // namespace jaxgpuops::reduce
