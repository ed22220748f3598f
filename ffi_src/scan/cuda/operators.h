// The operators of cumulative operations: sums, products, extremes, and logarithms of sums of exponentials. Each is a
// monoid, with the maps from an element to a state of it and from a state to a result.
#pragma once

#include "common/cuda/element.h"
#include "scan/cuda/policy.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

template <class E>
struct Sum {
  using Element = E;
  static constexpr Op kOp = Op::kSum;
  using State = typename E::Acc;
  JAXGPUOPS_FN static State identity(const Options&) { return Constant<State>::of(0); }
  JAXGPUOPS_FN static State element(State x, const Options&) { return x; }
  JAXGPUOPS_FN static State combine(State l, State r) { return add(l, r); }
  JAXGPUOPS_FN static State result(State s, const Options&) { return s; }
};

template <class E>
struct Product {
  using Element = E;
  static constexpr Op kOp = Op::kProd;
  using State = typename E::Acc;
  JAXGPUOPS_FN static State identity(const Options&) { return Constant<State>::of(1); }
  JAXGPUOPS_FN static State element(State x, const Options&) { return x; }
  JAXGPUOPS_FN static State combine(State l, State r) { return multiply(l, r); }
  JAXGPUOPS_FN static State result(State s, const Options&) { return s; }
};

// The maximum. For min, floats are multiplied by -1 before and after, and the mask reverses the order of integers.
template <class E>
struct Extreme {
  using Element = E;
  static constexpr Op kOp = Op::kMax;
  using State = float;
  JAXGPUOPS_FN static float flip(float x, const Options& o) { return x * o.sign; }
  JAXGPUOPS_FN static State identity(const Options&) { return E::lowest(); }
  JAXGPUOPS_FN static State element(float x, const Options& o) { return flip(x, o); }
  JAXGPUOPS_FN static State combine(State l, State r) { return larger(l, r); }
  JAXGPUOPS_FN static float result(State s, const Options& o) { return flip(s, o); }
};

// float64 numbers are compared as integers of the same order, in which NaN is the largest.
template <>
struct Extreme<Float64> {
  using Element = Float64;
  static constexpr Op kOp = Op::kMax;
  using State = int64_t;
  static constexpr int64_t kMagnitude = 0x7fffffffffffffff;
  JAXGPUOPS_FN static uint64_t sign(const Options& o) { return o.smaller ? ~static_cast<uint64_t>(kMagnitude) : 0; }
  JAXGPUOPS_FN static State element(double x, const Options& o) {
    if (x != x) return kMagnitude;
    const auto bits = static_cast<int64_t>(bits_as<uint64_t>(x) ^ sign(o));
    return bits < 0 ? bits ^ kMagnitude : bits;
  }
  JAXGPUOPS_FN static State identity(const Options&) { return element(Float64::lowest(), {}); }
  JAXGPUOPS_FN static State combine(State l, State r) { return l > r ? l : r; }
  JAXGPUOPS_FN static double result(State s, const Options& o) {
    return bits_as<double>(static_cast<uint64_t>(s < 0 ? s ^ kMagnitude : s) ^ sign(o));
  }
};

template <class Unsigned>
struct Extreme<Integer<Unsigned>> {
  using Element = Integer<Unsigned>;
  static constexpr Op kOp = Op::kMax;
  using Acc = typename Element::Acc;
  using State = std::conditional_t<sizeof(Unsigned) == 8, int64_t, int32_t>;
  using Signed = std::make_signed_t<Unsigned>;
  JAXGPUOPS_FN static State identity(const Options&) { return std::numeric_limits<Signed>::min(); }
  JAXGPUOPS_FN static State element(Acc x, const Options& o) {
    return static_cast<Signed>(static_cast<Unsigned>(x ^ static_cast<Acc>(o.mask)));
  }
  JAXGPUOPS_FN static State combine(State l, State r) { return l > r ? l : r; }
  JAXGPUOPS_FN static Acc result(State s, const Options& o) { return static_cast<Acc>(s) ^ static_cast<Acc>(o.mask); }
};

template <>
struct Extreme<Boolean> {
  using Element = Boolean;
  static constexpr Op kOp = Op::kMax;
  using State = uint32_t;
  JAXGPUOPS_FN static State identity(const Options&) { return 0; }
  JAXGPUOPS_FN static State element(uint32_t x, const Options& o) { return (x != 0) != o.smaller; }
  JAXGPUOPS_FN static State combine(State l, State r) { return l | r; }
  JAXGPUOPS_FN static uint32_t result(State s, const Options& o) { return (s != 0) != o.smaller; }
};

// Exponentials and logarithms of float64 for LogSumExp. They are shorter than CUDA's, since denormal numbers count as 0
// in a sum that has an e^0, and inlined, so that those of several numbers overlap.

// e^x for x <= 0. Of a NaN, the result may be any number.
JAXGPUOPS_FN float exp_of_term(float x) { return exp_below_one(x); }
JAXGPUOPS_FN double exp_of_term(double x) {
#if defined(__CUDA_ARCH__)
  constexpr double kShift = 6755399441055744.0;  // a number plus this ends with the integer nearest to it
  const double shifted = fma(x, 1.4426950408889634, kShift), k = shifted - kShift;
  const double r = fma(k, -2.3190468138462996e-17, fma(k, -6.9314718055994529e-1, x));
  constexpr double kTerms[] = {2.5052097064908941e-8,
                               2.7626262793835868e-7,
                               2.7557414788000726e-6,
                               2.4801504602132958e-5,
                               1.9841269707468915e-4,
                               1.3888888932258898e-3,
                               8.3333333333978320e-3,
                               4.1666666666573905e-2,
                               1.6666666666666563e-1,
                               5.0000000000000056e-1,
                               1.0,
                               1.0};
  double e = kTerms[0];
#pragma unroll
  for (int i = 1; i < 12; ++i) e = fma(e, r, kTerms[i]);
  return x > -708.0 ? bits_as<double>(bits_as<uint64_t>(e) + (bits_as<uint64_t>(shifted) << 52)) : 0.0;
#else
  return exp(x);
#endif
}

