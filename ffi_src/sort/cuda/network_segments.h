// Networks that sort the segments of rows, if only values of up to 32 bits are wanted.
#pragma once

#include <algorithm>

#include "sort/cuda/shape.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

// Rows whose segments a network sorts, and the most of a block.
constexpr int64_t kLeastNetworked = 33, kMostNetworked = 8 * kMostWarpLength;
constexpr int64_t kMostTogether = kMostWarpLength / kLeastNetworked;

// Whether all rows have the same offsets.
inline bool has_shared_offsets(const Problem& problem) {
  const IndexMap& at = problem.offsets_at.outer;
  return std::all_of(at.stride, at.stride + at.groups, [](int64_t stride) { return stride == 0; });
}

}  // namespace jaxgpuops::sort
