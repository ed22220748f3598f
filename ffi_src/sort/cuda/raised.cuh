// Keys of elements of any width in words of 32 or 64 bits, for sorts that read the elements themselves by index in the
// end: one kernel serves all elements of up to 32 bits.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/sort_order.h"

namespace jaxgpuops::sort {
namespace {

// Returns the same order for keys that have the element in their upper part and `bits` other bits below it.
inline SortOrder raised(SortOrder order, int bits) {
  order.ascending.order.magnitude <<= bits;
  order.ascending.order.flip <<= bits;
  order.ascending.sign <<= bits;
  order.ascending.nan_above = order.ascending.nan_above << bits | ((uint64_t{1} << bits) - 1);
  return order;
}

// Calls f with a zero of the unsigned type that has so many bytes.
template <class Key, class F>
__device__ __forceinline__ void dispatch_bytes(int bytes, F f) {
  if constexpr (sizeof(Key) == 8) {
    f(uint64_t{});
  } else {
    bytes == 4 ? f(uint32_t{}) : bytes == 2 ? f(uint16_t{}) : f(uint8_t{});
  }
}

// As sort_key(), for elements that are the upper part of a key, with the order raised().
template <class Key>
__device__ __forceinline__ Key raised_key(Key bits, const SortOrder& order) {
  const ArgOrder& rules = order.ascending;
  const Key magnitude = bits & static_cast<Key>(~rules.sign);
  Key key = magnitude == 0 ? static_cast<Key>(rules.order.flip) : encode(bits, rules.order);
  key = magnitude > static_cast<Key>(rules.nan_above) ? static_cast<Key>(~Key{0}) : key;
  return key ^ static_cast<Key>(order.invert);
}

}  // namespace
}  // namespace jaxgpuops::sort
