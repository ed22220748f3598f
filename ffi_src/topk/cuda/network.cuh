// The best eight of a team of lanes, by sorting networks.
#pragma once

#include "topk/cuda/candidates.cuh"

namespace jaxgpuops::topk {

constexpr int kBest = 8;  // elements that a network sorts, and that it keeps

// Comparators. Minima and maxima run on the pipe that most other instructions of these kernels need. So some
// comparators compute the lesser value as the sum minus the maximum, by two multiply-adds, which run on another pipe.
struct Network {
  uint32_t one, minus_one;

  template <bool kBySum>
  __device__ __forceinline__ void exchange(uint32_t& a, uint32_t& b) const {
    const uint32_t most = max(a, b);
    if constexpr (kBySum) {
      uint32_t sum;
      asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(one), "r"(b));
      asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(b) : "r"(most), "r"(minus_one), "r"(sum));
    } else {
      b = min(a, b);
    }
    a = most;
  }
  // Sorts eight values downwards (19 comparators).
  __device__ __forceinline__ void sort(uint32_t (&v)[kBest]) const {
    // clang-format off
    step<0, 2, 1, 3, 4, 6, 5, 7>(v), step<0, 4, 1, 5, 2, 6, 3, 7>(v), step<0, 1, 2, 3, 4, 5, 6, 7>(v);
    step<2, 4, 3, 5>(v), step<1, 4, 3, 6>(v), step<1, 2, 3, 4, 5, 6>(v);
    // clang-format on
  }
  // Sorts v, which has the elementwise maxima of one sorted list of eight and of another one in reverse order. These
  // are the eight best of both lists.
  __device__ __forceinline__ void merge(uint32_t (&v)[kBest]) const {
    step<0, 4, 1, 5, 2, 6, 3, 7>(v), step<0, 2, 1, 3, 4, 6, 5, 7>(v), step<0, 1, 2, 3, 4, 5, 6, 7>(v);
  }

 private:
  template <int kA, int kB, int... kRest>
  __device__ __forceinline__ void step(uint32_t (&v)[kBest]) const {
    exchange<sizeof...(kRest) != 0>(v[kA], v[kB]);
    if constexpr (sizeof...(kRest) > 0) step<kRest...>(v);
  }
};

// Each lane has eight elements in order. Replaces them by the eight best of the team, in order.
template <int kTeam>
__device__ __forceinline__ void best_of_lanes(const Network& network, uint32_t (&best)[kBest]) {
#pragma unroll 1  // code that runs once mostly waits for its instructions to be fetched, so keep it short
  for (int lanes = 1; lanes < kTeam; lanes *= 2) {
    uint32_t other[kBest];
#pragma unroll
    for (int i = 0; i < kBest; ++i) other[i] = __shfl_xor_sync(kEveryLane, best[kBest - 1 - i], lanes);
#pragma unroll
    for (int i = 0; i < kBest; ++i) best[i] = max(best[i], other[i]);
    network.merge(best);
  }
}

// Selects from rows of up to kShortRow elements, of which a lane has eight: lane t of a team of eight lanes gets the
// t-th best element, for t < k <= 8. Elements with an index of `length` or more do not exist and have key 0.
//
// The network sorts keys whose low bits are replaced by the mirrored index. That order is exact, except for elements
// that differ only in those low bits. A team that finds such elements sorts again, by the distance of the keys from a
// bound of the k-th. If that distance has too many bits, the team searches for the next best element, k times.
constexpr uint32_t kShortRow = 64;

template <class IndexOf, class KeyAt>
__device__ __forceinline__ void best_of_short_row(const Network& network, const uint32_t (&keys)[kBest],
                                                  uint32_t length, uint32_t k, IndexOf index_of, KeyAt key_at,
                                                  uint32_t& key, uint32_t& index) {
  constexpr uint32_t kLow = kShortRow - 1;
  const uint32_t lane = threadIdx.x & 31, t = lane % kBest, first = lane - t;
  uint32_t words[kBest];
#pragma unroll
  for (int i = 0; i < kBest; ++i) words[i] = (keys[i] & ~kLow) | (kLow - index_of(i));
#pragma unroll 1
  for (bool again = false;; again = true) {
    uint32_t best[kBest], mine = 0;
#pragma unroll
    for (int i = 0; i < kBest; ++i) best[i] = words[i];
    network.sort(best);
    best_of_lanes<kBest>(network, best);
#pragma unroll
    for (int i = 0; i < kBest; ++i)
      if (t == i) mine = best[i];
    index = kLow - (mine & kLow);
    key = index < length ? key_at(index) : 0;
    if (again) return;

    // Checks that the chosen elements are in order, and that no other element is above the last of them.
    const uint32_t after = __shfl_down_sync(kEveryLane, key, 1), least = __shfl_sync(kEveryLane, key, first + k - 1);
    const uint32_t last = __shfl_sync(kEveryLane, mine, first + k - 1);
    const uint32_t next = __shfl_sync(kEveryLane, mine, first + min(k, kBest - 1));
    bool wrong = t + 1 < k && key < after;
    if (__any_sync(kEveryLane, (next | kLow) == (last | kLow))) {
#pragma unroll
      for (int i = 0; i < kBest; ++i) wrong |= words[i] < last && keys[i] > least;
    }
    if (!__any_sync(kEveryLane, wrong)) return;
    const uint32_t low = last & ~kLow, most = best[0] | kLow;
    if (__any_sync(kEveryLane, most - low > ~0u / kShortRow)) break;
#pragma unroll
    for (int i = 0; i < kBest; ++i) words[i] = keys[i] < low ? 0 : (keys[i] - low) * kShortRow + (kLow - index_of(i));
  }
  uint64_t highest = ~uint64_t{0};  // the bound of what is left: that may be the largest key of all, at index 0
#pragma unroll 1
  for (uint32_t round = 0; round < k; ++round) {
    uint64_t most = 0;
#pragma unroll
    for (int i = 0; i < kBest; ++i) {
      const uint64_t composite = static_cast<uint64_t>(keys[i]) << 32 | ~index_of(i);
      if (index_of(i) < length && composite <= highest) most = larger(most, composite);
    }
    most = largest_of_lanes<kBest>(most);
    highest = most - 1;
    if (t == round) key = static_cast<uint32_t>(most >> 32), index = ~static_cast<uint32_t>(most);
  }
}

}  // namespace jaxgpuops::topk
