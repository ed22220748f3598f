// Selects the kernels that are compiled for an element type, and fills their parameters.
#pragma once

#include "common/cuda/dispatch.cuh"
#include "softmax/cuda/kernels.h"
#include "softmax/cuda/policy.cuh"

namespace jaxgpuops::softmax {

using row_engine::Parameters;

template <class P>
Parameters<P> parameters_of(const Problem& problem, const Buffers& buffers) {
  Parameters<P> p = {};
  p.operands[0] = buffers.x;
  p.operands[1] = buffers.y;
  p.out = buffers.out;
  p.extras.bias = buffers.bias;
  p.extras.where = buffers.where;
  p.extras.bias_at = problem.bias;
  p.extras.where_at = problem.where;
  p.extras.queries = problem.queries;
  p.extras.query_stride = problem.query_stride;
  return p;
}

template <class Acc>
Scale<Acc> scale_of(const Problem& problem, const Buffers& buffers) {
  return {static_cast<Acc>(problem.factor), static_cast<const Acc*>(buffers.scale), problem.scale};
}

template <class P>
Parameters<P> softmax_parameters_of(const Problem& problem, const Buffers& buffers) {
  auto p = parameters_of<P>(problem, buffers);
  p.args.scale = scale_of<typename P::Acc>(problem, buffers);
  p.args.op = problem.op;
  p.args.lse = static_cast<typename P::Bits*>(buffers.lse);
  p.args.maximum = static_cast<typename P::Acc*>(buffers.maximum);
  p.args.log_sum = static_cast<typename P::Acc*>(buffers.log_sum);
  return p;
}

// What the arguments of a known operation without a scale are made of. It is short, so that a kernel waits for few
// lines of parameters, and the kernel has the code of one operation.
template <class P, Op op>
struct GivenOp {
  static constexpr Op kOp = op;
  static constexpr bool kOutput = kOp != Op::kLogSumExp;
  // Results of 16 bits are multiples of what is added up. Those of float32 need more accurate exponentials.
  static constexpr bool kKept = kOp == Op::kSoftmax && sizeof(typename P::Bits) == 2;
  typename P::Acc factor;
  typename P::Bits* lse;
  typename P::Acc *maximum, *log_sum;

  __device__ operator typename P::Args() const {
    typename P::Args args = {};
    args.op = kOp;
    args.scale.factor = factor;
    args.lse = lse;
    args.maximum = maximum;
    args.log_sum = log_sum;
    return args;
  }
};
template <class P, Op kOp>
GivenOp<P, kOp> given_op(const Problem& problem, const Buffers& buffers) {
  using Acc = typename P::Acc;
  return {static_cast<Acc>(problem.factor), static_cast<typename P::Bits*>(buffers.lse),
          static_cast<Acc*>(buffers.maximum), static_cast<Acc*>(buffers.log_sum)};
}

// Calls f with softmax, log_softmax or logsumexp as a compile-time constant.
template <class F>
cudaError_t with_op(Op op, F f) {
  switch (op) {
    case Op::kSoftmax: return f(std::integral_constant<Op, Op::kSoftmax>());
    case Op::kLogSoftmax: return f(std::integral_constant<Op, Op::kLogSoftmax>());
    default: return f(std::integral_constant<Op, Op::kLogSumExp>());
  }
}

template <class P>
cudaError_t launch_softmax_policy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace) {
  return row_engine::run<P>(stream, plan, problem.rows, softmax_parameters_of<P>(problem, buffers), workspace);
}

}  // namespace jaxgpuops::softmax
