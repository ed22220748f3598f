// The geometry of the row engine (cuda/engine.cuh): how the elements of a row are divided among lanes, warps and
// blocks, and what goes through memory. A plan is a pure function of the shape, the dtype and the GPU.
//
// What changes the bits of a result depends on length, inner and dtype only. The rest of a plan may also depend on the
// number of rows and on the GPU: statistics are merged in the same order, whichever thread computes them.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"

namespace jaxgpuops {

enum class RowAlgorithm {
  kEmpty,  // nothing to write
  kRows,   // inner == 1. A team of lanes, a block or a cluster holds a row in registers: one read, one write
  // Many short rows that are not whole vectors, in shared memory (cuda/tiles.cuh); and few columns side by side along
  // short axes (cuda/columns_tiles.cuh).
  kRowsTiles,
  kRowsStream,  // long rows, in registers as in kRows, by persistent blocks (cuda/stream.cuh)
  kRowsSplit,   // rows too long for these: kernels for statistics of the parts, then of the rows, then for the results
  kRowsTogether,   // few long rows with results: all multiprocessors hold them in registers, and one kernel does it all
  kColumns,        // inner > 1. Lanes along inner; a block or a cluster holds the axis in registers
  kColumnsStream,  // as kColumns for many columns, by persistent blocks that load the next columns meanwhile
  kColumnsSplit,   // axes too long for these
  kColumnsWalk,    // short axes: each lane goes along its columns, twice if there are results (cuda/columns_walk.cuh)
  kColumnsFlat,    // few columns: an outer index is a flat row, read in vectors (cuda/columns_flat.cuh)
  kSmall,          // few elements in all: a lane has one; or few flat rows, which clusters share (cuda/small.cuh)
};

const char* name(RowAlgorithm algorithm);

constexpr int kTiledWarps = 8;  // the most warps of a block of column_tiles_kernel

// What the plan must know about an operation.
struct RowTraits {
  int item_bytes = 4;
  int operands = 1;
  bool fast = true;     // there are kernels for several numbers of vectors in a lane; otherwise only for kOnlyVectors
  bool large = true;    // fast, and there is a kernel for the largest number of vectors, too
  bool masked = false;  // there may be masks: columns are read one by one
  bool output = true;   // the call has results of the full shape
  bool label = false;   // each row has a label, an element that must be found before the row is read
  bool lean = false;    // this call has only statistics, and there are kernels of few registers for that
  bool tiled = false;   // there are full results, and the kernels of short rows: tile_kernel and spread_kernel
  bool wide = false;    // there is the kernel of few longer rows: wide_kernel
  int wide_statistics = 0;  // statistics only: the most warps per multiprocessor for which wide_kernel is faster
  bool staged = false;  // there are only statistics; of rows that are not whole vectors, tile_kernel makes them faster
  bool swept = false;   // there are only statistics; of the kernels of rows, only tile_kernel and sweep_kernel
  bool strips = false;  // there are only statistics, and a kernel that walks strips of columns
  bool packs = false;   // there are only statistics, and along_kernel although the operation is not fast
  int stat_bytes = 8;   // bytes of the statistics of a part of a row
  int final_bytes = 8;  // bytes of what the full results of a row need from its statistics
};

constexpr int kOnlyVectors = 4;
constexpr int kLeanVectors = 2;  // vectors in a lane of lean_rows_kernel, which is for short rows and statistics only

constexpr int kMaxBlockWarps = 32;
constexpr int kMaxCluster = 16;    // blocks of the largest cluster
constexpr int kPartWarps = 8;      // the most warps of a small block, which holds a part of a row, or several rows
constexpr int kStreamWarps = 16;   // warps of a block of kRowsStream
constexpr int kStreamChains = 32;  // chains of spans in a row: a chain is every 32nd span, and one lane merges it
constexpr int kSpreadWarps = 4;    // the most warps of a block of spread_kernel
constexpr int kWideVectors = 2;    // the most vectors of a lane of wide_kernel
constexpr int kTileThreads = 128;  // threads of a block that has a tile of rows
constexpr int kTileBytes =
    8 << 10;                    // a tile has about so many bytes if a row is shorter than what a team of lanes can hold
constexpr int kTileTurns = 4;   // the most rows of a team of lanes
constexpr int kAlongWarps = 8;  // warps of a block whose lanes go along the axis
constexpr int kMaxSerialUnits = 16;  // the most units whose statistics one lane merges
// The most warps along the axis, and the most blocks of a cluster, because half a warp merges their statistics.
constexpr int kMaxColumnWarps = 16;
constexpr int kMaxFlatSpans = 512;   // the most spans whose statistics one warp merges
constexpr int kSweepWarps = 16;      // the most warps of a block of sweep_kernel
constexpr int kMaxSweptSpans = 64;   // the most spans of a block of sweep_kernel
constexpr int kWalkWarps = 8;        // warps of a block of a walking kernel, unless more share its columns
constexpr int kMostFlatParts = 256;  // the most blocks that share a flat row: one warp merges their statistics at once
constexpr int kFlatWarps = 16;       // the most warps of a block that reads flat rows
constexpr int kSmallFlatWarps = 32;  // the most warps of a block of small_flat_kernel
constexpr int kSmallWarps = 16;      // the most warps of a block of small_kernel, and the most that share a column
constexpr int kSmallBeside = 8;      // the most columns of a warp of small_kernel
constexpr int kSmallStep = 4;        // positions that small_kernel adds up before it checks whether there are more

// Positions along the axis that a lane of a column kernel holds.
constexpr int column_vectors(int operands) { return operands == 1 ? 8 : 4; }
// Columns that a lane of a walking kernel takes side by side.
constexpr int walk_columns(int item_bytes, bool label) {
  return item_bytes == 8 || (label && item_bytes == 4) ? 1 : item_bytes == 1 ? 4 : 2;
}
// Columns of a lane of the kernel that walks strips for statistics. They are neighbours in memory.
constexpr int kStripColumns = 8;
// The longest axis that a thread of a walking kernel holds in registers.
constexpr int held_positions(int operands) { return 8 / operands; }
constexpr int kHeldWalk = 24;  // the most positions of a column that a thread of walk_once_kernel holds
// For the __launch_bounds__ of walk_once_kernel. Its blocks have at most 16 warps; a larger number limits registers.
constexpr int kOnceWarps = 24;
constexpr int kFewPacks = 4;  // a kernel of its own for as many packs of columns
// Vectors of a flat row that a lane loads at a time.
constexpr int flat_vectors(int operands) { return operands == 1 ? 4 : 2; }
// Blocks per multiprocessor for the __launch_bounds__ of rows_together_kernel.
constexpr int together_resident(int item_bytes) { return item_bytes == 8 ? 2 : 3; }
// Blocks per multiprocessor for the __launch_bounds__ of along_kernel.
constexpr int along_resident(int item_bytes) { return item_bytes == 4 ? 4 : 3; }

struct RowPlan {
  RowAlgorithm algorithm = RowAlgorithm::kEmpty;
  RowTraits traits;
  // Rows: a lane holds `vectors` of 16 bytes. A span is what a warp holds: vector (span * vectors + j) * lanes + lane.
  int vectors = 1;
  int lane_bits = 0;  // 2^lane_bits lanes share a row (and a warp has several rows), if spans == 1
  int64_t spans = 1;  // spans in a row
  int part = 1;       // kRowsStream and swept rows: the most spans of a block
  int stages = 1;     // kRowsStream and swept rows: for how many spans a block has shared memory
  // kRows: a lane has `each` vectors instead of `vectors`, and `vectors / each` times as many lanes share a row.
  bool spread = false;
  int each = 1;
  int wide = 0;  // kRows: if not 0, a block has a row, and each lane has so many of its vectors (wide_kernel)
  // kRows: lanes load and store the elements of rows that are not aligned one by one, instead of aligned windows that
  // neighbouring lanes put together; with `spread`, words (softmax/cuda/loose_rows.cu). kColumns: a block holds few
  // columns (softmax/cuda/held_columns.cu). kColumnsWalk: lanes have one column each. kSmall, flat: lanes load
  // elements.
  bool single = false;
  // What a block prefetches into the L2 cache; 0: nothing. kRows: the row that is `ahead` rows later. kColumnsFlat,
  // split: `ahead` bytes of the block's part.
  int64_t ahead = 0;
  int64_t room = 0;  // kRows: a block takes at least these bytes of shared memory, so that fewer share a multiprocessor
  int unit_warps = 1;  // kRowsSplit: spans whose statistics are merged before they are stored
  // Columns: a lane holds consecutive positions of one column, or of 16 bytes of columns beside each other. kSmall: the
  // order of additions is that of a kernel with such lanes in which all positions share a peak.
  bool vector = false;
  int column_lane_bits = 0;  // lanes of a warp (`along`: of a block) along inner; the others are along the axis
  int column_warp_bits = 0;  // warps of a block that are along inner
  int axis_warps = 1;  // warps of a block that are along the axis; kColumnsStream: those of two blocks of kColumns
  bool along = false;  // statistics only: lanes go along the axis (along_kernel)
  // kColumnsFlat: a period is the smallest number of vectors that holds a whole number of positions; that number of
  // positions is `turns`. A block takes `across` vectors of each of `deep` periods at a time.
  int period = 1, turns = 1, across = 1, deep = 1, slices = 1;
  int64_t part_length = 0;    // positions of a block, also of one of a cluster
  int64_t result_length = 0;  // split: positions of a block of the kernel that writes results
  bool flat = false;          // kSmall: in the order of kColumnsFlat
  bool split = false;         // statistics of parts go through the workspace
  bool staged = false;        // not split: a block copies its part to shared memory first, and reads it there twice
  bool late = false;  // split: no kernel of its own merges statistics, since each block that writes results does so
  // Rows and columns.
  int block_warps = 1;
  int64_t blocks = 1;  // blocks that share a row: the size of a cluster, unless split
  int64_t units = 1;   // split: how many statistics of a row the workspace holds
  bool overlap = false;
  bool packed = false;          // kRows: several blocks of a cluster may share a multiprocessor
  int64_t workspace_bytes = 0;  // workspace of one outer index

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
// not. Must not be called for rows or columns that no cluster can hold.
RowPlan held_in_registers(RowPlan plan);

// Replaces a plan by that of a kernel for few elements, if results keep their bits; else returns `plan`. These kernels
// are for columns, and for operations on one array, without masks and labels. Of columns that `plan` walks along, an
// array has at most `most` elements.
RowPlan small_form(const RowPlan& plan, const Rows& rows, int64_t most);

// Two more forms for operations on one array, without masks and labels, of which results keep their bits, too.
//
// Replaces a plan that gives a flat row to a block by RowAlgorithm::kSmall, in which a cluster of `blocks` shares it,
// if flat rows are few and long enough; else returns `plan`.
RowPlan shared_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu);

// Replaces a plan that walks along columns by RowAlgorithm::kRowsTiles, if few columns lie side by side; else returns
// `plan`. A block has `part_length` outer indices, and `axis_warps` threads share a column.
RowPlan tiled_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu);

// `workspace_bytes` < 0 asks for the best plan. Otherwise the caller has a workspace of that size, and the plan needs
// no more: a sharded call is planned for the whole batch but runs on a part of it. Results have the same bits either
// way.
RowPlan plan_row_engine(const Rows& rows, const RowTraits& traits, const Gpu& gpu, int64_t workspace_bytes = -1,
                        const RowTuning& = {});

}  // namespace jaxgpuops
