// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "count/count.h"
#include "count/select_plan.h"
#include "sort/plan.h"

namespace jaxgpuops::count {

constexpr int64_t kMostBlocks = 0x7fffffff;  // the most blocks of a grid

// ---- Counts ---------------------------------------------------------------------------------------------------------

enum class Counting {
  kEmpty,   // there are no counts
  kRows,    // many short rows: a lane has a row
  kWarps,   // many rows that are somewhat longer: a warp has a row
  kTables,  // tables in shared memory
  kParts,   // more bins in long rows: ids are cut by their high bits before a part is counted in a table
  kGlobal,  // atomics on the result, if there are too many bins, or few ids, or the axis is not the last
  kNone,    // histograms only: there is no kernel, so JAX computes the bin of each element, and bincount counts them
};
constexpr const char* kCountingNames[] = {"empty", "rows", "warps", "tables", "parts", "global", "none"};

constexpr int kMostRowWarps = 4;  // the most warps of a block of kRows; a block of kWarps has as many
// Of so few ids in so many bins, tables in few blocks would take longer than atomics by many.
constexpr int64_t kFewIds = 256 << 10, kFewBins = 2048;
// For kParts: the most parts, threads and warps that share a tile, the ids of a tile, and their places in the
// workspace, where the parts begin at multiples of 16 bytes.
constexpr int kMostParts = 32, kPartThreads = 512, kPartWarps = kPartThreads / 32, kPartTile = 16 * kPartThreads;
constexpr int kPartPitch = kPartTile + 8 * kMostParts;

struct BincountPlan {
  Counting algorithm = Counting::kEmpty;
  int threads = 0;
  int tables = 0;  // tables that a block has of its range of bins
  // Bins in a table. For kRows: the words of a lane's table. For kWarps: the words of a warp's tables. For kGlobal: the
  // ids of a block.
  int64_t range = 0;
  int64_t ranges = 1;  // ranges of bins; the blocks of each range read all ids, but for kParts
  int64_t slices = 1;  // slices of a row; each range of bins has a block for each
  int cluster = 1;     // for kTables: blocks of a cluster, which add up their tables; divides `slices`
  int64_t shared_bytes = 0;
  int64_t tiles = 0;            // for kParts: tiles of a row
  int64_t workspace_bytes = 0;  // workspace of one outer index

  bool overlap = false;  // whether the last kernel may start before the one before it ends

  // Atomics add the counts to the result, which must be zero before.
  bool merged() const { return algorithm == Counting::kGlobal || slices > cluster; }
};

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu);

BincountPlan plan_histogram(const Histogram& problem, const Gpu& gpu);

// ---- Ranks ----------------------------------------------------------------------------------------------------------

constexpr int kSelectBinBits = 9;          // there are 2^9 parts of an interval of keys, each with a count
constexpr int kSelectFew = 64;             // the most elements that are compared with each other
constexpr int kMostRanks = 9;              // 8 quantiles and the last element of the row
constexpr int kMostClusterThreads = 1024;  // threads of a block of kCluster, or half as many
// For short rows: threads of a block; the longest rows that one thread selects from, and those that a warp selects
// from.
constexpr int kShortSelectThreads = 128;
constexpr int64_t kMostThreadSelect = 64, kMostWarpSelect = 1024;
// Elements of a row in the registers of a thread, and the longest rows that the registers of a block hold.
constexpr int kRegisterSelect = 32;
constexpr int64_t kMostRegisterSelect = 512 * kRegisterSelect;
// For rows that no block holds: the threads of a block, the most elements that are listed in the end, the bits of a
// part's number in a table, the sets of tables in the workspace, the most steps from which a warp keeps elements, and
// the bytes of the head of a row's workspace.
constexpr int kLongThreads = 512, kLongFew = 2048, kLongBinBits = 9, kLongTables = 3, kMostKeptSteps = 32;
constexpr int64_t kLongHeadBytes = 1024;
constexpr int64_t kPartitionTile = 8192;  // elements of a row that a block of its partition moves, if several share it

