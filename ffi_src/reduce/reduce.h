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
  DType dtype = DType::kFloat32;  // floats in float32 at least, with one rounding at the end; integers wrap
  Rows rows;
  bool wide_result = false;  // kSum, kDot of float8, float16, bfloat16: results are float32
  bool masked = false;       // there is a `where`
  Broadcast where;           // entries where it is 0 count as the identity
};

// x and y have the shape of the problem, row-major; out is (outer, 1, inner).
struct Buffers {
  const void* x = nullptr;
  const void* y = nullptr;         // kDot; else null
  const uint8_t* where = nullptr;  // PRED; null: all entries count
  void* out = nullptr;
};

}  // namespace jaxgpuops::reduce
