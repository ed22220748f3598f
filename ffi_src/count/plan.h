// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "count/count.h"

namespace jaxgpuops::count {

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

}  // namespace jaxgpuops::count
