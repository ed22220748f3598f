#include "scan/plan.h"

#include <algorithm>

#include "common/rounding.h"

namespace jaxgpuops::scan {
namespace {

int operands_of(Kind kind) {
  switch (kind) {
    case Kind::kCumulative: return 1;
    case Kind::kLinear: return 2;
    case Kind::kTangent:
    case Kind::kLinearVjp: break;
  }
  return 3;
}

// With fewer strips than this, one block for each strip would leave much of the device idle, so blocks share the axis.
// Blocks that share an axis of spans read it twice; the more there is to compute for a byte, the more strips this pays
// for. One block of kAcross has several tiles in flight and fills a multiprocessor; if there are few tiles, fewer
// blocks are enough, as it takes some time to begin to share an axis. So the fewer tiles rows have, the fewer rows are
// enough.
int64_t enough_strips(const Problem& problem, Layout layout, Algorithm shared_out, int64_t tiles, const Gpu& gpu) {
  const int64_t all = gpu.multiprocessors;
  const int operands = operands_of(problem.kind), bytes = bytes_of(problem.dtype);
  const bool cumulative = problem.kind == Kind::kCumulative, exponentials = cumulative && problem.op == Op::kLogSumExp;
  if (layout == Layout::kAlong) {
    if (operands > 2 || (cumulative && problem.segmented)) return tiles > 2 ? all * 3 / 2 : 2 * all;
    return tiles <= 3 ? all + 1 : tiles <= 8 ? all * 3 / 2 : 2 * all;
  }
  if (layout == Layout::kSpans) {
    if (tiles > 2 && (bytes <= 2 || exponentials))
      return problem.rows.inner > kFewColumns && !exponentials ? 2 * all : 3 * all;
    return tiles > 2 && operands == 1 && bytes == 4 ? 2 * all : all * 11 / 8;
  }
  if (exponentials) return all;
  const int64_t most = shared_out == Algorithm::kColumnTwice ? all * 3 / 4 : all;
  return tiles <= 8 ? std::min(most, all - all * 5 / 3 / tiles) : most;
}

// With one block for each row, blocks run in waves, and the last wave leaves much of the device idle; that matters if
// there are few waves. So blocks share rows if there are fewer than kManyRows rows, a row has at least kLongRow almost
// full tiles, and a sum is one number (larger sums take longer to fold than to load).
constexpr int64_t kManyRows = 2048;  // an H200 runs 660 blocks at the same time
constexpr int64_t kLongRow = 16;     // tiles of such a row
constexpr int64_t kOddTiles = 8;     // the least tiles of a row that is shared because it is not whole packs

constexpr int64_t kManyTiles = 256;       // kSpans of two operands: tiles are larger if there are more
constexpr int kSlimRun = 33;              // kSpans of lines that are too long for one span: positions of a run
constexpr int64_t kExactBlocks = 132;     // kSpans of exact operations: tiles are smaller if there are fewer
constexpr int64_t kOnceBytes = 24 << 20;  // columns of more bytes are not read twice if a kernel can read them once
// kResident of spans, without clusters: the most tiles of all strips, of a strip, and sums that a block reads.
constexpr int64_t kResidentSpans = 396, kResidentStrip = 256, kResidentSums = 1024;
constexpr int64_t kClusterTiles = 8;       // the blocks of a cluster have up to so many
constexpr int64_t kClusterBlocks = 3;      // blocks of clusters on a multiprocessor
constexpr int64_t kOddLines = 128;         // the most columns of lines that are no whole vectors in kSpans
constexpr int64_t kOddLength = 4096;       // the shortest axis for them, of logsumexps and recurrences
constexpr int64_t kShortBytes = 24 << 10;  // shared memory of a block where the axis is short

// The most elements that an array may have for kSmall. On a short axis: kSmallDirect if kPacks, or the lanes of kShort,
// would read it directly from memory with few loads (kSmallLong if lanes of kPacks take more turns, kSmallWhole if rows
// are also whole lanes of theirs), kSmallExact if they would not and the order of folding does not change states,
// otherwise kSmallElements. On a longer axis: kSmallRare for dtypes that have only the kernels of spans, otherwise
// kSmallLong.
constexpr int64_t kSmallDirect = 3 << 15, kSmallElements = 1 << 17, kSmallExact = 1 << 18;
constexpr int64_t kSmallLong = 1 << 16, kSmallRare = 1 << 18;
constexpr int64_t kSmallWhole = 3 << 13;
// So many columns of up to 4 bytes along a longer axis are left to kPieces: kSmallColumns if kSmallBeside are side by
// side, otherwise kSmallMany.
constexpr int64_t kSmallColumns = 192, kSmallBeside = 64, kSmallMany = 352;
// The most elements of kLanes: cumulative operations, and recurrences.
constexpr int64_t kLanesElements = 1 << 21, kLanesPairs = 3 << 18;
// Columns of rare dtypes along at most kSmallInner positions take kPieces if they have more than kSmallDirect elements.
constexpr int64_t kSmallInner = 512;

// kPieces. kPieceAcross, kPieceSpans: the most elements of an array with that layout; with kSpans half as many if the
// order of folding does not change states, unless the dtype has only kernels of spans. kPieceBytes: the most bytes
// of a block's columns. kPieceLoads: about the elements that a thread loads.
constexpr int64_t kPieceAcross = 1 << 18, kPieceSpans = 1 << 20, kPieceBytes = 64 << 10, kPieceLoads = 4;
// A block takes more columns only while at least kPieceBlocks blocks are left (kPieceWideBlocks if inner is above
// kPieceWide). A block reads whole lines of memory; the lines that hold its columns have at most kPieceLines bytes.
constexpr int64_t kPieceBlocks = 132, kPieceWideBlocks = 50, kPieceWide = 64, kPieceLines = 1 << 18;
// Gradients: arrays of more than kPieceTangents elements only if they have at most kPieceBlocks columns.
constexpr int64_t kPieceTangents = 1 << 17;
// Two operands: axes longer than kPiecePair only if the array has at most kPieceFewPairs elements, and those of 4 or 8
// bytes that lie across only if it has at most kPieceWidePairs. (Of 16 bits, twice kPieceFewPairs.)
constexpr int64_t kPiecePair = 1024, kPieceFewPairs = 1 << 14, kPieceWidePairs = 1 << 15;
constexpr int64_t kPieceLength = 8192;  // the longest axis, if inner is not 1; of kAcross, that of 8 bytes is 1024

// kFew. The most bytes of a row. The most elements of rows that are whole packs: kFewLines of rows of up to kFewLine
// bytes, otherwise kFewElements; of others: kFewOdd of 2 bytes, half as many of 4, an eighth of 8. Columns of
// recurrences: the longest axis, and the most bytes that lie side by side.
constexpr int64_t kFewBytes = 8192, kFewLine = 512, kFewLines = 3 << 16, kFewElements = 1 << 15, kFewOdd = 1 << 19;
constexpr int64_t kFewLength = 64, kFewInner = 80;
// Rows of more than kFewLong bytes: of 2-byte elements, at most so many rows and elements; whole packs up to
// kFewLongPacks bytes.
constexpr int64_t kFewLong = 2048, kFewLongPacks = 4096, kFewLongRows = 200, kFewLongElements = 9 << 16;

// kLaneRows: the most bytes of a row (kLaneRowPairs: of recurrences), the fewest rows for each position, and shared
// memory of a block.
constexpr int64_t kLaneRowBytes = 256, kLaneRowPairs = 224, kLaneRowsTimes = 256, kLaneRowsBytes = 40 << 10;

// In kShort, lanes read the axis directly from memory if that takes few loads. With more loads they do so only if the
// array is so small that the caches serve them.
constexpr int64_t kDirectLength = 8, kDirectBytes = 16, kDirectElements = 1 << 22;
// They have no more columns than are in flight at a time if at least so many bytes of columns lie side by side.
constexpr int64_t kDirectLine = 32;
// Blocks of a multiprocessor in which lanes read bytes from shared memory, which takes longer than to bring them there.
constexpr int64_t kByteBlocks = 4;

// An upper bound of the number of 32-bit words in the State of the problem's policy.
int state_words(const Problem& problem, int bytes) {
  const int value = std::max(1, bytes / 4);
  if (problem.kind != Kind::kCumulative) return 2 * value;
  const int words = problem.op == Op::kLogSumExp ? 2 * value : value;
  const bool cut = problem.segmented || is_general(problem) || bytes == 1;
  return cut ? words + (bytes >= 8 ? 2 : 1) : words;
}

// The workspace of kernels that read tiles twice: the sums of tiles, and the states that the threads of a tile have of
// what comes before them within it.
int64_t bytes_of_twice(int64_t tiles, int64_t columns, int64_t of_threads, int state_bytes) {
  return kWorkspaceHeader + tiles * (columns + of_threads) * state_bytes;
}

// Whether states have the same bits whatever the order of folding.
bool is_exact(const Problem& problem) {
  if (problem.kind != Kind::kCumulative) return false;
  if (!is_float(problem.dtype) && !is_complex(problem.dtype)) return true;
  return !is_general(problem) && (problem.op == Op::kMax || problem.op == Op::kMin);
}

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

// Plans kPieces for few elements along an axis that is not short. Whoever else took the problem would fold it in the
// order of `plan`, and so does kPieces, unless the order does not matter. Returns `plan` where there are too many
// elements.
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
  const int64_t most_spans = exact && !is_rare(problem) ? kPieceSpans / 2 : kPieceSpans;
  if (operands * problem.rows.elements() > (across ? kPieceAcross : most_spans)) return plan;
  const int64_t most_pairs = length > kPiecePair ? kPieceFewPairs * (bytes_of(problem.dtype) > 2 ? 1 : 2)
                             : across && bytes_of(problem.dtype) > 2 ? kPieceWidePairs
                                                                     : kPieceSpans;
  if (linear && problem.rows.elements() > most_pairs) return plan;
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

// Whether a gradient in kPieces can make y of x: in the order of the forward call, of which a lane also has a run.
bool makes_y(const Problem& gradient, const Plan& plan) {
  const Problem problem = forward_of(gradient);
  if (is_exact(problem)) return true;
  const Plan forward = plan_scan(problem, gpu_of(90), -1, static_cast<int>(Algorithm::kSpans));
  if (forward.layout == Layout::kAlong || forward.tiles > kGroup) return false;
  const Order order = forward_order(gradient, plan);
  const int64_t groups = ceil_div(problem.rows.length, int64_t{order.run} * order.runs);
  return ceil_div(plan.columns * groups, int64_t{32 / order.runs}) <= kPieceThreads / 32;
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

// Plans a short axis, where one lane has the whole axis of a column. If the columns of an outer index are less than a
// line of memory, a block first loads whole outer indices into shared memory.
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

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kShort: return "short";
    case Algorithm::kPacks: return "packs";
    case Algorithm::kSmall: return "small";
    case Algorithm::kLanes: return "lanes";
    case Algorithm::kPieces: return "pieces";
    case Algorithm::kFew: return "few";
    case Algorithm::kLaneRows: return "lane_rows";
    case Algorithm::kRows: return "rows";
    case Algorithm::kWalk: return "walk";
    case Algorithm::kResident: return "resident";
    case Algorithm::kRowLookAhead: return "row_look_ahead";
    case Algorithm::kChunkLookAhead: return "chunk_look_ahead";
    case Algorithm::kChunkTwice: return "chunk_twice";
    case Algorithm::kColumns: return "columns";
    case Algorithm::kColumnLookAhead: return "column_look_ahead";
    case Algorithm::kColumnTwice: return "column_twice";
    case Algorithm::kSpans: return "spans";
    case Algorithm::kSpanTwice: return "span_twice";
  }
  return "?";
}

const char* name(Layout layout) {
  switch (layout) {
    case Layout::kAlong: return "along";
    case Layout::kAcross: return "across";
    case Layout::kSpans: return "spans";
  }
  return "?";
}

bool is_paired(const Problem& problem) {
  return problem.kind == Kind::kCumulative && problem.op == Op::kSum && problem.dtype == DType::kFloat32 &&
         problem.rows.inner == 2 && problem.rows.length > kShortAxis && !problem.segmented;
}

Problem paired(Problem problem) {
  problem.dtype = DType::kComplex64;
  problem.rows.inner = 1;
  return problem;
}

Plan plan_scan(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, int forced) {
  Plan plan;
  const auto [outer, length, inner] = problem.rows;
  if (problem.rows.elements() == 0) return plan;
  const bool in_spans =
      forced == static_cast<int>(Algorithm::kSpans) || forced == static_cast<int>(Algorithm::kSpanTwice);
  if (is_paired(problem) && !in_spans) return plan_scan(paired(problem), gpu, workspace_bytes, forced);
  const int bytes = bytes_of(problem.dtype), operands = operands_of(problem.kind);
  const int state_bytes = 4 * state_words(problem, bytes);

  // Results depend on the geometry of a tile, so that geometry depends on length, inner and the dtype only.
  const bool rare = is_rare(problem);
  // Whether neighbouring columns of all operands are neighbours in memory.
  const bool simple = problem.a.inner.groups <= 1 && problem.starts.inner.groups <= 1;
  // Lines that are no whole vectors are loaded faster as they lie in memory, those with more to compute along long
  // axes.
  const bool logs = problem.kind == Kind::kCumulative && problem.op == Op::kLogSumExp;
  const bool pairs = problem.kind == Kind::kLinear && problem.a.axis_stride == inner;
  const bool sums = problem.kind == Kind::kCumulative && !logs;
  const bool along = (logs || pairs) && bytes <= 4 && length >= kOddLength;
  const bool odd_lines = (sums || along) && inner * bytes % 16 != 0 && inner <= kOddLines;
  const bool across = inner * bytes % 4 == 0 && inner > 32 && simple && !odd_lines;
  const bool twice = forced == static_cast<int>(Algorithm::kSpanTwice);
  const bool rows = is_any_operator(problem) && inner == 1 && forced != static_cast<int>(Algorithm::kSpans);
  plan.layout = (rare && !rows) || twice || length <= kShortAxis ? Layout::kSpans
                : inner == 1                                     ? Layout::kAlong
                : across                                         ? Layout::kAcross
                                                                 : Layout::kSpans;
  if (plan.layout == Layout::kSpans && length <= kShortAxis) return plan_short(problem, gpu, plan, forced);
  const RunShape shape = run_shape(plan.layout, operands, bytes);
  const int64_t runs = ceil_div(length, shape.run);
  if (plan.layout == Layout::kAcross) {
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, int64_t{1} << bits_for(runs)));
  } else if (plan.layout == Layout::kAlong) {
    plan.run_bits = std::min(5, bits_for(ceil_div(runs, shape.per_lane)));
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, ceil_div(runs, shape.per_lane << plan.run_bits)));
    plan.per_lane = shape.per_lane;
  } else {
    // If a rare call has many columns, a span takes only 128 bytes of them or a little more, so that a tile has more
    // positions. So it is with lines of small elements that are too long for one span.
    const bool slim = inner > kMostColumns && (bytes == 2 || (bytes == 1 && !is_float(problem.dtype)));
    const bool narrow = slim || (rare && bytes >= 4 && inner > 64);
    plan.columns = static_cast<int>(std::min<int64_t>(narrow ? 32 : kMostColumns, inner));
    plan.runs = std::max(1, 32 / plan.columns);
    plan.column_bits = bits_for(ceil_div(plan.columns, 32));
    plan.axis_warps = kWarps >> plan.column_bits;
    // A run has an odd number of positions, so that the runs of neighbouring lanes start in different banks of shared
    // memory.
    plan.per_lane = slim ? kSlimRun : shape.per_lane;
    const int64_t lanes = plan.runs * plan.axis_warps;  // lanes that share a column
    const bool exact = is_exact(problem) && !problem.segmented;
    if (exact && lanes * plan.per_lane >= length) {
      // Few warps with long runs take fewer instructions in all; few elements take kPieces, which has runs of its own.
      plan.axis_warps = static_cast<int>(ceil_div(length, plan.runs * plan.per_lane));
      plan.per_lane = std::max<int>(9, ceil_div(length, plan.runs * plan.axis_warps) | 1);
    } else if (!slim) {
      const int64_t parts = ceil_div(inner, plan.columns);
      const auto few = [&](int64_t per_lane) {
        const int64_t tiles = ceil_div(length, lanes * per_lane);
        if (tiles == 1) return true;
        if (!exact || outer * parts * ceil_div(length, lanes * plan.per_lane) >= kExactBlocks) return false;
        return workspace_bytes < 0 || bytes_of_twice(tiles, inner, parts * kThreads, state_bytes) <= workspace_bytes;
      };
      // Two parts of a logsumexp and one position: with a single part, the position would take most of the time.
      const int least = logs && bytes <= 2 ? 17 : 9;
      while (plan.per_lane > least && few(plan.per_lane / 2 + 1)) plan.per_lane = plan.per_lane / 2 + 1;
      // Much of the work for a tile does not depend on its size.
      if (operands == 2 && ceil_div(length, lanes * plan.per_lane) > kManyTiles) plan.per_lane = 2 * plan.per_lane - 1;
    }
    plan.axis_warps = static_cast<int>(std::min<int64_t>(plan.axis_warps, ceil_div(length, plan.runs * plan.per_lane)));
  }
  const int lanes = 1 << plan.run_bits;
  plan.tile = plan.axis_warps * plan.per_lane * (plan.layout == Layout::kSpans ? plan.runs : lanes * shape.run);
  plan.tiles = ceil_div(length, plan.tile);
  while (int64_t{1} << (kGroupBits * plan.levels) < plan.tiles) ++plan.levels;
  if (is_few(problem, plan.layout, forced)) return plan_few(problem, plan);
  if (is_lane_rows(problem, plan.layout, forced)) return plan_lane_rows(problem, plan);
  if (is_small(problem, forced)) return plan_small(problem, plan);
  if (forced < 0 || forced == static_cast<int>(Algorithm::kPieces)) {
    const Plan pieces = plan_pieces(problem, gpu, plan);
    if (pieces.algorithm == Algorithm::kPieces) return pieces;
  }

  // Nothing below changes results. Blocks get more columns as long as there are enough blocks for the device.
  const int64_t vectors = outer * (inner / shape.width), vectors_of_warp = 32 / lanes;
  const auto strips = [&] { return ceil_div(vectors, vectors_of_warp << plan.column_bits); };
  if (plan.layout == Layout::kSpans) {
    plan.parts = ceil_div(inner, plan.columns);
    plan.strips = outer * plan.parts;
  } else {
    plan.column_bits = bits_for(kWarps / plan.axis_warps);
    // A warp of the forward call may have the rows of two warps.
    const int least = problem.from_x && plan.axis_warps == 1 ? 1 : 0;
    while (plan.column_bits > least && strips() < 2 * gpu.multiprocessors) --plan.column_bits;
    plan.strips = strips();
  }
  const bool cut = problem.kind == Kind::kCumulative && problem.segmented;
  const int stayers =
      plan.layout == Layout::kAlong ? row_blocks(operands, cut) : 0;  // blocks per multiprocessor of row_look_ahead
  const bool once = reads_once(plan.layout, problem.kind, problem.op, cut, problem.dtype);
  // The kernel in which a block has all of an axis, and the one in which blocks share it.
  Algorithm alone = Algorithm::kSpans, shared_out = Algorithm::kSpanTwice;
  if (plan.layout == Layout::kAlong) {
    alone = plan.tiles == 1 ? Algorithm::kRows : Algorithm::kWalk;
    shared_out = stayers > 0 ? Algorithm::kRowLookAhead : once ? Algorithm::kChunkLookAhead : Algorithm::kChunkTwice;
  } else if (plan.layout == Layout::kAcross) {
    alone = Algorithm::kColumns;
    const bool large = forced < 0 ? problem.rows.elements() * bytes > kOnceBytes
                                  : forced == static_cast<int>(Algorithm::kColumnLookAhead);
    shared_out = once && large ? Algorithm::kColumnLookAhead : Algorithm::kColumnTwice;
  }
  plan.algorithm = alone;
  int stage = 0;
  if (plan.layout == Layout::kSpans) {
    if (inner == plan.columns) plan.span_bytes = static_cast<int>(span_bytes(plan.tile * inner, bytes, 0));
    stage = operands * plan.span_bytes;
  } else {
    stage = stage_bytes(plan.layout, operands, bytes, state_bytes);
  }
  const int64_t most = gpu.shared_bytes;
  // Shared memory of a block: its tiles in flight, the folds that warps exchange, and 1 KB to spare.
  const auto shared = [&](int stages, int slots) {
    const int64_t columns =
        plan.layout == Layout::kSpans ? plan.columns : (vectors_of_warp << plan.column_bits) * shape.width;
    return stages * stage * plan.width() + slots * (plan.axis_warps + 1) * columns * state_bytes + 1024;
  };
  if (plan.layout == Layout::kSpans && shared(1, 2) > most)
    plan.span_bytes = stage = 0;  // lanes load operands themselves
  if (shared_out == Algorithm::kColumnLookAhead && shared(2, 2) > most) shared_out = Algorithm::kColumnTwice;
  bool enough = plan.strips >= enough_strips(problem, plan.layout, shared_out, plan.tiles, gpu);
  if (forced >= 0) enough = forced == static_cast<int>(alone);
  if (plan.layout == Layout::kAcross) {
    // Two blocks share a multiprocessor if there is room for two tiles of each. If it leaves no multiprocessor idle,
    // one block of twice the width replaces them, which also reads memory in contiguous pieces of twice the size. (The
    // kernels that read tiles twice have no such blocks.)
    const int64_t least = shared_out == Algorithm::kColumnTwice && !enough ? INT64_MAX
                          : enough                                         ? 2 * gpu.multiprocessors * 9 / 10
                                                                           : 2 * kManyStrips;
    if (plan.axis_warps == kWarps && plan.tiles > 1 && plan.strips >= least) {
      ++plan.column_bits;
      if ((enough ? shared(2, 2) : shared(kMostLate + 2, kMostLate + 2)) > most) --plan.column_bits;
      plan.strips = strips();
    }
    const int blocks = 2 / plan.width();
    plan.stages = static_cast<int>(std::min<int64_t>(3, plan.tiles));
    while (plan.stages > 2 && blocks * shared(plan.stages, 2) > most) --plan.stages;
    while (plan.stages > 1 && shared(plan.stages, 2) > most) --plan.stages;
  }
  if (plan.layout == Layout::kAlong && plan.tiles > 1) plan.stages = shared(2, 2) <= most ? 2 : 1;
  if (plan.layout == Layout::kSpans) {  // two blocks share a multiprocessor
    plan.stages = static_cast<int>(std::min<int64_t>(3, plan.tiles));
    while (plan.stages > 1 && 2 * shared(plan.stages, 2) > most) --plan.stages;
  }
  plan.stage_bytes = stage * plan.width();
  if (plan.tiles == 1 || plan.strips * plan.tiles > INT32_MAX) return plan;
  // The kernels in which blocks share rows load long rows of 16 bits faster if these are not whole packs.
  const bool odd =
      plan.layout == Layout::kAlong && operands < 3 && bytes == 2 && length % 8 != 0 && plan.tiles >= kOddTiles;
  // Whether all tiles may be on the GPU at the same time.
  const bool fits = plan.layout == Layout::kAlong && !cut && plan.strips * plan.tiles <= kResidentTiles;
  const bool ragged = plan.layout == Layout::kAlong && !cut && bytes >= 4 && state_bytes == bytes && length % 4 == 0 &&
                      !is_complex(problem.dtype) && plan.strips < kManyRows && plan.tiles >= kLongRow &&
                      plan.tiles * plan.tile - length <= length / 16 && gpu.bulk_copy;
  const bool cluster = forced < 0 && plan.width() == 1 && plan.strips <= gpu.multiprocessors &&
                       plan.strips * plan.tiles <= kClusterBlocks * gpu.multiprocessors &&
                       plan.tiles <= std::min<int64_t>(kClusterTiles, gpu.max_cluster);
  if (cluster) {
    plan.algorithm = Algorithm::kResident;
    plan.cluster = static_cast<int>(plan.tiles);
    plan.stages = 1;
    return plan;
  }
  const bool resident_spans = plan.layout == Layout::kSpans && !rare && plan.tiles <= kResidentStrip &&
                              plan.strips * plan.tiles <= kResidentSpans && plan.tiles * plan.columns <= kResidentSums;
  auto choice = enough && !ragged && !odd ? alone : fits || resident_spans ? Algorithm::kResident : shared_out;
  if (forced >= 0) choice = static_cast<Algorithm>(forced);
  if (choice == Algorithm::kResident && !fits && !resident_spans) choice = shared_out;
  if (choice != Algorithm::kResident && choice != shared_out) return plan;
  // A call for a part of this batch may take the resident kernel, or read columns twice, so the workspace has room for
  // that, too.
  const bool reads_twice = shared_out == Algorithm::kSpanTwice || shared_out == Algorithm::kColumnTwice ||
                           shared_out == Algorithm::kChunkTwice;
  int64_t words = 0;  // of 8 bytes, with tags, for each column
  if (once || stayers > 0)
    for (int level = 0; level < plan.levels; ++level) words += ceil_div(plan.tiles, int64_t{1} << (kGroupBits * level));
  if (plan.layout == Layout::kAlong && !cut && plan.tiles <= kResidentTiles)
    words = std::max(words, plan.tiles * resident_copies(plan.tiles));
  if (plan.layout == Layout::kSpans && !rare && plan.tiles <= kResidentStrip) words = std::max(words, plan.tiles);
  int64_t needed = kWorkspaceHeader + inner * words * 2 * state_bytes;
  if (reads_twice || plan.layout == Layout::kAcross) {
    const int64_t parts = plan.layout == Layout::kAcross ? ceil_div(inner, 32 * shape.width) : plan.parts;
    const int64_t of_threads = plan.layout == Layout::kSpans
                                   ? plan.threads()
                                   : (plan.layout == Layout::kAlong ? 2 : shape.width) * 32 * plan.axis_warps;
    needed = std::max(needed, bytes_of_twice(plan.tiles, inner, parts * of_threads, state_bytes));
  }
  if (workspace_bytes >= 0 && needed > workspace_bytes) return plan;

  const auto room = [&](int stages) { return shared(stages, stages); };
  if (stayers > 0) {
    const int blocks = stayers * room(4) <= most ? stayers : 1;
    int stages = kMostStages;
    while (stages > 2 && blocks * room(stages) > most) --stages;
    if (room(stages) > most) return plan;
    plan.stages = stages;
  } else if (reads_twice) {
    plan.stages = 1;
  } else {
    plan.late = kMostLate;
    while (plan.late > 0 && room(plan.late + 2) > most) --plan.late;
    if (room(plan.late + 2) > most) return plan;
  }
  plan.algorithm = choice;
  plan.workspace_bytes = needed;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

