// The monoids of the scans, written for the compiler to vectorise. An element is stored in kPlanes planes, which are
// kPlane numbers apart; load and store move it. In combine(a, b), a comes before b in the direction of the scan.
#pragma once

#include <type_traits>

#include "common/cpu/simd_math.h"
#include "scan/cpu/tile.h"

namespace jaxgpuops::scan::cpu {

// e^-|a - b|, where the distance between equal infinities is 0.
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
    // The product as int would overflow.
    if constexpr (std::is_same_v<T, uint16_t>) return {static_cast<T>(1u * a.v * b.v)};
    return {static_cast<T>(a.v * b.v)};
  }
};

template <class T>
struct Maximum : Scalar<T> {  // elements are unsigned keys
  using typename Scalar<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) { return {a.v > b.v ? a.v : b.v}; }
};

// An element stands for w e^v, where v is the maximum of the logarithms, so that w >= 1.
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

// The map h -> v h + w. If v is 0, the result does not depend on h, even if h is infinite or NaN.
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

// An element stands for w e^-v (or w e^v), where v never decreases (or increases) along the scan. The tangent of
// cumlogsumexp uses it.
template <class T>
struct ScaledSum : Pair<T> {
  using typename Pair<T>::Value;
  static JAXGPUOPS_INLINE Value combine(Value a, Value b) { return {b.v, a.w * exp_distance(a.v, b.v) + b.w}; }
};

// Adds a plane to a monoid that marks the starts of segments: an element that is a start forgets everything before it.
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
