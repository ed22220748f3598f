// The dtypes, for code that neither includes XLA's headers nor is compiled for each dtype.
#pragma once

#include <cstdint>

namespace jaxgpuops {

enum class DType : uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};

constexpr int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kInt8:
    case DType::kUint8:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2: return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32: return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
    case DType::kComplex64: return 8;
    case DType::kComplex128: return 16;
  }
  return 0;
}

constexpr bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }
constexpr bool is_float(DType dtype) { return dtype >= DType::kFloat8E4M3FN && dtype <= DType::kFloat64; }

}  // namespace jaxgpuops
