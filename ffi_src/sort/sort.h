// Sort: the elements of each row in ascending or descending order, or the permutation that puts them there, or both.
#pragma once

#include <cstdint>

#include "common/sort_order.h"
#include "common/rows.h"

namespace jaxgpuops::sort {

// The sort is stable in both directions. Keys are only compared: what moves are the elements' own bits.
struct Problem {
  Rows rows;  // length < 2^31
  int key_bits = 32;
  SortOrder order;
  bool values = true, indices = true;  // what is wanted: one of them at least
};

}  // namespace jaxgpuops::sort
