// The monoids of the scans, as the compiler vectorises them. An element is kept in kPlanes planes that are kPlane
// apart; load and store take it from there. combine(a, b) is a before b, in the direction of the scan.
#pragma once

#include <type_traits>

#include "scan/cpu_tile.h"

namespace jaxgpuops::scan::cpu {

// ---- exp and log ----------------------------------------------------------------------------------------------------

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  using Bits = int32_t;
  static constexpr int kMantissaBits = 23, kBias = 127, kExpTerms = 7, kLogTerms = 5;
  static constexpr float kLeastExp = -104;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
};
template <>
struct FloatFormat<double> {
  using Bits = int64_t;
  static constexpr int kMantissaBits = 52, kBias = 1023, kExpTerms = 13, kLogTerms = 11;
  static constexpr double kLeastExp = -746;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
};

template <class To, class From>
JAXGPUOPS_INLINE To bits_as(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Adding it rounds to an integer, which is then in the low bits.
template <class T>
constexpr T kRounder = static_cast<T>(3 * (int64_t{1} << (FloatFormat<T>::kMantissaBits - 1)));

struct InverseFactorials {
  constexpr InverseFactorials() {
    for (int i = 1; i < 14; ++i) at[i] = at[i - 1] / i;
  }
  double at[14] = {1};
};
constexpr InverseFactorials kInverseFactorials;

// e^x for x <= 0.
template <class T>
JAXGPUOPS_INLINE T exp_negative(T x) {
  using F = FloatFormat<T>;
  using Bits = typename F::Bits;
  x = x < F::kLeastExp ? F::kLeastExp : x;
  const T shifted = x * static_cast<T>(1.44269504088896340736) + kRounder<T>;
  const T n = shifted - kRounder<T>;
  const T r = (x - n * F::kLn2High) - n * F::kLn2Low;
  T sum = static_cast<T>(kInverseFactorials.at[F::kExpTerms]);
  for (int i = F::kExpTerms - 1; i >= 0; --i) sum = sum * r + static_cast<T>(kInverseFactorials.at[i]);
  // 2^n in two factors: it may be a denormal.
  const Bits exponent = bits_as<Bits>(shifted) - bits_as<Bits>(kRounder<T>), half = exponent >> 1;
  const auto power = [](Bits e) { return bits_as<T>(static_cast<Bits>((e + F::kBias) << F::kMantissaBits)); };
  return sum * power(half) * power(exponent - half);
}

// log x for a normal x >= 1.
template <class T>
JAXGPUOPS_INLINE T log_above_one(T x) {
  using F = FloatFormat<T>;
  using Bits = typename F::Bits;
  constexpr Bits kOne = static_cast<Bits>(F::kBias) << F::kMantissaBits;
  constexpr Bits kMantissa = (Bits{1} << F::kMantissaBits) - 1;
  constexpr Bits kSqrt2 = static_cast<Bits>(0.41421356 * (Bits{1} << F::kMantissaBits));
  // x = 2^e m, m in [sqrt 1/2, sqrt 2)
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

// e^-|a - b|, where equal infinities do not differ.
template <class T>
JAXGPUOPS_INLINE T exp_distance(T a, T b) {
  const T d = a - b, negative = d > 0 ? -d : d;
  return exp_negative(a == b ? T(0) : negative);
}

// ---- Monoids --------------------------------------------------------------------------------------------------------

template <class T>
struct Scalar {
  using C = T;
  struct Value {
    T v;
  };
  static constexpr int kPlanes = 1;
  static JAXGPUOPS_INLINE Value load(const T* e, int64_t i) { return {e[i]}; }
  static JAXGPUOPS_INLINE void store(T* e, int64_t i, Value value) { e[i] = value.v; }
};

template <class T>
struct Pair {
  using C = T;
  struct Value {
    T v, w;
  };
  static constexpr int kPlanes = 2;
  static JAXGPUOPS_INLINE Value load(const T* e, int64_t i) { return {e[i], e[i + kPlane]}; }
  static JAXGPUOPS_INLINE void store(T* e, int64_t i, Value value) {
    e[i] = value.v;
    e[i + kPlane] = value.w;
  }
};

template <class T>
struct Sum : Scalar<T> {
  using typename Scalar<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) { return {static_cast<T>(a.v + b.v)}; }
};

template <class T>
struct Product : Scalar<T> {
  using typename Scalar<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) {
    if constexpr (std::is_same_v<T, uint16_t>) return {static_cast<T>(1u * a.v * b.v)};  // int would overflow
    return {static_cast<T>(a.v * b.v)};
  }
};

template <class T>
struct Maximum : Scalar<T> {  // of unsigned keys
  using typename Scalar<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) { return {a.v > b.v ? a.v : b.v}; }
};

// w e^v, v the maximum of the logarithms: w >= 1.
template <class T>
struct LogSumExp : Pair<T> {
  using typename Pair<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) {
    const T scale = exp_distance(a.v, b.v);
    const bool first = a.v > b.v;
    const T v = first || a.v != a.v ? a.v : b.v;
    return {v, (first ? b.w : a.w) * scale + (first ? a.w : b.w)};
  }
};

// The map h -> v h + w. v == 0 forgets h, whatever it is.
template <class T>
struct Affine : Pair<T> {
  using typename Pair<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) {
    const bool forgets = b.v == T(0);
    return {forgets || a.v == T(0) ? T(0) : product(a.v, b.v), forgets ? b.w : static_cast<T>(product(b.v, a.w) + b.w)};
  }

 private:
  static JAXGPUOPS_INLINE T product(T a, T b) {
    if constexpr (std::is_same_v<T, uint16_t>) return static_cast<T>(1u * a * b);
    return static_cast<T>(a * b);
  }
};

// w e^-v or w e^v, where the v of later elements are larger or smaller: those of the tangent of cumlogsumexp.
template <class T>
struct ScaledSum : Pair<T> {
  using typename Pair<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) { return {b.v, a.w * exp_distance(a.v, b.v) + b.w}; }
};

// A further plane says which elements forget what was before them.
template <class M>
struct Segmented {
  using C = typename M::C;
  struct Value {
    typename M::Value value;
    C start;
  };
  static constexpr int kPlanes = M::kPlanes + 1;
  static JAXGPUOPS_INLINE Value load(const C* e, int64_t i) { return {M::load(e, i), e[i + M::kPlanes * kPlane]}; }
  static JAXGPUOPS_INLINE void store(C* e, int64_t i, Value value) {
    M::store(e, i, value.value);
    e[i + M::kPlanes * kPlane] = value.start;
  }
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) {
    const bool starts = b.start != C(0);
    Value result = {M::combine(a.value, b.value), starts ? b.start : a.start};
    if constexpr (M::kPlanes == 2) result.value.w = starts ? b.value.w : result.value.w;
    result.value.v = starts ? b.value.v : result.value.v;
    return result;
  }
};

}  // namespace jaxgpuops::scan::cpu