SelectPlan plan_select(const Select& problem, const Gpu& gpu);

// ---- Places in sorted rows ------------------------------------------------------------------------------------------

enum class Searching {
  kEmpty,  // nothing to write
  kEach,   // a thread for each query, or a warp
  kRows,   // a block has short rows in shared memory
  kTree,   // a block has splitters of a row in shared memory
  kTable,  // a block has a table of all keys of 8 or 16 bits in shared memory
};
constexpr const char* kSearchingNames[] = {"empty", "search", "rows", "tree", "table"};

constexpr int kTreeTurn = 128;   // queries that a warp of kTree takes at a time
constexpr int kOrderTurn = 256;  // the same if all queries are in order
constexpr int kNearBits = 8;     // up to 2^8 elements between the 128 go to shared memory
// The most queries that have a warp each, and the shortest row that they search.
constexpr int64_t kMostTeamSearch = 4096, kLeastTeamSearch = 64;
constexpr int64_t kMostSearchRow = 1024;       // bytes of a row of kRows
constexpr int64_t kMostSearchRows = 16 << 10;  // and of those of a block

struct SearchPlan {
  Searching algorithm = Searching::kEmpty;
  int team = 1;  // for kEach: lanes that search for a query together, 1 or 32
  // The members below are for all but kEach.
  int threads = 0, levels = 0, group_bits = 0;
  int64_t rows = 0, queries = 0;  // sorted rows, and the queries of each
  int64_t blocks = 0, chunk = 0;  // of a row; the queries of a block
  int64_t shared_bytes = 0;
  int near_bits = 0;  // for kTree: if queries are in order, a warp copies 2^near_bits elements at most; 0: no check
  // For kRows: rows of a block; a block with several rows has all their queries. Query q of a block belongs to row
  // 2 q * reciprocal >> 32, since q times the queries of a row is less than 2^31. In shared memory, rows of an even
  // length may have a gap between them; then element i belongs to row i * length_reciprocal >> 32.
  int group_rows = 1;
  uint32_t reciprocal = 0, length_reciprocal = 0;
};

SearchPlan plan_search(const Search& problem, const Gpu& gpu);

// ---- Chosen places --------------------------------------------------------------------------------------------------

// The most threads of a block, and the blocks of a multiprocessor.
constexpr int kMostChooseThreads = 512, kMaskBlocks = 3, kStartsBlocks = 2;
constexpr int64_t kChooseFill = 16384;  // the fewest results of a part, which one block fills
// The most places of a unit that a warp lists before it writes them: of kLookBack, and of kRecount.
constexpr uint32_t kChooseList = 512, kRecountList = 256;

enum class Choosing {
  kEmpty,     // nothing to write
  kRecount,   // blocks take a tile each, and count for themselves what is chosen before it
  kLookBack,  // blocks have large tiles, and learn from each other what is chosen before them
  kNone,      // many short rows, or dimensions after the axis: other kernels are faster
};
constexpr const char* kChoosingNames[] = {"empty", "recount", "look_back", "none"};

// A row is cut into tiles, and its results into parts. A tile has units of 1024 elements, whose bits are a word for
// each lane of a warp; for kRecount, a tile has a unit for each warp. The workspace of an outer index has what tiles
// publish.
struct ChoosePlan {
  Choosing algorithm = Choosing::kEmpty;
  int threads = 0;
  int64_t units = 0;   // of a tile
  int64_t list = 0;    // places that a warp of kLookBack has room to list
  bool early = false;  // whether the warp lists places while it reads
  int64_t tiles = 0;   // of a row
  int64_t fill = 0;    // results of a part
  int64_t parts = 0;   // of a row's results; each but the first has a block without a tile
  int64_t blocks = 0;
  int64_t shared_bytes = 0;
  int64_t workspace_bytes = 0;
  bool overlap = false;  // whether the kernel may start before the one that clears the workspace ends
};

ChoosePlan plan_choose(const Choose& problem, const Gpu& gpu);

// ---- Segments -------------------------------------------------------------------------------------------------------

