// Element classes: how many bytes an element has in memory, and in which type it is computed. This header also compiles
// for the host, where it is tested.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/broadcast.h"
#include "common/dtype.h"

#if defined(__CUDACC__)
#define JAXGPUOPS_FN __host__ __device__ __forceinline__
#else
#define JAXGPUOPS_FN inline
#endif

namespace jaxgpuops {

template <class To, class From>
JAXGPUOPS_FN To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------
// Multiply-adds are explicit: kernels that must agree bit for bit must not depend on which operations the compiler
// fuses.

template <class Real>
struct Complex {
  Real re, im;
};

JAXGPUOPS_FN uint32_t add(uint32_t a, uint32_t b) { return a + b; }
JAXGPUOPS_FN uint64_t add(uint64_t a, uint64_t b) { return a + b; }
JAXGPUOPS_FN float add(float a, float b) { return a + b; }
JAXGPUOPS_FN double add(double a, double b) { return a + b; }
template <class Real>
JAXGPUOPS_FN Complex<Real> add(Complex<Real> a, Complex<Real> b) {
  return {a.re + b.re, a.im + b.im};
}

JAXGPUOPS_FN uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
JAXGPUOPS_FN uint64_t multiply_add(uint64_t a, uint64_t b, uint64_t c) { return a * b + c; }
JAXGPUOPS_FN float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
JAXGPUOPS_FN double multiply_add(double a, double b, double c) { return fma(a, b, c); }
template <class Real>
JAXGPUOPS_FN Complex<Real> multiply_add(Complex<Real> a, Complex<Real> b, Complex<Real> c) {
  return {multiply_add(-a.im, b.im, multiply_add(a.re, b.re, c.re)),
          multiply_add(a.im, b.re, multiply_add(a.re, b.im, c.im))};
}

JAXGPUOPS_FN uint32_t multiply(uint32_t a, uint32_t b) { return a * b; }
JAXGPUOPS_FN uint64_t multiply(uint64_t a, uint64_t b) { return a * b; }
JAXGPUOPS_FN float multiply(float a, float b) { return a * b; }
JAXGPUOPS_FN double multiply(double a, double b) { return a * b; }
template <class Real>
JAXGPUOPS_FN Complex<Real> multiply(Complex<Real> a, Complex<Real> b) {
  const Real re = -a.im * b.im, im = a.im * b.re;
  return {multiply_add(a.re, b.re, re), multiply_add(a.re, b.im, im)};
}

template <class Acc>
struct Constant {
  JAXGPUOPS_FN static Acc of(int value) { return static_cast<Acc>(value); }
};
template <class Real>
struct Constant<Complex<Real>> {
  JAXGPUOPS_FN static Complex<Real> of(int value) { return {static_cast<Real>(value), Real{0}}; }
};

template <class Acc>
JAXGPUOPS_FN bool is_zero(Acc a) {
  return a == Acc{0};
}
template <class Real>
JAXGPUOPS_FN bool is_zero(Complex<Real> a) {
  return a.re == Real{0} && a.im == Real{0};
}

#if defined(__CUDACC__)
// Not inlined, since otherwise kernels of float64 would be mostly copies of this long function.
__device__ __noinline__ inline double called_exp(double x) { return exp(x); }
__device__ __noinline__ inline double called_log(double x) { return log(x); }
#endif

// e^x for x <= 0 or NaN, with a relative error of about 1e-7 |x|.
JAXGPUOPS_FN float exp_below_one(float x) {
#if defined(__CUDA_ARCH__)
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.44269504f));
  return e;
#else
  return expf(x);
#endif
}
JAXGPUOPS_FN double exp_below_one(double x) {
#if defined(__CUDA_ARCH__)
  return called_exp(x);
#else
  return exp(x);
#endif
}

// c + log(x) for x >= 0 or NaN, with an absolute error of about 1e-7 (1 + |log(x)|). That is enough, since callers pass
// sums of many terms, which are no more accurate.
JAXGPUOPS_FN float log_of_sum(float x, float c) {
#if defined(__CUDA_ARCH__)
  float l;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(x));
  return fmaf(l, 0.693147181f, c);
#else
  return c + logf(x);
#endif
}
JAXGPUOPS_FN double log_of_sum(double x, double c) {
#if defined(__CUDA_ARCH__)
  return c + called_log(x);
#else
  return c + log(x);
#endif
}

// Returns x, which is at most 0, or 0 if x is NaN.
JAXGPUOPS_FN float not_nan(float x) { return fminf(x, 0.0f); }
JAXGPUOPS_FN double not_nan(double x) { return fmin(x, 0.0); }

// Returns the larger of two numbers, or NaN if either is NaN. -0 is less than +0.
JAXGPUOPS_FN float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#elif defined(__CUDA_ARCH__)
  return a != a ? a : b != b ? b : fmaxf(a, b);
#else
  if (a != a || b != b) return a != a ? a : b;
  return a > b || (a == b && std::signbit(b)) ? a : b;
#endif
}
JAXGPUOPS_FN double larger(double a, double b) { return a != a || a > b ? a : b; }

