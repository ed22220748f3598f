// Turns the buffers and attributes of a softmax target into a checked problem. The handlers of both backends start
// here. The length of the axis may exceed 2^31.
#pragma once

#include "ffi.h"
#include "softmax/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

struct Call {
  Problem problem;
  Buffers buffers;
};

inline const char* target_name(Op op) {
  switch (op) {
    case Op::kSoftmax: return "jaxgpuops.softmax";
    case Op::kLogSoftmax: return "jaxgpuops.log_softmax";
    case Op::kLogSumExp: return "jaxgpuops.logsumexp";
    case Op::kCrossEntropy: return "jaxgpuops.cross_entropy";
    case Op::kCrossEntropyGrad: return "jaxgpuops.cross_entropy_grad";
    case Op::kSoftmaxJvp: return "jaxgpuops.softmax_jvp";
    case Op::kLogSoftmaxJvp: return "jaxgpuops.log_softmax_jvp";
    case Op::kLogSumExpGrad: return "jaxgpuops.logsumexp_grad";
  }
  return "";
}

// Which optional operands a call has. They follow the required operands in the order of these fields.
struct Optional {
  bool scaled = false, biased = false, masked = false;
};

// The dtype of intermediate results, and of results that have one element for each row.
inline ffi::DataType wide_type(DType dtype) {
  return dtype == DType::kFloat64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// Sets the dtype, the rows and the data pointer from the first operand.
inline void set_main(Call& call, const char* name, ffi::AnyBuffer buffer, int64_t axis) {
  call.problem.dtype = require_dtype(name, buffer);
  if (!is_float(call.problem.dtype) || bytes_of(call.problem.dtype) == 1)
    throw invalid(name, " has element type ", printable(buffer.element_type()), ", which is not supported here");
  call.problem.rows = rows_of(name, buffer, axis);
  call.buffers.x = buffer.untyped_data();
}

// Checks another operand or a result, which must have the dtype and shape of `main`.
inline void* require_like(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer main) {
  require_type(name, buffer, main.element_type());
  require_shape(name, buffer, dims_of(main));
  return buffer.untyped_data();
}

// Checks an operand that has one element for each row and may broadcast.
inline Broadcast require_row_broadcast(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer main, int64_t axis,
                                       ffi::DataType dtype) {
  require_type(name, buffer, dtype);
  return require_broadcast(name, buffer, with_axis(dims_of(main), axis, 1), axis);
}

// Checks a result that has one element for each row.
inline void* require_row_result(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer main, int64_t axis,
                                ffi::DataType dtype) {
  require_type(name, buffer, dtype);
  require_shape(name, buffer, without_axis(dims_of(main), axis));
  return buffer.untyped_data();
}

inline void set_optional(Call& call, ffi::RemainingArgs arguments, ffi::AnyBuffer main, int64_t axis,
                         Optional optional) {
  Rest rest(arguments);
  if (optional.scaled) {
    const ffi::AnyBuffer scale = rest.next("scale");
    call.problem.scale = require_row_broadcast("scale", scale, main, axis, wide_type(call.problem.dtype));
    call.buffers.scale = scale.untyped_data();
  }
  if (optional.biased) {
    const ffi::AnyBuffer bias = rest.next("bias");
    require_type("bias", bias, main.element_type());
    call.problem.bias = require_broadcast("bias", bias, dims_of(main), axis);
    call.buffers.bias = bias.untyped_data();
  }
  if (optional.masked) {
    const ffi::AnyBuffer where = rest.next("where");
    require_type("where", where, ffi::DataType::PRED);
    call.problem.where = require_broadcast("where", where, dims_of(main), axis);
    call.buffers.where = static_cast<const uint8_t*>(where.untyped_data());
  }
  rest.require_end();
}

// `query_axis` is the dimension of the queries, or -1 if the call is not causal.
inline void set_causal(Problem& problem, ffi::AnyBuffer main, int64_t axis, int64_t query_axis) {
  if (query_axis < 0) return;
  if (query_axis >= axis) throw invalid("query_axis ", query_axis, " is not before axis ", axis);
  const Dims dims = dims_of(main);
  problem.queries = dims[query_axis];
  for (int64_t i = query_axis + 1; i < axis; ++i) problem.query_stride *= dims[i];
}

// Makes the part that the calls of kSoftmax, kLogSoftmax and kLogSumExp have in common.
inline Call logits_call(Op op, ffi::AnyBuffer x, ffi::RemainingArgs rest, int64_t axis, double factor, bool scaled,
                        bool biased, bool masked, int64_t query_axis) {
  Call call;
  call.problem.op = op;
  call.problem.factor = factor;
  call.problem.general = is_general(op, factor, scaled, biased, masked || query_axis >= 0);
  set_main(call, "x", x, axis);
  set_optional(call, rest, x, axis, {scaled, biased, masked});
  set_causal(call.problem, x, axis, query_axis);
  return call;
}

// Makes the call of kSoftmax or kLogSoftmax.
inline Call softmax_call(Op op, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, int64_t axis,
                         double factor, bool scaled, bool biased, bool masked, int64_t query_axis) {
  Call call = logits_call(op, x, rest, axis, factor, scaled, biased, masked, query_axis);
  call.buffers.out = require_like("y", y, x);
  return call;
}

inline void set_parts(Call& call, ffi::AnyBuffer maximum, ffi::AnyBuffer log_sum, ffi::AnyBuffer main, int64_t axis) {
  const ffi::DataType wide = wide_type(call.problem.dtype);
  call.buffers.maximum = require_row_result("maximum", maximum, main, axis, wide);
  call.buffers.log_sum = require_row_result("log_sum", log_sum, main, axis, wide);
}

// Makes the call of kLogSumExp. The results are maximum and log_sum if `parts`, else y. Results that follow these (on
// CUDA, the workspace) are left to the caller.
inline Call log_sum_exp_call(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results, int64_t axis,
                             double factor, bool scaled, bool biased, bool masked, bool parts, int64_t query_axis) {
  Call call = logits_call(Op::kLogSumExp, x, rest, axis, factor, scaled, biased, masked, query_axis);
  if (parts) {
    set_parts(call, require_buffer("maximum", results, 0), require_buffer("log_sum", results, 1), x, axis);
  } else {
    call.buffers.lse = require_row_result("y", require_buffer("y", results, 0), x, axis, x.element_type());
  }
  return call;
}

// Makes the call of kSoftmaxJvp or kLogSoftmaxJvp.
inline Call jvp_call(Op op, ffi::AnyBuffer t, ffi::AnyBuffer y, ffi::RemainingArgs rest, ffi::AnyBuffer out,
                     int64_t axis, double factor, bool scaled, bool masked, int64_t query_axis, bool transpose,
                     bool of_logits) {
  Call call;
  call.problem.op = op;
  call.problem.factor = factor;
  call.problem.general = is_general(op, factor, scaled, false, masked || query_axis >= 0, transpose);
  call.problem.transpose = transpose;
  set_main(call, "t", t, axis);
  call.buffers.y = require_like("y", y, t);
  call.problem.of_logits = of_logits;
  if (of_logits && (scaled || !takes_logits(call.problem)))
    throw invalid(
        "of_logits is for rows, few long columns of float32, and columns of up to 24 positions, and of 64 bits for "
        "rows of up to 32 KiB and columns of up to 16 positions, without a scale");
  set_optional(call, rest, t, axis, {scaled, false, masked});
  set_causal(call.problem, t, axis, query_axis);
  call.buffers.out = require_like("out", out, t);
  return call;
}

// Makes the call of kLogSumExpGrad.
inline Call log_sum_exp_grad_call(ffi::AnyBuffer x, ffi::AnyBuffer cotangent, ffi::AnyBuffer out, int64_t axis) {
  Call call;
  call.problem.op = Op::kLogSumExpGrad;
  set_main(call, "x", x, axis);
  call.problem.cotangent = require_row_broadcast("cotangent", cotangent, x, axis, x.element_type());
  call.buffers.cotangent = cotangent.untyped_data();
  call.buffers.out = require_like("out", out, x);
  return call;
}

// Makes the part that the calls of kCrossEntropy and kCrossEntropyGrad have in common.
inline Call loss_call(Op op, ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::RemainingArgs arguments,
                      ffi::AnyBuffer loss, int64_t axis, double label_smoothing, double z_loss, bool masked) {
  Call call;
  call.problem.op = op;
  call.problem.label_smoothing = label_smoothing;
  call.problem.z_loss = z_loss;
  set_main(call, "logits", logits, axis);
  require_type("labels", labels, ffi::DataType::S32);
  require_shape("labels", labels, with_axis(dims_of(logits), axis, 1));
  call.buffers.labels = static_cast<const int32_t*>(labels.untyped_data());
  Rest rest(arguments);
  if (masked) {
    const ffi::AnyBuffer where = rest.next("where");
    call.problem.row_where = require_row_broadcast("where", where, logits, axis, ffi::DataType::PRED);
    call.buffers.row_where = static_cast<const uint8_t*>(where.untyped_data());
  }
  rest.require_end();
  call.buffers.loss = require_row_result("loss", loss, logits, axis, wide_type(call.problem.dtype));
  return call;
}

inline Call cross_entropy_call(ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                               ffi::AnyBuffer loss, ffi::AnyBuffer maximum, ffi::AnyBuffer log_sum, int64_t axis,
                               double label_smoothing, double z_loss, bool masked) {
  Call call = loss_call(Op::kCrossEntropy, logits, labels, rest, loss, axis, label_smoothing, z_loss, masked);
  set_parts(call, maximum, log_sum, logits, axis);
  return call;
}

inline Call cross_entropy_grad_call(ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::AnyBuffer cotangent,
                                    ffi::RemainingArgs rest, ffi::AnyBuffer gradient, ffi::AnyBuffer loss, int64_t axis,
                                    double label_smoothing, double z_loss, bool masked) {
  Call call = loss_call(Op::kCrossEntropyGrad, logits, labels, rest, loss, axis, label_smoothing, z_loss, masked);
  call.problem.cotangent = require_row_broadcast("cotangent", cotangent, logits, axis, wide_type(call.problem.dtype));
  call.buffers.cotangent = cotangent.untyped_data();
  call.buffers.out = require_like("gradient", gradient, logits);
  return call;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto forward_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .RemainingArgs()                  // scale, bias, where
                              .template Ret<ffi::AnyBuffer>())  // y
      .template Attr<int64_t>("axis")
      .template Attr<double>("factor")
      .template Attr<bool>("scaled")
      .template Attr<bool>("biased")
      .template Attr<bool>("masked")
      .template Attr<int64_t>("query_axis");
}

