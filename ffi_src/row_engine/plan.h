// The geometry of the row engine (cuda/engine.cuh): how statistics of a row are divided among lanes, warps and blocks,
// and what goes through memory. A pure function of shape, element and compute capability.
//
// Whatever decides the bits of a result depends on (length, inner, element) only. The rest of a plan may also depend on
// the number of rows and the device: the same statistics are merged in the same order, wherever they were computed.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"

namespace jaxgpuops {

enum class RowAlgorithm {
  kEmpty,          // nothing to write
  kRows,           // inner == 1. A team of lanes, a block or a cluster holds a row in registers: one read, one write
  kRowsTiles,      // many short rows that are not whole vectors, in shared memory (cuda/tiles.cuh)
  kRowsStream,     // as kRows, of long rows, by blocks that stay and take the next rows in turn (cuda/stream.cuh)
  kRowsSplit,      // rows too long for that: statistics of all parts, then of the row, then the results
  kColumns,        // inner > 1. Lanes along inner; a block or a cluster holds the axis in registers
  kColumnsStream,  // the same for many columns, by blocks that stay and have the next on their way
  kColumnsSplit,   // axes too long for that
  kColumnsWalk,    // lanes go along short axes, twice if there are results (cuda/columns_walk.cuh)
  kColumnsFlat,    // few columns: an outer index is a flat row, read in vectors (cuda/columns_flat.cuh)
  kSmall,          // few elements in all, one of a lane (cuda/small.cuh)
};

const char* name(RowAlgorithm algorithm);

// What the plan must know about an operation.
struct RowTraits {
  int item_bytes = 4;
  int operands = 1;
  bool fast = true;     // there are kernels for several numbers of vectors per lane; otherwise only for kOnlyVectors
  bool large = true;    // and for the largest number, too
  bool masked = false;  // there may be masks: columns are read one by one
  bool output = true;   // results of the full shape
  bool label = false;   // each row has a label, an element that must be found before the row is read
  bool lean = false;    // this call has only statistics; a kernel of few registers is for that (Sharing::kStatistics)
  bool tiled = false;   // there are full results, and the kernels of short rows: tile_kernel and spread_kernel
  bool swept = false;   // there are only statistics; of the kernels of rows, only tile_kernel and sweep_kernel
  bool strips = false;  // there are only statistics, and a kernel that walks strips of columns
  int stat_bytes = 8;   // of the statistics of a part of a row
  int final_bytes = 8;  // of what the full results of a row need to know of the row
};

constexpr int kOnlyVectors = 4;
constexpr int kLeanVectors = 2;  // vectors of a lane of lean_rows_kernel: short rows, statistics only

constexpr int kMaxBlockWarps = 32;
constexpr int kMaxCluster = 16;    // blocks of the largest cluster
constexpr int kPartWarps = 8;      // the most warps of a small block, which holds a part of a row, or several rows
constexpr int kStreamWarps = 16;   // warps of a block of kRowsStream
constexpr int kStreamChains = 32;  // chains of spans: a lane merges every 32nd span
constexpr int kSpreadWarps = 4;    // the most warps of a block of spread_kernel
constexpr int kWideVectors = 2;    // vectors of a lane of wide_kernel
constexpr int kTileThreads = 128;  // threads of a block that has a tile of rows
constexpr int kTileBytes =
    8 << 10;                    // about the bytes of a tile, where rows are shorter than what a team of lanes holds
constexpr int kTileTurns = 4;   // the most rows of a team of lanes
constexpr int kAlongWarps = 8;  // warps of a block whose lanes go along the axis
constexpr int kMaxSerialUnits = 16;  // the most units whose statistics one lane merges
constexpr int kMaxColumnWarps = 16;  // the most warps along the axis, and blocks of a cluster: half a warp merges them
constexpr int kMaxFlatSpans = 512;   // the most spans whose statistics one warp merges
constexpr int kSweepWarps = 16;      // the most warps of a block of sweep_kernel
constexpr int kMaxSweptSpans = 64;   // the most spans of a block of sweep_kernel
constexpr int kWalkWarps = 8;        // warps of a block of a walking kernel, unless more share its columns
constexpr int kFlatWarps = 16;       // the most warps of a block that reads flat rows
constexpr int kSmallWarps = 16;      // the most warps of a block of small_kernel, and the most that share a column
constexpr int kSmallBeside = 8;      // the most columns of such a warp
constexpr int kSmallStep = 4;        // positions that it adds before it asks whether there are more

// Positions along the axis that a lane of a column kernel holds.
constexpr int column_vectors(int operands) { return operands == 1 ? 8 : 4; }
// Columns that a lane of a walking kernel takes side by side.
constexpr int walk_columns(int item_bytes, bool label) {
  return item_bytes == 8 || (label && item_bytes == 4) ? 1 : item_bytes == 1 ? 4 : 2;
}
// The same for a kernel that walks a strip for statistics: these columns are neighbours in memory.
constexpr int kStripColumns = 8;
// The longest axis that a thread of a walking kernel holds in registers.
constexpr int held_positions(int operands) { return 8 / operands; }
constexpr int kFewPacks = 4;  // a kernel of its own for as many packs of columns
// Vectors of a flat row that a lane loads at a time.
constexpr int flat_vectors(int operands) { return operands == 1 ? 4 : 2; }
// Blocks per multiprocessor for the __launch_bounds__ of along_kernel.
constexpr int along_resident(int item_bytes) { return item_bytes == 4 ? 4 : 3; }

struct RowPlan {
  RowAlgorithm algorithm = RowAlgorithm::kEmpty;
  RowTraits traits;
  // Rows: a lane holds `vectors` of 16 bytes. A span is what a warp holds: vector (span * vectors + j) * lanes + lane.
  int vectors = 1;
  int lane_bits = 0;    // 2^lane_bits lanes share a row (and a warp has several rows), if spans == 1
  int64_t spans = 1;    // of a row
  int part = 1;         // kRowsStream, or swept: the most spans of a block
  int stages = 1;       // the same plans: the spans for which a block has shared memory
  bool spread = false;  // kRows: a lane has one vector instead of `vectors`, and that many times the lanes share a row
  bool wide = false;    // kRows: a block has a row, and a lane kWideVectors of it (wide_kernel)
  // What a block prefetches into the L2 cache; 0: nothing. kRows: the row that comes this many rows later.
  // kColumnsFlat, split: these many bytes of its part.
  int64_t ahead = 0;
  int64_t room = 0;  // kRows: a block takes at least these bytes of shared memory, so that fewer share a multiprocessor
  int unit_warps = 1;  // kRowsSplit: spans whose statistics are merged before they are stored
  // Columns: a lane holds consecutive positions of one column, or of 16 bytes of columns beside each other.
  bool vector = false;
  int column_lane_bits = 0;  // lanes of a warp (`along`: of a block) along inner; the others are along the axis
  int column_warp_bits = 0;  // warps of a block that are along inner
  int axis_warps = 1;  // warps of a block that are along the axis; kColumnsStream: those of two blocks of kColumns
  bool along = false;  // statistics only: lanes go along the axis (along_kernel)
  // kColumnsFlat: a period is the smallest number of vectors that make up whole positions, `turns` of them. A block
  // takes `across` vectors of each of `deep` periods at a time.
  int period = 1, turns = 1, across = 1, deep = 1, slices = 1;
  int64_t part_length = 0;    // positions of a block
  int64_t result_length = 0;  // split: the same while results are written
  bool split = false;         // statistics of parts go through the workspace
  bool late = false;          // split: no kernel merges them, since each block that writes results does
  // Rows and columns.
  int block_warps = 1;
  int64_t blocks = 1;  // blocks that share a row: the size of a cluster, unless split
  int64_t units = 1;   // split: statistics of each row in the workspace
  bool overlap = false;
  bool packed = false;          // kRows: blocks of a cluster may share a multiprocessor
  int64_t workspace_bytes = 0;  // per outer index

