// How segments fold elements: by addition, or by the largest of keys that are made from the elements.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/segments.h"

namespace jaxgpuops::segments {

// How Extreme makes keys from elements.
struct Keys {
  uint64_t flip;      // integers: key = bits ^ flip
  uint64_t infinity;  // floats: the bits of infinity; integers: 0
  bool smallest;
  uint64_t empty;  // result of a segment without rows, for Sum too
};

template <class E>
struct Sum {
  using Element = E;
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  using Result = Bits;
  __device__ static Acc identity() { return Acc{0}; }
  __device__ static Acc load(Bits bits, const Keys&) { return E::load(bits); }
  __device__ static Acc fold(Acc a, Acc b) { return add(a, b); }
  __device__ static Bits store(Acc acc, const Keys&) { return E::store(acc); }
};

// Folds to the largest key. Keys are unsigned and as wide as the elements. NaN has the largest key, and the identity
// has key 0, which no float has.
template <class Unsigned>
struct Extreme {
  using Bits = Unsigned;
  using Acc = Unsigned;
  using Result = Bits;
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  static constexpr Bits kAll = static_cast<Bits>(~Bits{0});
  __device__ static Acc identity() { return 0; }
  __device__ static Acc load(Bits bits, const Keys& keys) {
    if (keys.infinity == 0) return static_cast<Bits>(bits ^ static_cast<Bits>(keys.flip));
    if (static_cast<Bits>(bits & ~kSign) > static_cast<Bits>(keys.infinity)) return kAll;
    const Bits key = bits & kSign ? static_cast<Bits>(~bits) : static_cast<Bits>(bits | kSign);
    return keys.smallest ? static_cast<Bits>(~key) : key;
  }
  __device__ static Acc fold(Acc a, Acc b) { return a > b ? a : b; }
  __device__ static Bits store(Acc key, const Keys& keys) {
    if (key == 0) return static_cast<Bits>(keys.empty);
    if (keys.infinity == 0) return static_cast<Bits>(key ^ static_cast<Bits>(keys.flip));
    if (key == kAll) return static_cast<Bits>(~kSign);  // stores a quiet NaN
    if (keys.smallest) key = static_cast<Bits>(~key);
    return key & kSign ? static_cast<Bits>(key ^ kSign) : static_cast<Bits>(~key);
  }
};

// The largest number and the sum of the exponentials of the differences from it, for softmax and for logarithms of
// sums. Where the largest element is not finite, the result follows from it alone; it is NaN if any element is. E: the
// elements of the data, of 16 or 32 bits.
template <class E>
struct Exponentials {
  using Bits = typename E::Bits;
  using Result = uint64_t;
  struct alignas(8) Acc {
    float largest, sum;
  };
  __device__ static Acc identity() { return {-INFINITY, 0.0f}; }
  __device__ static Acc load(Bits bits, const Keys&) { return {E::load(bits), 1.0f}; }
  __device__ static Acc fold(Acc a, Acc b) {
    const bool first = a.largest >= b.largest || isnan(a.largest);
    Acc more = first ? a : b;
    const Acc less = first ? b : a;
    if (less.largest != -INFINITY) more.sum += less.sum * expf(less.largest - more.largest);
    return more;
  }
  __device__ static Result store(Acc acc, const Keys&) { return bits_as<Result>(acc); }
  // Returns the logarithm of the sum of the exponentials.
  __device__ static float log_of(Acc acc) { return isfinite(acc.largest) ? logf(acc.sum) + acc.largest : acc.largest; }
  // Returns the softmax of x, one of the numbers that `acc` is folded from.
  __device__ static float share_of(float x, Acc acc) {
    if (isfinite(acc.largest)) return expf(x - acc.largest) / acc.sum;
    return acc.largest == INFINITY && x != INFINITY ? 0.0f : NAN;
  }
};

template <class Monoid>
constexpr bool is_extreme = false;
template <class Unsigned>
constexpr bool is_extreme<Extreme<Unsigned>> = true;

// Whether the monoid is a sum of floats, which must be exact where the order of additions is not fixed.
template <class Monoid>
constexpr bool is_exact = false;
template <class E>
constexpr bool is_exact<Sum<E>> = is_float(E::kDType);

inline Keys keys_of(const Segments& problem) {
  Keys keys = {};
  if (problem.op == Op::kSum) return keys;
  const DType dtype = problem.dtype;
  const uint64_t sign = uint64_t{1} << (8 * bytes_of(dtype) - 1);
  keys.smallest = problem.op == Op::kMin;
  if (is_float(dtype)) {
    keys.infinity = dtype == DType::kFloat16    ? 0x7c00
                    : dtype == DType::kBFloat16 ? 0x7f80
                    : dtype == DType::kFloat32  ? 0x7f800000
                                                : 0x7ff0000000000000;
    keys.empty = keys.infinity | (keys.smallest ? 0 : sign);
  } else {
    const bool is_signed = dtype <= DType::kInt64;
    keys.flip = (is_signed ? sign : 0) ^ (keys.smallest ? ~uint64_t{0} : 0);
    keys.empty = keys.flip;  // the element whose key is 0
  }
  return keys;
}

// Calls f with the monoid of the problem: its operation on elements of its dtype.
template <class F>
cudaError_t dispatch_monoid(const Segments& problem, F f) {
  const int bits = 8 * bytes_of(problem.dtype);
  if (problem.op != Op::kSum) return dispatch_key(bits, [&](auto width) { return f(Extreme<decltype(width)>{}); });
  switch (problem.dtype) {
    case DType::kFloat16: return f(Sum<Float16>{});
    case DType::kBFloat16: return f(Sum<BFloat16>{});
    case DType::kFloat32: return f(Sum<Float32>{});
    case DType::kFloat64: return f(Sum<Float64>{});
    default: return dispatch_key(bits, [&](auto width) { return f(Sum<Integer<decltype(width)>>{}); });
  }
}

}  // namespace jaxgpuops::segments
