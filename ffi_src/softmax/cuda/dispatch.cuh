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

template <class P>
cudaError_t launch_softmax_policy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace) {
  return row_engine::run<P>(stream, plan, problem.rows, softmax_parameters_of<P>(problem, buffers), workspace);
}

}  // namespace jaxgpuops::softmax