  int threads() const { return algorithm == RowAlgorithm::kEmpty ? 0 : 32 * block_warps; }
};

// For experiments: values other than 0 replace the plan's choice.
struct RowTuning {
  int vectors = 0;
  int cluster = 0;
  int block_warps = 0;  // used where spans is 1
  bool split = false;
};

// The register-resident plan for the same shape: kRows for rows that are streamed or split, kColumns for
// kColumnsStream. It needs no workspace and accepts operands and results of different alignment, which streaming does
// not. Not for rows or columns that are split because no cluster holds them.
RowPlan held_in_registers(RowPlan plan);

// Plans for the same rows by the kernels for few elements, where results keep their bits: small_fold() for statistics
// that are the same in any order, small_walk() for what `plan` walks along, if the array has at most so many elements.
// Both are for operations on one array, without masks and labels.
RowPlan small_fold(const RowPlan& plan, const Rows& rows);
RowPlan small_walk(const RowPlan& plan, const Rows& rows, int64_t most);

// `workspace_bytes` < 0 asks for the best plan. Otherwise it is what the caller has, and the plan makes do with it: a
// sharded call is planned for the whole batch but runs on a part of it. Results have the same bits either way.
RowPlan plan_row_engine(const Rows& rows, const RowTraits& traits, const Gpu& gpu, int64_t workspace_bytes = -1,
                        const RowTuning& = {});

}  // namespace jaxgpuops