bool takes_x(const Problem& problem, const Gpu& gpu) {
  if (problem.kind != Kind::kTangent || is_complex(problem.dtype)) return false;
  const Plan plan = plan_scan(problem, gpu);
  if (plan.algorithm == Algorithm::kSmall) return true;
  // A logsumexp of fewer positions takes them together in other numbers, and XLA has the call anyway.
  const bool few = plan.algorithm == Algorithm::kShort || plan.algorithm == Algorithm::kPacks;
  if (few && is_plain(problem.kind, problem) && problem.rows.length > 3)
    return problem.dtype != DType::kFloat64 || problem.op != Op::kLogSumExp;
  if (plan.algorithm == Algorithm::kPieces) return makes_y(problem, plan);
  if (is_rare(problem)) return false;
  // Rows of 16 bits that are shifted on the way to several rows of a warp take longer in one kernel.
  const bool shifted = bytes_of(problem.dtype) == 2 && problem.rows.length % 8 != 0 && plan.axis_warps == 1;
  return plan.algorithm == Algorithm::kRows && !shifted;
}

Problem forward_of(const Problem& gradient) {
  Problem problem = gradient;
  problem.kind = Kind::kCumulative;
  problem.transpose = problem.from_x = false;
  return problem;
}

Order forward_order(const Problem& gradient, const Plan& plan) {
  const Problem problem = forward_of(gradient);
  if (is_exact(problem)) return {plan.per_lane, plan.runs, plan.axis_warps};
  const Plan forward = plan_scan(problem, gpu_of(90), -1, static_cast<int>(Algorithm::kSpans));
  if (forward.layout != Layout::kAcross) return {forward.per_lane, forward.runs, forward.axis_warps};
  return {run_shape(forward.layout, operands_of(problem.kind), bytes_of(problem.dtype)).run, 1, forward.axis_warps};
}

Plan plan_forward(const Problem& gradient, const Plan& plan) {
  // Of this plan, only the shape of a tile is used, which is the same for any GPU.
  Plan forward = plan_scan(forward_of(gradient), gpu_of(90), -1, static_cast<int>(Algorithm::kRows));
  forward.column_bits = plan.column_bits + forward.run_bits - plan.run_bits;
  forward.strips = plan.strips;
  return forward;
}

}  // namespace jaxgpuops::scan
