// How the elements of a problem are spread over threads: shared between the plan and the kernels.
//
// A block takes tiles of `length` positions by some columns (a column: one outer and one inner index). Its warps are
// `axis_warps` along the axis by `column_warps`; the lanes of a warp are 2^run_bits along the axis by the rest. A lane
// has `per_lane` runs of consecutive positions, one after the other.
//
// In kSpans, a warp has `runs` runs of `per_lane` positions for each of up to 32 columns; for more columns, warps stand
// side by side. If the axis is short, a lane has all its positions.
#pragma once

#include <cstdint>

#include "scan/scan.h"

namespace jaxgpuops::scan {

enum class Layout {
  kAlong,   // inner is 1: 16 bytes along the axis are one load, and one run
  kAcross,  // 16 bytes across columns are one load; a lane has a run of positions, of as many columns as 4 bytes have
  kSpans,   // 16 bytes of memory are one load, whatever positions and columns they belong to; a lane has a run of one
            // column
};

struct RunShape {
  int run;       // positions of a run
  int width;     // columns that a lane has
  int per_lane;  // the most runs that a lane has
};

// The shape for a policy with `operands` full-size operands. A tile is 16 KB of an operand, less where there are
// several.
constexpr RunShape run_shape(Layout layout, int operands, int bytes) {
  switch (layout) {
    case Layout::kAlong: return {16 / bytes, 1, operands <= 2 && bytes > 1 ? 4 : 2};
    case Layout::kAcross: return {(operands == 1 ? 32 : 16) / (bytes > 4 ? 2 : 1), bytes < 4 ? 4 / bytes : 1, 1};
    case Layout::kSpans: break;
  }
  return {1, 1, (operands == 1 ? 128 : operands == 2 ? 64 : 32) / (bytes < 2 ? 2 : bytes > 8 ? 8 : bytes) + 1};
}

constexpr int64_t kShortAxis = 32;
// kSmall: the longest axis, for operators whose states do not depend on the order of folding.
constexpr int kMostSmallLength = 1024;
constexpr int kSmallWarps = 4;  // kSmall: warps of a block
constexpr int kSmallStep = 4;   // kSmall: positions that a lane steps over before it checks whether there are more
constexpr int kLanesThreads = 256, kLanesStep = 8;  // kLanes: threads of a block; positions that a lane loads at once
constexpr int kLaneRowsThreads = 128;               // kLaneRows: the most threads of a block
constexpr int kMostColumns = 256;                   // the most columns of a span
// kPieces: the most threads of a block.
constexpr int kPieceThreads = 1024;
// A line of memory; in shared memory, spans are aligned to lines.
constexpr int kLineBits = 7, kLineBytes = 1 << kLineBits;

// Bytes of shared memory that one operand's part of a span takes.
constexpr int64_t span_bytes(int64_t elements, int bytes, int padding) {
  return ((elements * bytes + kLineBytes - 1) / kLineBytes + 1) * (kLineBytes + padding);
}

// Whether a call is so rare that it has no kernels with 16-byte loads, which cost build time and bytes: it takes
// Layout::kSpans. `op` matters for cumulative calls only.
constexpr bool is_rare(Kind kind, Op op, bool segmented, DType dtype) {
  const int bytes = bytes_of(dtype);
  if (bytes == 1 || bytes == 16) return true;
  const bool cumulative = kind == Kind::kCumulative, exponentials = cumulative && op == Op::kLogSumExp;
  if (dtype == DType::kFloat64) return kind == Kind::kLinearVjp || (segmented && exponentials);
  if (is_float(dtype)) return segmented && (exponentials || (cumulative && dtype == DType::kFloat16));
  if (is_complex(dtype)) return cumulative ? segmented : kind != Kind::kLinear;
  return bytes == 2 || !cumulative || op == Op::kProd || segmented;
}

// Whether a call has only options for which the fast kernels are compiled. Among tangents these are the transposed
// ones, which gradients need.
template <class Call>
constexpr bool is_plain(Kind kind, const Call& call) {
  return !call.segmented && !call.exclusive && (kind != Kind::kTangent || call.transpose);
}

inline bool is_rare(const Problem& problem) {
  return is_rare(problem.kind, problem.op, problem.segmented, problem.dtype) ||
         (problem.kind == Kind::kTangent && !is_plain(problem.kind, problem));
}

// Whether a cumulative call runs in a kernel that gets the operator as an option, not as a template argument.
inline bool is_general(const Problem& problem) {
  return problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp && (problem.segmented || is_rare(problem));
}

// Whether there is a kernel, other than row_look_ahead, that looks ahead and so reads operands once. There are such
// kernels for calls with little to compute. `cut`: segments of cumulative calls.
constexpr bool reads_once(Layout layout, Kind kind, Op op, bool cut, DType dtype) {
  const int bytes = bytes_of(dtype);
  if (cut || is_complex(dtype)) return false;
  if (layout == Layout::kAcross) return kind == Kind::kCumulative && (bytes == 4 || (bytes == 8 && op == Op::kSum));
  return layout == Layout::kAlong && (kind == Kind::kTangent || kind == Kind::kLinearVjp) && bytes == 4;
}

// Whether rows of integers take kernels that get the operator as an option.
inline bool is_any_operator(const Problem& problem) {
  return is_general(problem) && !problem.segmented && !is_float(problem.dtype) && !is_complex(problem.dtype) &&
         problem.dtype != DType::kBool;
}

// kPacks: the lanes of a row.
constexpr int row_lanes(int64_t row_bytes) {
  const int64_t step = row_bytes & -row_bytes;  // rows begin at multiples of this power of two
  return static_cast<int>((row_bytes + 31 - (step < 16 ? step : 16)) / 16);
}
// The lanes in front of a warp's own that read its first rows from their begin, if rows lie across warps.
constexpr int row_lanes_before(int64_t row_bytes) {
  const int lanes = row_lanes(row_bytes);
  return row_bytes % 16 == 0 && 32 % lanes == 0 ? 0 : lanes - 1;
}

// kPacks: the most lanes of a row (one of 8-byte elements), and the most elements of arrays whose rows have more than
// kFewRowLanes: of 4 bytes, of those with the operator as an option or with one factor, and of 8 bytes.
constexpr int kMostRowLanes = 17, kFewRowLanes = 6;
constexpr int64_t kPacksElements = 1 << 22, kPacksRare = 1 << 20, kPacksWide = 1 << 19;
// Whether a recurrence of several rows has one factor for all of their positions.
inline bool is_one_factor(const Problem& problem) {
  const auto& of_row = problem.a.outer;
  return problem.kind == Kind::kLinear && problem.rows.inner == 1 && problem.rows.outer > 1 &&
         problem.a.axis_stride == 0 && (of_row.groups == 0 || (of_row.groups == 1 && of_row.stride[0] == 0));
}

// The most lanes of a row: they take turns, which are short where a pack has few elements.
inline int most_row_lanes(const Problem& problem) {
  const int bytes = bytes_of(problem.dtype);
  if (problem.kind == Kind::kTangent) return 1;  // they take too much computing for more
  if (problem.kind == Kind::kCumulative && problem.op == Op::kLogSumExp) return 2;  // so do logsumexps
  if (is_any_operator(problem) && bytes == 2) return 3;
  if (bytes < 4) return 5;
  // Of many elements, kShort is faster than more turns.
  const int64_t most = bytes == 8                                           ? kPacksWide
                       : is_any_operator(problem) || is_one_factor(problem) ? kPacksRare
                                                                            : kPacksElements;
  return problem.rows.elements() <= most && problem.kind != Kind::kLinearVjp ? kMostRowLanes : kFewRowLanes;
}

// Whether rows are so short that few lanes have a row, and kPacks takes the problem.
inline bool in_packs(const Problem& problem) {
  const auto [outer, length, inner] = problem.rows;
  const int64_t bytes = length * bytes_of(problem.dtype);
  if (inner != 1 || length > kShortAxis || problem.segmented || problem.initial) return false;
  // Neighbours must be in the same warp.
  const bool neighbours = problem.kind == Kind::kTangent || problem.kind == Kind::kLinearVjp;
  if (row_lanes(bytes) > most_row_lanes(problem) || (neighbours && row_lanes_before(bytes) > 0)) return false;
  if (is_rare(problem.kind, problem.op, problem.segmented, problem.dtype) && !is_any_operator(problem)) return false;
  const auto& a = problem.a;
  if (problem.kind != Kind::kLinear || is_one_factor(problem)) return true;
  return (length == 1 || a.axis_stride == 1) && (outer == 1 || (a.outer.groups == 1 && a.outer.stride[0] == length));
}

constexpr int kWarps = 8;  // the most warps of a block, without those that look ahead
constexpr int kThreads = 32 * kWarps;
constexpr int kWideThreads = 2 * kThreads;  // the most threads of a block that walks along 256 bytes of columns

// The most bytes of shared memory that a tile in flight takes: operands, neighbours, the folds before runs.
constexpr int stage_bytes(Layout layout, int operands, int bytes, int state_bytes) {
  const RunShape shape = run_shape(layout, operands, bytes);
  if (layout == Layout::kAcross)  // and one line of neighbours
    return kThreads * (operands * shape.run + (operands < 3 ? 0 : 1)) * shape.width * bytes;
  return kThreads * (operands * shape.per_lane * 16 + (operands < 3 ? 0 : bytes) + state_bytes);
}

// look_ahead: the most steps between a tile's sum and its results.
constexpr int kMostLate = 1;
// kAcross: with at least this many strips, a persistent block stays with one strip.
constexpr int kManyStrips = 16;
// row_look_ahead: blocks per multiprocessor, and the most tiles in a block's shared memory. There is no such kernel (0)
// for gradients; for `cut` (segments of cumulative calls, whose states need too many registers); and for logsumexps of
// float64, which take so long to compute that it is faster to read them twice.
constexpr int row_blocks(Kind kind, Op op, bool cut, DType dtype) {
  if (cut || (kind == Kind::kCumulative && op == Op::kLogSumExp && dtype == DType::kFloat64)) return 0;
  return kind == Kind::kCumulative ? 2 : kind == Kind::kLinear ? 1 : 0;
}
constexpr int kMostStages = 6;

// resident: the most tiles, of all rows together. 132 multiprocessors hold so many at the same time.
constexpr int kResidentTiles = 528;
// Kernels that read tiles twice: if columns are this few and tiles at most kGroup (kAcross: if tiles are this few), the
// blocks that make results also fold the sums of tiles.
constexpr int kFewColumns = 16, kFewTiles = 6;
// When all tiles of a row read the same sum, memory serves them one after the other. So rows of many tiles keep copies
// of each sum, each for some of the tiles. A power of two.
constexpr int kMostCopies = 8;
constexpr int resident_copies(int64_t tiles) { return tiles >= 128 ? kMostCopies : 1; }

// The order of folding: 32 sums of a level make one of the next. So the digits of a tile's number, in base kGroup, say
// how many sums of each level come before it; these are folded from the highest level down. Kernels that walk the axis
// tile by tile and kernels whose blocks share it do the same, so they give the same bits.
constexpr int kGroupBits = 5;
constexpr int kGroup = 1 << kGroupBits;
constexpr int kMaxLevels = 8;

// The workspace: counters, then the sums. Every 32 bits of a sum take a word of 64, whose other half is a tag that says
// that they have been written.
constexpr int kMostCounters = 256;
constexpr int kWorkspaceHeader = 4 * kMostCounters;

}  // namespace jaxgpuops::scan
