// The order of a sort: how bits map to keys that are compared, and only compared: -0 and +0, and all NaNs, share one.
#pragma once

#include "common/ordered_key.h"

namespace jaxgpuops {

// The order of jax.lax.sort: the rules of argmax, in both directions. A smaller key comes first; `invert` is all ones
// where the largest element does.
struct SortOrder {
  ArgOrder ascending;
  uint64_t invert = 0;
};

template <class Key>
JAXGPUOPS_HD Key sort_key(Key bits, const SortOrder& order) {
  const ArgOrder& rules = order.ascending;
  Key key = encode(bits, rules.order);
  if (rules.sign) {  // of a float
    const Key magnitude = static_cast<Key>(bits & static_cast<Key>(~rules.sign));
    if (magnitude == 0) key = static_cast<Key>(rules.order.flip);
    if (magnitude > static_cast<Key>(rules.nan_above)) key = static_cast<Key>(~Key{0});
  }
  return static_cast<Key>(key ^ static_cast<Key>(order.invert));
}

}  // namespace jaxgpuops
