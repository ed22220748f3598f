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

// The lanes that share a row read neighbouring elements together, so long rows have several. Rows and columns that
// would leave the device idle have more, as long as each lane has a load of its own; fewer for a larger k, since
// merging what lanes have takes longer then.
inline FewShape few_shape(Rows rows, int64_t k, int key_bytes, int64_t multiprocessors) {
  FewShape shape;
  const int64_t length = rows.length, wanted = (k <= 2 ? 1024 : k <= 4 ? 512 : 128) * multiprocessors;
  if (rows.inner == 1) shape.lanes = length * key_bytes <= 32 ? 1 : length <= 64 ? 2 : length <= 160 ? 4 : 8;
  while (shape.lanes < 32 && shape.lanes * kFewLoads < length && rows.count() * shape.lanes < wanted) shape.lanes *= 2;
  shape.blocks = ceil_div(rows.count(), kFewThreads / shape.lanes);
  return shape;
}

}  // namespace jaxgpuops::topk
