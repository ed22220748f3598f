// Turns the buffers and attributes of the targets into a checked problem. The handlers of both backends start here.
#pragma once

#include "ffi.h"
#include "topk_softmax/topk_softmax.h"

namespace jaxgpuops::topk_softmax {

struct Call {
  Problem problem;
  Buffers buffers;
};

struct Options {
  int64_t axis, score;
  bool normalize, biased;
  int64_t groups, topk_groups;
  double scale;
  bool log_sums;
};

inline void set_groups(Problem& problem, const Options& options) {
  const int64_t groups = options.groups, length = problem.rows.length;
  if (groups < 1 || length % groups != 0) throw invalid("groups is ", groups, ", which does not divide ", length);
  if (options.topk_groups < 1 || options.topk_groups > groups)
    throw invalid("topk_groups is ", options.topk_groups, ", expected 1 to ", groups);
  if (problem.k > options.topk_groups * (length / groups))
    throw invalid("k is ", problem.k, " but ", options.topk_groups, " groups have ",
                  options.topk_groups * (length / groups), " experts");
  problem.groups = groups;
  problem.topk_groups = options.topk_groups;
}

// If the call asks for the logarithms of sums, they are the first result in `more`.
inline Call call_of(ffi::AnyBuffer logits, ffi::RemainingArgs arguments, ffi::AnyBuffer weights, ffi::AnyBuffer indices,
                    ffi::RemainingRets more, const Options& options) {
  const int64_t axis = options.axis;
  Call call;
  Problem& problem = call.problem;
  problem.dtype = require_dtype("logits", logits);
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16 && problem.dtype != DType::kFloat32)
    throw invalid("logits has element type ", printable(logits.element_type()), ", which is not supported here");
  problem.rows = require_rows("logits", logits, axis);
  require_rank_of("weights", weights, logits);
  problem.k = weights.dimensions()[axis];
  if (problem.k > problem.rows.length)
    throw invalid("k is ", problem.k, " but logits has length ", problem.rows.length);
  require_type("weights", weights, logits.element_type());
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("weights", weights, with_axis(dims_of(logits), axis, problem.k));
  require_shape("indices", indices, dims_of(weights));
  if (options.score < 0 || options.score > 2) throw invalid("score is ", options.score, ", expected 0, 1 or 2");
  problem.score = static_cast<Score>(options.score);
  problem.normalize = options.normalize;
  problem.scale = static_cast<float>(options.scale);
  set_groups(problem, options);
  call.buffers = {logits.untyped_data(), nullptr, weights.untyped_data(),
                  static_cast<int32_t*>(indices.untyped_data())};
  if (options.log_sums) {
    if (problem.k == 0) throw invalid("log_sums come with experts that are chosen, but k is 0");
    const ffi::AnyBuffer sums = require_buffer("log_sums", more, 0);
    require_type("log_sums", sums, ffi::DataType::F32);
    require_shape("log_sums", sums, without_axis(dims_of(logits), axis));
    call.buffers.log_sums = static_cast<float*>(sums.untyped_data());
  }
  Rest rest(arguments);
  if (options.biased) {
    const ffi::AnyBuffer bias = rest.next("bias");
    require_type("bias", bias, ffi::DataType::F32);
    problem.bias = require_broadcast("bias", bias, dims_of(logits), axis);
    call.buffers.bias = static_cast<const float*>(bias.untyped_data());
  }
  rest.require_end();
  return call;
}

// The binding of the target, which both backends share. The operands, results and attributes are in the order of the
// handler's parameters.
template <class Backend>
auto gate_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // logits
      .RemainingArgs()                 // bias
      .template Ret<ffi::AnyBuffer>()  // weights
      .template Ret<ffi::AnyBuffer>()  // indices
      .RemainingRets()                 // log_sums; on CUDA the workspace
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("score")
      .template Attr<bool>("normalize")
      .template Attr<bool>("biased")
      .template Attr<int64_t>("groups")
      .template Attr<int64_t>("topk_groups")
      .template Attr<double>("scale")
      .template Attr<bool>("log_sums");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::topk_softmax
