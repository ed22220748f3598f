// Top-k of one row on the CPU: the elements that reach a rising threshold are kept, in the order of their indices.
//
// 1. The elements of a first chunk are dealt out to groups. The k-th largest of the group maxima is a threshold that at
//    least k elements reach; on most data few others do.
// 2. Elements are compared with the threshold in blocks; nearly every block has none to keep.
// 3. When the list of kept elements is full, it is cut to the best k, and the threshold rises to just above the k-th.
//
// The result is exact and the time linear for any data, since each cut of at least 2k elements is one linear selection.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include "common/cpu/composite.h"
#include "common/ordered_key.h"
#include "common/cpu/simd.h"

namespace jaxgpuops::topk {

// Moves the best k elements of a list to its front, without changing their order, and returns the k-th best. `scratch`
// has room for `size` elements.
template <class C>
C keep_best(C* list, int64_t size, int64_t k, C* scratch) {
  std::copy(list, list + size, scratch);
  std::nth_element(scratch, scratch + k - 1, scratch + size, std::greater<>());
  const C last = scratch[k - 1];
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) {
    list[kept] = list[i];
    kept += list[i] >= last;
  }
  return last;
}

// Sets reached[i] to 1 if element i of the block reaches its floor, else to 0. Returns whether any does.
template <class Key, int64_t kSize, class Floor>
JAXGPUOPS_INLINE bool compare_block(const Key* x, KeyOrder order, Floor floor, uint8_t* reached) {
  uint8_t flags[kSize];  // a local array, so that the compiler knows that it does not overlap x
  for (int64_t i = 0; i < kSize; ++i) flags[i] = encode(x[i], order) >= floor(i);
  uint64_t words[kSize / 8], any = 0;
  std::memcpy(words, flags, sizeof(flags));
  for (const uint64_t word : words) any |= word;
  if (any) std::memcpy(reached, flags, sizeof(flags));
  return any != 0;
}

// Calls visit(i) for each byte of `reached` that is set, in order.
template <class Visit>
void for_each_reached(const uint8_t* reached, int64_t size, Visit visit) {
  for (int64_t begin = 0; begin < size; begin += 8) {
    uint64_t word;  // little endian, so the lowest byte is that of the first element
    std::memcpy(&word, reached + begin, sizeof(word));
    for (; word; word &= word - 1) visit(begin + __builtin_ctzll(word) / 8);
  }
}

constexpr int64_t kFilterBlock = 64;

// Returns the first block of x at or after `at` that has an element whose key reaches `floor`, or at least n if there
// is none. The last block may be short.
template <class Key>
JAXGPUOPS_SIMD int64_t find_block(const Key* x, int64_t at, int64_t n, KeyOrder order, Key floor, uint8_t* reached) {
  for (; at + kFilterBlock <= n; at += kFilterBlock)
    if (compare_block<Key, kFilterBlock>(x + at, order, [=](int64_t) { return floor; }, reached)) return at;
  for (int64_t i = 0; i < kFilterBlock; ++i) reached[i] = at + i < n && encode(x[at + i], order) >= floor;
  return at;
}

// Here a block is one cache line of neighbouring columns, each of which has a floor of its own. Lines are `stride`
// elements apart.
template <class Key>
constexpr int64_t kLine = 64 / sizeof(Key);

template <class Key>
JAXGPUOPS_SIMD int64_t find_line(const Key* x, int64_t at, int64_t end, int64_t stride, KeyOrder order,
                                 const Key* floors, uint8_t* reached) {
  for (; at < end; ++at)
    if (compare_block<Key, kLine<Key>>(x + at * stride, order, [=](int64_t i) { return floors[i]; }, reached)) break;
  return at;
}

// Computes the largest key of each group. Element i belongs to group i % groups.
template <class Key>
JAXGPUOPS_SIMD void group_maxima(const Key* x, int64_t n, KeyOrder order, int64_t groups, Key* maxima) {
  std::fill(maxima, maxima + groups, Key{0});
  for (; n >= groups; n -= groups, x += groups)
    for (int64_t g = 0; g < groups; ++g) maxima[g] = std::max(maxima[g], encode(x[g], order));
}