// For ordering rows by id in one launch: the most rows, the threads of a block, and the most rows in a block's range
// that a warp lists.
constexpr int64_t kMostOrderRows = 64 << 10;
constexpr int kOrderThreads = 1024, kOrderList = 512;

// How rows of ids are sorted, as offsets in the workspace of an outer index. The sorted ids are at 0; then come their
// positions, the workspace of the sort and, after `bytes`, the partial results of segments.
struct OrderPlan {
  // If `ranges` is not 0, one launch orders the rows: each row of ids has `ranges` blocks, with `range` segments each.
  int64_t ranges = 0, range = 0, shared_bytes = 0;
  sort::Plan sort;  // orders the rows if `ranges` is 0
  int64_t positions = 0, workspace = 0, bytes = 0;
};

constexpr int mantissa_bits(DType dtype) {  // bits of the mantissa that a float stores
  return dtype == DType::kFloat64 ? 52 : dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7;
}
constexpr int least_exponent(DType dtype) {  // the least denormal number is 2 to this power
  return dtype == DType::kFloat64 ? -1074 : dtype == DType::kFloat32 ? -149 : dtype == DType::kFloat16 ? -24 : -133;
}

// How exact sums of floats are kept. A float with place p is an integer times 2^p times the least denormal number;
// accumulator b adds up those with places from b * width to (b + 1) * width - 1.
struct ExactShape {
  static constexpr int64_t kHeadBytes = 256;  // bytes of the workspace before the accumulators
  static constexpr int kMostBins = 29;

  int width = 0, bins = 0;  // `bins` accumulators, and one more for infinities and NaN
  uint32_t reciprocal = 0;  // p / width is p * reciprocal >> 16
  double step = 0;          // 2^width
};

// The same for float64: places of the numbers of a call say which accumulators there are, at most `bins` of each sum.
constexpr int64_t kWideHeadBytes = 8192, kWideRangeBlocks = 528;
constexpr int kMostDoublePlace = 2045, kWidePlaceBits = 20;  // p / width is p * reciprocal >> kWidePlaceBits
constexpr int64_t kMostWideSumRows = 1 << 26;
// The words of a sum: its accumulators, and one for infinities and NaN, up to a whole sector of 32 bytes.
constexpr int wide_stride(int bins) { return (bins + 4) / 4 * 4; }

enum class Segmenting {
  kEmpty,    // there are no segments
  kLanes,    // few segments: a table for each lane, in shared memory
  kMatch,    // very few rows: a lane compares its ids with all of a range of segments, in one launch
  kFew,      // few rows: tables for each lane of a range of segments, in one launch
  kPicks,    // few segments: a block picks the rows of eight segments, and lanes compare
  kRanges,   // some thousand rows: a block orders the rows of a range of segments and reads them in order
  kTables,   // few columns: a table for each warp; or any, if any order does: a table for each block
  kAtomics,  // few columns, many segments: atomics on integers
  kScatter,  // few numbers that any order folds alike: atomics on the results
  kSorted,   // the ids ascend: tiles of rows in their order
  kOrdered,  // as kSorted, after a first step has found the order of the rows by id
  kCells,    // softmax only: atomics on integers, in shared memory or in the workspace
  kNone,     // ids are bytes, which only kLanes reads
};
constexpr const char* kSegmentingNames[] = {"empty",   "lanes",   "match",  "few",     "picks", "ranges", "tables",
                                            "atomics", "scatter", "sorted", "ordered", "cells", "none"};
// Only sums of elements of 4 bytes have kernels that read ids of 8 bits: those are the gradients of boosted trees, as
// float32 or as integers.
constexpr bool takes_byte_ids(Op op, int bytes) { return op == Op::kSum && bytes == 4; }

