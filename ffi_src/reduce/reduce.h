// Reductions along an axis: sum, maximum, minimum, and the dot product of two arrays.
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::reduce {

enum class Op { kSum, kMax, kMin, kDot };

struct Problem {
  Op op = Op::kSum;
  DType dtype = DType::kFloat32;  // floats are computed in float32 or wider and rounded once at the end; integers wrap
  Rows rows;
  bool wide_result = false;  // kSum, kDot of float8, float16, bfloat16: results are float32
  int64_t divisor = 1;       // kSum of floats: sums are multiplied by its inverse before they are rounded
  bool masked = false;       // the call has a `where` operand
  Broadcast where;  // where the elements of the operand `where` are; an entry of x whose element there is 0 is left out
};

// x and y have the shape of the problem, row-major. out has the shape (outer, 1, inner).
struct Buffers {
  const void* x = nullptr;
  const void* y = nullptr;         // null unless kDot
  const uint8_t* where = nullptr;  // the operand `where`, of dtype PRED; null if all entries count
  void* out = nullptr;
};

}  // namespace jaxgpuops::reduce
