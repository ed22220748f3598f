// Chooses the kernel of a call, its geometry and the size of its workspace. The plan is a pure function of the problem
// and the compute capability: Python sizes the workspace and explains a call with it where there is no GPU, and the
// CUDA handler calls the same function.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "scan/scan.h"
#include "scan/cuda/shape.h"

namespace jaxgpuops::scan {

// The kernels. If blocks share an axis, a block waits for the sums of earlier tiles; otherwise a block has the whole
// axis.
enum class Algorithm {
  kEmpty,            // nothing to write
  kShort,            // kSpans: a lane has the whole (short) axis
  kPacks,            // kSpans: a lane has 16 bytes of whole rows
  kSmall,            // kSpans: few elements in all, and a lane has one
  kLanes,            // kSpans: a lane has the whole (short) axis, which it reads directly; not many elements in all
  kPieces,           // kAcross, kSpans: few elements in all, and a block has whole columns
  kFew,              // kAlong: rows of up to 8 KB, few of them; kSpans: short columns; a lane has 16 bytes
  kLaneRows,         // kAlong: many rows of few elements; a lane has a row
  kRows,             // kAlong: the axis is one tile
  kWalk,             // kAlong: a block walks over the tiles of a row
  kResident,         // blocks share an axis, and all run at the same time; they are a cluster if they are few
  kRowLookAhead,     // kAlong: blocks share a row; some warps only fold what comes before a tile
  kChunkLookAhead,   // kAlong: the same for three operands of 32 bits
  kChunkTwice,       // kAlong: the same for three of 16 bits, and segments of cumulative calls; tiles are read twice
  kColumns,          // kAcross: a block walks over the tiles of its columns
  kColumnLookAhead,  // kAcross: blocks share the columns; some warps only fold what comes before a tile
  kColumnTwice,      // kAcross: blocks share the columns, and read tiles twice: for sums, and for results
  kSpans,            // kSpans: a block walks over the tiles of its columns
  kSpanTwice,        // kSpans: blocks share the columns, and read tiles twice: for sums, and for results
};

const char* name(Algorithm algorithm);
const char* name(Layout layout);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  Layout layout = Layout::kAlong;
  int run_bits = 0;  // cuda/shape.h explains run_bits, axis_warps and per_lane
  int axis_warps = 1;
  int column_bits = 0;  // a block has 2^column_bits warps across the columns
  int per_lane = 1;
  int runs = 1;               // kSpans: runs of a warp
  int columns = 1;            // kSpans: columns of a span; kSmall: columns of a warp; kPieces: columns of a block
  int64_t parts = 1;          // kSpans: parts into which `inner` is divided
  int64_t block_columns = 0;  // columns of a block if the axis is short, else 0
  int span_bytes = 0;    // shared memory for an operand's part of a span; 0 if that part is not contiguous in memory
  int padding = 0;       // bytes of span_bytes that are left free after each 128
  int stage_bytes = 0;   // shared memory for a tile
  int tile = 0;          // positions along the axis that a tile has
  int64_t tiles = 0;     // tiles along the axis
  int64_t strips = 0;    // blocks needed to cover all columns once
  int levels = 1;        // levels of the tree in which sums of tiles are folded
  int late = 0;          // look_ahead: steps between the sum of a tile and its results
  int stages = 1;        // tiles that a block has in shared memory at a time
  int warps = 0;         // kPieces, kFew, kLaneRows: warps of a block
  int cluster = 1;       // kResident: blocks of a cluster
  bool overlap = false;  // the second of two kernels may start before the first ends
  int64_t workspace_bytes = 0;  // workspace of one outer index

  int threads() const { return warps > 0 ? 32 * warps : 32 * axis_warps << column_bits; }
  // Columns of a block, in multiples of those that a block of kThreads has.
  int width() const { return threads() > kThreads ? threads() / kThreads : 1; }
};

// `workspace_bytes` < 0 asks for the best plan. Otherwise the caller has a workspace of that size, and the plan needs
// no more: a sharded call is planned for the whole batch but runs on a part of it. Results have the same bits either
// way. `forced` is for experiments: the Algorithm to use if it can take the problem. (If it cannot, the plan names
// another.)
Plan plan_scan(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1, int forced = -1);

// Sums of two columns of float32 side by side are those of rows of complex64, which have faster kernels: whether the
// problem is such a sum, and the same as rows.
bool is_paired(const Problem& problem);
Problem paired(Problem problem);

// Whether the kernel of a tangent can make y of x, in the order of the forward call: in kSmall, where a lane sees all
// positions of its column anyway; of gradients also along other short axes (cuda/short_from_x.cuh), rows of one tile
// (cuda/from_x.cuh), and columns in kPieces (cuda/tangent_pieces.cu).
bool takes_x(const Problem& problem, const Gpu& gpu);

// The forward call of a gradient from x, and its plan in the same kernel. `plan`: that of the gradient.
Problem forward_of(const Problem& gradient);
Plan plan_forward(const Problem& gradient, const Plan& plan);

// The order in which kPieces folds: positions of a run, runs of a group, groups of a tile. That of the forward call of
// a gradient, whose plan is `plan`.
struct Order {
  int run, runs, of_tile;
};
Order forward_order(const Problem& gradient, const Plan& plan);

}  // namespace jaxgpuops::scan
