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

// Returns an integer of up to 128 bits times 2^place times the least denormal number of the float, rounded once.
// `more`: the exact value is a little larger; then the integer has at least 65 bits. The value is a multiple of that
// number.
template <class Float>
__device__ __forceinline__ typename Float::Bits rounded(unsigned __int128 integer, bool more, bool negative,
                                                        int place) {
  using Bits = typename Float::Bits;
  constexpr int kMantissa = Parts<Float>::kMantissa;
  constexpr uint64_t kInfinite = uint64_t{Parts<Float>::kMostExponent} << kMantissa;
  if (place < 0) integer >>= -place, place = 0;
  const auto high = static_cast<uint64_t>(integer >> 64), low = static_cast<uint64_t>(integer);
  const int size = high ? 128 - __clzll(high) : 64 - __clzll(low), drop = size - (kMantissa + 1);
  uint64_t mantissa;
  if (drop > 0) {
    const unsigned __int128 half = static_cast<unsigned __int128>(1) << (drop - 1), rest = integer & (2 * half - 1);
    mantissa = static_cast<uint64_t>(integer >> drop);
    if (rest > half || (rest == half && (more || mantissa & 1))) ++mantissa;
    place += drop;
  } else {  // exact; denormal numbers have place 0
    const int up = min(place, -drop);
    mantissa = low << up;
    place -= up;
  }
  const uint64_t bits = min((static_cast<uint64_t>(place) << kMantissa) + mantissa, kInfinite);
  return mantissa == 0 ? 0 : static_cast<Bits>(bits | uint64_t{negative} << (8 * sizeof(Bits) - 1));
}

// Returns a sum, rounded once. Accumulator b of `bins` is words[b * stride], times 2^(width * b). They are changed.
template <class Float>
__device__ __forceinline__ typename Float::Bits rounded_sum(uint64_t* words, int64_t stride, int bins, int width,
                                                            int place) {
  const auto word = [&](int b) { return static_cast<int64_t>(words[b * stride]); };
  if ((bins - 1) * width <= 62) {  // 126 bits have all
    __int128 sum = 0;
#pragma unroll 4
    for (int b = bins - 1; b >= 0; --b) sum = (sum << width) + word(b);
    return rounded<Float>(static_cast<unsigned __int128>(sum < 0 ? -sum : sum), false, sum < 0, place);
  }
  // Each accumulator carries into the next. Then all have `width` bits of the sum without its sign.
  int64_t carry = 0;
  for (int b = 0; b < bins; ++b) carry = (word(b) + carry) >> width;
  const bool negative = carry < 0;
  carry = 0;
  for (int b = 0; b < bins; ++b) {
    const int64_t value = (negative ? -word(b) : word(b)) + carry;
    carry = value >> width;
    words[b * stride] = value - (carry << width);
  }
  // The sum is `top` times 2^place, and more if `more`. `top` has all bits, or at least 65 of them.
  auto top = static_cast<unsigned __int128>(carry);
  bool more = false;
  place += bins * width;
  for (int b = bins - 1; b >= 0; --b) {
    if (top >> 64) {
      more |= words[b * stride] != 0;
    } else {
      top = top << width | words[b * stride];
      place -= width;
    }
  }
  return rounded<Float>(top, more, negative, place);
}

// The same in float32, of floats of up to 32 bits: 2^place is times the element's least denormal number.
template <class Element>
__device__ __forceinline__ float rounded_to_float(uint64_t* words, int64_t stride, int bins, int width, int place) {
  constexpr int kUp = least_exponent(Element::kDType) - least_exponent(DType::kFloat32);
  return bits_as<float>(rounded_sum<Float32>(words, stride, bins, width, place + kUp));
}

}  // namespace jaxgpuops::segments
