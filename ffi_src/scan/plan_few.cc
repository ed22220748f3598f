// The kernels for short axes and for few elements: which problems they take, and their geometry.
#include <algorithm>

#include "common/rounding.h"
#include "scan/plan_parts.h"

namespace jaxgpuops::scan {
namespace {

constexpr int64_t kShortBytes = 24 << 10;  // shared memory of a block where the axis is short

// kSmall has the shortest code, but its lanes read all that comes before their position: it is for few elements. The
// most elements of an array along a short axis:
constexpr int64_t kSmallDirect = 3 << 15;    // if kPacks, or the lanes of kShort, would read memory with few loads
constexpr int64_t kSmallLong = 1 << 16;      // if lanes of kPacks would take more turns
constexpr int64_t kSmallWhole = 3 << 13;     // if they would, and rows are also whole lanes of theirs
constexpr int64_t kSmallElements = 1 << 17;  // if columns would come to shared memory first
constexpr int64_t kSmallExact = 1 << 18;     // the same if states do not depend on the order of folding
// The most elements along a longer axis: kSmallLong, but kSmallRare of dtypes that have only the kernels of spans.
constexpr int64_t kSmallRare = 1 << 18;
// Columns of those dtypes along at most so many positions take kPieces if they have more than kSmallDirect elements.
constexpr int64_t kSmallInner = 512;
// Columns of up to 4 bytes along a longer axis fill the GPU in kPieces if there are so many in all; fewer are enough if
// kSmallBeside of them are side by side, since a block of kPieces reads whole lines of memory.
constexpr int64_t kSmallMany = 352, kSmallColumns = 192, kSmallBeside = 64;

// kLanes: the most elements, of cumulative operations and of recurrences.
constexpr int64_t kLanesElements = 1 << 21, kLanesPairs = 3 << 18;

// kPieces: a block waits for all of its columns before it computes, so arrays must be small. The most elements of an
// array, of all operands:
constexpr int64_t kPieceAcross = 1 << 18;  // if columns lie across
constexpr int64_t kPieceSpans = 1 << 20;   // otherwise; half as many of exact operations (is_exact) that are not rare,
constexpr int64_t kPieceHalves = 128;      // and of floats of 16 bits along more positions than these
// The most elements of an array whose columns lie across and are one tile of kColumns, which would have few threads.
constexpr int64_t kPieceTile = 3 << 18, kPieceTilePairs = 1 << 19;  // of recurrences
// The most elements of gradients; more only if they have at most kPieceBlocks columns.
constexpr int64_t kPieceTangents = 1 << 18;
// Recurrences read twice as much for a column. Along more than kPiecePair positions, arrays have at most kPieceFewPairs
// elements (of 16 bits twice as many), or kPieceOnePairs if they are one tile; several tiles of columns of 4 or 8 bytes
// that lie across, at most kPieceWidePairs; columns of 8 bytes, at most kPieceLongPairs.
constexpr int64_t kPiecePair = 1024, kPieceFewPairs = 1 << 14, kPieceWidePairs = 1 << 15;
constexpr int64_t kPieceOnePairs = 1 << 18, kPieceLongPairs = 1 << 17;
constexpr int64_t kPieceLength = 8192;     // the longest axis, if inner is not 1; that of 8 bytes across is 1024
constexpr int64_t kPieceBytes = 64 << 10;  // the most bytes of a block's columns
constexpr int64_t kPieceLines = 1 << 18;   // the most bytes of the lines of memory that hold them, which a block reads
constexpr int64_t kPieceLoads = 4;         // about the elements that a thread loads
// A block takes more columns only while so many blocks are left: kPieceWideBlocks if more than kPieceWide columns are
// side by side, as a block with few of them would read most of each line for nothing.
constexpr int64_t kPieceBlocks = 132, kPieceWideBlocks = 50, kPieceWide = 64;

// kFew: the most bytes of a row, which a block of 16 warps has.
constexpr int64_t kFewBytes = 8192;
// The most elements of rows of whole packs: of rows of up to kFewLine bytes, and of longer ones.
constexpr int64_t kFewLine = 512, kFewLines = 3 << 16, kFewElements = 1 << 15;
// The most elements of other rows, which kRows copies element by element: of 2 bytes; half as many of 4, an eighth
// of 8.
constexpr int64_t kFewOdd = 1 << 19;
// A row of more than kFewLong bytes has a block. There may be so many such rows and elements, of 2 bytes each; if they
// are whole packs, they have at most kFewLongPacks bytes.
constexpr int64_t kFewLong = 2048, kFewLongRows = 200, kFewLongElements = 9 << 16, kFewLongPacks = 4096;
// Recurrences of 4 bytes: as many rows that are no whole packs, of up to so many bytes.
constexpr int64_t kFewOddPairs = 6400;
// Columns of recurrences: the longest axis, and the most bytes that lie side by side.
constexpr int64_t kFewLength = 64, kFewInner = 80;

// kLaneRows: the most bytes of a row, and of a row of recurrences. Longer rows leave room for too few in shared memory.
constexpr int64_t kLaneRowBytes = 256, kLaneRowPairs = 224;
constexpr int64_t kLaneRowsTimes = 256;       // the fewest rows for each position
constexpr int64_t kLaneRowsBytes = 40 << 10;  // shared memory of a block

// In kShort, lanes read the axis directly from memory if that takes few loads. With more loads they do so only if the
// array is so small that the caches serve them.
constexpr int64_t kDirectLength = 8, kDirectBytes = 16, kDirectElements = 1 << 22;
// They have no more columns than are in flight at a time if at least so many bytes of columns lie side by side.
constexpr int64_t kDirectLine = 32;
// Blocks of a multiprocessor in which lanes read bytes from shared memory, which takes longer than to bring them there.
constexpr int64_t kByteBlocks = 4;

// Whether the lanes of kShort read the axis directly from memory. Longer rows that are whole vectors, and rows of
// bytes, are better copied through shared memory.
bool is_direct(const Problem& problem) {
  const auto [outer, length, inner] = problem.rows;
  const int bytes = bytes_of(problem.dtype);
  if (in_packs(problem) && length * bytes <= 16) return true;
  const bool vectors = inner == 1 && (bytes == 1 || length * bytes % 16 == 0);
  return !vectors && (length <= kDirectLength || inner * bytes >= kDirectBytes) &&
         problem.rows.elements() <= kDirectElements;
}

// Whether the kernels for few elements know the operands.
bool is_simple(const Problem& problem) {
  return problem.a.inner.groups <= 1 && problem.a.outer.groups <= 1 && !problem.segmented;
}

// The most elements that kSmall takes along a short axis.
int64_t most_small(const Problem& problem, bool exact) {
  const int64_t length = problem.rows.length, bytes = bytes_of(problem.dtype), lanes = row_lanes(length * bytes);
  if (!in_packs(problem)) {
    if (exact && !is_direct(problem) && length > 2) return kSmallExact;
    return length <= kDirectLength ? kSmallDirect : kSmallElements;
  }
  if (length <= kDirectLength) return kSmallDirect;
  if (exact) return lanes > kFewRowLanes ? kSmallExact : kSmallLong;
  return bytes >= 4 && row_lanes_before(length * bytes) == 0 ? kSmallWhole : kSmallLong;
}

// Whether the kernels for few elements take the problem.
bool is_small(const Problem& problem, int forced) {
  if (forced >= 0 && forced != static_cast<int>(Algorithm::kSmall)) return false;
  const auto [outer, length, inner] = problem.rows;
  if (!is_simple(problem) || problem.op == Op::kLogSumExp) return false;
  const int64_t elements = problem.rows.elements();
  const bool exact = is_exact(problem), rare = is_rare(problem);
  if (length <= kShortAxis) return elements <= most_small(problem, exact);
  if (length > kMostSmallLength) return false;
  // If inner is 1, other kernels are faster than kSmall, unless the dtype has only kernels of spans, or rows are not
  // whole packs of small integers.
  if (inner == 1 && is_any_operator(problem))
    return bytes_of(problem.dtype) < 4 && length * bytes_of(problem.dtype) % 16 != 0 && elements <= kSmallLong;
  if (!exact || (inner == 1 && !rare)) return false;
  // kPieces is faster with many columns.
  const bool many = outer * inner >= (inner >= kSmallBeside ? kSmallColumns : kSmallMany);
  if (forced < 0 && !rare && bytes_of(problem.dtype) <= 4 && many) return false;
  return elements <= (!rare ? kSmallLong : inner > 1 && length <= kSmallInner ? kSmallDirect : kSmallRare);
}

// Whether kLanes takes a problem with a short axis, which neither kSmall nor kPacks takes.
bool is_lanes(const Problem& problem, int forced) {
  if (forced >= 0 && forced != static_cast<int>(Algorithm::kLanes)) return false;
  const auto [outer, length, inner] = problem.rows;
  const int64_t bytes = bytes_of(problem.dtype);
  const bool cumulative = problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp;
  const bool linear = problem.kind == Kind::kLinear && bytes >= 4;  // pairs of 16 bits were slower
  if (inner == 1 || !is_simple(problem) || !(cumulative || linear)) return false;
  // Bytes that lanes read directly, however many: kShort takes a few positions at a time, and tests the operator anew.
  const bool far = problem.rows.elements() > INT32_MAX || outer >> 23 || outer > (int64_t{1} << 40) / (inner * inner);
  if (bytes == 1 && !far && (inner * bytes >= kLineBytes || is_direct(problem))) return true;
  if (forced >= 0) return problem.rows.elements() <= kLanesElements;
  return (inner * bytes >= kLineBytes || is_direct(problem)) && length <= kDirectLength &&
         problem.rows.elements() <= (cumulative ? kLanesElements : kLanesPairs);
}

Plan plan_small(const Problem& problem, Plan plan) {
  const auto [outer, length, inner] = problem.rows;
  plan.algorithm = Algorithm::kSmall;
  const int bits = bits_for(std::clamp<int64_t>(length, kSmallStep, kMostSmallLength));
  plan.columns = bits < 5 ? 32 >> bits : 1;
  plan.axis_warps = bits <= 5 ? kSmallWarps : 1 << (bits - 5);
  plan.column_bits = 0;
  plan.block_columns = bits <= 5 ? kSmallWarps * plan.columns : 1;
  plan.strips = ceil_div(outer * inner, plan.block_columns);
  return plan;
}

// Whether kFew takes the problem. Rows are folded in the order of kRows where one warp has a row, so their number
// decides. Columns of recurrences, which other kernels fold in another order, are taken for their shape alone.
bool is_few(const Problem& problem, Layout layout, int forced) {
  const auto [outer, length, inner] = problem.rows;
  const int64_t bytes = bytes_of(problem.dtype), row_bytes = length * bytes, elements = problem.rows.elements();
  const bool linear = problem.kind == Kind::kLinear && is_float(problem.dtype);
  const bool cumulative = problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp;
  if (!is_simple(problem) || !(linear || cumulative) || bytes == 1) return false;
  if (layout == Layout::kSpans) return linear && length <= kFewLength && inner * bytes <= kFewInner;
  if (layout != Layout::kAlong || row_bytes > kFewBytes) return false;
  if (forced >= 0) return forced == static_cast<int>(Algorithm::kFew);
  if (row_bytes > kFewLong && bytes == 4)
    return linear && row_bytes % 16 != 0 && row_bytes <= kFewOddPairs && outer <= kFewLongRows;
  if (row_bytes > kFewLong)
    return bytes == 2 && outer <= kFewLongRows && elements <= kFewLongElements &&
           (row_bytes % 16 != 0 || row_bytes <= kFewLongPacks);
  if (row_bytes % 16 != 0) return elements <= (bytes == 2 ? kFewOdd : bytes == 4 ? kFewOdd / 2 : kFewOdd / 8);
  return elements <= (row_bytes <= kFewLine ? kFewLines : kFewElements);
}

Plan plan_few(const Problem& problem, Plan plan) {
  const int64_t packs = ceil_div(problem.rows.length * bytes_of(problem.dtype), 16), columns = problem.rows.count();
  plan.algorithm = Algorithm::kFew;
  plan.run_bits = std::clamp(bits_for(packs), 2, 5);
  plan.axis_warps = static_cast<int>(ceil_div(packs, 32));
  plan.column_bits = 0;
  plan.warps = plan.axis_warps;
  plan.strips = columns;
  if (plan.axis_warps > 1) return plan;
  const int64_t of_warp = 32 >> plan.run_bits;  // columns of a warp
  plan.warps = static_cast<int>(std::min<int64_t>(kSmallWarps, ceil_div(columns, of_warp)));
  plan.strips = ceil_div(columns, of_warp * plan.warps);
  return plan;
}

// Whether kLaneRows takes the problem, whose rows are folded in the order of kRows: so their number may decide.
bool is_lane_rows(const Problem& problem, Layout layout, int forced) {
  if (forced >= 0 && forced != static_cast<int>(Algorithm::kLaneRows)) return false;
  const auto [outer, length, inner] = problem.rows;
  const bool cumulative = problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp;
  const bool linear = problem.kind == Kind::kLinear && problem.a.axis_stride == 1 &&
                      (outer == 1 || (problem.a.outer.groups == 1 && problem.a.outer.stride[0] == length));
  if (layout != Layout::kAlong || problem.segmented || !(cumulative || linear)) return false;
  const int64_t bytes = bytes_of(problem.dtype), slots = int64_t{1} << bits_for(length);
  if (bytes > 2 || (bytes == 1 && !is_any_operator(problem)) ||
      length * bytes > (linear ? kLaneRowPairs : kLaneRowBytes))
    return false;
  if (forced >= 0) return true;
  // kRows takes whole packs faster, unless it would have room for as many again that do not exist.
  const bool packs = bytes == 2 && length * bytes % 16 == 0;
  return outer >= kLaneRowsTimes * (packs ? 4 : 1) * length && !(packs && 8 * length > 5 * slots);
}

Plan plan_lane_rows(const Problem& problem, Plan plan) {
  const int64_t row_bytes = problem.rows.length * bytes_of(problem.dtype), operands = operands_of(problem.kind);
  plan.algorithm = Algorithm::kLaneRows;
  const int64_t fitting = kLaneRowsBytes / (operands * row_bytes) / 32;
  plan.axis_warps = 1;
  plan.column_bits = 0;
  plan.warps = static_cast<int>(std::clamp<int64_t>(fitting, 1, kLaneRowsThreads / 32));
  plan.block_columns = 32 * plan.warps;
  plan.strips = ceil_div(problem.rows.outer, plan.block_columns);
  plan.padding = row_bytes % 16 == 0 ? 16 : 0;
  plan.span_bytes =
      static_cast<int>(span_bytes(plan.block_columns * problem.rows.length, bytes_of(problem.dtype), plan.padding));
  plan.stage_bytes = static_cast<int>(operands) * plan.span_bytes;
  return plan;
}

}  // namespace

bool plan_few_elements(const Problem& problem, int forced, Plan& plan) {
  if (is_few(problem, plan.layout, forced)) {
    plan = plan_few(problem, plan);
  } else if (is_lane_rows(problem, plan.layout, forced)) {
    plan = plan_lane_rows(problem, plan);
  } else if (is_small(problem, forced)) {
    plan = plan_small(problem, plan);
  } else {
    return false;
  }
  return true;
}

Plan plan_pieces(const Problem& problem, const Gpu& gpu, const Plan& plan) {
  const auto [outer, length, inner] = problem.rows;
  const bool linear = problem.kind == Kind::kLinear && is_float(problem.dtype) && problem.a.inner.groups <= 1 &&
                      problem.a.outer.groups <= 1;
  const bool cumulative = problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp;
  const bool tangent = problem.kind == Kind::kTangent && is_plain(problem.kind, problem) &&
                       !is_complex(problem.dtype) && (problem.dtype != DType::kFloat64 || problem.op != Op::kLogSumExp);
  if (problem.segmented || !(linear || cumulative || tangent)) return plan;
  if (tangent && problem.rows.elements() > kPieceTangents && outer * inner > kPieceBlocks) return plan;
  // In shared memory, elements have the size in which they are computed, but those of tangents their own.
  const int bytes = tangent ? bytes_of(problem.dtype) : std::max(4, bytes_of(problem.dtype));
  const int operands = operands_of(problem.kind);
  if (plan.layout == Layout::kAlong) return plan;
  const bool across = plan.layout == Layout::kAcross, exact = is_exact(problem);
  if (tangent && across && problem.op == Op::kLogSumExp) return plan;  // kColumns takes other numbers together
  if (!exact && plan.tiles > kGroup) return plan;
  const int element_bytes = bytes_of(problem.dtype);
  const bool half =
      (exact && !is_rare(problem)) || (!exact && cumulative && element_bytes == 2 && length > kPieceHalves);
  const int64_t most_spans = half ? kPieceSpans / 2 : kPieceSpans;
  const int64_t elements = problem.rows.elements();
  const bool one_tile = across && plan.tiles == 1 && element_bytes <= 4;
  const int64_t most_tile = linear ? kPieceTilePairs : kPieceTile;
  if (one_tile ? elements > most_tile : operands * elements > (across ? kPieceAcross : most_spans)) return plan;
  const int64_t most_long = plan.tiles == 1 ? kPieceOnePairs : kPieceFewPairs * (element_bytes > 2 ? 1 : 2);
  const int64_t most_pairs = length > kPiecePair                        ? most_long
                             : across && element_bytes > 2 && !one_tile ? kPieceWidePairs
                             : element_bytes == 8                       ? kPieceLongPairs
                                                                        : kPieceSpans;
  if (linear && elements > most_pairs) return plan;
  if (inner > 1 && length * (across ? bytes : 1) > kPieceLength) return plan;
  if (inner > 1 && length * std::min<int64_t>(inner * bytes_of(problem.dtype), kLineBytes) > kPieceLines) return plan;
  Plan pieces = plan;
  pieces.algorithm = Algorithm::kPieces;
  if (exact) {
    pieces.per_lane = static_cast<int>(8 * std::max<int64_t>(1, length / (4 * kPieceThreads)) + 1);
    pieces.runs = static_cast<int>(std::min<int64_t>(32, ceil_div(length, pieces.per_lane)));
    pieces.axis_warps = kPieceThreads / 32;
  } else if (across) {
    pieces.per_lane = run_shape(plan.layout, operands, bytes_of(problem.dtype)).run;
  }
  const int64_t groups = ceil_div(length, pieces.runs * pieces.per_lane), slots = 32 / pieces.runs;  // slots of a warp
  // Nothing below changes results. Shared memory of a column: its elements, which launch_pieces() spreads over the
  // banks, and the folds of groups and tiles.
  const int64_t held = groups * pieces.runs * pieces.per_lane, folds = groups + ceil_div(groups, pieces.axis_warps);
  const int64_t column_bytes = operands * (held + held / 32 + 1) * bytes + folds * 4 * state_words(problem, bytes);
  const int64_t most = std::min({(tangent ? 2 : 1) * kPieceBytes / (operands * length * bytes),
                                 gpu.shared_bytes / column_bytes, kPieceThreads / 32 * slots / groups});
  if (most == 0) return plan;
  const int64_t blocks = inner > kPieceWide ? kPieceWideBlocks : kPieceBlocks;
  int64_t columns = 1;
  while (inner > 1 && columns < 32 && 2 * columns <= most && outer * inner >= 2 * columns * blocks) columns *= 2;
  const int64_t for_loads =
      std::min(ceil_div(operands * columns * length, 32 * kPieceLoads), int64_t{kPieceThreads / 32});
  pieces.warps = static_cast<int>(std::max(ceil_div(columns * groups, slots), for_loads));
  pieces.column_bits = 0;
  pieces.columns = static_cast<int>(columns);
  pieces.block_columns = columns;
  pieces.strips = ceil_div(outer * inner, columns);
  return pieces;
}

bool makes_y(const Problem& gradient, const Plan& plan) {
  const Problem problem = forward_of(gradient);
  if (is_exact(problem)) return true;
  const Plan forward = plan_scan(problem, gpu_of(90), -1, static_cast<int>(Algorithm::kSpans));
  if (forward.layout == Layout::kAlong || forward.tiles > kGroup) return false;
  const Order order = forward_order(gradient, plan);
  const int64_t groups = ceil_div(problem.rows.length, int64_t{order.run} * order.runs);
  return ceil_div(plan.columns * groups, int64_t{32 / order.runs}) <= kPieceThreads / 32;
}

Plan plan_short(const Problem& problem, const Gpu& gpu, Plan plan, int forced) {
  const auto [outer, length, inner] = problem.rows;
  const int bytes = bytes_of(problem.dtype), operands = operands_of(problem.kind);
  plan.algorithm = Algorithm::kShort;
  plan.per_lane = plan.tile = static_cast<int>(length);
  plan.tiles = 1;
  const int64_t columns = outer * inner;
  const int64_t at_once = length <= 2 ? 4 : length <= 4 ? 2 : 1;  // columns that a lane has at the same time
  if (is_small(problem, forced)) return plan_small(problem, plan);
  // Logsumexps have other bits in kPacks, so no other kernel takes them.
  const bool only = problem.kind == Kind::kCumulative && problem.op == Op::kLogSumExp;
  if (in_packs(problem) && (only || forced != static_cast<int>(Algorithm::kShort))) {
    plan.algorithm = Algorithm::kPacks;
    plan.axis_warps = kWarps;
    // A block has whole rows in whole packs: a multiple of `period` packs.
    const int64_t row_bytes = length * bytes, period = row_bytes / std::min<int64_t>(row_bytes & -row_bytes, 16);
    plan.block_columns = kWarps * (32 - row_lanes_before(row_bytes)) / period * period * 16 / row_bytes;
    plan.strips = ceil_div(columns, plan.block_columns);
    return plan;
  }
  if (is_lanes(problem, forced)) {
    plan.algorithm = Algorithm::kLanes;
    plan.axis_warps = kLanesThreads / 32;
    plan.block_columns = kLanesThreads;
    plan.strips = ceil_div(columns, plan.block_columns);
    return plan;
  }
  if (inner * bytes < kLineBytes) {
    const int64_t rows = std::max<int64_t>(kShortBytes / (operands * length * inner * bytes), 1);
    const int64_t blocks = (bytes == 1 ? kByteBlocks : 2) * gpu.multiprocessors;
    const int64_t shared_out = ceil_div(std::max<int64_t>(ceil_div(columns, blocks), 64), inner);
    plan.block_columns = inner * std::min(rows, shared_out);
    if (is_direct(problem) && inner * bytes >= kDirectLine)
      plan.block_columns = std::min(plan.block_columns, inner * std::max<int64_t>(at_once * kThreads / inner, 1));
    if (!is_direct(problem)) {
      plan.padding = length * inner * bytes % 16 == 0 ? 16 : 0;
      plan.span_bytes = static_cast<int>(span_bytes(plan.block_columns * length, bytes, plan.padding));
      plan.stage_bytes = operands * plan.span_bytes;
    }
    plan.parts = 0;
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, ceil_div(plan.block_columns, 32)));
    plan.strips = ceil_div(columns, plan.block_columns);
  } else {
    plan.parts = ceil_div(inner, at_once * kThreads);
    plan.block_columns = ceil_div(inner, plan.parts);
    plan.axis_warps = static_cast<int>(ceil_div(plan.block_columns, 32 * at_once));
    plan.strips = outer * plan.parts;
  }
  return plan;
}

}  // namespace jaxgpuops::scan
