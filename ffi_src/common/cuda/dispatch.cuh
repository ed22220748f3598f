// Selects the element class of a dtype. Kernels are compiled for element classes.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/element.h"
#include "common/dtype.h"

namespace jaxgpuops {

inline bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }

// Each of these functions calls f with the element class of the dtype.
template <class F>
cudaError_t with_float(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16: return f(Float16{});
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat32: return f(Float32{});
    case DType::kFloat64: return f(Float64{});
    default: return cudaErrorInvalidValue;
  }
}

template <class F>
cudaError_t with_float8(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat8E4M3FN: return f(Float8E4M3FN{});
    case DType::kFloat8E5M2: return f(Float8E5M2{});
    default: return cudaErrorInvalidValue;
  }
}

// Signed integers, unsigned integers and bool of the same width share one class: their bits are treated alike.
template <class F>
cudaError_t with_integer(DType dtype, F f) {
  switch (bytes_of(dtype)) {
    case 1: return f(Integer<uint8_t>{});
    case 2: return f(Integer<uint16_t>{});
    case 4: return f(Integer<uint32_t>{});
    case 8: return f(Integer<uint64_t>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops
