// How few elements are spread over threads (cuda/small.cuh): 2^part_bits threads share a column, and take kSmallEach of
// its elements at a time; 2^column_bits columns beside each other share a warp. A block has more than one column only
// if a warp has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops {

constexpr int kSmallEach = 4;
constexpr int kMostSmallThreads = 1024;  // of a block; kSmallThreads, if it has several columns
constexpr int kSmallThreads = 128;

struct SmallShape {
  int column_bits = 0, part_bits = 0;
  int threads = 0;  // of a block
  int64_t blocks = 0;
};

inline SmallShape small_shape(Rows rows) {
  SmallShape shape;
  while (1 << shape.part_bits < kMostSmallThreads && int64_t{kSmallEach} << shape.part_bits < rows.length)
    ++shape.part_bits;
  while (shape.part_bits + shape.column_bits < 5 && int64_t{1} << shape.column_bits < rows.inner) ++shape.column_bits;
  const int64_t group = int64_t{1} << (shape.part_bits + shape.column_bits);
  const int64_t groups = (rows.count() + (int64_t{1} << shape.column_bits) - 1) >> shape.column_bits;
  shape.threads = static_cast<int>(shape.part_bits > 5 ? group : kSmallThreads);
  shape.blocks = (groups * group + shape.threads - 1) / shape.threads;
  return shape;
}

}  // namespace jaxgpuops
