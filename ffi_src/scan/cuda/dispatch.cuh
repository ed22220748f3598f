// From an element type to the kernels compiled for it. (Floats and integers: common/cuda/dispatch.cuh.)
#pragma once

#include "common/cuda/dispatch.cuh"
#include "scan/cuda/algorithms.cuh"

namespace jaxgpuops::scan {

struct Dispatch {
  cudaStream_t stream;
  const Plan& plan;
  const Problem& problem;
  const Buffers& buffers;
  void* workspace;

  template <class Policy>
  cudaError_t run() const {
    return launch_policy<Policy>(stream, plan, problem, buffers, workspace);
  }
};

// Each calls f with a value of the element's type.
template <class F>
cudaError_t with_complex(DType dtype, F f) {
  switch (dtype) {
    case DType::kComplex64: return f(Complex64{});
    case DType::kComplex128: return f(Complex128{});
    default: return cudaErrorInvalidValue;
  }
}

template <class F>
cudaError_t with_wide_integer(DType dtype, F f) {
  return bytes_of(dtype) == 4 ? f(Integer<uint32_t>{}) : f(Integer<uint64_t>{});
}

}  // namespace jaxgpuops::scan
