// The radix sort of the segments of a row, or of a part of it, in a block: first by the digits of keys, from the lowest
// up, then by one or two digits of the numbers of segments. So it does not matter how long segments are. Numbers are
// counted from bits at the places where segments begin. A pass in which all elements have the same digit is skipped.
#pragma once

#include "sort/cuda/digits.cuh"

namespace jaxgpuops::sort {
namespace {

// The numbers of segments, by bits at the places where they begin.
struct Numbers {
  const uint32_t *begins, *before;  // words of 32 places; how many bits words before have

  __device__ __forceinline__ uint32_t of(uint32_t place) const {
    return before[place / 32] + __popc(begins[place / 32] & ((2u << place % 32) - 1));
  }
};

// What the sort has in shared memory.
template <class Key, int kThreads, int kItems>
struct DigitsShared {
  uint32_t counts[kThreads / 32 * kDigits];
  Key keys[kThreads * kItems];
  uint16_t indices[kThreads * kItems];
  uint32_t warps[kDigits / 32];
  Key any, all;  // bits that any key has, and that all have
  Digits digits;
};

// Finds how many bits of words are before each of them. All threads of the block call it.
template <int kThreads, int kWords>
__device__ __forceinline__ void count_begins(const uint32_t* begins, uint32_t* before, uint32_t* warps) {
  static_assert(kThreads >= kDigits && kWords <= 2 * kDigits);
  const uint32_t pair = 2 * threadIdx.x;
  const uint32_t own = pair < kWords ? __popc(begins[pair]) : 0,
                 next = pair + 1 < kWords ? __popc(begins[pair + 1]) : 0;
  const uint32_t sum = sum_before(own + next, warps);
  if (pair < kWords) before[pair] = sum;
  if (pair + 1 < kWords) before[pair + 1] = sum + own;
  __syncthreads();
}

// Folds a key of each thread into one in shared memory.
template <class Key, class Atomic, class Fold>
__device__ __forceinline__ void fold_words(Key* to, Key key, Atomic atomic, Fold fold) {
  key = fold_lanes(key, fold);
  if (threadIdx.x % 32 != 0) return;
  auto* const words = reinterpret_cast<uint32_t*>(to);
  atomic(words, static_cast<uint32_t>(key));
  if constexpr (sizeof(Key) == 8) atomic(words + 1, static_cast<uint32_t>(key >> 32));
}

// Returns the bits in which keys differ. `any` and `all`: bits that any and all of the thread's keys have; shared.any
// is 0 and shared.all all ones. All threads of the block call it.
template <int kThreads, int kItems, class Key>
__device__ __forceinline__ Key differing_bits(DigitsShared<Key, kThreads, kItems>& shared, Key any, Key all) {
  const auto with_any = [](uint32_t* to, uint32_t word) { atomicOr(to, word); };
  const auto with_all = [](uint32_t* to, uint32_t word) { atomicAnd(to, word); };
  fold_words(&shared.any, any, with_any, [](Key x, Key y) { return x | y; });
  fold_words(&shared.all, all, with_all, [](Key x, Key y) { return x & y; });
  __syncthreads();
  return shared.any ^ shared.all;
}

// Sorts `length` keys, which are in shared memory, and writes their indices there. Only the upper `bytes` of a key may
// have bits, and only those of `differ` do not agree. Returns false if the elements stay where they are; then there are
// no indices.
template <int kThreads, int kItems, class Key>
__device__ __forceinline__ bool sort_by_digits(DigitsShared<Key, kThreads, kItems>& shared, uint32_t length, int bytes,
                                               Key differ, const Numbers& numbers) {
  constexpr Key kLast = static_cast<Key>(~Key{0});  // for slots past the end, in every pass
  constexpr int kBytes = sizeof(Key);
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const bool live = first - threadIdx.x % 32 < length;
  const auto is_there = [&](int i) { return first + i * 32 < length; };
  Key keys[kItems];
  const auto read = [&] {
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = is_there(i) ? (shared.keys + first)[i * 32] : kLast;
  };
  read();
  const uint32_t last = numbers.of(length - 1);

  bool moved = false;
#pragma unroll 1
  for (int pass = kBytes - bytes; pass < kBytes + 2; ++pass) {
    const int shift = pass % kBytes * kDigitBits;
    if (pass == kBytes) {
      if (!moved) break;  // all keys are equal, so that segments are in order
      __syncthreads();    // all threads have read the keys
#pragma unroll 1
      for (uint32_t place = threadIdx.x; place < length; place += kThreads)
        shared.keys[place] = static_cast<Key>(numbers.of(shared.indices[place]));
      __syncthreads();
      read();
    }
    if ((pass < kBytes ? differ >> shift & (kDigits - 1) : last >> shift) == 0) continue;
    __syncthreads();
    clear_counts(shared.counts);
    Indices<kItems> indices;
    indices.read(shared.indices, first, moved);
    __syncthreads();
    // place_by_digit() has digits read anew, but these are bytes of keys.
    place_by_digit<kThreads, kItems>(
        shared.counts, shared.warps, const_cast<volatile Digits&>(shared.digits), 0, live,
        [&](int i, const Digits&) { return static_cast<uint32_t>(keys[i] >> shift) & (kDigits - 1); }, [](uint32_t) {},
        [&](int i, uint32_t place) {
          shared.keys[place] = keys[i];
          shared.indices[place] = indices[i];
        });
    moved = true;
    __syncthreads();
    read();
  }
  return moved;
}

}  // namespace
}  // namespace jaxgpuops::sort
