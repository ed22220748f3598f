// Folds of all tiles before one, associated in the same way whoever folds them (shape.h): the tile's number is written
// in digits; each digit counts groups of tiles, which are folded as balanced trees, one for each bit of the digit; then
// the folds of the digits are folded.
#pragma once

#include "scan/cuda/block.cuh"

namespace jaxgpuops::scan {

// Used by one thread that gets the sums of all tiles of a column, one after the other.
template <class Policy>
class Counter {
 public:
  using State = typename Policy::State;

  __device__ explicit Counter(const Parameters& p) : p(p) {}

  // Adds tile t, after those before it.
  __device__ void add(int t, State sum) {
    int bit = 0;
    for (; t >> bit & 1; ++bit) sum = Policy::combine(trees[bit], sum, p.options);
    trees[bit] = sum;
  }

  // The fold of all sums so far, of which there are `count`.
  __device__ State fold(int count) const { return fold(count, Policy::identity(p.options)); }

  // The same, followed by `all`, which the digits of lower levels count.
  __device__ State fold(int count, State all) const {
    for (int level = 0; count >> (kGroupBits * level); ++level) {
      State digit = Policy::identity(p.options);
      for (int b = kGroupBits * level; b < kGroupBits * (level + 1); ++b)
        if (count >> b & 1) digit = Policy::combine(trees[b], digit, p.options);
      all = Policy::combine(digit, all, p.options);
    }
    return all;
  }

 private:
  const Parameters& p;
  State trees[kGroupBits * kMaxLevels];  // fold of 2^bit tiles
};

// The same fold of at(0), at(1), .. of `count` tiles, at most fifteen.
template <class Policy, class At>
__device__ __forceinline__ typename Policy::State fold_of_few(const Options& options, int count, At at) {
  const auto two = [&](int i) { return Policy::combine(at(i), at(i + 1), options); };
  const auto four = [&](int i) { return Policy::combine(two(i), two(i + 2), options); };
  typename Policy::State all = Policy::identity(options);
  if (count & 1) all = Policy::combine(at(count - 1), all, options);
  if (count & 2) all = Policy::combine(two(count & 12), all, options);
  if (count & 4) all = Policy::combine(four(count & 8), all, options);
  if (count & 8) all = Policy::combine(Policy::combine(four(0), four(4), options), all, options);
  return Policy::combine(all, Policy::identity(options), options);
}

// An inclusive scan over the lanes: each lane gets the fold of the sums of all lanes up to itself. Lane i has the sum
// of tile i of a group; only the first `count` lanes have one.
template <class Policy, class State>
__device__ __forceinline__ State scan_group(const Options& options, State sum, int count = kGroup) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int bit = 0; bit < kGroupBits; ++bit) {
    if (1 << bit >= count) break;
    const State left = shuffle_from(sum, (lane >> bit << bit) - 1);
    if (lane >> bit & 1) sum = Policy::combine(left, sum, options);
  }
  return sum;
}

// Used by a warp that gets sums one after the other: those of tiles (level 0), or of groups of tiles (higher levels).
template <class Policy>
class Digits {
 public:
  using State = typename Policy::State;

  __device__ explicit Digits(const Parameters& p) : p(p) {}

  // Takes the next sum of a level; all lanes pass the same.
  __device__ void add(int level, int index, State sum) {
    for (;; ++level) {
      if (threadIdx.x % 32 == index % kGroup) sums[level] = sum;
      if (index % kGroup != kGroup - 1 || level == kMaxLevels - 1) return;
      sum = shuffle_from(scan_group<Policy>(p.options, sums[level]), kGroup - 1);
      index /= kGroup;
    }
  }

  // The fold of what comes before tile t. `state` is the part of it that the digits below `level` count.
  __device__ State before(int level, int t, State state) const {
    for (; t >> (kGroupBits * level); ++level) {
      const int digit = (t >> (kGroupBits * level)) % kGroup;
      if (digit != 0)
        state = Policy::combine(shuffle_from(scan_group<Policy>(p.options, sums[level]), digit - 1), state, p.options);
    }
    return state;
  }

 private:
  const Parameters& p;
  State sums[kMaxLevels];  // lane i: sum i of the level's present group
};

}  // namespace jaxgpuops::scan
