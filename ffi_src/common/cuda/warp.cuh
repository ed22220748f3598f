// Operations of all lanes of a warp: shuffles, reductions, and sums over lower lanes. All lanes of the warp must call
// these functions together; a warp may be divided into parts of kLanes neighbouring lanes, a power of two.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/element.h"

namespace jaxgpuops {

constexpr unsigned kEveryLane = 0xffffffffu;

// ---- Shuffles of numbers and of whole structs -----------------------------------------------------------------------

template <class T>
struct WordsOf {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t word[sizeof(T) / 4];
};

template <class T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
  auto words = bits_as<WordsOf<T>>(value);
#pragma unroll
  for (auto& word : words.word) word = __shfl_sync(kEveryLane, word, lane);
  return bits_as<T>(words);
}

template <class T>
__device__ __forceinline__ T shuffle_up(T value, int lanes) {
  auto words = bits_as<WordsOf<T>>(value);
#pragma unroll
  for (auto& word : words.word) word = __shfl_up_sync(kEveryLane, word, lanes);
  return bits_as<T>(words);
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_xor_sync(kEveryLane, static_cast<uint32_t>(value), mask));
  } else if constexpr (std::is_arithmetic_v<T>) {
    return __shfl_xor_sync(kEveryLane, value, mask);
  } else {
    auto words = bits_as<WordsOf<T>>(value);
#pragma unroll
    for (auto& word : words.word) word = __shfl_xor_sync(kEveryLane, word, mask);
    return bits_as<T>(words);
  }
}

// ---- Reductions: each lane gets the result --------------------------------------------------------------------------

template <int kLanes = 32, class T, class Fold>
__device__ __forceinline__ T fold_lanes(T value, Fold fold) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes; lanes /= 2) value = fold(value, shuffle_xor(value, lanes));
  return value;
}

template <int kLanes = 32, class T>
__device__ __forceinline__ T sum_of_lanes(T value) {
  return fold_lanes<kLanes>(value, [](T a, T b) { return a + b; });
}

template <int kLanes = 32, class T>
__device__ __forceinline__ T largest_of_lanes(T value) {
  return fold_lanes<kLanes>(value, [](T a, T b) { return a > b ? a : b; });
}

// The sum over a whole warp. From compute capability 8.0 on, one instruction computes it.
__device__ __forceinline__ uint32_t sum_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kEveryLane, value);
#else
  return sum_of_lanes(value);
#endif
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kEveryLane, value);
#else
  return largest_of_lanes(value);
#endif
}

__device__ __forceinline__ uint64_t largest_of_warp(uint64_t value) {
#if __CUDA_ARCH__ >= 800
  const auto high = static_cast<uint32_t>(value >> 32), most = __reduce_max_sync(kEveryLane, high);
  const uint32_t low = high == most ? static_cast<uint32_t>(value) : 0;
  return static_cast<uint64_t>(most) << 32 | __reduce_max_sync(kEveryLane, low);
#else
  return largest_of_lanes(value);
#endif
}

__device__ __forceinline__ unsigned __int128 largest_of_warp(unsigned __int128 value) {
  const auto high = static_cast<uint64_t>(value >> 64), most = largest_of_warp(high);
  const uint64_t low = high == most ? static_cast<uint64_t>(value) : 0;
  return static_cast<unsigned __int128>(most) << 64 | largest_of_warp(low);
}

// The largest number of the warp; no lane may have NaN. Numbers are compared as integers in the same order, which takes
// one instruction; floats would take five shuffles, one after the other.
__device__ __forceinline__ float largest_of_warp(float number) {
#if __CUDA_ARCH__ >= 800
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(kEveryLane, ordered(__float_as_int(number)))));
#else
  return fold_lanes(number, [](float a, float b) { return fmaxf(a, b); });
#endif
}

// ---- Sums over lower lanes and threads ------------------------------------------------------------------------------

// The sum of the values of the lanes up to this one, within each part of the warp.
template <int kLanes = 32, class T>
__device__ __forceinline__ T sum_up_to_lane(T value) {
  if constexpr (sizeof(T) == 4) {  // the shuffle's predicate says whether that lane exists
    auto sum = static_cast<uint32_t>(value);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2)
      asm volatile(
          "{\n.reg .u32 up;\n.reg .pred p;\nshfl.sync.up.b32 up|p, %0, %1, %2, 0xffffffff;\n@p add.u32 %0, %0, up;\n}"
          : "+r"(sum)
          : "r"(lanes), "n"((32 - kLanes) << 8));
    return static_cast<T>(sum);
  } else {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      const T other = shuffle_up(value, lanes);
      if (lane >= lanes) value += other;
    }
    return value;
  }
}

// The sum of the values of all lower threads of a block of kThreads. All threads must be past their last use of `sums`,
// which has room for one value of each warp and may be used again after the next barrier.
template <int kThreads>
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* sums) {
  constexpr uint32_t kWarps = kThreads / 32;
  const uint32_t up_to = sum_up_to_lane(value), warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 31) sums[warp] = up_to;
  __syncthreads();
  const uint32_t before = sum_up_to_lane(sums[threadIdx.x % kWarps]);
  return up_to - value + (warp ? shuffle_from(before, warp - 1) : 0);
}

// The same for a block of `warps` warps; `total` gets the sum over all threads, and `sums` may be used again at once.
template <class T>
__device__ __forceinline__ T sum_before(T value, T* sums, int warps, T& total) {
  const int warp = threadIdx.x / 32;
  const T up_to = sum_up_to_lane(value);
  if (threadIdx.x % 32 == 31) sums[warp] = up_to;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    before += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  __syncthreads();
  return before + up_to - value;
}

}  // namespace jaxgpuops
