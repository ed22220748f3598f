// The geometry of the CUDA kernel: a pure function of the shape, so that Python can ask for it where there is no GPU.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::topk_softmax {

// The limits of the kernel. For longer rows, larger k and more groups, Python composes the call of other kernels.
constexpr int64_t kMaxLength = 1024;
constexpr int64_t kMaxK = 64;
constexpr int64_t kMaxGroups = 64;
constexpr int kBlock = 128;                        // threads of a block
constexpr int64_t kShortLength = 16, kShortK = 8;  // of rows that a lane has alone
constexpr int64_t kRankedLength = 64;              // of rows whose logits are all compared with each other

struct Plan {
  bool empty = true;    // nothing to write
  bool few = false;     // a warp for each row, for few rows
  bool ranked = false;  // all logits of a row are compared with each other
  int team = 0;         // lanes of a warp that share a row; 1: many short rows
  int elements = 0;     // elements of a lane
};

// `sums_rows`: Problem::sums_rows(). Throws std::invalid_argument if the kernel cannot take the problem.
Plan plan_topk_softmax(Rows rows, int64_t k, int64_t groups, bool biased, bool sums_rows);

}  // namespace jaxgpuops::topk_softmax