template <class Key>
JAXGPUOPS_SIMD void compose_all(const Key* x, int64_t n, KeyOrder order, uint32_t first, Composite<Key>* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = compose<Key>(encode(x[i], order), first + static_cast<uint32_t>(i));
}

template <class Key>
class Selector {
 public:
  // A row that is offered must have at least k and at most `length` elements.
  Selector(int64_t k, int64_t length, KeyOrder order) : k_(k), order_(order), limit_(std::min(2 * k + 256, length)) {
    list_.reset(new Composite<Key>[limit_ + kFilterBlock]);
    for (groups_ = 16; groups_ < 2 * k; groups_ *= 2) {
    }
  }

  void reset() {
    size_ = 0;
    floor_ = 0;
    closed_ = false;
  }

  // Offers n elements with consecutive indices, which must be higher than those of all elements offered before. The
  // first offer for a row sets the threshold; it should have at least seed_elements(k) elements if the row has so many.
  void offer(const Key* x, int64_t n, int64_t first, Composite<Key>* scratch) {
    if (size_ == 0) seed(x, n, reinterpret_cast<Key*>(scratch));
    for (int64_t at = 0; at < n && !closed_;) {
      if (floor_ == 0) {
        const int64_t count = std::min(n - at, limit_ + kFilterBlock - size_);
        compose_all(x + at, count, order_, static_cast<uint32_t>(first + at), &list_[size_]);
        size_ += count;
        at += count;
      } else {
        uint8_t reached[kFilterBlock];
        at = find_block(x, at, n, order_, floor_, reached);
        if (at >= n) break;
        for_each_reached(reached, kFilterBlock, [&](int64_t i) {
          list_[size_++] = compose(encode(x[at + i], order_), static_cast<uint32_t>(first + at + i));
        });
        at += kFilterBlock;
      }
      if (size_ > limit_) cut(scratch);
    }
  }

  // Adds one element whose key is known to reach the floor.
  void take(Key bits, int64_t index, Composite<Key>* scratch) {
    if (closed_) return;
    list_[size_++] = compose(encode(bits, order_), static_cast<uint32_t>(index));
    if (size_ > limit_) cut(scratch);
  }

  // The least key that an element must have to be kept, or 0 while there is no threshold.
  Key floor() const { return floor_; }

  // Returns the best k elements (all, if there were fewer) in the order of their indices.
  Composite<Key>* finish(Composite<Key>* scratch) {
    if (size_ > k_) cut(scratch);
    return list_.get();
  }
  int64_t size() const { return size_; }

  // The number of elements for which `scratch` must have room.
  int64_t scratch_elements() const { return std::max(limit_ + kFilterBlock, groups_); }

  static int64_t seed_elements(int64_t k) { return std::max<int64_t>(4096, 16 * k); }

 private:
  void seed(const Key* x, int64_t n, Key* maxima) {
    n = std::min(n, 4 * seed_elements(k_));
    if (n < 4 * groups_) return;  // groups this small would give a threshold that most elements reach
    group_maxima(x, n, order_, groups_, maxima);
    std::nth_element(maxima, maxima + k_ - 1, maxima + groups_, std::greater<>());
    floor_ = maxima[k_ - 1];
  }

  void cut(Composite<Key>* scratch) {
    const Key last = key_of<Key>(keep_best(list_.get(), size_, k_, scratch));
    size_ = k_;
    closed_ = last == std::numeric_limits<Key>::max();
    if (!closed_) floor_ = last + 1;  // a later element with the same key has a higher index, so it would lose the tie
  }

  const int64_t k_;
  const KeyOrder order_;
  const int64_t limit_;  // the list is cut when it is longer than this
  int64_t groups_;
  std::unique_ptr<Composite<Key>[]> list_;
  int64_t size_ = 0;
  Key floor_ = 0;
  bool closed_ = false;  // no later element can be kept
};

}  // namespace jaxgpuops::topk
