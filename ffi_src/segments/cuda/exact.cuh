// Floats as integers times powers of two: sums of integers are the same in any order.
#pragma once

#include <type_traits>

#include "common/cuda/element.h"
#include "segments/plan.h"

namespace jaxgpuops::segments {

// Bits that a sum sets if an infinity or NaN is added to it.
constexpr uint32_t kInfinity = 1, kMinusInfinity = 2, kNan = 4;

// The value is integer * 2^place times the least denormal number, negated if `negative`. If `special` is not 0, the
// value is an infinity or NaN.
template <class Element>
struct Parts {
  using Bits = typename Element::Bits;
  using Integer = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  static constexpr int kMantissa = mantissa_bits(Element::kDType);
  static constexpr uint32_t kMostExponent = (1u << (8 * sizeof(Bits) - 1 - kMantissa)) - 1;

  Integer integer;
  uint32_t place, special;  // `special`: one of the bits above, or 0 for a finite number
  bool negative;

  __device__ explicit Parts(Bits bits) {
    const auto exponent = static_cast<uint32_t>(bits >> kMantissa) & kMostExponent;
    const Integer fraction = bits & ((Integer{1} << kMantissa) - 1);
    negative = bits >> (8 * sizeof(Bits) - 1);
    integer = fraction | (exponent ? Integer{1} << kMantissa : 0);
    place = exponent ? exponent - 1 : 0;
    special = exponent != kMostExponent ? 0 : fraction ? kNan : negative ? kMinusInfinity : kInfinity;
  }
};

// The result of a sum that an infinity or NaN was added to; `bits` has the special bits of all terms.
__device__ __forceinline__ float special_sum(uint32_t bits) {
  return bits == kInfinity ? INFINITY : bits == kMinusInfinity ? -INFINITY : NAN;
}

}  // namespace jaxgpuops::segments
