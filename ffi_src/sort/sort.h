// Sort: the elements of each row in ascending or descending order, or the permutation that puts them there, or both.
#pragma once

#include <cstdint>

#include "common/ordered_key.h"
#include "common/rows.h"

namespace jaxgpuops::sort {

// The order of jax.lax.sort: NaNs are equal and above every number, -0 and +0 are equal. A smaller key comes first;
// `invert` is all ones where the largest element does.
struct Order {
  ArgOrder ascending;
  uint64_t invert = 0;
};

template <class Key>
JAXGPUOPS_HD Key sort_key(Key bits, const Order& order) {
  return static_cast<Key>(encode_arg(bits, order.ascending) ^ static_cast<Key>(order.invert));
}

// The sort is stable in both directions. Keys are only compared: what moves are the elements' own bits.
struct Problem {
  Rows rows;  // length < 2^31
  int key_bits = 32;
  Order order;
  bool values = true, indices = true;  // what is wanted: one of them at least
};

}  // namespace jaxgpuops::sort
