// The arguments with which the kernels of a gradient from x make the result, and then the gradient from it.
#pragma once

#include "softmax/cuda/policy.cuh"

namespace jaxgpuops::softmax {

template <class P>
__device__ __forceinline__ Unscaled<typename P::Args> forward_args(Op op) {
  typename P::Args args = {};
  args.op = op;
  args.scale.factor = 1;
  return Unscaled<typename P::Args>(args);
}

template <class Q>
__device__ __forceinline__ typename Q::Args backward_args() {
  typename Q::Args args = {};
  args.scale.factor = 1;
  args.transpose = true;
  return args;
}

}  // namespace jaxgpuops::softmax