// c + log(x) for a normal number x, or if c is -inf or NaN.
JAXGPUOPS_FN float log_of_terms(float x, float c) { return log_of_sum(x, c); }
JAXGPUOPS_FN double log_of_terms(double x, double c) {
#if defined(__CUDA_ARCH__)
  const uint64_t bits = bits_as<uint64_t>(x);
  const int exponent = static_cast<int>(static_cast<uint32_t>(bits >> 32) - 0x3fe6a09e) >> 20;
  const double m = bits_as<double>(bits - (static_cast<uint64_t>(exponent) << 52));  // between the roots of 1/2 and 2
  const double over = m + 1;
  double inverse;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(over));
#pragma unroll
  for (int i = 0; i < 2; ++i) inverse = fma(inverse, fma(-over, inverse, 1.0), inverse);
  const double u = 2 * ((m - 1) * inverse), square = u * u;  // log(m) is 2 atanh(u / 2)
  constexpr double kTerms[] = {2.0077354029605262e-7, 8.9757582720588234e-7, 4.0690104166666666e-6,
                               1.8780048076923078e-5, 8.8778409090909093e-5, 4.3402777777777775e-4,
                               2.2321428571428571e-3, 1.2500000000000000e-2, 8.3333333333333329e-2};
  double sum = kTerms[0];
#pragma unroll
  for (int i = 1; i < 9; ++i) sum = fma(sum, square, kTerms[i]);
  return c + fma(exponent, 6.9314718055994531e-1, fma(u * square, sum, u));
#else
  return c + log(x);
#endif
}

// The logarithm of a sum of exponentials, kept as the maximum m of the numbers and the sum of e^(x - m) over them.
template <class E>
struct LogSumExp {
  using Element = E;
  static constexpr Op kOp = Op::kLogSumExp;
  using Real = typename E::Acc;
  struct State {
    Real maximum, sum;
  };
  JAXGPUOPS_FN static State identity(const Options&) { return {-std::numeric_limits<Real>::infinity(), Real{0}}; }
  JAXGPUOPS_FN static State element(Real x, const Options&) { return {x, Real{1}}; }
  // If an element is NaN, the maximum is NaN, and so is the result, whatever the sum is.
  JAXGPUOPS_FN static State combine(State l, State r) {
    const Real apart = l.maximum - r.maximum;  // NaN also if both are the same infinity
    const bool left = l.maximum >= r.maximum;
    const Real factor = exp_of_term(not_nan(-std::fabs(apart)));
    return {larger(l.maximum, r.maximum), multiply_add(left ? r.sum : l.sum, factor, left ? l.sum : r.sum)};
  }
  JAXGPUOPS_FN static Real result(State s, const Options&) { return log_of_terms(s.sum, s.maximum); }

  // Folds n numbers x(i) and computes one exponential for each. sums[i] is the sum of e^(x - m) over the first i + 1
  // numbers, where m is the maximum of all n.
  template <int n, class X>
  JAXGPUOPS_FN static State fold(X x, Real* sums) {
    const Real maximum = maximum_of<n>(x);
    sums[0] = exp_of_term(x(0) - maximum);
#pragma unroll
    for (int i = 1; i < n; ++i) sums[i] = sums[i - 1] + exp_of_term(x(i) - maximum);
    return {maximum, std::fabs(maximum) == std::numeric_limits<Real>::infinity() ? Real{1} : sums[n - 1]};
  }

  // Adds n numbers, which fold() has folded to `maximum` and `sums`, to `state`; x0 is the first of them. If the
  // maximum rises far within the n numbers, it adds nothing and returns false: the sums are relative to the maximum of
  // all n, so the first results would lose digits.
  template <int n>
  JAXGPUOPS_FN static bool add(State& state, Real x0, Real maximum, const Real* sums, Real (&results)[n],
                               const Options& o) {
    const Real rise = maximum - (o.exclusive ? state.maximum : larger(state.maximum, x0));
    if (!(rise <= 4 && rise > -std::numeric_limits<Real>::infinity())) return false;
    const Real last = larger(state.maximum, maximum), factor = exp_of_term(maximum - last);
    const Real before = state.sum * exp_of_term(state.maximum - last);
    state = {last, multiply_add(sums[n - 1], factor, before)};
    if (o.exclusive) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        results[i] = log_of_terms(i == 0 ? before : multiply_add(sums[i - 1], factor, before), last);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) results[i] = log_of_terms(multiply_add(sums[i], factor, before), last);
    }
    return true;
  }

 private:
  template <int n, class X>
  JAXGPUOPS_FN static Real maximum_of(X x) {
    Real maximum = x(0);
#pragma unroll
    for (int i = 1; i < n; ++i) maximum = larger(maximum, x(i));
    return maximum;
  }
};

}  // namespace jaxgpuops::scan
