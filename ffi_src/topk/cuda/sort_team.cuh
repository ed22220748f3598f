// A team of threads sorts words in descending order. Each thread has kEach words. A network sorts the words of each
// thread; then bitonic merges follow, over lanes by shuffles and over warps through shared memory. In the end, thread t
// has the words from place t * kEach on.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "topk/cuda/candidates.cuh"

namespace jaxgpuops::topk {
namespace {

// Comparators of the elements of one thread. Their places are compile-time constants.
template <int kEach>
struct Comparators {
  int first[kEach * 8] = {}, second[kEach * 8] = {};
  size_t size = 0;

  constexpr void add(int a, int b) { first[size] = a, second[size++] = b; }
};

template <int kEach>
struct SortingNetwork {  // Batcher's odd-even merge sort
  static constexpr Comparators<kEach> make() {
    Comparators<kEach> network;
    for (int p = 1; p < kEach; p *= 2)
      for (int k = p; k >= 1; k /= 2)
        for (int j = k % p; j + k < kEach; j += 2 * k)
          for (int i = j; i < j + k && i + k < kEach; ++i)
            if (i / (2 * p) == (i + k) / (2 * p)) network.add(i, i + k);
    return network;
  }
  static constexpr Comparators<kEach> kAll = make();
};

template <int kEach>
struct MergingNetwork {  // for a sequence that rises and then falls, or the reverse
  static constexpr Comparators<kEach> make() {
    Comparators<kEach> network;
    for (int stride = kEach / 2; stride; stride /= 2)
      for (int i = 0; i < kEach; ++i)
        if (!(i & stride)) network.add(i, i + stride);
    return network;
  }
  static constexpr Comparators<kEach> kAll = make();
};

// As __syncthreads() and __syncthreads_or(), for the first `threads` threads of the block, which are whole warps. The
// others do not take part.
__device__ __forceinline__ void sync_first(uint32_t threads) {
  asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory");
}
__device__ __forceinline__ bool any_of_first(uint32_t threads, bool b) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.red.or.pred q, 1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(static_cast<uint32_t>(b)), "r"(threads)
               : "memory");
  return any;
}

// What words are compared as: numbers of 32 bits, or pairs of 16 bits, so that the two halves of words are sorted each
// by itself.
struct Wholes {
  __device__ static __forceinline__ uint32_t most(uint32_t a, uint32_t b) { return max(a, b); }
  __device__ static __forceinline__ uint32_t least(uint32_t a, uint32_t b) { return min(a, b); }
};
struct Halves {
  __device__ static __forceinline__ uint32_t most(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
  __device__ static __forceinline__ uint32_t least(uint32_t a, uint32_t b) { return __vminu2(a, b); }
};

// A team, which is a part of a warp or a block. All threads of the warp (or of the block) call its functions together.
// If kFirst, a team of kBlock is the first threads of a block only.
template <int kEach, bool kBlock, bool kFirst = false, class Words = Wholes>
struct SortTeam {
  uint32_t size, t;  // threads of the team, and the number of this one
  uint4* buffer;     // used by a block: kEach words for each thread

