// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "count/count.h"

namespace jaxgpuops::count {

// ---- Counts ---------------------------------------------------------------------------------------------------------

enum class Counting {
  kEmpty,   // there are no counts
  kRows,    // many short rows: a lane has a row
  kTables,  // tables in shared memory
  kGlobal,  // atomics on the result, if there are too many bins or the axis is not the last
  kNone,    // of a histogram: its bins are computed before they are counted
};
constexpr const char* kCountingNames[] = {"empty", "rows", "tables", "global", "none"};

constexpr int kMostRowWarps = 4;  // of a block of kRows

struct BincountPlan {
  Counting algorithm = Counting::kEmpty;
  int threads = 0;
  int tables = 0;      // tables that a block has of its range of bins
  int64_t range = 0;   // bins in a table; of kRows: the words of a lane's table
  int64_t ranges = 1;  // ranges of bins; the blocks of each range read all ids
  int64_t slices = 1;  // slices of a row, for each range
  int64_t shared_bytes = 0;

  bool merged() const { return algorithm == Counting::kGlobal || slices > 1; }  // counts are added by atomics, to zeros
};

BincountPlan plan_bincount(const Bincount& problem, const Gpu& gpu);

BincountPlan plan_histogram(const Histogram& problem, const Gpu& gpu);

// ---- Ranks ----------------------------------------------------------------------------------------------------------

constexpr int kSelectBins = 512;  // parts of an interval of keys, each with a count
constexpr int kSelectFew = 64;    // the most elements that are compared with each other
constexpr int kMostRanks = 9;     // 8 quantiles, and the last element
// The same of rows that blocks share, and of their workspace.
constexpr int kLongThreads = 512, kLongBins = 4096, kLongFew = 2048;
constexpr int64_t kLongHeadBytes = 1024;

enum class Selecting {
  kEmpty,  // nothing to write
  kBlock,  // rows whose keys fit in the shared memory of a block
  kLong,   // longer rows, by several blocks in several launches
  kNone,   // a sort is faster
};
constexpr const char* kSelectingNames[] = {"empty", "block", "long", "none"};

struct SelectPlan {
  Selecting algorithm = Selecting::kEmpty;
  bool turns = false;  // the axis is not the last: columns are transposed to rows, into the workspace
  int threads = 0;
  int64_t table_at = 0;  // where the counts of the ranks are: in shared memory after the keys, or in a row's workspace
  int64_t shared_bytes = 0;
  int64_t workspace_bytes = 0;  // for each outer index
  // Of kLong:
  int64_t slices = 1;        // blocks that share a row
  int64_t slice_packs = 0;   // vectors of 16 bytes that each has of it
  int steps = 0;             // most steps that a row needs
  int64_t turned_bytes = 0;  // of the workspace, before that of the rows
  int64_t list_at = 0, list_size = 0,
          row_bytes = 0;  // in a row's workspace: its lists, words of each, and bytes of all
  bool overlap = false;   // whether a step may start before the one before it ends
};

SelectPlan plan_select(const Select& problem, const Gpu& gpu);

// ---- Segments -------------------------------------------------------------------------------------------------------

// The stable order of ids is a counting sort by digits from the lowest up. A block sorts one tile.
constexpr int kOrderThreads = 256, kOrderItems = 8, kOrderTile = kOrderThreads * kOrderItems;
constexpr int kMaxDigitBits = 10;

struct OrderPlan {
  int passes = 0;  // 0 if the ids are sorted already
  int digit_bits = 0;
  int64_t tiles = 0;
  // Offsets in the workspace of a row. Pass p writes its keys and positions to number p % 2.
  int64_t keys[2] = {}, positions[2] = {}, counts = 0, totals = 0, bytes = 0;

  int last() const { return (passes - 1) & 1; }
};

// How exact sums of floats are kept. A float with place p is an integer times unit * 2^p; accumulator b has those with
// places from b * width on.
struct ExactShape {
  static constexpr int64_t kHeadBytes = 256;  // in the workspace, before the accumulators
  static constexpr int kMostBins = 29;

  int width = 0, bins = 0;  // one accumulator more is for what is not finite
  uint32_t reciprocal = 0;  // p / width is p * reciprocal >> 16
  double unit = 0, step = 0;

  static constexpr int mantissa(DType dtype) {  // bits of it that a float stores
    return dtype == DType::kFloat32 ? 23 : dtype == DType::kFloat16 ? 10 : 7;
  }
};

enum class Segmenting {
  kEmpty,    // there are no segments
  kLanes,    // few segments: a table for each lane, in shared memory
  kFew,      // few rows: blocks order them in shared memory, for a range of segments each
  kTables,   // few columns, some more segments: a table for each warp
  kAtomics,  // few columns, many segments: atomics on integers
  kSorted,   // the ids ascend: tiles of rows in their order
  kOrdered,  // as kSorted, after a first step has found the order of the rows by id
};
constexpr const char* kSegmentingNames[] = {"empty", "lanes", "few", "tables", "atomics", "sorted", "ordered"};
constexpr int kFewRows = 2048, kFewSegments = 1024, kFewThreads = 256;  // of a block of kFew
constexpr int kTableThreads = 256;
constexpr int kMostLaneWarps = 8;  // of a block
constexpr int64_t kMostTableColumns = 8;

struct SegmentsPlan {
  Segmenting algorithm = Segmenting::kEmpty;
  OrderPlan order;
  int64_t rows = 0;              // rows of a tile or slice; of kFew: segments of a range
  int64_t tiles = 0;             // or ranges
  int columns = 1;               // of kLanes: that a lane has of a row
  int team_bits = 0;             // of it and of kFew: 2^team_bits lanes have a row
  int parts = 1;                 // warps that share a slice
  int warps = 0;                 // of a block of it
  int64_t shared_bytes = 0;      // that it has
  ExactShape exact;              // of kAtomics, for sums of floats
  int64_t heads = 0, tails = 0;  // where a row's workspace has the parts of segments that cross tiles
  int64_t workspace_bytes = 0;
};

SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu);

}  // namespace jaxgpuops::count
