// Which kernel a call takes, with which geometry and how much workspace: a pure function of the problem and the compute
// capability, so that Python can size the workspace and explain a call where there is no GPU. The handler calls it,
// too.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "scan/scan.h"
#include "scan/cuda/shape.h"

namespace jaxgpuops::scan {

// The kernels. Where blocks share an axis, a block waits for the sums of earlier tiles; else it has all of it.
enum class Algorithm {
  kEmpty,            // nothing to write
  kShort,            // kSpans: a lane has the axis
  kRows,             // kAlong: the axis is one tile
  kWalk,             // kAlong: a block walks over the tiles of a row
  kResident,         // kAlong: blocks share a row, and all run at a time
  kRowLookAhead,     // kAlong: blocks share a row, and have warps that only find out what comes before a tile
  kChunkLookAhead,   // kAlong: blocks share a row: three operands, or segments of cumulative calls
  kColumns,          // kAcross: a block walks over the tiles of its columns
  kColumnLookAhead,  // kAcross: blocks share the columns
  kSpans,            // kSpans: a block walks over the tiles of its columns
  kSpanLookAhead,    // kSpans: blocks share the columns
};

const char* name(Algorithm algorithm);
const char* name(Layout layout);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  Layout layout = Layout::kAlong;
  int run_bits = 0;  // see cuda/shape.h
  int axis_warps = 1;
  int column_bits = 0;  // 2^column_bits warps along the columns
  int per_lane = 1;
  int runs = 1;                 // kSpans: of a warp
  int columns = 1;              // and of a span
  int64_t parts = 1;            // of inner
  int64_t block_columns = 0;    // of a block where the axis is short; else 0
  int span_bytes = 0;           // shared memory of an operand's part of a span; 0 if that is not contiguous
  int padding = 0;              // of these, bytes that are left free after each 128
  int stage_bytes = 0;          // and of a tile
  int tile = 0;                 // positions of a tile
  int64_t tiles = 0;            // along the axis
  int64_t strips = 0;           // blocks that the columns take
  int levels = 1;               // of folds of tiles
  int late = 0;                 // look_ahead: steps from a tile's sum to its results
  int stages = 1;               // kAcross, loop; look_ahead along rows: tiles in shared memory
  bool overlap = false;         // the second kernel of two may start before the first ends
  int64_t workspace_bytes = 0;  // per outer index

  int threads() const { return 32 * axis_warps << column_bits; }
  int width() const { return threads() > kThreads ? threads() / kThreads : 1; }  // as many columns as others have
};

// `workspace_bytes` < 0 asks for the best plan. Otherwise it is what the caller has, and the plan makes do with it: a
// sharded call is planned for the whole batch but runs on a part of it. Results have the same bits either way. `forced`
// is for experiments: the Algorithm to take where it can. (Where it cannot, the plan names another.)
Plan plan_scan(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1, int forced = -1);

}  // namespace jaxgpuops::scan
