// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "search/search.h"
#include "sort/plan.h"

namespace jaxgpuops::search {

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

// ---- Different elements ---------------------------------------------------------------------------------------------

// The most different elements that are found by tables, of 64 bits and of less; and the slots of a table.
constexpr int kMostDistinct = 512, kMostShortDistinct = 256, kSlotBits = 11;
// Of kCounts: threads of a block, and the keys of its range.
constexpr int kCountsThreads = 1024, kCountsRange = 4096;
constexpr int kCollectThreads = 512, kCollectBlocks = 2;  // of a block, and the blocks of a multiprocessor
// Of kCompare: threads of a block, and the elements of its part of the row.
constexpr int kUniqueThreads = 512, kUniquePart = 32;
constexpr int64_t kMostUniqueCompared = 1024;  // elements of a row
// Of kTable, if few results are wanted: words that a block hands on of the sample of its part, and those of all blocks
// that a thread has room for.
constexpr int kLeastWords = 32, kSampledWords = 20;
constexpr int64_t kMostLeast = 4096;  // the most of the least elements that are collected

enum class Finding {
  kEmpty,    // nothing to write
  kCompare,  // few elements: each block collects all, and compares some with the others
  kCounts,   // each block counts the possible elements of a range
  kTable,    // blocks collect the different elements in tables; if these are too many, the row is sorted
  kNone,     // few elements, or several rows: other calls are faster
};
constexpr const char* kFindingNames[] = {"empty", "compare", "counts", "table", "none"};

struct UniquePlan {
  Finding algorithm = Finding::kEmpty;
  int64_t blocks = 0;  // of a row
  // For kCompare, and for kTable if few results are wanted: there are 2^slot_bits slots for different elements.
  int slot_bits = 0;
  int64_t shared_bytes = 0;  // for kCompare, and for kCounts of a long row
  bool overlap = false;      // for kCounts of a long row: whether kernels may start before those before them end
  // How many elements a block collects (kTable), or counts (kCounts; 0 if the row is short).
  int64_t chunk = 0;
  // The members below are for kTable.
  sort::Problem sorting;
  sort::Plan sort;
  Choose choosing;
  ChoosePlan choose;
  // What the workspace has after the table: the sorted row, its order, and the workspaces of the sort and of the
  // choice. For the inverse also the bits of the choice, and how many are set before each unit of it.
  int64_t sorted = 0, order = 0, sort_workspace = 0, choose_workspace = 0, bits = 0, before = 0;
  int64_t units = 0;  // of the choice
  // If few results are wanted, elements that a block samples, and which of the sampled ones, in order, is the bound of
  // the least elements; where these, their numbers and the sample are in the workspace.
  int samples = 0, sampled_rank = 0;
  int64_t least = 0, least_at = 0, sample = 0;
  int64_t workspace_bytes = 0;
};

// `counted`: whether rows that a block cannot count are counted by other calls.
UniquePlan plan_unique(const Unique& problem, const Gpu& gpu, bool counted = false);

}  // namespace jaxgpuops::search
