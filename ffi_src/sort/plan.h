// Chooses the kernel of a call, its geometry and the size of its workspace. topk/plan.h says who calls such a plan.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"
#include "select/plan.h"
#include "sort/sort.h"
#include "topk/cuda/sort_shape.h"

namespace jaxgpuops::sort {

enum class Algorithm {
  kEmpty,  // there is nothing to write
  kShort,  // rows of a few elements, each in the registers of a thread
  // Longer rows of 16 or 32 bits, or segments of rows of any: a network sorts each in the registers of some lanes, or
  // of a block.
  kNetwork,
  kTeam,  // other rows of up to 1024 elements: top-k's kernel, in the registers of some lanes or of a block
  // Longer rows where only one element must be in its place: select finds it, and the rest goes before or after it.
  kPart,
  kBlock,     // longer rows: radix sort in the shared memory of a block
  kMerge,     // few elements in all, or segments of longer rows: tiles are sorted, and then merged
  kSweep,     // rows of any length: radix sort in passes over memory
  kSegments,  // segments of rows that a block holds: radix sort in its shared memory
  kCompare,   // segments of few elements: each is compared with the others of its segment
  kNone,      // segments of other rows, or numbers carried by other kernels than kSweep: other calls are faster
};

const char* name(Algorithm algorithm);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  bool pairs = false;  // for kNetwork: a network sorts two rows at once
  bool turns = false;  // the axis is not the last: columns are transposed to rows, and results are transposed back
  int threads = 0;     // threads of a block
  int items = 0;       // for kBlock, kSegments: elements of a thread; for kSweep: the same if one launch sorts, else 0
  int64_t blocks = 0;  // blocks of the largest launch
  int64_t workspace_bytes = 0;  // workspace of one outer index
  int64_t shared_bytes = 0;
  int64_t counted = 0;        // for kSweep: how many elements a block counts
  bool small = false;         // for kSweep: tiles are small
  bool tickets = false;       // for kSweep: blocks take tickets, as they may be more than run at the same time
  bool exchanges = false;     // for kSweep: tiles are so few that each may wait for the counts of all of its row
  int64_t in_blocks = 0;      // for kSweep of segments: up to so many elements, a block sorts each
  bool overlap = false;       // for kSweep: whether a pass may start before the one before it ends
  select::SelectPlan select;  // for kPart
  int64_t together = 0;  // for kCompare and kNetwork of segments: how many rows a block has at a time, if it has many
  int tile_bits = 0;     // for kMerge: the logarithm of the longest tile
  topk::SortShape team;  // the plan of top-k's kernel, for kTeam
};

// kNetwork and kTeam sort whole rows, and so does kShort but for columns: for other rows that short, k must be the
// length. `workspace_bytes` is what the caller has for one outer index. It decides only whether a few rows that blocks
// could hold are swept instead; a negative number asks for the best plan.
Plan plan_sort(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = 0);

}  // namespace jaxgpuops::sort
