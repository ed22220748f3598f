// A candidate as one integer: the ordered key above, the mirrored index below. Composites are distinct and compare in
// exactly the order of the result (larger key first, ties to the lower index), so every kernel of this family may
// find candidates in any order and through any atomics and still write the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ordered_key.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

template <class Key>
using Composite = std::conditional_t<sizeof(Key) == 8, unsigned __int128, uint64_t>;
static_assert(sizeof(Composite<uint32_t>) == composite_bytes(4) && sizeof(Composite<uint64_t>) == composite_bytes(8));

template <class Key>
struct Packing {
  using C = Composite<Key>;
  uint32_t last;  // length - 1: the index is stored as last - index
  // The number of bits for the index: 32 below 32-bit keys, so that no shift is needed; below narrow keys as few as
  // possible, so that equal keys are spread over bins.
  int index_bits;

  JAXGPUOPS_HD static Packing make(uint32_t length) {
    int bits = 1;
    while (bits < 31 && (length - 1) >> bits) ++bits;
    return {length - 1, bits};
  }
  JAXGPUOPS_HD int shift() const { return sizeof(Key) == 4 ? 32 : index_bits; }
  JAXGPUOPS_HD C pack(Key key, uint32_t index) const { return (static_cast<C>(key) << shift()) | (last - index); }
  JAXGPUOPS_HD C lowest(Key key) const { return static_cast<C>(key) << shift(); }
  JAXGPUOPS_HD Key key(C c) const { return static_cast<Key>(c >> shift()); }
  JAXGPUOPS_HD uint32_t index(C c) const {
    const uint32_t mirrored =
        sizeof(Key) == 4 ? static_cast<uint32_t>(c) : static_cast<uint32_t>(c) & ((1u << index_bits) - 1);
    return last - mirrored;
  }

  // The candidate with its index above its key, by which results are sorted in the order of indices.
  JAXGPUOPS_HD C by_index(C c) const { return (static_cast<C>(last - index(c)) << (8 * sizeof(Key))) | key(c); }
  JAXGPUOPS_HD C from_by_index(C c) const {
    return pack(static_cast<Key>(c), last - static_cast<uint32_t>(c >> (8 * sizeof(Key))));
  }
};

// Compares elements with a threshold by their raw bits, so that an element costs one exclusive or and one comparison.
// `flips` depends on the sign of the threshold: for elements of that sign, bits ^ flips is in the order of the keys,
// and for the others the top bit decides.
template <class Key>
struct Filter {
  using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;  // a word has 1, 2 or 4 elements
  static constexpr int kBits = 8 * sizeof(Key), kWordBits = 8 * sizeof(Word), kPerWord = kWordBits / kBits;
  Word flips, floor;  // `flips` repeats in every element of a word; `floor` is only in the top element

  JAXGPUOPS_HD Filter(Key threshold, KeyOrder order) {
    const bool negative = decode(threshold, order) >> (kBits - 1);
    Word word = static_cast<Key>(order.flip ^ (negative ? order.magnitude : 0));
#pragma unroll
    for (int bits = kBits; bits < kWordBits; bits *= 2) word |= word << bits;
    flips = word;
    floor = static_cast<Word>(threshold) << (kWordBits - kBits);
  }
  // most() returns the largest elements of two words, the first of which is a result of most() or 0. reaches() says
  // whether any of these elements passes the filter.
  __device__ Word most(Word a, Word word) const {
    if constexpr (kPerWord == 1) {
      return a > (word ^ flips) ? a : word ^ flips;
    } else {
      return kPerWord == 2 ? __vmaxu2(a, word ^ flips) : __vmaxu4(a, word ^ flips);
    }
  }
  __device__ bool reaches(Word most) const {
    bool any = false;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) any |= most << (kWordBits - kBits * (e + 1)) >= floor;
    return any;
  }
  // Whether any of the elements that most() returned is above the threshold.
  __device__ bool exceeds(Word most) const {
    bool any = false;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e)
      any |= most << (kWordBits - kBits * (e + 1)) > (floor | ((Word{1} << (kWordBits - kBits)) - 1));
    return any;
  }
  // One bit for each element of the word that passes.
  JAXGPUOPS_HD uint32_t passes(Word word) const {
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e)  // the lower elements of the word cannot change the answer
      bits |= static_cast<uint32_t>(((word ^ flips) << (kWordBits - kBits * (e + 1))) >= floor) << e;
    return bits;
  }
};

}  // namespace jaxgpuops::topk