// For kMatch: the segments of a range, the rows that a lane loads at a time, and the most warps of a block.
constexpr int kMatchRange = 8, kMatchRows = 2, kMostMatchWarps = 10;
constexpr int64_t kFewRows = 2048;
constexpr int kMostFewWarps = 16;                           // the most warps of a block of kFew
constexpr int64_t kFewNumbers = 16 << 10;                   // the most that always take kScatter, if it has their fold
constexpr int64_t kWholeRows = 8192;                        // the most that one block of kTables takes alone
constexpr int kFewList = 384;                               // the most rows that a warp of kFew lists at a time
constexpr int kTableThreads = 256, kExtremeThreads = 1024;  // the most of a block of kTables: for sums of floats, else
constexpr int kLaneBatch = 96;                              // steps of a warp of kLanes; batches of loads divide them
constexpr int kMostLaneWarps = 8;                           // the most warps of a block of kLanes
// For kScatter: rows of a thread, if it has several; threads of a block; the most lanes of a team.
constexpr int kScatterRows = 4, kScatterThreads = 256, kMostScatterTeam = 16;
constexpr int64_t kMostTableColumns = 8;
constexpr int64_t kMostAtomicColumns = 64;  // the most columns for atomics where an accumulator is one integer
constexpr int kMostCellThreads = 1024;      // the most threads of a block of kCells

struct SegmentsPlan {
  Segmenting algorithm = Segmenting::kEmpty;
  OrderPlan order;
  int64_t rows = 0;          // rows of a tile or slice; for kFew, kMatch, kPicks and kRanges: segments of a range
  int64_t tiles = 0;         // how many tiles, slices or ranges there are
  int columns = 1;           // for kLanes: columns of a row that a lane has; for kTables and kCells: that a block has
  int team_bits = 0;         // not for tiles: 2^team_bits lanes share a row, or as many columns
  int parts = 1;             // for kLanes: warps of a slice; for kRanges: the most pieces of a list; shares of a tile
  int64_t batch = 0;         // for kFew, kPicks and kRanges: the most outer indices of a launch
  int warps = 0;             // warps of a block, but for tiles and atomics
  int cluster = 1;           // for kCells: blocks of a cluster, which divides `tiles`
  int64_t shared_bytes = 0;  // shared memory of a block
  ExactShape exact;          // for kAtomics: how sums of floats are kept
  int table_bins = 0;        // for kAtomics: how many accumulators of each sum a block has in shared memory
  int64_t blocks = 0;        // and how many such blocks an outer index has
  bool looks = false;        // for kAtomics: whether accumulators of extremes are looked at before an atomic
  bool overlap = false;      // not for kLanes and kTables: whether a kernel may start before the one before it ends
  // For kSorted and kOrdered, after the bytes of the order: heads of tiles, then, at these offsets, tails and the
  // counters of segment_join_kernel (cuda/tiles.cuh). `joined_bytes` is the size of all.
  int64_t tails = 0, counters = 0, joined_bytes = 0;
  int64_t pairs = 0;  // for softmax: offset of each segment's largest element and sum
  int64_t workspace_bytes = 0;
};

// A block of segment_join_kernel has 2^kJoinTeamBits threads. At most 2^3 of them, a team, share a tile, so that a
// block folds the partial results of many tiles at a time.
constexpr int kJoinTeamBits = 9, kJoinThreads = 1 << kJoinTeamBits;
constexpr int join_team_bits(int64_t inner) { return inner > 4 ? 3 : inner > 2 ? 2 : inner > 1 ? 1 : 0; }

// The sort of the ids, as a problem of sort/.
sort::Problem order_of(const Segments& problem);

SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu);

// The plans of softmax of segments and of its logarithms are kCells, kSorted, kOrdered or kNone.
constexpr int64_t kPairBytes = 8;  // for kSorted and kOrdered: the largest element and a sum, both float32
// For kCells: the bytes of a cell, and the bits of an exponential below the point: a sum of all rows fits in 64 bits.
constexpr int64_t kBlockCellBytes = 12, kCellBytes = 16;
constexpr int64_t kMostWideRows = 1024;  // of float64, whose terms have 53 bits then, as its mantissa has
constexpr int term_bits(int64_t length) {
  int bits = 64;
  for (; length > 0; length /= 2) --bits;
  return bits;
}
SegmentsPlan plan_segment_softmax(const Segments& problem, const Gpu& gpu);

}  // namespace jaxgpuops::count
