// Of each contiguous row, the k elements that come first in an order, in order of appearance: a partition (kth in
// count.h) of which only the first part is wanted. Top-k takes it for large k.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "select/select.h"
#include "select/plan.h"

namespace jaxgpuops::select {

inline Select firsts_of(const Rows& rows, int64_t k, int bits) {
  Select problem;
  problem.rows = rows;
  problem.count = 1;
  problem.bits = bits;
  problem.kth = k - 1;
  return problem;
}

// By kLong, in rows of any length. A workspace of any number of rows has as many times the bytes of one.
SelectPlan plan_firsts(const Rows& rows, int64_t k, int bits, const Gpu& gpu);

}  // namespace jaxgpuops::select
