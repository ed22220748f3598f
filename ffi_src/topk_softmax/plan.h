// The geometry of the CUDA kernel: a pure function of the shape, known where there is no GPU.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::topk_softmax {

// Longer rows, larger k and more groups are composed of other kernels, in Python.
constexpr int64_t kMaxLength = 1024;
constexpr int64_t kMaxK = 64;
constexpr int64_t kMaxGroups = 64;
constexpr int kBlock = 128;  // threads

struct Plan {
  bool empty = true;  // nothing to write
  int team = 0;       // lanes of a warp that share a row
  int elements = 0;   // of a lane
};

// Throws std::invalid_argument where the kernel cannot.
Plan plan_topk_softmax(Rows rows, int64_t k, int64_t groups = 1);

}  // namespace jaxgpuops::topk_softmax
