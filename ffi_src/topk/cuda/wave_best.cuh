// What a thread of wave.cu keeps of the vectors that it reads: the best element at each place of a vector. Elements at
// one place are far from each other in the row, so that neighbours, which are alike in sorted rows and where many
// elements tie, do not push each other out. A vector has few places, since the code for each takes long to fetch: those
// of 16-bit keys have 8 bytes. Where reading takes longer than all else, and of bytes, a thread keeps one element.
//
// add() takes the vectors of several rounds. After list(), `left` has the elements that are kept, and rest() bounds all
// others.
#pragma once

#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key>
using Vector = std::conditional_t<sizeof(Key) == 2, uint2, uint4>;

// Finds the largest key at each place of some vectors, or of all places, and the largest of all other keys.
template <class Key, int kPlaces, int kLoads>
__device__ __forceinline__ void best_and_next(const Vector<Key> (&tile)[kLoads], KeyOrder order, Key (&best)[kPlaces],
                                              Key& next) {
  constexpr int kWords = kLoads * sizeof(Vector<Key>) / 4;
  if constexpr (sizeof(Key) >= 4) {
    next = 0;
#pragma unroll
    for (int j = 0; j < kLoads * 16 / static_cast<int>(sizeof(Key)); ++j) {
      const Key key = encode(reinterpret_cast<const Key*>(tile)[j], order);
      if (j >= kPlaces) next = larger(next, smaller(best[j % kPlaces], key));
      best[j % kPlaces] = j < kPlaces ? key : larger(best[j % kPlaces], key);
    }
  } else if constexpr (kPlaces > 1) {
    static_assert(sizeof(Key) == 2 && kPlaces == 4);
    const Lanes<Key> lanes(order);
    uint32_t ones[4] = {}, twos = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t keys = lanes.encode(reinterpret_cast<const uint32_t*>(tile)[w]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t key = e ? keys >> 16 : keys & 0xffff;
        twos = larger(twos, smaller(ones[w % 2 * 2 + e], key));
        ones[w % 2 * 2 + e] = larger(ones[w % 2 * 2 + e], key);
      }
    }
    next = static_cast<Key>(twos);
#pragma unroll
    for (int p = 0; p < 4; ++p) best[p] = static_cast<Key>(ones[p]);
  } else {
    const Lanes<Key> lanes(order);
    uint32_t ones = 0, twos = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t keys = lanes.encode(reinterpret_cast<const uint32_t*>(tile)[w]);
      const uint32_t less = sizeof(Key) == 2 ? __vminu2(ones, keys) : __vminu4(ones, keys);
      twos = Lanes<Key>::max(twos, less);
      ones = Lanes<Key>::max(ones, keys);
    }
    best[0] = static_cast<Key>(ones), next = static_cast<Key>(Lanes<Key>::largest(twos));
#pragma unroll
    for (int bits = 8 * sizeof(Key); bits < 32; bits += 8 * sizeof(Key)) {
      const Key key = static_cast<Key>(ones >> bits);
      next = larger(next, smaller(best[0], key));
      best[0] = larger(best[0], key);
    }
  }
}

// Row: a row that is dealt out to threads. `mine`: the vector that this thread reads in the first round; the one of a
// later round is so many times row.threads vectors after it.
template <class Key, class Row, int kEach>
struct Best {
  using C = Composite<Key>;
  static constexpr int kVector = sizeof(Vector<Key>) / sizeof(Key);
  const Row& row;
  const KeyOrder order;
  const Packing<Key> packing;
  const uint32_t mine;
  Key best[kEach] = {}, second = 0;
  uint32_t index[kEach] = {};
  C left[kEach] = {};

  // Adds the vector `from`, and those of the next rounds.
  template <int kLoads>
  __device__ __forceinline__ void add(const Vector<Key> (&tile)[kLoads], uint32_t from) {
    Key ones[kEach], next;
    best_and_next<Key, kEach>(tile, order, ones, next);
    second = larger(second, next);
    bool rises = from == mine;
#pragma unroll
    for (int p = 0; p < kEach; ++p) {
      second = larger(second, smaller(best[p], ones[p]));
      rises |= ones[p] > best[p];
    }
    if (!rises) return;
#pragma unroll
    for (int p = 0; p < kEach; ++p) {
      const Key bits = decode(ones[p], order);
      uint32_t at = 0;
#pragma unroll
      for (int j = kLoads * kVector - 1; j >= 0; --j)
        if (j % kEach == p && reinterpret_cast<const Key*>(tile)[j] == bits) at = j;
      if (from == mine || ones[p] > best[p])
        best[p] = ones[p], index[p] = row.index(from + at / kVector * row.threads) + at % kVector;
    }
  }

  __device__ __forceinline__ void list() {
#pragma unroll
    for (int p = 0; p < kEach; ++p) left[p] = packing.pack(best[p], index[p]);
  }
  __device__ __forceinline__ C head() const {
    C most = left[0];
#pragma unroll
    for (int p = 1; p < kEach; ++p) most = larger(most, left[p]);
    return most;
  }
  // Of those that were not the best at their place, an element that equals the best of all comes after it: at the same
  // place, in another round.
  __device__ __forceinline__ C rest() const {
    Key most = best[0];
#pragma unroll
    for (int p = 1; p < kEach; ++p) most = larger(most, best[p]);
    const uint32_t after = kEach == 1 ? index[0] + 1 : row.index(mine + row.threads);
    return packing.pack(second, second == most ? min(after, row.length - 1) : row.index(mine));
  }
};

}  // namespace
}  // namespace jaxgpuops::topk
