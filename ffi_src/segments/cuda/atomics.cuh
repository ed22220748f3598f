// Atomics that fold integers, in global or shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "segments/cuda/monoid.cuh"

namespace jaxgpuops::segments {

// Adds the value to a word, or replaces the word by the value if that is larger. Most values are not larger, and a load
// tells that sooner than an atomic. If the load reads an old word, the atomic is only needless, never wrong.
template <bool kLargest>
__device__ __forceinline__ void atomic_fold(uint32_t* to, uint32_t value) {
  if constexpr (kLargest) {
    if (*to < value) atomicMax(to, value);
  } else {
    atomicAdd(to, value);
  }
}
template <bool kLargest>
__device__ __forceinline__ void atomic_fold(uint64_t* to, uint64_t value) {
  auto* const word = reinterpret_cast<unsigned long long*>(to);
  if constexpr (kLargest) {
    if (*to < value) atomicMax(word, static_cast<unsigned long long>(value));
  } else {
    atomicAdd(word, static_cast<unsigned long long>(value));
  }
}

// Replaces an integer or float in memory by the larger of both, or the smaller. Floats that are not negative compare
// like their bits as signed integers. Negative floats compare like their bits as unsigned integers, in reverse.
template <class Word>
__device__ __forceinline__ void atomic_extreme(Word* to, Word bits, const Keys& keys) {
  using Unsigned = std::conditional_t<sizeof(Word) == 8, unsigned long long, unsigned>;
  using Signed = std::make_signed_t<Unsigned>;
  constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
  const bool negative = bits & kSign, is_float = keys.infinity != 0;
  const bool is_signed = is_float ? !negative : (keys.smallest ? ~keys.flip : keys.flip) & kSign;
  const bool largest = is_float ? negative == keys.smallest : !keys.smallest;
  auto* const as_unsigned = reinterpret_cast<Unsigned*>(to);
  auto* const as_signed = reinterpret_cast<Signed*>(to);
  if (is_signed) {
    largest ? atomicMax(as_signed, static_cast<Signed>(bits)) : atomicMin(as_signed, static_cast<Signed>(bits));
  } else {
    largest ? atomicMax(as_unsigned, static_cast<Unsigned>(bits)) : atomicMin(as_unsigned, static_cast<Unsigned>(bits));
  }
}

// What atomic_extreme() folds into a result, for a key.
template <class Monoid>
__device__ __forceinline__ typename Monoid::Bits extreme_operand(typename Monoid::Acc key, const Keys& keys) {
  // The smallest of floats is NaN if its bits are not below any others.
  const bool is_nan = keys.infinity && key == Monoid::kAll;
  return is_nan && keys.smallest ? key : Monoid::store(key, keys);
}

// Adds the value to a sum of 64 bits of which the halves are in two words. Shared memory has no such atomic.
__device__ __forceinline__ void add_halves(uint32_t* low, uint32_t* high, uint64_t value) {
  const auto part = static_cast<uint32_t>(value);
  const uint32_t sum = part ? atomicAdd(low, part) + part : 0;
  const uint32_t up = static_cast<uint32_t>(value >> 32) + (sum < part);
  if (up) atomicAdd(high, up);
}

}  // namespace jaxgpuops::segments