// ---- Element types --------------------------------------------------------------------------------------------------
// An element class has two types: Bits is loaded and stored, Acc is computed in. Integers are computed in their own
// bits, widened to at least 32.

// Serves signed integers, too; kDType is that of the unsigned integer.
template <class Unsigned>
struct Integer {
  using Bits = Unsigned;
  static constexpr DType kDType = sizeof(Unsigned) == 1   ? DType::kUint8
                                  : sizeof(Unsigned) == 2 ? DType::kUint16
                                  : sizeof(Unsigned) == 4 ? DType::kUint32
                                                          : DType::kUint64;
  using Acc = std::conditional_t<sizeof(Unsigned) == 8, uint64_t, uint32_t>;
  JAXGPUOPS_FN static Acc load(Bits bits) { return bits; }
  JAXGPUOPS_FN static Bits store(Acc value) { return static_cast<Bits>(value); }
};

struct Boolean : Integer<uint8_t> {};

struct Float32 {
  using Bits = uint32_t;
  static constexpr DType kDType = DType::kFloat32;
  using Acc = float;
  JAXGPUOPS_FN static float lowest() { return -std::numeric_limits<float>::infinity(); }
  JAXGPUOPS_FN static float load(Bits bits) { return bits_as<float>(bits); }
  JAXGPUOPS_FN static Bits store(float value) { return bits_as<Bits>(value); }
};

struct Float64 {
  using Bits = uint64_t;
  static constexpr DType kDType = DType::kFloat64;
  using Acc = double;
  JAXGPUOPS_FN static double lowest() { return -std::numeric_limits<double>::infinity(); }
  JAXGPUOPS_FN static double load(Bits bits) { return bits_as<double>(bits); }
  JAXGPUOPS_FN static Bits store(double value) { return bits_as<Bits>(value); }
};

// A float with kExponent bits of exponent and kMantissa bits of mantissa. store() rounds to the nearest one, ties to
// even. A format without infinities (kFinite) has NaN for values that are too large, and its NaN is all ones.
template <int kExponent, int kMantissa, bool kFinite>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  static constexpr uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;
  static constexpr uint32_t kLargest = kFinite ? kSign - 2 : kInfinity - 1;  // bits of the largest finite value
  static constexpr uint32_t kNan = kFinite ? kSign - 1 : kInfinity | (1u << (kMantissa - 1));

  JAXGPUOPS_FN static float load(uint32_t bits) {
    const uint32_t magnitude = bits & (kSign - 1), sign = (bits & kSign) ? 0x80000000u : 0;
    // The bits are read as those of a float32, whose exponent bias is larger, and the product corrects for that. It is
    // exact, for denormals, too.
    float value = bits_as<float>(magnitude << (23 - kMantissa)) * bits_as<float>((254u - kBias) << 23);
    if (magnitude > kLargest) value = bits_as<float>(!kFinite && magnitude == kInfinity ? 0x7f800000u : 0x7fc00000u);
    return bits_as<float>(bits_as<uint32_t>(value) | sign);
  }

  JAXGPUOPS_FN static uint32_t store(float value) {
    const uint32_t all = bits_as<uint32_t>(value), magnitude = all & 0x7fffffffu, sign = (all >> 31) ? kSign : 0;
    if (magnitude > 0x7f800000u) return sign | kNan;
    uint32_t bits;
    if (magnitude < (128u - kBias) << 23) {  // below the smallest normal number: count denormal steps
      const float steps = bits_as<float>(magnitude) * bits_as<float>((126u + kBias + kMantissa) << 23);
      bits = static_cast<uint32_t>(rintf(steps));
    } else {
      const uint32_t odd = (magnitude >> (23 - kMantissa)) & 1;
      bits = (magnitude - ((127u - kBias) << 23) + (1u << (22 - kMantissa)) - 1 + odd) >> (23 - kMantissa);
    }
    if (bits > kLargest) bits = kFinite ? kNan : kInfinity;
    return sign | bits;
  }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kFloat16;
  using Acc = float;
  JAXGPUOPS_FN static float lowest() { return -std::numeric_limits<float>::infinity(); }
  JAXGPUOPS_FN static float load(Bits bits) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return SmallFloat<5, 10, false>::load(bits);
