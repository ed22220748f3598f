#include "reduce/plan.h"

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
  // A warp is as fast alone if it holds a row of whole vectors.
  const int64_t row_bytes = problem.rows.length * traits.item_bytes;
  traits.wide_statistics = row_bytes > kWarpBytes ? 50 : row_bytes % 16 ? 16 : 0;
  traits.strips =
      traits.item_bytes < 4 && traits.operands == 1 && !problem.masked && (traits.fast || !is_float(problem.dtype));
  // Along long axes. (The maximum of 3 x 70 x 100004 takes 27 us where lanes have columns one by one, and would
  // take 29.)
  traits.packs = traits.item_bytes == 4 && !is_float(problem.dtype) && !problem.masked &&
                 (problem.op == Op::kMax || problem.op == Op::kMin) && problem.rows.length >= kPackedLength;
  traits.swept = is_rare(problem.dtype) && !problem.masked;
  traits.stat_bytes = traits.final_bytes = traits.item_bytes == 8 ? 8 : 4;
  RowPlan plan = plan_row_engine(problem.rows, traits, gpu, workspace_bytes, tuning);
  const bool tuned = tuning.vectors || tuning.cluster || tuning.block_warps || tuning.split;
  if (!tuned && holds_spans(plan, problem, gpu)) {
    plan.wide = plan.vectors;
    plan.blocks = 1;
    plan.block_warps = static_cast<int>(plan.spans);
    return plan;
  }
  if (problem.op != Op::kSum || !is_float(problem.dtype) || problem.masked) return plan;
  if (plan.algorithm == RowAlgorithm::kColumnsFlat) {
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
