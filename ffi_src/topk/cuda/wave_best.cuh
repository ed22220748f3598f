// What a thread of wave.cu keeps of the vectors that it reads: the best element at each place of a vector. Elements at
// one place are far from each other in the row, so that neighbours, which are alike in sorted rows and where many
// elements tie, do not push each other out. A vector has few places, since the code for each takes long to fetch: those
// of 16-bit keys have 8 bytes, and of bytes it is the best element of all.
//
// add() takes the vectors of several rounds. After list(), head() is the best element that is left, and pop() removes
// it. rest() bounds all elements that are not left.
#pragma once

#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key>
using Vector = std::conditional_t<sizeof(Key) == 2, uint2, uint4>;

// The elements that a thread keeps; those that a warp keeps, which are no fewer than two neighbouring vectors have.
template <class Key>
constexpr uint32_t kPlaces = sizeof(Key) >= 2 ? sizeof(Vector<Key>) / sizeof(Key) : 1;
template <class Key>
constexpr uint32_t kKept = kPlaces<Key> == 4 ? 8 : 4;

// Finds the largest key at each place of some vectors, and the largest of all other keys.
template <class Key, int kLoads>
__device__ __forceinline__ void best_and_next(const Vector<Key> (&tile)[kLoads], KeyOrder order,
                                              Key (&best)[kPlaces<Key>], Key& next) {
  if constexpr (sizeof(Key) == 2) {
    const Lanes<Key> lanes(order);
    uint32_t ones[4] = {}, twos = 0;
#pragma unroll
    for (int w = 0; w < kLoads * 2; ++w) {
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
  } else if constexpr (sizeof(Key) >= 4) {
    constexpr int kPer = 16 / sizeof(Key);
    next = 0;
#pragma unroll
    for (int j = 0; j < kLoads * kPer; ++j) {
      const Key key = encode(reinterpret_cast<const Key*>(tile)[j], order);
      if (j >= kPer) next = larger(next, smaller(best[j % kPer], key));
      best[j % kPer] = j < kPer ? key : larger(best[j % kPer], key);
    }
  } else {
    const Lanes<Key> lanes(order);
    uint32_t ones = 0, twos = 0;
#pragma unroll
    for (int w = 0; w < kLoads * 4; ++w) {
      const uint32_t keys = lanes.encode(reinterpret_cast<const uint32_t*>(tile)[w]);
      twos = Lanes<Key>::max(twos, __vminu4(ones, keys));
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
template <class Key, class Row>
struct Best {
  using C = Composite<Key>;
  static constexpr int kEach = kPlaces<Key>, kVector = sizeof(Vector<Key>) / sizeof(Key);
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
    best_and_next<Key>(tile, order, ones, next);
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
  __device__ __forceinline__ void pop(C most) {
#pragma unroll
    for (int p = 0; p < kEach; ++p)
      if (left[p] == most) left[p] = 0;
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
