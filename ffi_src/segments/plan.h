// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "segments/segments.h"
#include "sort/plan.h"

namespace jaxgpuops::segments {

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
};

// The same for float64: places of the numbers of a call say which accumulators there are, at most `bins` of each sum.
constexpr int64_t kWideHeadBytes = 8192, kWideRangeBlocks = 264;
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
  kBuckets,  // sums of floats in rows of few bytes: rows are moved to the bucket of their segment, which a block has
  kCells,    // softmax only: atomics on integers, in shared memory or in the workspace
  kNone,     // ids are bytes, which only kLanes reads
};
constexpr const char* kSegmentingNames[] = {"empty",   "lanes",   "match",  "few",     "picks",   "ranges", "tables",
                                            "atomics", "scatter", "sorted", "ordered", "buckets", "cells",  "none"};
// Only sums of elements of 4 bytes have kernels that read ids of 8 bits: those are the gradients of boosted trees, as
// float32 or as integers.
constexpr bool takes_byte_ids(Op op, int bytes) { return op == Op::kSum && bytes == 4; }

// For kMatch: the segments of a range, the rows that a lane loads at a time, and the most warps of a block.
constexpr int kMatchRange = 8, kMatchRows = 2, kMostMatchWarps = 22;
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
constexpr int kMostTableBins = 2;           // accumulators of a sum in the table of a block
constexpr int64_t kMostAtomicColumns = 64;  // the most columns for atomics where an accumulator is one integer
constexpr int kMostCellThreads = 1024;      // the most threads of a block of kCells

// For kRanges: the most warps of a block, the most rows that a warp lists at a time, the least rows of a piece, and the
// most rows.
constexpr int kMostRangeWarps = 32, kRangeList = 128, kLeastRangePiece = 8;
constexpr int64_t kMostRangeRows = 64 << 10;

// For kPicks: the segments of a range, the most warps of a block, and the shared memory of a warp: room for a list of
// rows, and later for its accumulators, which take as much with 32 columns of 8 bytes.
constexpr int kPickRange = 8, kMostPickWarps = 32, kPickBytes = 2048;

// For kRanges and kPicks: bytes of a block's results in shared memory.
constexpr int64_t range_result_bytes(int64_t range, int team_bits, int64_t cell_bytes) {
  return ((range << team_bits) * cell_bytes + 15) / 16 * 16;
}

// For kSorted and kOrdered: the most threads of a block of segment_tiles_kernel, the most rows of its tile if rows have
// few vectors, and the step of the rows of a share: threads load so many at a time, or a divisor of it.
constexpr int64_t kTileThreads = 256, kMostTileRows = 2048, kTileStep = 8;
constexpr int64_t kMostVectorPart = 32;  // bytes of the partial result of a thread's vector, at most

// For kBuckets: the threads of a block, the ids of a lane in a tile that is moved, and the rows that a lane adds up at
// a time.
constexpr int kBucketThreads = 512, kBucketItems = 8, kBucketRows = 4;
constexpr int kMostBucketBits = 11, kMostShift = 13;  // bits of the number of a bucket, and of a segment in a bucket
// Shared memory of a block that adds up rows whose sums have so many bytes: the sums of a bucket, and the rows and
// segments of a step.
constexpr int64_t bucket_sum_bytes(int shift, int64_t sum_bytes) {
  return (sum_bytes << shift) + kBucketThreads * kBucketRows * (sum_bytes + 2);
}

struct BucketsPlan {
  int shift = 0;                   // a bucket is 2^shift segments
  uint32_t count = 0;              // of buckets
  uint32_t digits = 0;             // buckets, and one more for ids out of range, up to an even number
  uint32_t tile = 0, tiles = 0;    // rows of a tile that is moved, and how many tiles there are
  uint32_t blocks = 0;             // that move the tiles of an outer index
  uint32_t piece = 0, pieces = 0;  // the most rows of a piece of a bucket, and the most pieces of all together
  int64_t before = 0, totals = 0, low = 0, moved = 0, parts = 0;  // offsets in the workspace of an outer index
};

struct SegmentsPlan {
  Segmenting algorithm = Segmenting::kEmpty;
  OrderPlan order;
  int64_t rows = 0;   // rows of a tile or slice; for kFew, kMatch, kPicks and kRanges: segments of a range
  int64_t tiles = 0;  // how many tiles, slices or ranges there are
  int columns = 1;    // for kLanes: columns of a row that a lane has; for kTables, kCells, kBuckets: that a block has
  int team_bits = 0;  // not for tiles: 2^team_bits lanes share a row, or as many columns
  int parts = 1;      // for kLanes: warps of a slice; for kRanges: the most pieces of a list; shares of a tile
  int64_t batch = 0;  // for kFew, kPicks and kRanges: the most outer indices of a launch
  int warps = 0;      // warps of a block, but for tiles and atomics
  int cluster = 1;    // for kCells: blocks of a cluster, which divides `tiles`
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
  BucketsPlan buckets;  // for kBuckets
};

// A block of segment_join_kernel has 2^kJoinTeamBits threads. At most 2^3 of them, a team, share a tile, so that a
// block folds the partial results of many tiles at a time.
constexpr int kJoinTeamBits = 9, kJoinThreads = 1 << kJoinTeamBits;
constexpr int join_team_bits(int64_t inner) { return inner > 4 ? 3 : inner > 2 ? 2 : inner > 1 ? 1 : 0; }

// The sort of the ids, as a problem of sort/.
sort::Problem order_of(const Segments& problem);

// Plans tiles of rows in the order of their ids. `part_bytes`: the bytes of one column of a partial result.
void plan_tiles(const Segments& problem, int64_t part_bytes, const Gpu& gpu, SegmentsPlan& plan);

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

}  // namespace jaxgpuops::segments
