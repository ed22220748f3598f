// Rows that need not begin at a multiple of 16 bytes, and the vectors of memory that hold them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/between.cuh"

namespace jaxgpuops::scan {

// How many bytes an address is after a multiple of 16.
__device__ __forceinline__ unsigned misaligned(const void* address) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address)) & 15;
}

// The 16 aligned bytes that hold the element.
template <class T>
__device__ __forceinline__ auto* vector_of(T* element) {
  using Vector = std::conditional_t<std::is_const_v<T>, const Pack, Pack>;
  return reinterpret_cast<Vector*>(reinterpret_cast<uintptr_t>(element) - misaligned(element));
}

// Copies the first `count` (at most 16) bytes of 16 that are aligned, as copy_async() does, and clears the rest.
__device__ __forceinline__ void copy_async_part(void* to, const void* from, int count) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(count)
               : "memory");
#else
#pragma unroll 1
  for (int i = 0; i < 16; ++i)
    static_cast<unsigned char*>(to)[i] = i < count ? static_cast<const unsigned char*>(from)[i] : 0;
#endif
}

// Starts to copy what a row from `begin` to `end` has of 16 aligned bytes, and clears what comes after the row. (What
// came before it is copied.)
template <class T>
__device__ __forceinline__ void copy_row_part(Pack* to, const Pack* from, const T* begin, const T* end) {
  const auto bytes = [&](const T* element) {
    return reinterpret_cast<const unsigned char*>(element) - reinterpret_cast<const unsigned char*>(from);
  };
  const int64_t before = bytes(begin), left = bytes(end);
  copy_async_part(to, from, before < 16 ? static_cast<int>(max(int64_t{0}, min(left, int64_t{16}))) : 0);
}

// A warp's part of a tile in shared memory has kPacks for each lane, in the order of memory. Packs are permuted within the
// kPacks of a lane, so that lanes meet in no bank.
template <int kPacks>
constexpr __device__ int permuted(int pack) {
  return pack ^ (pack / 8 & (kPacks - 1));
}

// Moves a part down by `shift` bytes. `last` is the pack after the part. kFast takes more registers.
template <class Bits, int kPacks, bool kFast>
__device__ __forceinline__ void shift_part(Pack* part, const Pack* last, unsigned shift) {
  constexpr int kUnroll = kFast ? kPacks : 1;
  const int lane = threadIdx.x % 32;
  const auto own = [&](int j) { return part + permuted<kPacks>(lane * kPacks + j); };
  const Pack beyond = lane == 31 ? *last : part[permuted<kPacks>((lane + 1) * kPacks)];
  __syncwarp();
  Pack pack = *own(0);
#pragma unroll kUnroll
  for (int j = 0; j < kPacks; ++j) {
    const Pack next = j + 1 < kPacks ? *own(j + 1) : beyond;
    *own(j) = between<sizeof(Bits), 15>(pack, next, shift);
    pack = next;
  }
}

// Stores elements `begin` to `end` of a part, whose first element belongs to `to`: vectors that are aligned in memory,
// and the elements before and after them.
template <class Bits, int kPacks, bool kFast>
__device__ __forceinline__ void store_part(const Pack* part, Bits* to, int begin, int end) {
  constexpr int kInPack = 16 / sizeof(Bits), kUnroll = kFast ? kPacks : 1;
  const int lane = threadIdx.x % 32;
  const unsigned shift = misaligned(to);
  const int skew = static_cast<int>(shift / sizeof(Bits));  // vector k of memory begins at element k * kInPack - skew
#pragma unroll kUnroll
  for (int k = lane; k < 32 * kPacks; k += 32) {
    const int e = k * kInPack - skew;
    const Pack pack =
        between<sizeof(Bits), 16>(part[permuted<kPacks>(max(k - 1, 0))], part[permuted<kPacks>(k)], 16 - shift);
    if (e >= begin && e + kInPack <= end) vector_of(to)[k] = pack;
  }
  const int k = ((lane < 8 ? begin : end) + skew) / kInPack, e = k * kInPack - skew + lane % 8;
  if (lane < 16 && lane % 8 < kInPack && e >= begin && e < end)
    to[e] = reinterpret_cast<const Bits*>(part + permuted<kPacks>(e / kInPack))[e % kInPack];
}

}  // namespace jaxgpuops::scan
