// The geometry of the few kernel that the plan, the launch and the kernel must agree on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxFewK = 8, kMaxFewLength = 4096;
constexpr int kFewThreads = 256;
constexpr int kFewLoads = 8;  // elements that a lane loads at once

struct FewShape {
  int lanes = 1;  // that share a row or column: a power of two, at most 32
  int64_t blocks = 0;
};

// Rows have so many lanes that these together read a whole sector. Rows and columns that would leave the device idle
// have more, as long as each lane has a load of its own.
inline FewShape few_shape(Rows rows, int key_bytes, int64_t multiprocessors) {
  FewShape shape;
  if (rows.inner == 1) shape.lanes = 32 / key_bytes;
  while (shape.lanes < 32 && shape.lanes * kFewLoads < rows.length &&
         rows.count() * shape.lanes < 1024 * multiprocessors)
    shape.lanes *= 2;
  shape.blocks = ceil_div(rows.count(), kFewThreads / shape.lanes);
  return shape;
}

}  // namespace jaxgpuops::topk
