#include "softmax/plan.h"

#include <algorithm>
#include <cmath>

#include "common/rounding.h"
#include "row_engine/plan.h"

namespace jaxgpuops::softmax {
namespace {

// The small kernel takes arrays of up to kSmallElements. Results of up to 32 bits have other limits along axes that
// several warps walk (kSmallShared for float32, kSmallSharedHalf for 16 bits), and along axes of more than kSmallLength
// positions that one warp has (kSmallLongHalf for 16 bits, kSmallLongVectors for float32 in vectors).
constexpr int64_t kSmallElements = 1 << 17, kSmallShared = 1 << 18, kSmallSharedHalf = 1 << 16;
// The most elements of an array whose lanes have columns, if so many lie side by side.
constexpr int64_t kMostLaneColumns = 1 << 20, kLeastLaneColumns = 32;
constexpr int64_t kSmallLength = 16, kSmallLongHalf = 1 << 15, kSmallLongVectors = 1 << 16;

// Gradients of rows that no cluster holds, and of columns in flat rows. A row has at most kMostUnits units. Blocks hold
// their units if a cluster has the row, or if all of them run at the same time. Otherwise, a block that writes results
// takes as many units as leave kResultBlocks blocks per multiprocessor, from one to kMostMerged.
constexpr int64_t kMostUnits = 512, kMostMerged = 8, kResultBlocks = 4, kLeastFlatGradient = 2 << 10;
// Flat rows of vectors (takes_vectors()) have at least kLeastFlatVectors bytes. Others of 16 bits are faster from x
// only where blocks hold them: kHalfColumns columns of kLeastHalf to kMostHalf elements, of which few arrays have more.
constexpr int64_t kLeastFlatVectors = 512, kLeastHalf = 1 << 18, kMostHalf = 1 << 20, kHalfColumns = 3;
// Gradients of columns of few positions, not of float32: the most elements of an array of which a lane has one
// position, not a column.
constexpr int64_t kMostSmallGradient = 1 << 15;
// Gradients of short rows: lanes have one vector instead of several, as long as that makes at most so many warps per
// multiprocessor.
constexpr int64_t kFewWarps = 16;
// Teams of lanes that share a row (share_rows): up to kFewTeams warps per multiprocessor, a lane has one vector; with
// two or four, there are at most kManyTeams of them, and without results kManyFolds.
constexpr int64_t kFewTeams = 8, kManyTeams = 64, kManyFolds = 16;
// Rows of 16 bits of more than two vectors, up to kLooseRow bytes, that are not whole vectors: gradients of arrays of
// more than kMostLoose bytes are faster from y, by tiles. (300000 x 29 bfloat16 took 30 us with the forward pass, and
// 35 from x.)
constexpr int64_t kLooseRow = 64, kMostLoose = 4 << 20;
// Gradients of longer rows: a lane has two vectors if that makes at most so many warps per multiprocessor, and in a
// block, but for float64. (10 x 8191 float32 took 6.9 us in 32 warps, and 3.8 in a cluster of fewer.)
constexpr int64_t kFewWideWarps = 32, kMostWideWarps = 16;
// Longer rows of float32 are taken in any number if they have at most so many warps.
constexpr int64_t kFullWideWarps = 7;
// Gradients along short axes: the most positions that a lane holds, and the same for float64.
constexpr int64_t kMostHeld = 24, kMostWideHeld = 16;
constexpr int64_t kMostSharedWarps = 32;  // the most warps that share a longer column
constexpr int64_t kMostTeamBytes = 16 * kOnlyVectors * 32, kMostClusterBytes = kMaxFlatSpans * kMostTeamBytes;

int64_t row_bytes(const Problem& problem) { return problem.rows.length * bytes_of(problem.dtype); }

int64_t wide_warps(const Problem& problem) { return ceil_div(row_bytes(problem), 16 * kWideVectors * 32); }

// For RowTraits::wide_statistics. (Rows of float32 in whole vectors are fast without it, and few blocks of many warps
// share a multiprocessor.)
int logsumexp_warps(const Problem& problem) {
  const int64_t warps = wide_warps(problem);
  if (warps > 16) return warps <= 20 ? 8 : 0;
  return problem.dtype == DType::kFloat32 && row_bytes(problem) % 16 == 0 ? 8 : 20;
}

// These values must agree with the policies in cuda/policy.cuh: the plan runs where no CUDA code is compiled.
RowTraits traits_of(const Problem& problem) {
  const bool wide = problem.dtype == DType::kFloat64;
  const int acc_bytes = wide ? 8 : 4;
  RowTraits traits;
  traits.item_bytes = bytes_of(problem.dtype);
  traits.fast = traits.large = !wide;
  const int shift_numbers = traits.item_bytes == 2 ? 3 : 1;  // number of fields of the largest ExponentialSum::Shift
  switch (problem.op) {
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kLogSumExp:
      traits.masked = problem.general;
      traits.fast = traits.fast && !traits.masked;
      traits.output = problem.op != Op::kLogSumExp;
      traits.tiled = traits.output && !problem.general;
      traits.wide = !problem.general;
      traits.wide_statistics = logsumexp_warps(problem);
      // For 16 bits, teams of lanes without tiles are faster, unless a lane has only one vector.
      traits.staged = !traits.output && traits.fast && (traits.item_bytes == 4 || row_bytes(problem) <= 32);
      traits.stat_bytes = 2 * acc_bytes;
      traits.final_bytes = (shift_numbers + 1) * acc_bytes;
      break;
    case Op::kLogSumExpGrad:
      traits.output = traits.tiled = traits.wide = true;
      traits.stat_bytes = 2 * acc_bytes;
      traits.final_bytes = (shift_numbers + 2) * acc_bytes;
      break;
    case Op::kCrossEntropy:
    case Op::kCrossEntropyGrad:
      traits.label = true;
      traits.output = traits.wide = problem.op == Op::kCrossEntropyGrad;
      traits.stat_bytes = 3 * acc_bytes;
      traits.final_bytes = (shift_numbers + 6) * acc_bytes;
      break;
    case Op::kSoftmaxJvp:
    case Op::kLogSoftmaxJvp:
      traits.masked = problem.general;
      traits.fast = traits.fast && !traits.masked;
      traits.large = false;
      traits.operands = 2;
      traits.tiled = traits.wide = !problem.general && !problem.of_logits;
      traits.stat_bytes = (traits.item_bytes > 2 ? 3 : 1) * acc_bytes;
      traits.final_bytes = 4 * acc_bytes;
      break;
  }
  traits.lean = traits.fast && !traits.output;
  return traits;
}

// Softmax, log_softmax and logsumexp of few rows of up to 128 vectors: a lane has fewer vectors than in rows_kernel
// (RowPlan::each), which shortens the chain of instructions of a row, but takes more warps. With results, rows of 16
// bits that are not aligned take so much work that blocks are spread over all multiprocessors.
void share_rows(RowPlan& plan, const Problem& problem, const Gpu& gpu) {
  const bool output = plan.traits.output, loose = row_bytes(problem) % 16 != 0;
  if (plan.algorithm != RowAlgorithm::kRows || plan.spans > 1 || plan.vectors == kLeanVectors) return;
  if (plan.vectors == 8 && (output || plan.lane_bits != 3)) return;
  if (plan.lane_bits == 5 && (plan.wide || !output)) return;
  const int64_t lanes = int64_t{1} << plan.lane_bits;
  const auto warps = [&](int each) { return ceil_div(problem.rows.outer * lanes * plan.vectors / each, 32); };
  int each = 1;
  while (lanes * plan.vectors / each > 32) each *= 2;
  if (each > 1 && loose && (output || plan.wide)) return;  // several such vectors take a lane too much work
  if (each == 1 && plan.vectors > 1 && !loose && warps(1) > kFewTeams * gpu.multiprocessors) each = 2;
  const bool always = plan.spread && each == 1;  // there is no other kernel for such rows
  if (each > 4 || (!always && warps(each) > (output ? kManyTeams : kManyFolds) * gpu.multiprocessors)) return;
  plan.spread = true;
  plan.wide = 0;
  plan.each = each;
  plan.block_warps = kSpreadWarps;
  if (output && loose && plan.traits.item_bytes == 2)
    while (plan.block_warps > 1 && ceil_div(warps(each), plan.block_warps) < 2 * gpu.multiprocessors)
      plan.block_warps /= 2;
}

// Rows of 16 and 32 bits that are not whole vectors (cuda/loose_rows.cuh, cuda/loose_gradient.cu): the bytes of rows of
// softmax (lax/softmax_primitives.py has them, too; is_loose() has those of other operations), and the words of a unit.
constexpr int64_t kShortestLoose = 512, kLongestLoose = 28 << 10, kLooseUnit = 32 * 4;
// The most units of a span, and spans.
constexpr int kMostLooseUnits = 4, kMostLooseSpans = 16;
constexpr int kLooseTeam = 4;  // rows of a block whose warps have a row each
// Few rows: a warp has a unit if that makes at most so many warps per multiprocessor, and in a block.
constexpr int64_t kLooseResident = 32, kLooseWarps = 12;

bool is_value(const Problem& problem) {
  return (problem.op == Op::kSoftmax || problem.op == Op::kLogSoftmax || problem.op == Op::kLogSumExp) &&
         !problem.general && problem.rows.outer > 0;
}

// The length alone decides, since it decides the order of additions. (Longer rows, and gradients of softmax and
// log_softmax of float32, took up to 1.8 times as long so: 3000 x 13001 bfloat16 95 us, and 167.)
bool is_loose(const Problem& problem) {
  const int64_t bytes = row_bytes(problem);
  if (problem.rows.outer == 0 || problem.rows.inner != 1 || problem.dtype == DType::kFloat64 || bytes % 16 == 0)
    return false;
  const bool half = bytes_of(problem.dtype) == 2;
  const auto between = [&](int64_t least, int64_t most) { return bytes > least && bytes <= most; };
  switch (problem.op) {
    case Op::kSoftmax:
    case Op::kLogSoftmax: return !problem.general && between(kShortestLoose, kLongestLoose);
    case Op::kLogSumExp: return !problem.general && between(2 * kShortestLoose, 16 << 10);
    case Op::kLogSumExpGrad: return between(kShortestLoose, 16 << 10);
    case Op::kCrossEntropyGrad: return half ? between(kShortestLoose, 20 << 10) : between(2 * kShortestLoose, 10 << 10);
    case Op::kSoftmaxJvp: return problem.of_logits && half && between(2 * kShortestLoose, 6 << 10);
    case Op::kLogSoftmaxJvp: return problem.of_logits && half && between(4 * kShortestLoose, 5 << 10);
    default: return false;
  }
}

// The number of units of a span follows from the length, since it decides the order of additions: as few units are
// empty as can be, and spans are long.
RowPlan plan_loose(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  plan.algorithm = RowAlgorithm::kRows;
  plan.single = plan.spread = true;
  plan.lane_bits = 5;
  const int64_t outer = problem.rows.outer, units = ceil_div(ceil_div(row_bytes(problem), 4), kLooseUnit);
  int64_t least = INT64_MAX;
  for (int each = kMostLooseUnits; each > 1; --each) {
    const int64_t spans = ceil_div(units, each);
    if (spans * each >= least || spans > kMostLooseSpans) continue;
    least = spans * each;
    plan.each = each;
    plan.spans = spans;
  }
  const bool few = least <= kLooseWarps && outer * least <= kLooseResident * gpu.multiprocessors;
  plan.wide = few ? plan.each : plan.spans > 1 ? 1 : 0;  // groups of warps that share a span; 0: a warp has a row
  plan.block_warps = static_cast<int>(std::max(plan.wide, 1) * plan.spans);
  if (plan.wide) return plan;
  plan.block_warps = kLooseTeam;
  while (plan.block_warps > 1 && ceil_div(outer, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
  return plan;
}

// Few columns along axes of middle length (cuda/held_columns.cu): the least positions, the most columns, and the most
// elements of an outer index, and the same for float64; the least positions and the most elements without results;
// threads of a block; elements of a thread.
constexpr int64_t kLeastHeldLength = 65, kMostHeldColumns = 32, kMostHeldElements = 4000;
constexpr int64_t kLeastWideHeldLength = 25, kMostWideHeldColumns = 64, kMostWideHeldElements = 15'500;
constexpr int64_t kLeastHeldStatistics = 129, kMostHeldStatistics = 15'900;
constexpr int64_t kLeastHeldThreads = 128, kMostHeldThreads = 1024;
constexpr int kHeldElements = 8;

bool is_held(const Problem& problem) {
  const Rows& rows = problem.rows;
  const bool wide = problem.dtype == DType::kFloat64;
  const bool statistics = problem.op == Op::kLogSumExp;
  const int64_t least = wide ? kLeastWideHeldLength : statistics ? kLeastHeldStatistics : kLeastHeldLength;
  const int64_t most = wide ? kMostWideHeldElements : statistics ? kMostHeldStatistics : kMostHeldElements;
  return is_value(problem) && rows.inner > 1 && rows.inner <= (wide ? kMostWideHeldColumns : kMostHeldColumns) &&
         rows.length >= least && rows.length * rows.inner <= most;
}

RowPlan plan_held(const Problem& problem) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  plan.algorithm = RowAlgorithm::kColumns;
  plan.single = true;
  const int64_t inner = problem.rows.inner, elements = problem.rows.length * inner;
  int64_t threads = kLeastHeldThreads;
  const auto chains = [&] { return threads / inner * inner; };
  while (threads < kMostHeldThreads && elements > kHeldElements * chains()) threads *= 2;
  plan.part_length = chains();
  plan.each = elements <= kHeldElements * chains() ? kHeldElements : 2 * kHeldElements;
  plan.lane_bits = 5;
  while (inner << plan.lane_bits > threads) --plan.lane_bits;
  plan.block_warps = static_cast<int>(threads / 32);
  return plan;
}

// Gives a lane one vector of a row, where that is faster than several or the only kernel. It is faster for many rows,
// too, if one lane would have a whole row. (260000 x 15 float32 took 14 us so, and 40 us with a lane for each row.)
void spread_gradient(RowPlan& plan, const Problem& problem, const Gpu& gpu) {
  const int64_t lanes = int64_t{plan.vectors} << plan.lane_bits, warps = ceil_div(problem.rows.outer * lanes, 32);
  const bool only = problem.dtype == DType::kFloat16;
  plan.spread = plan.vectors == 1 || plan.lane_bits == 0 || only || warps <= kFewWarps * gpu.multiprocessors;
  if (!plan.spread) return;
  const int64_t least = std::max<int64_t>(1, lanes / 32);
  plan.block_warps = kGradientWarps;
  while (plan.block_warps > least && ceil_div(warps, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
}

int64_t row_spans(const Problem& problem) {
  return ceil_div(row_bytes(problem), 16 * 32 * row_vectors(bytes_of(problem.dtype)));
}

// Whether a block of so many warps has a row, however many rows there are. Of rows of 16 bits with so many warps, the
// last span of the other kernel would have at most half of its vectors, or three quarters. (Of float32, 4000 x 1100
// took 16.8 us so, and 22.6; 20000 x 1500 92 and 100.)
bool is_always_wide(const Problem& problem, int64_t warps) {
  if (problem.dtype == DType::kFloat32) return warps <= kFullWideWarps;
  return bytes_of(problem.dtype) == 2 && (warps == 3 || warps == 5 || warps == 6);
}

// If rows are few, or short, a block has a row, and lanes have two vectors. Otherwise lanes have more, and a block or a
// cluster of blocks has a row.
RowPlan plan_row_gradient(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  if (problem.rows.outer == 0) return plan;
  plan.algorithm = RowAlgorithm::kRows;
  plan.lane_bits = 5;
  const int64_t warps = wide_warps(problem);
  const bool few = problem.rows.outer * warps <= kFewWideWarps * gpu.multiprocessors;
  const int64_t most = problem.dtype == DType::kFloat64 ? kMaxBlockWarps : kMostWideWarps;
  if (warps <= most && (few || is_always_wide(problem, warps))) {
    plan.wide = plan.vectors = kWideVectors;
    plan.block_warps = static_cast<int>(warps);
    return plan;
  }
  plan.vectors = row_vectors(bytes_of(problem.dtype));
  plan.spans = row_spans(problem);
  const auto part = [&] { return ceil_div(plan.spans, plan.blocks); };
  while (plan.blocks < gpu.max_cluster && part() > kPartWarps) plan.blocks *= 2;
  while (plan.blocks < gpu.max_cluster && 2 * problem.rows.outer * plan.blocks <= gpu.multiprocessors && part() > 2)
    plan.blocks *= 2;
  plan.block_warps = static_cast<int>(part());
  plan.packed = plan.blocks == kMaxCluster && problem.rows.outer * plan.blocks > gpu.multiprocessors;
  return plan;
}

bool is_held_by_lanes(const Problem& problem) {
  return problem.rows.length <= (problem.dtype == DType::kFloat64 ? kMostWideHeld : kMostHeld);
}

// Whether lanes, or warps that share a column, hold columns in registers. Bits depend on the length, inner and the
// dtype alone, and so does the choice.
bool is_short_axis(const Problem& problem) {
  const int bytes = bytes_of(problem.dtype);
  const auto& [outer, length, inner] = problem.rows;
  if (inner == 1 || length <= 2) return false;
  return is_held_by_lanes(problem) ||
         (inner > kGradientColumns && length <= kMostSharedWarps * shared_positions(bytes));
}

// Gradients along longer axes (cuda/gradient_parts.cu): elements of a thread, or twice as many; the most parts of a
// flat row in blocks that wait for each other, and the same with twice as many elements.
constexpr int kPartElements = 8;
constexpr int64_t kMostParts = 128, kMostLargeParts = 256;
// Vectors of columns take it only if they are narrow or have more positions than a cluster holds, and 16 bits only if
// they are no vectors and have between 64 and 256 columns: of large batches, other kernels are faster. (bfloat16, this
// kernel and the two others: 1 x 8192 x 70 9.8 and 19.8 us, 200 x 3000 x 20 107 and 62, 24 x 513 x 314 40 and 31.)
constexpr int64_t kNarrowPart = 128, kHeldByCluster = 8192, kLeastHalfPart = 64, kMostHalfPart = 256;

// Positions of a column that a block takes at a time.
int64_t part_turns(const Rows& rows) { return rows.inner > 0 ? kGradientPartThreads / rows.inner : 0; }

// Elements of a thread, of so few parts of a flat row as hold it. Twice as many are better if a cluster then has all
// parts, or if there would be too many. Returns 0 if there are too many all the same.
int part_elements(const Rows& rows) {
  const int64_t turns = part_turns(rows);
  if (turns == 0) return 0;
  const auto parts = [&](int each) { return ceil_div(rows.length, each * turns); };
  const int64_t few = parts(kPartElements), large = parts(2 * kPartElements);
  if (few <= kMaxCluster || (large > kMaxCluster && few <= kMostParts)) return kPartElements;
  return large <= kMostLargeParts ? 2 * kPartElements : 0;
}

// The length, inner and the dtype decide.
bool takes_parts(const Problem& problem) {
  const auto& [outer, length, inner] = problem.rows;
  if (inner <= kGradientColumns || problem.dtype == DType::kFloat64 || is_short_axis(problem)) return false;
  const int64_t beside = inner * bytes_of(problem.dtype);
  const bool vectors = beside % 16 == 0;
  if (problem.dtype == DType::kFloat32 ? vectors && beside >= kNarrowPart && length <= kHeldByCluster
                                       : vectors || inner < kLeastHalfPart || inner > kMostHalfPart)
    return false;
  return part_elements(problem.rows) > 0;
}

RowPlan plan_parts(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  const auto& [outer, length, inner] = problem.rows;
  if (outer == 0) return plan;
  const int64_t turns = part_turns(problem.rows);
  plan.algorithm = RowAlgorithm::kColumns;
  plan.traits = traits_of(problem);
  plan.traits.stat_bytes = plan.traits.final_bytes = 5 * 4;
  plan.each = part_elements(problem.rows);
  plan.part_length = ceil_div(length, ceil_div(length, plan.each * turns));
  plan.blocks = plan.units = ceil_div(length, plan.part_length);
  plan.split = plan.blocks > gpu.max_cluster;
  plan.workspace_bytes = (plan.blocks + 1) * inner * plan.traits.stat_bytes;
  plan.block_warps = static_cast<int>(ceil_div(turns * inner, 32));
  plan.lane_bits = 5;
  while (inner << plan.lane_bits > plan.threads()) --plan.lane_bits;
  return plan;
}

RowPlan plan_column_gradient(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  if (problem.rows.outer == 0) return plan;
  if (problem.dtype != DType::kFloat32 && is_held_by_lanes(problem) && problem.rows.elements() <= kMostSmallGradient) {
    plan.algorithm = RowAlgorithm::kSmall;
    plan.column_lane_bits = 5 - bits_for(problem.rows.length);
    const int64_t warps = ceil_div(problem.rows.count(), int64_t{1} << plan.column_lane_bits);
    plan.block_warps = static_cast<int>(std::min<int64_t>(warps, kGradientWarps));
    return plan;
  }
  plan.algorithm = RowAlgorithm::kColumnsWalk;
  if (!is_held_by_lanes(problem)) {
    plan.axis_warps = static_cast<int>(ceil_div(problem.rows.length, shared_positions(plan.traits.item_bytes)));
    while (plan.axis_warps << (plan.column_warp_bits + 1) <= kPartWarps &&
           problem.rows.count() >> (6 + plan.column_warp_bits) >= 2 * gpu.multiprocessors)
      ++plan.column_warp_bits;
    plan.block_warps = plan.axis_warps << plan.column_warp_bits;
    return plan;
  }
  const int columns = 32 * columns_of_lane(plan.traits.item_bytes, problem.rows.length);
  const int64_t warps = ceil_div(problem.rows.count(), columns);
  plan.block_warps = kPartWarps;
  while (plan.block_warps > 1 && ceil_div(warps, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
  return plan;
}

// The most elements of an array that the small kernel takes instead of this plan.
int64_t most_of_small(const RowPlan& plan, const Rows& rows) {
  if (!plan.traits.output || !plan.traits.fast) return kSmallElements;
  const bool half = plan.traits.item_bytes == 2;
  if (plan.axis_warps > 1) return half ? kSmallSharedHalf : kSmallShared;
  if (rows.length <= kSmallLength) return kSmallElements;
  if (half) return kSmallLongHalf;
  return plan.algorithm == RowAlgorithm::kColumns ? kSmallLongVectors : kSmallElements;
}

// Replaces a plan that walks along columns of few positions, if the array is small: a lane has a column.
RowPlan lane_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  const int64_t most = rows.inner < kLeastLaneColumns ? kSmallElements : kMostLaneColumns;
  if (plan.algorithm != RowAlgorithm::kColumnsWalk || plan.vector || !plan.traits.fast ||
      rows.length > held_positions(1) || rows.elements() == 0 || rows.elements() > most)
    return plan;
  RowPlan lanes;
  lanes.algorithm = RowAlgorithm::kSmall;
  lanes.traits = plan.traits;
  lanes.single = true;
  lanes.block_warps = kSpreadWarps;
  while (lanes.block_warps > 1 && ceil_div(rows.count(), 32 * lanes.block_warps) < 2 * gpu.multiprocessors)
    lanes.block_warps /= 2;
  return lanes;
}

// The division into units depends on the length, inner and the dtype alone, since sums do.
RowPlan plan_split_gradient(const Problem& problem, const Gpu& gpu) {
  RowPlan plan;
  plan.traits = traits_of(problem);
  plan.traits.stat_bytes = 5 * 4;
  if (problem.rows.outer == 0) return plan;
  const int64_t inner = problem.rows.inner, length = problem.rows.length * inner;
  plan.algorithm = inner == 1 ? RowAlgorithm::kRowsSplit : RowAlgorithm::kColumnsFlat;
  plan.block_warps = kPartWarps;
  // Of 1 x 2156400 bfloat16, lanes with vectors took 9.0 us, and lanes with elements 11.3; of float32, 77 and 71 us for
  // 20 x 700000. Vectors of rows that begin anywhere in memory are slower, too.
  plan.vector = inner == 1 && bytes_of(problem.dtype) == 2 && row_bytes(problem) % 16 == 0;
  const int64_t form = plan.vector ? kWholeRows : inner;
  const int64_t turn = 32 / inner * inner * kPartWarps * gradient_each(bytes_of(problem.dtype), form);
  plan.part_length = ceil_div(ceil_div(length, turn), kMostUnits) * turn;
  plan.units = ceil_div(length, plan.part_length);
  plan.blocks = plan.units;
  plan.workspace_bytes = plan.units * inner * plan.traits.stat_bytes;
  if (gpu.max_cluster > 1 && plan.units <= std::min<int64_t>(kMaxCluster, gpu.max_cluster)) {
    plan.workspace_bytes = 0;
    if (plan.units == 1) plan.block_warps = static_cast<int>(ceil_div(length * kPartWarps, turn));
    return plan;
  }
  plan.split = plan.part_length > turn || problem.rows.outer * plan.units > gradient_blocks(form) * gpu.multiprocessors;
  if (!plan.split) return plan;
  const int64_t merged = ceil_div(problem.rows.outer * plan.units, kResultBlocks * gpu.multiprocessors);
  plan.result_length = std::clamp<int64_t>(merged, 1, kMostMerged) * plan.part_length;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

}  // namespace

bool is_general(Op op, double factor, bool scaled, bool biased, bool masked, bool transpose) {
  if (masked || op == Op::kSoftmaxJvp) return masked;
  if (op == Op::kLogSoftmaxJvp) return !transpose;
  return scaled || biased || !(factor > 0 && std::isfinite(factor));
}

bool takes_logits(const Problem& problem) {
  const bool derivative = problem.op == Op::kSoftmaxJvp || (problem.op == Op::kLogSoftmaxJvp && problem.transpose);
  if (!derivative || problem.general || problem.factor != 1) return false;
  if (is_short_axis(problem) || takes_parts(problem)) return true;
  const int64_t inner = problem.rows.inner;
  if (problem.dtype == DType::kFloat64) return inner == 1 && row_spans(problem) <= kRowWarps * kMaxCluster;
  if (inner == 1) return true;
  const int64_t flat = problem.rows.length * inner;
  if (takes_vectors(inner)) return flat * bytes_of(problem.dtype) >= kLeastFlatVectors;
  if (bytes_of(problem.dtype) == 2) return inner == kHalfColumns && flat >= kLeastHalf && flat <= kMostHalf;
  return inner <= kGradientColumns && flat * bytes_of(problem.dtype) >= kLeastFlatGradient;
}

bool prefers_logits(const Problem& problem, const Gpu& gpu) {
  if (problem.rows.inner != 1) return true;
  const int64_t bytes = row_bytes(problem);
  if (bytes_of(problem.dtype) == 2 && bytes % 16 != 0 && bytes > 32 && bytes <= kLooseRow)
    return problem.rows.outer * bytes <= kMostLoose;
  if (bytes <= kMostTeamBytes || bytes > kMostClusterBytes) return true;
  return row_spans(problem) <= kRowWarps * gpu.max_cluster;
}

RowPlan plan_softmax(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, const RowTuning& tuning) {
  const bool tuned = tuning.vectors || tuning.cluster || tuning.block_warps || tuning.split;
  if (!tuned && is_loose(problem)) return plan_loose(problem, gpu);
  if (problem.of_logits) {
    if (is_short_axis(problem)) return plan_column_gradient(problem, gpu);
    if (takes_parts(problem)) return plan_parts(problem, gpu);
    if (problem.rows.inner != 1 || row_bytes(problem) > kMostClusterBytes) return plan_split_gradient(problem, gpu);
    if (row_bytes(problem) > kMostTeamBytes) return plan_row_gradient(problem, gpu);
  }
  if (!tuned && is_held(problem)) return plan_held(problem);
  RowPlan plan = plan_row_engine(problem.rows, traits_of(problem), gpu, workspace_bytes, tuning);
  if (problem.of_logits && plan.algorithm == RowAlgorithm::kRows) spread_gradient(plan, problem, gpu);
  const bool plain = problem.op == Op::kSoftmax || problem.op == Op::kLogSoftmax || problem.op == Op::kLogSumExp ||
                     problem.op == Op::kLogSumExpGrad;
  if (!plain || problem.general) return plan;
  if (problem.op != Op::kLogSumExpGrad) {
    share_rows(plan, problem, gpu);
    plan = lane_form(plan, problem.rows, gpu);
  }
  const RowPlan small =
      small_form(shared_form(plan, problem.rows, gpu), problem.rows, most_of_small(plan, problem.rows));
  return problem.op == Op::kLogSumExpGrad ? small : tiled_form(small, problem.rows, gpu);
}

}  // namespace jaxgpuops::softmax
