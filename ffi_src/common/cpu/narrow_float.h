// Conversions between floats of 8 or 16 bits and float32, written for the compiler to vectorise. No step computes with
// float32 denormals, because XLA's threads flush them to zero.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/cpu/simd_math.h"

namespace jaxgpuops {

template <class Bits_, int kMantissaBits, int kBias, bool kHasInfinity>
struct Narrow {
  using Bits = Bits_;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Bits) - 1);
  static constexpr uint32_t kLeast = 1u << kMantissaBits;  // the smallest normal number
  // The bits of infinity, or of NaN if the format has no infinity.
  static constexpr uint32_t kSpecial = kHasInfinity ? (kSign - 1) & ~(kLeast - 1) : kSign - 1;
  static constexpr uint32_t kNaN = kSign - 1;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;

  static JAXGPUOPS_INLINE float decode(Bits bits) {
    const uint32_t magnitude = bits & (kSign - 1);
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const float denormal = bits_as<float>(normal + (1u << 23)) - bits_as<float>(kRebias + (1u << 23));
    uint32_t result = magnitude < kLeast ? bits_as<uint32_t>(denormal) : normal;
    result = magnitude >= kSpecial ? (kHasInfinity ? normal | 0x7f800000u : 0x7fc00000u) : result;
    return bits_as<float>(result | (bits & kSign) << (32 - 8 * sizeof(Bits)));
  }

  static JAXGPUOPS_INLINE Bits encode(float value) {
    const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
    const uint32_t normal = (rounded - kRebias) >> kShift;
    // The last bit of kAlign, as a float, stands for the smallest denormal of the narrow format. So the addition rounds
    // a value that becomes a denormal there to a multiple of it.
    constexpr uint32_t kAlign = static_cast<uint32_t>(127 + 23 + 1 - kBias - kMantissaBits) << 23;
    const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(kAlign)) - kAlign;
    uint32_t result = magnitude < kRebias + (1u << 23) ? denormal : normal;
    result = rounded >= (kSpecial << kShift) + kRebias ? kSpecial : result;
    result = magnitude > 0x7f800000u ? kNaN : result;
    return static_cast<Bits>(result | (bits >> (32 - 8 * sizeof(Bits)) & kSign));
  }
};

struct BFloat16 {
  using Bits = uint16_t;
  static JAXGPUOPS_INLINE float decode(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
  static JAXGPUOPS_INLINE uint16_t encode(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
  }
};
using Float16 = Narrow<uint16_t, 10, 15, true>;
using Float8E5M2 = Narrow<uint8_t, 2, 15, true>;
using Float8E4M3FN = Narrow<uint8_t, 3, 7, false>;

template <class T>
struct Whole {
  using Bits = T;
  static JAXGPUOPS_INLINE T decode(T value) { return value; }
  static JAXGPUOPS_INLINE T encode(T value) { return value; }
};

// Calls body with the format of a floating-point dtype of at least 16 bits.
template <class Body>
void with_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16: return body(Float16{});
    case DType::kBFloat16: return body(BFloat16{});
    case DType::kFloat64: return body(Whole<double>{});
    default: return body(Whole<float>{});
  }
}

// Calls body with the format of any floating-point dtype.
template <class Body>
void with_any_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat8E4M3FN: return body(Float8E4M3FN{});
    case DType::kFloat8E5M2: return body(Float8E5M2{});
    default: return with_format(dtype, body);
  }
}

}  // namespace jaxgpuops
