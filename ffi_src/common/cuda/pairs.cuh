// Words that hold two 16-bit floats, on which one instruction computes two results.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cuda/element.h"

namespace jaxgpuops {

// Rounds two floats to the nearest 16-bit floats, `low` in the low half of the word.
template <class Element>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (Element::kDType == DType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return Element::store(low) | static_cast<uint32_t>(Element::store(high)) << 16;
#endif
}

// Returns the larger element of each half. With kNan, NaN is the largest and -0 is less than +0; without it, NaN is
// ignored.
template <class Element, bool kNan>
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t c;
  if constexpr (Element::kDType == DType::kBFloat16) {
    if constexpr (kNan) {
      asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    } else {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    }
  } else {
    if constexpr (kNan) {
      asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    } else {
      asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    }
  }
  return c;
#else
  float larger[2];
  for (int i = 0; i < 2; ++i) {
    const float of_a = Element::load(static_cast<uint16_t>(a >> 16 * i));
    const float of_b = Element::load(static_cast<uint16_t>(b >> 16 * i));
    larger[i] = kNan ? jaxgpuops::larger(of_a, of_b) : fmaxf(of_a, of_b);
  }
  return pair_of<Element>(larger[0], larger[1]);
#endif
}

}  // namespace jaxgpuops
