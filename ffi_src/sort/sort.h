// Sorts the elements of each row, or of each of its segments, in ascending or descending order. The results are the
// sorted elements, the permutation that sorts them, or both.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/broadcast.h"
#include "common/rows.h"
#include "common/sort_order.h"

namespace jaxgpuops::sort {

// The sort is stable in both directions. Keys serve comparisons only: the results have the bits of the elements.
struct Problem {
  Rows rows;      // the length is less than 2^31
  int64_t k = 0;  // the first k elements of each sorted row are wanted, from 1 to all
  // If not negative, a partition is enough: the element of this rank is in its place, those that sort before it come
  // before it, and the others after it.
  int64_t kth = -1;
  int key_bits = 32;
  SortOrder order;
  bool values = true, indices = true;  // which results are wanted: at least one of them
  bool low_keys = false;               // small integers: as a rule, two of their four bytes are the same in all
  bool carries = false;  // the rows have numbers, which are moved with the elements and stand in place of the indices
  // If not 0: a row has so many offsets, between which its segments are; rows may share them. An offset counts as the
  // nearest place of the row, and as the largest offset before it if that is larger. Elements before the first offset
  // and from the last one on stay where they are.
  int64_t offsets = 0;
  Broadcast offsets_at;

  bool shares_offsets() const {  // whether all rows have the same
    const IndexMap& at = offsets_at.outer;
    return std::all_of(at.stride, at.stride + at.groups, [](int64_t stride) { return stride == 0; });
  }
};

}  // namespace jaxgpuops::sort
