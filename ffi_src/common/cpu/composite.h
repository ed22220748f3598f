// Composites on the CPU, which are keys together with their indices, and how to sort a list of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/cpu/simd.h"

namespace jaxgpuops {

// A key and its index as one integer. Larger composites come first, and no two are equal. The index is complemented, so
// that the lower index wins a tie.
template <class Key>
using Composite = std::conditional_t<sizeof(Key) == 8, unsigned __int128, uint64_t>;

template <class Key>
Composite<Key> compose(Key key, uint32_t index) {
  return static_cast<Composite<Key>>(key) << 32 | static_cast<uint32_t>(~index);
}

template <class Key>
Key key_of(Composite<Key> composite) {
  return static_cast<Key>(composite >> 32);
}

template <class Key>
int32_t index_of(Composite<Key> composite) {
  return static_cast<int32_t>(~static_cast<uint32_t>(composite));
}

// rank() computes the position of each key in descending order by counting the keys before it: O(n^2), but vectorised.
// Equal keys keep their order. Longer lists than kMaxRanked are sorted otherwise.
constexpr int64_t kMaxRanked = 128;

template <class Key>
JAXGPUOPS_SIMD void rank(const Key* keys, int64_t size, int32_t* ranks) {
  for (int64_t i = 0; i < size; ++i) {
    const Key key = keys[i];
    int32_t ahead = 0;
    for (int64_t j = 0; j < i; ++j) ahead += keys[j] >= key;
    for (int64_t j = i + 1; j < size; ++j) ahead += keys[j] > key;
    ranks[i] = ahead;
  }
}

// Sorts a list, given in the order of indices, by descending keys. Lists that are too long for rank() are sorted by
// radix digits of eight bits from the lowest up. Both ways keep equal keys in the order of indices.
template <class Key>
void sort_by_key(Composite<Key>* list, int64_t size, Composite<Key>* scratch) {
  if (size <= kMaxRanked) {
    Key keys[kMaxRanked] = {};
    int32_t ranks[kMaxRanked];
    for (int64_t i = 0; i < size; ++i) keys[i] = key_of<Key>(list[i]);
    rank(keys, size, ranks);
    std::copy(list, list + size, scratch);
    for (int64_t i = 0; i < size; ++i) list[ranks[i]] = scratch[i];
    return;
  }
  constexpr int kDigits = sizeof(Key);
  int32_t counts[kDigits][256] = {};
  for (int64_t i = 0; i < size; ++i)
    for (int d = 0; d < kDigits; ++d) ++counts[d][static_cast<uint8_t>(list[i] >> (32 + 8 * d))];
  Composite<Key>* from = list;
  Composite<Key>* to = scratch;
  for (int d = 0; d < kDigits; ++d) {
    const int shift = 32 + 8 * d;
    if (counts[d][static_cast<uint8_t>(from[0] >> shift)] == size) continue;  // all keys have the same digit
    int32_t start = 0;
    for (int digit = 255; digit >= 0; --digit) start += std::exchange(counts[d][digit], start);
    for (int64_t i = 0; i < size; ++i) to[counts[d][static_cast<uint8_t>(from[i] >> shift)]++] = from[i];
    std::swap(from, to);
  }
  if (from != list) std::copy(from, from + size, list);
}

}  // namespace jaxgpuops
