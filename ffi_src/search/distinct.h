// The different elements of a row, as the blocks of unique.cu leave them in the workspace.
#pragma once

#include <cstdint>

#include "search/plan.h"

namespace jaxgpuops::search {

constexpr int kSlots = 1 << kSlotBits;

struct Distinct {
  uint32_t count;  // of different elements
  uint32_t many;   // 1 if there are too many: then only the next two lines are of use
  uint32_t sorts;  // 1 if the row must be sorted: there are many, and `least` elements did not give all results
  // If few results of a row are wanted: how many blocks have sampled their parts; whether `bound` is known, the highest
  // word of an element that may be one of the least; and how many such elements there are.
  uint32_t sampled, bounded, bound, candidates;
  uint32_t unused;
  // A hash table. The key of a slot, or 0 if it is free: an element whose key is 0 has the last slot.
  uint64_t keys[kSlots];
  uint32_t counts[kSlots + 4];  // how many elements are equal
  uint32_t firsts[kSlots + 4];  // the complement of the first place of these
  uint32_t ranks[kSlots + 4];   // how many different elements are smaller
  // The slots that are not free, in no order, and their keys.
  uint64_t listed_keys[kMostDistinct];
  uint32_t listed[kMostDistinct];
};
static_assert(sizeof(Distinct) % 16 == 0);

}  // namespace jaxgpuops::search
