// The problems of top-k along an axis, and of argmax and argmin, its relatives for k = 1, without buffers.
#pragma once

#include <cstdint>

#include "common/ordered_key.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

struct Problem {
  Rows rows;
  int64_t k = 0;       // 0 <= k <= rows.length < 2^31
  int key_bits = 32;   // width of an element in bits: 8, 16, 32 or 64
  KeyOrder order;      // larger keys come first; ties go to the lower index
  bool sorted = true;  // false: the same elements, in the order of their indices
};

struct ArgProblem {
  Rows rows;  // the length is at least 1
  int key_bits = 32;
  ArgOrder order;
};

// The size of a key with its index, as one integer (a composite) or side by side.
constexpr int64_t composite_bytes(int64_t key_bytes) { return key_bytes == 8 ? 16 : 8; }

}  // namespace jaxgpuops::topk