  __device__ __forceinline__ void sync() const {
    if constexpr (!kBlock) {
      __syncwarp();
    } else if constexpr (kFirst) {
      sync_first(size);
    } else {
      __syncthreads();
    }
  }
  // Whether a condition holds for any thread of the team of kBlock, or of the warp.
  __device__ __forceinline__ bool any(bool b) const {
    if constexpr (!kBlock) return __any_sync(kEveryLane, b);
    if constexpr (kFirst) return any_of_first(size, b);
    return __syncthreads_or(b);
  }
  // The same for a condition that all threads of a team have in common.
  __device__ __forceinline__ bool agree(bool b) const { return kBlock ? b : __any_sync(kEveryLane, b); }
  // The sum of the values of the team. `turn` alternates from call to call: a block needs one barrier then.
  __device__ __forceinline__ uint32_t sum(uint32_t value, uint32_t turn) const {
    if constexpr (!kBlock) {
      if (size == 32) return sum_of_warp(value);
      for (uint32_t lanes = size / 2; lanes; lanes /= 2) value += __shfl_xor_sync(kEveryLane, value, lanes);
      return value;
    } else {
      uint32_t* const warps = reinterpret_cast<uint32_t*>(buffer) + 64 + turn % 2 * 32;
      value = sum_of_warp(value);
      if (t % 32 == 0) warps[t / 32] = value;
      sync();
      return sum_of_warp(t % 32 < size / 32 ? warps[t % 32] : 0);
    }
  }
  template <class T, class Combine>
  __device__ __forceinline__ T reduce(T value, Combine combine) const {
    for (uint32_t lanes = kBlock ? 16 : size / 2; lanes; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
    if constexpr (!kBlock) return value;
    T* const warps = reinterpret_cast<T*>(buffer);
    if (t % 32 == 0) warps[t / 32] = value;
    sync();
    value = warps[0];
    for (uint32_t w = 1; w < size / 32; ++w) value = combine(value, warps[w]);
    sync();
    return value;
  }
  // The sum of the values of the threads before this one.
  __device__ __forceinline__ uint32_t sum_before(uint32_t value) const {
    uint32_t inclusive = value;
#pragma unroll 1
    for (uint32_t lanes = 1; lanes < (kBlock ? 32 : size); lanes *= 2) {
      const uint32_t up = __shfl_up_sync(kEveryLane, inclusive, lanes);
      if ((t & 31) >= lanes) inclusive += up;
    }
    if constexpr (!kBlock) return inclusive - value;
    uint32_t* const warps = reinterpret_cast<uint32_t*>(buffer);
    if (t % 32 == 31) warps[t / 32] = inclusive;
    sync();
    for (uint32_t w = 0; w < t / 32; ++w) inclusive += warps[w];
    sync();
    return inclusive - value;
  }
  // The value of the next thread of the team, or of the one before.
  template <class T>
  __device__ __forceinline__ T from(int offset, T value) const {
    if constexpr (!kBlock) return __shfl_sync(kEveryLane, value, (threadIdx.x & 31) + offset);
    T* const all = reinterpret_cast<T*>(buffer);
    all[t] = value;
    sync();
    value = all[(t + offset) & (size - 1)];
    sync();
    return value;
  }

  __device__ static __forceinline__ void order(uint32_t& a, uint32_t& b) {
    const uint32_t most = Words::most(a, b);
    b = Words::least(a, b);
    a = most;
  }
  template <class Network, size_t... kI>
  __device__ static __forceinline__ void run(uint32_t (&v)[kEach], std::index_sequence<kI...>) {
    (order(v[std::integral_constant<int, Network::kAll.first[kI]>::value],
           v[std::integral_constant<int, Network::kAll.second[kI]>::value]),
     ...);
  }
  template <class Network>
  __device__ static __forceinline__ void run(uint32_t (&v)[kEach]) {
    run<Network>(v, std::make_index_sequence<Network::kAll.size>());
  }
  // Compares its elements, one by one, with those of the thread whose number differs by `lanes`; if kBackwards, with
  // that thread's elements in reverse order.
  template <bool kBackwards>
  __device__ __forceinline__ void exchange(uint32_t (&v)[kEach], uint32_t lanes, bool first) const {
    const auto choose = [first](uint32_t a, uint32_t b) { return first ? Words::most(a, b) : Words::least(a, b); };
    if (!kBlock || lanes < 32) {
#pragma unroll
      for (int i = 0; i < kEach / 2; ++i) {  // pairs, so that few registers hold elements of the other thread
        const int j = kEach - 1 - i;
        const uint32_t a = __shfl_xor_sync(kEveryLane, v[kBackwards ? j : i], lanes);
        const uint32_t b = __shfl_xor_sync(kEveryLane, v[kBackwards ? i : j], lanes);
        v[i] = choose(v[i], a), v[j] = choose(v[j], b);
      }
      return;
    }
    uint32_t other[kEach];
    sync();
#pragma unroll
    for (int q = 0; q < kEach / 4; ++q)
      buffer[q * size + t] = make_uint4(v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
    sync();
#pragma unroll
    for (int q = 0; q < kEach / 4; ++q) {
      const uint4 four = buffer[q * size + (t ^ lanes)];
      const int i = kBackwards ? kEach - 1 - 4 * q : 4 * q, step = kBackwards ? -1 : 1;
      other[i] = four.x, other[i + step] = four.y, other[i + 2 * step] = four.z, other[i + 3 * step] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = choose(v[i], other[i]);
  }
  __device__ __forceinline__ void sort(uint32_t (&v)[kEach]) const {
    run<SortingNetwork<kEach>>(v);
#pragma unroll 1
    for (uint32_t merged = 2; merged <= size; merged *= 2) {
      exchange<true>(v, merged - 1, !(t & (merged / 2)));
#pragma unroll 1
      for (uint32_t lanes = merged / 4; lanes; lanes /= 2) exchange<false>(v, lanes, !(t & lanes));
      run<MergingNetwork<kEach>>(v);
    }
    if constexpr (kBlock) sync();  // all have read the last exchange, so the buffer is free
  }
};

// Sorts elements that are nearly in descending order of their keys, by up to kRounds rounds in which neighbours change
// places. Equal keys stay as they are. Returns whether all elements are in order then.
template <int kRounds, class Key, int kEach, class Team>
__device__ __forceinline__ bool mend(const Team& team, Key (&key)[kEach], uint32_t (&index)[kEach]) {
  const auto exchange = [&](int i, int j) {
    const bool swap = key[i] < key[j];
    const Key k = key[i];
    const uint32_t at = index[i];
    key[i] = swap ? key[j] : key[i], index[i] = swap ? index[j] : index[i];
    key[j] = swap ? k : key[j], index[j] = swap ? at : index[j];
  };
#pragma unroll 1
  for (int round = 0;; ++round) {
    bool wrong = key[kEach - 1] < team.from(1, key[0]) && team.t + 1 < team.size;
#pragma unroll
    for (int j = 0; j + 1 < kEach; ++j) wrong |= key[j] < key[j + 1];
    if (!team.any(wrong)) return true;
    if (round == kRounds) return false;
#pragma unroll
    for (int j = 0; j + 1 < kEach; j += 2) exchange(j, j + 1);
    const Key next = team.from(1, key[0]), before = team.from(-1, key[kEach - 1]);
    const uint32_t next_index = team.from(1, index[0]), index_before = team.from(-1, index[kEach - 1]);
#pragma unroll
    for (int j = 1; j + 1 < kEach; j += 2) exchange(j, j + 1);
    if (team.t + 1 < team.size && key[kEach - 1] < next) key[kEach - 1] = next, index[kEach - 1] = next_index;
    if (team.t > 0 && before < key[0]) key[0] = before, index[0] = index_before;
  }
}

}  // namespace
}  // namespace jaxgpuops::topk
