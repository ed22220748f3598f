// The form of every problem: a row-major array viewed as (outer, length, inner), with the axis in the middle.
#pragma once

#include <cstdint>

namespace jaxgpuops {

struct Rows {
  int64_t outer = 1;   // product of the dimensions before the axis
  int64_t length = 1;  // size of the axis
  int64_t inner = 1;   // product of the dimensions after the axis

  constexpr int64_t count() const { return outer * inner; }        // number of rows
  constexpr int64_t elements() const { return count() * length; }  // number of elements
};

}  // namespace jaxgpuops
