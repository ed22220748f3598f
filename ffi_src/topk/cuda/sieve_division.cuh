// How sieve.cu divides the survivors of a row into bins.
#pragma once

#include "topk/cuda/sieve_row.cuh"

namespace jaxgpuops::topk {
namespace {

// Sorts a sample, which may contain equal elements.
__device__ __noinline__ void sort_sample(C* sorted, const C* sample) {
  constexpr uint32_t kEach = kThreads / kSieveSample;  // threads that rank one element of the sample
  const uint32_t i = threadIdx.x / kEach;
  const C mine = sample[i];
  uint32_t above = 0;
#pragma unroll 4
  for (uint32_t j = threadIdx.x % kEach; j < kSieveSample; j += kEach)
    above += sample[j] > mine || (sample[j] == mine && j < i);
  above = sum_of_lanes<kEach>(above);
  if (threadIdx.x % kEach == 0) sorted[above] = mine;
}

// Maps a survivor to a bin. At first all bins have equal width. If keys take few values, composites lose the bits
// between a key and its index before that, and the last bits of keys if these are 0, so that indices divide equal keys.
// If a bin is crowded, splitters (a sorted sample of the survivors) divide the range, and the bins between two
// splitters have equal width.
struct Division {
  C high;
  int shift;
  const C* splitters;
  bool squeezes;                  // whether keys take few values
  int key_at, zeros, index_bits;  // where keys begin in composites; their last bits that are 0; the bits of an index

  __device__ __forceinline__ C squeezed(C c) const {
    return c >> (key_at + zeros) << index_bits | (c & ((C{1} << index_bits) - 1));
  }
  // Whether squeezed() loses bits of the key.
  __device__ __forceinline__ bool loses(C c) const { return squeezes && (c >> key_at & ((C{1} << zeros) - 1)) != 0; }

  __device__ __forceinline__ uint32_t of_equal_width(C c) const {
    return c >= high ? 0 : static_cast<uint32_t>((high - c) >> shift);
  }

  template <int kCount>
  __device__ __forceinline__ void bins(const C (&c)[kCount], uint32_t (&bin)[kCount]) const {
    if (!splitters && squeezes) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) bin[j] = of_equal_width(squeezed(c[j]));
      return;
    }
    if (!splitters) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) bin[j] = of_equal_width(c[j]);
      return;
    }
    constexpr uint32_t kEach = kSieveBins / kSieveSample;
    uint32_t above[kCount] = {};
#pragma unroll 1
    for (uint32_t step = kSieveSample / 2; step; step /= 2)
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (splitters[above[j] + step - 1] > c[j]) above[j] += step;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const C upper = above[j] ? splitters[above[j] - 1] : high, lower = splitters[above[j]];
      const int narrow = max(0, bit_length(upper - lower) - bit_length<C>(kEach - 1));
      bin[j] = above[j] * kEach + static_cast<uint32_t>(smaller((upper - c[j]) >> narrow, C{kEach - 1}));
    }
  }
};

}  // namespace
}  // namespace jaxgpuops::topk
