// The workspace of kRadix, on which the plan and the launch must agree.
#pragma once

#include <cstdint>

#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

// If results are sorted: the gathered elements are at 0, their indices follow, and then the workspace of the selection,
// which is that of the sort afterwards.
struct RadixShape {
  RadixShape(const Rows& rows, int64_t k, int key_bytes)
      : indices(aligned(rows.count() * k * key_bytes)), bytes(indices + aligned(rows.count() * k * 4)) {}

  int64_t indices;
  int64_t bytes;
};

}  // namespace jaxgpuops::topk
