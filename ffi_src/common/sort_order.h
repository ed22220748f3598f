// The order of a sort, as a map from bits to keys. Unlike those of ordered_key.h, these keys serve comparisons only: -0
// and +0 have the same key, and so do all NaNs.
#pragma once

#include "common/ordered_key.h"

namespace jaxgpuops {

// The order of jax.lax.sort. Smaller keys come first. Keys compare as those of argmax do (NaNs are equal, and so are
// zeros); `invert`, all ones for a descending sort, reverses that order.
struct SortOrder {
  ArgOrder ascending;
  uint64_t invert = 0;
};

template <class Key>
JAXGPUOPS_HD Key sort_key(Key bits, const SortOrder& order) {
  const ArgOrder& rules = order.ascending;
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Key) == 4) {  // the sum turns -0 into 0, and any NaN into one whose key is the largest
    const Key number = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.f));
    return encode(rules.sign ? number : bits, rules.order) ^ static_cast<Key>(order.invert);
  }
#endif
  Key key = encode(bits, rules.order);
  // For integers, neither line changes the key. A branch would cost more.
  const Key magnitude = static_cast<Key>(bits & static_cast<Key>(~rules.sign));
  key = magnitude == 0 ? static_cast<Key>(rules.order.flip) : key;
  key = magnitude > static_cast<Key>(rules.nan_above) ? static_cast<Key>(~Key{0}) : key;
  return static_cast<Key>(key ^ static_cast<Key>(order.invert));
}

}  // namespace jaxgpuops