#endif
  }
  JAXGPUOPS_FN static Bits store(float value) {
#if defined(__CUDA_ARCH__)
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return static_cast<Bits>(SmallFloat<5, 10, false>::store(value));
#endif
  }
  JAXGPUOPS_FN static uint32_t store(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return store(low) | static_cast<uint32_t>(store(high)) << 16;
#endif
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  using Acc = float;
  JAXGPUOPS_FN static float lowest() { return -std::numeric_limits<float>::infinity(); }
  JAXGPUOPS_FN static float load(Bits bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
  JAXGPUOPS_FN static Bits store(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    Bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32_t all = bits_as<uint32_t>(value);
    if ((all & 0x7fffffffu) > 0x7f800000u) return static_cast<Bits>(all >> 16 | 0x40);
    return static_cast<Bits>((all + 0x7fff + (all >> 16 & 1)) >> 16);
#endif
  }
  JAXGPUOPS_FN static uint32_t store(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return store(low) | static_cast<uint32_t>(store(high)) << 16;
#endif
  }
};

struct Float8E4M3FN {
  using Bits = uint8_t;
  static constexpr DType kDType = DType::kFloat8E4M3FN;
  using Acc = float;
  JAXGPUOPS_FN static float lowest() { return -448; }
  JAXGPUOPS_FN static float load(Bits bits) { return SmallFloat<4, 3, true>::load(bits); }
  JAXGPUOPS_FN static Bits store(float value) { return static_cast<Bits>(SmallFloat<4, 3, true>::store(value)); }
};

struct Float8E5M2 {
  using Bits = uint8_t;
  static constexpr DType kDType = DType::kFloat8E5M2;
  using Acc = float;
  JAXGPUOPS_FN static float lowest() { return -std::numeric_limits<float>::infinity(); }
  JAXGPUOPS_FN static float load(Bits bits) { return SmallFloat<5, 2, false>::load(bits); }
  JAXGPUOPS_FN static Bits store(float value) { return static_cast<Bits>(SmallFloat<5, 2, false>::store(value)); }
};

struct Complex64 {
  using Bits = uint64_t;
  static constexpr DType kDType = DType::kComplex64;
  using Acc = Complex<float>;
  JAXGPUOPS_FN static Acc load(Bits bits) {
    return {bits_as<float>(static_cast<uint32_t>(bits)), bits_as<float>(static_cast<uint32_t>(bits >> 32))};
  }
  JAXGPUOPS_FN static Bits store(Acc value) {
    return static_cast<Bits>(bits_as<uint32_t>(value.im)) << 32 | bits_as<uint32_t>(value.re);
  }
};

struct alignas(16) Bits128 {
  uint64_t word[2];
};

struct Complex128 {
  using Bits = Bits128;
  static constexpr DType kDType = DType::kComplex128;
  using Acc = Complex<double>;
  JAXGPUOPS_FN static Acc load(Bits bits) { return {bits_as<double>(bits.word[0]), bits_as<double>(bits.word[1])}; }
  JAXGPUOPS_FN static Bits store(Acc value) { return {{bits_as<uint64_t>(value.re), bits_as<uint64_t>(value.im)}}; }
};

// ---- Packs: 16 bytes of elements ------------------------------------------------------------------------------------

struct alignas(16) Pack {
  uint32_t word[4];
};

template <class Bits>
JAXGPUOPS_FN Bits get(const Pack& pack, int i) {
  if constexpr (sizeof(Bits) == 8) {
    return static_cast<uint64_t>(pack.word[2 * i + 1]) << 32 | pack.word[2 * i];
  } else {
    constexpr int kPerWord = 4 / sizeof(Bits);
    return static_cast<Bits>(pack.word[i / kPerWord] >> (8 * sizeof(Bits) * (i % kPerWord)));
  }
}

template <class Bits>
JAXGPUOPS_FN void set(Pack& pack, int i, Bits bits) {
  if constexpr (sizeof(Bits) == 8) {
    pack.word[2 * i] = static_cast<uint32_t>(bits);
    pack.word[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (sizeof(Bits) == 4) {
    pack.word[i] = bits;
  } else {
    constexpr int kPerWord = 4 / sizeof(Bits);
    constexpr uint32_t kMask = (1u << 8 * sizeof(Bits)) - 1;
    const int shift = 8 * sizeof(Bits) * (i % kPerWord);
    uint32_t& word = pack.word[i / kPerWord];
    word = (word & ~(kMask << shift)) | static_cast<uint32_t>(bits) << shift;
  }
}

// Makes a pack of as many values as it has elements.
template <class E>
JAXGPUOPS_FN Pack pack_of(const typename E::Acc* values) {
  Pack pack = {};
  if constexpr (std::is_same_v<E, Float16> || std::is_same_v<E, BFloat16>) {
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = E::store(values[2 * w], values[2 * w + 1]);
  } else {
    constexpr int kCount = 16 / sizeof(typename E::Bits);
#pragma unroll
    for (int i = 0; i < kCount; ++i) set<typename E::Bits>(pack, i, E::store(values[i]));
  }
  return pack;
}

// Returns the elements of a pack in reverse order.
template <class Bits>
JAXGPUOPS_FN Pack reversed(const Pack& pack) {
  Pack to;
  constexpr int kCount = 16 / sizeof(Bits);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(Bits) == 8) {
      to.word[w] = pack.word[w ^ 2];
    } else {
      to.word[w] = pack.word[3 - w];
      if constexpr (sizeof(Bits) == 2) to.word[w] = to.word[w] >> 16 | to.word[w] << 16;
    }
  }
  static_assert(kCount <= 8, "single bytes are not packed");
  return to;
}

template <class Bits, int rows, int packs>
JAXGPUOPS_FN void reverse_each(Pack (&each)[rows][packs]) {
#pragma unroll
  for (auto& row : each)
#pragma unroll
    for (auto& pack : row) pack = reversed<Bits>(pack);
}

}  // namespace jaxgpuops
