// Top-k along an axis, and its k = 1 relatives argmax and argmin: what both backends implement, in plain pointers.
#pragma once

#include <cstdint>

#include "common/ordered_key.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

struct Problem {
  Rows rows;
  int64_t k = 0;       // 0 <= k <= rows.length < 2^31
  int key_bits = 32;   // 8, 16, 32 or 64
  KeyOrder order;      // larger keys come first; ties go to the lower index
  bool sorted = true;  // false: the same set, in index order
};

struct ArgProblem {
  Rows rows;  // length >= 1
  int key_bits = 32;
  ArgOrder order;
};

}  // namespace jaxgpuops::topk
