// Which kernel a call takes, with which geometry and how much workspace: pure functions, as in topk/plan.h.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/rows.h"
#include "sort/sort.h"
#include "topk/cuda/sort_shape.h"

namespace jaxgpuops::sort {

enum class Algorithm {
  kEmpty,  // nothing to write
  kTeam,   // short rows: top-k's kernel, which sorts a row in the registers of a part of a warp or of a block
  kBlock,  // longer ones: radix sort in the shared memory of a block
  kSweep,  // any length: radix sort in passes over memory
};

const char* name(Algorithm algorithm);

struct Plan {
  Algorithm algorithm = Algorithm::kEmpty;
  bool turns = false;           // columns become rows and are put back: the axis is not the last
  int threads = 0;              // of a block
  int64_t blocks = 0;           // of the largest launch
  int64_t workspace_bytes = 0;  // per outer index
  int64_t shared_bytes = 0;
  topk::SortShape team;  // (kTeam)
};

Plan plan_sort(const Problem& problem, const Gpu& gpu);

}  // namespace jaxgpuops::sort
