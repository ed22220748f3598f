// exp and log, written for the compiler to vectorise.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu/simd.h"

namespace jaxgpuops {

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  using Bits = int32_t;
  static constexpr int kMantissaBits = 23, kBias = 127, kExpTerms = 7, kLogTerms = 5;
  static constexpr float kLeastExp = -87.33654f;  // below this, e^x is a denormal
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
};
template <>
struct FloatFormat<double> {
  using Bits = int64_t;
  static constexpr int kMantissaBits = 52, kBias = 1023, kExpTerms = 13, kLogTerms = 11;
  static constexpr double kLeastExp = -708.3964185322641;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
};

template <class To, class From>
JAXGPUOPS_INLINE To bits_as(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Adding this number rounds a float to an integer, whose bits are then the low bits of the sum.
template <class T>
constexpr T kRounder = static_cast<T>(3 * (int64_t{1} << (FloatFormat<T>::kMantissaBits - 1)));

struct InverseFactorials {
  constexpr InverseFactorials() {
    for (int i = 1; i < 14; ++i) at[i] = at[i - 1] / i;
  }
  double at[14] = {1};
};
constexpr InverseFactorials kInverseFactorials;

// e^x for x <= 0. Results that would be denormal are 0.
template <class T>
JAXGPUOPS_INLINE T exp_negative(T x) {
  using F = FloatFormat<T>;
  using Bits = std::make_unsigned_t<typename F::Bits>;
  const T shifted = x * static_cast<T>(1.44269504088896340736) + kRounder<T>;
  const T n = shifted - kRounder<T>;
  const T r = (x - n * F::kLn2High) - n * F::kLn2Low;
  T sum = static_cast<T>(kInverseFactorials.at[F::kExpTerms]);
  for (int i = F::kExpTerms - 1; i >= 0; --i) sum = sum * r + static_cast<T>(kInverseFactorials.at[i]);
  // The shift keeps the low bits of `shifted` only, which are n; so this is 2^n.
  const T power = bits_as<T>(static_cast<Bits>((bits_as<Bits>(shifted) + F::kBias) << F::kMantissaBits));
  return x < F::kLeastExp ? T(0) : sum * power;
}

// log(x) for x >= 1 that is not infinite or NaN.
template <class T>
JAXGPUOPS_INLINE T log_above_one(T x) {
  using F = FloatFormat<T>;
  using Bits = typename F::Bits;
  constexpr Bits kOne = static_cast<Bits>(F::kBias) << F::kMantissaBits;
  constexpr Bits kMantissa = (Bits{1} << F::kMantissaBits) - 1;
  constexpr Bits kSqrt2 = static_cast<Bits>(0.41421356 * (Bits{1} << F::kMantissaBits));
  // x = 2^e m, where m is in [sqrt(1/2), sqrt(2)).
  const Bits bits = bits_as<Bits>(x), up = (bits & kMantissa) > kSqrt2 ? 1 : 0;
  const Bits exponent = ((bits - kOne) >> F::kMantissaBits) + up;
  const T m = bits_as<T>(bits - (exponent << F::kMantissaBits));
  const T e = bits_as<T>(bits_as<Bits>(kRounder<T>) + exponent) - kRounder<T>;
  const T f = m - 1, s = f / (2 + f), z = s * s;
  T sum = T(2) / (2 * F::kLogTerms + 1);
  for (int i = F::kLogTerms - 1; i >= 1; --i) sum = sum * z + T(2) / (2 * i + 1);
  const T half_square = T(0.5) * f * f;
  return e * F::kLn2High + (f - (half_square - (s * (half_square + z * sum) + e * F::kLn2Low)));
}

}  // namespace jaxgpuops
