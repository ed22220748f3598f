// How the elements of a problem are spread over threads: shared between the plan and the kernels.
//
// A block takes tiles of `length` positions by some columns (a column: one outer and one inner index). Its warps are
// `axis_warps` along the axis by `column_warps`; the lanes of a warp are 2^run_bits along the axis by the rest. A lane
// has `per_lane` runs of consecutive positions, one after the other.
//
// kSpans, a warp has `runs` runs, of up to 32 columns each, of `per_lane` positions; more columns have warps beside
// each other. Of a short axis a lane has all positions.
#pragma once

#include <cstdint>

#include "scan/scan.h"

namespace jaxgpuops::scan {

enum class Layout {
  kAlong,   // inner is 1: 16 bytes along the axis are one load, and one run
  kAcross,  // 16 bytes across columns are one load; a lane has a run of positions of 4 bytes, or of one column
  kSpans,   // 4 bytes of memory are one load, whatever they belong to; a lane has a run of one column
};

struct RunShape {
  int run;       // positions of a run
  int width;     // columns of a lane
  int per_lane;  // runs of a lane, at most
};

// For a policy of `operands` operands as large as its results. Tiles of 16 KB an operand, or less where there are more.
constexpr RunShape run_shape(Layout layout, int operands, int bytes) {
  switch (layout) {
    case Layout::kAlong: return {16 / bytes, 1, operands <= 2 ? 4 : 2};
    case Layout::kAcross: return {(operands == 1 ? 32 : 16) / (bytes > 4 ? 2 : 1), bytes < 4 ? 4 / bytes : 1, 1};
    case Layout::kSpans: break;
  }
  return {1, 1, (operands == 1 ? 128 : operands == 2 ? 64 : 32) / (bytes < 2 ? 2 : bytes > 8 ? 8 : bytes) + 1};
}

constexpr int64_t kShortAxis = 32;
constexpr int kMostColumns = 256;                          // of a span
constexpr int kLineBits = 7, kLineBytes = 1 << kLineBits;  // of memory; spans are aligned to these in shared memory

// Bytes of shared memory of an operand's part of a span.
constexpr int64_t span_bytes(int64_t elements, int bytes, int padding) {
  return ((elements * bytes + kLineBytes - 1) / kLineBytes + 1) * (kLineBytes + padding);
}

// Calls that are not worth the time to compile kernels of 16-byte loads for: they take Layout::kSpans.
constexpr bool is_rare(Kind kind, bool product, bool segmented, DType dtype) {
  const int bytes = bytes_of(dtype);
  if (bytes == 1 || bytes == 16) return true;
  if (is_float(dtype)) return false;
  if (is_complex(dtype)) return kind == Kind::kCumulative && segmented;
  return bytes == 2 || kind != Kind::kCumulative || product || segmented;
}

inline bool is_rare(const Problem& problem) {
  const bool product = problem.kind == Kind::kCumulative && problem.op == Op::kProd;
  return is_rare(problem.kind, product, problem.segmented, problem.dtype);
}

// Cumulative calls of which kernels learn the operator from their options.
inline bool is_general(const Problem& problem) {
  return problem.kind == Kind::kCumulative && problem.op != Op::kLogSumExp && (problem.segmented || is_rare(problem));
}

constexpr int kWarps = 8;  // of a block, at most; those that look ahead not counted
constexpr int kThreads = 32 * kWarps;
constexpr int kWideThreads = 2 * kThreads;  // of a block that walks along 256 bytes of columns, at most

// Bytes of shared memory of a tile on its way, at most: operands, neighbours, the folds before runs.
constexpr int stage_bytes(Layout layout, int operands, int bytes, int state_bytes) {
  const RunShape shape = run_shape(layout, operands, bytes);
  if (layout == Layout::kAcross)  // a line of neighbours more
    return kThreads * (operands * shape.run + (operands < 3 ? 0 : 1)) * shape.width * bytes;
  return kThreads * (operands * shape.per_lane * 16 + (operands < 3 ? 0 : bytes) + state_bytes);
}

// look_ahead: steps from a tile's sum to its results, at most.
constexpr int kMostLate = 1;
// Across columns, strips from which on a block stays with one.
constexpr int kManyStrips = 16;
// The same along rows of few operands: blocks of a multiprocessor, and tiles in the shared memory of one, at most. 0 of
// other calls (`cut`: segments of cumulative ones, whose states need too many registers): they take the kernel above.
constexpr int row_blocks(int operands, bool cut) { return cut ? 0 : operands == 1 ? 2 : operands == 2 ? 1 : 0; }
constexpr int kMostStages = 6;

// resident: tiles of all rows together, at most; 132 multiprocessors have as many at a time.
constexpr int kResidentTiles = 528;
// Where all tiles of a row look for a sum, memory tells them one after the other: of rows of many tiles there are
// copies of each sum, for some of the tiles each. A power of two.
constexpr int kMostCopies = 8;
constexpr int resident_copies(int64_t tiles) { return tiles >= 128 ? kMostCopies : 1; }

// Tiles are numbered in base kGroup, and their sums folded by digits: 32 of a level make one of the next, and the fold
// of all before a tile is, from the highest level down, the folds of those that its digits count. The same in kernels
// that walk the axis tile by tile, and in those whose blocks share it.
constexpr int kGroupBits = 5;
constexpr int kGroup = 1 << kGroupBits;
constexpr int kMaxLevels = 8;

// The workspace: counters, then a word of 64 bits for each 32 of a sum: those, and a tag that says they are there.
constexpr int kMostCounters = 256;
constexpr int kWorkspaceHeader = 4 * kMostCounters;

}  // namespace jaxgpuops::scan
