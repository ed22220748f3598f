// What a call of the target asks for: buffers and attributes in, a checked problem out. Both backends' handlers start
// here.
#pragma once

#include "ffi.h"
#include "topk_softmax/topk_softmax.h"

namespace jaxgpuops::topk_softmax {

struct Call {
  Problem problem;
  Buffers buffers;
};

inline Call call_of(ffi::AnyBuffer logits, ffi::RemainingArgs arguments, ffi::AnyBuffer weights, ffi::AnyBuffer indices,
                    int64_t axis, int64_t score, bool normalize, bool biased) {
  Call call;
  Problem& problem = call.problem;
  problem.dtype = require_dtype("logits", logits);
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16 && problem.dtype != DType::kFloat32)
    throw invalid("logits has element type ", printable(logits.element_type()), ", which is not supported here");
  problem.rows = require_rows("logits", logits, axis);
  if (weights.dimensions().size() != logits.dimensions().size())
    throw invalid("weights has rank ", weights.dimensions().size(), ", expected ", logits.dimensions().size());
  problem.k = weights.dimensions()[axis];
  if (problem.k > problem.rows.length)
    throw invalid("k is ", problem.k, " but logits has length ", problem.rows.length);
  require_type("weights", weights, logits.element_type());
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("weights", weights, with_axis(dims_of(logits), axis, problem.k));
  require_shape("indices", indices, dims_of(weights));
  if (score != 0 && score != 1) throw invalid("score is ", score, ", expected 0 or 1");
  problem.sigmoid = score == 1;
  problem.normalize = normalize;
  call.buffers = {logits.untyped_data(), nullptr, weights.untyped_data(),
                  static_cast<int32_t*>(indices.untyped_data())};
  Rest rest(arguments);
  if (biased) {
    const ffi::AnyBuffer bias = rest.next("bias");
    require_type("bias", bias, ffi::DataType::F32);
    problem.bias = require_broadcast("bias", bias, dims_of(logits), axis);
    call.buffers.bias = static_cast<const float*>(bias.untyped_data());
  }
  rest.require_end();
  return call;
}

// What the targets take, in the order of the handlers' parameters.
template <class Backend>
auto gate_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // logits
                              .RemainingArgs()                  // bias
                              .template Ret<ffi::AnyBuffer>()   // weights
                              .template Ret<ffi::AnyBuffer>())  // indices
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("score")
      .template Attr<bool>("normalize")
      .template Attr<bool>("biased");
}

// The tables of cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::topk_softmax
