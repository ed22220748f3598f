// Chooses the kernel of a call, its geometry and the size of its workspace. topk/plan.h says who calls such a plan.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"
#include "sort/sort.h"
#include "topk/cuda/sort_shape.h"

namespace jaxgpuops::sort {

enum class Algorithm {
  kEmpty,  // there is nothing to write
  kShort,  // rows of a few elements, each in the registers of a thread
  kTeam,   // longer rows: top-k's kernel sorts a row in the registers of some lanes, or of a block
  kPart,   // longer rows, of which one element is wanted in its place: a selection, and parts around it
  kBlock,  // longer rows: radix sort in the shared memory of a block
  kSweep,  // rows of any length: radix sort in passes over memory
};

const char* name(Algorithm algorithm);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  bool turns = false;           // the axis is not the last: columns are transposed to rows, and the results back
  int threads = 0;              // threads of a block
  int64_t blocks = 0;           // blocks of the largest launch
  int64_t workspace_bytes = 0;  // for each outer index
  int64_t shared_bytes = 0;
  int64_t counted = 0;   // of kSweep: elements that a block counts
  bool overlap = false;  // and whether a pass may start before the one before it ends
  int64_t table_at = 0;  // of kPart: where a block has its counts in shared memory
  topk::SortShape team;  // used by kTeam
};

// Rows that kShort and kTeam take are sorted whole: k must be their length.
Plan plan_sort(const Problem& problem, const Gpu& gpu);

}  // namespace jaxgpuops::sort