template <class Backend>
auto log_sum_exp_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x
      .RemainingArgs()                 // scale, bias, where
      .RemainingRets()                 // y, or maximum and log_sum; workspace
      .template Attr<int64_t>("axis")
      .template Attr<double>("factor")
      .template Attr<bool>("scaled")
      .template Attr<bool>("biased")
      .template Attr<bool>("masked")
      .template Attr<bool>("parts")
      .template Attr<int64_t>("query_axis");
}

template <class Backend>
auto softmax_jvp_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // t
                              .template Arg<ffi::AnyBuffer>()   // y
                              .RemainingArgs()                  // scale
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<double>("factor")
      .template Attr<bool>("scaled")
      .template Attr<bool>("of_logits");
}

template <class Backend>
auto log_softmax_jvp_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // t
                              .template Arg<ffi::AnyBuffer>()   // y
                              .RemainingArgs()                  // scale, where
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<double>("factor")
      .template Attr<bool>("scaled")
      .template Attr<bool>("masked")
      .template Attr<int64_t>("query_axis")
      .template Attr<bool>("transpose")
      .template Attr<bool>("of_logits");
}

template <class Backend>
auto cross_entropy_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // logits
                              .template Arg<ffi::AnyBuffer>()   // labels
                              .RemainingArgs()                  // where
                              .template Ret<ffi::AnyBuffer>()   // loss
                              .template Ret<ffi::AnyBuffer>()   // maximum
                              .template Ret<ffi::AnyBuffer>())  // log_sum
      .template Attr<int64_t>("axis")
      .template Attr<double>("label_smoothing")
      .template Attr<double>("z_loss")
      .template Attr<bool>("masked");
}

template <class Backend>
auto cross_entropy_grad_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // logits
                              .template Arg<ffi::AnyBuffer>()   // labels
                              .template Arg<ffi::AnyBuffer>()   // cotangent
                              .RemainingArgs()                  // where
                              .template Ret<ffi::AnyBuffer>()   // gradient
                              .template Ret<ffi::AnyBuffer>())  // loss
      .template Attr<int64_t>("axis")
      .template Attr<double>("label_smoothing")
      .template Attr<double>("z_loss")
      .template Attr<bool>("masked");
}

template <class Backend>
auto log_sum_exp_grad_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // cotangent
                              .template Ret<ffi::AnyBuffer>())  // the cotangent of x
      .template Attr<int64_t>("axis");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::softmax
