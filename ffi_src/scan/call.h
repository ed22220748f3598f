// Turns the buffers and attributes of a scan target into a checked problem. The handlers of both backends start here.
// The length of the axis may exceed 2^31.
#pragma once

#include "ffi.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

struct Call {
  Problem problem;
  Buffers buffers;
};

// The target of a recurrence, of its derivative, of a cumulative operation or of its tangent. (cumsum has no target for
// its tangent, which is a cumsum, too.)
inline const char* target_name(Kind kind, Op op) {
  if (kind == Kind::kLinear) return "jaxgpuops.linear_scan";
  if (kind == Kind::kLinearVjp) return "jaxgpuops.linear_scan_vjp";
  const bool cumulative = kind == Kind::kCumulative;
  switch (op) {
    case Op::kSum: return "jaxgpuops.cumsum";
    case Op::kProd: return cumulative ? "jaxgpuops.cumprod" : "jaxgpuops.cumprod_jvp";
    case Op::kMax: return cumulative ? "jaxgpuops.cummax" : "jaxgpuops.cummax_jvp";
    case Op::kMin: return cumulative ? "jaxgpuops.cummin" : "jaxgpuops.cummin_jvp";
    case Op::kLogSumExp: return cumulative ? "jaxgpuops.cumlogsumexp" : "jaxgpuops.cumlogsumexp_jvp";
  }
  return "";
}

// Whether the kind of scan, with the operator if it has one, is defined for elements of this dtype.
inline bool accepts(Kind kind, Op op, DType dtype) {
  const bool narrow = dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
  switch (kind) {
    case Kind::kCumulative:
      if (op == Op::kLogSumExp) return is_float(dtype);
      if (op == Op::kMax || op == Op::kMin) return !is_complex(dtype);
      return dtype != DType::kBool;
    case Kind::kTangent: return (is_float(dtype) && !narrow) || (is_complex(dtype) && op == Op::kProd);
    case Kind::kLinear:
    case Kind::kLinearVjp: return (is_float(dtype) && !narrow) || is_complex(dtype);
  }
  return false;
}

// Sets the dtype and the rows from the first operand.
inline void set_main(Problem& problem, const char* name, ffi::AnyBuffer buffer, int64_t axis) {
  problem.dtype = require_dtype(name, buffer);
  if (!accepts(problem.kind, problem.op, problem.dtype))
    throw invalid(name, " has element type ", printable(buffer.element_type()), ", which is not supported here");
  problem.rows = rows_of(name, buffer, axis);
}

// Checks another operand or a result, which must have the dtype and shape of `main`.
inline void* require_like(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer main) {
  require_type(name, buffer, main.element_type());
  require_shape(name, buffer, dims_of(main));
  return buffer.untyped_data();
}

// Takes the optional operands from number `next` on: h0 if problem.initial is set, then starts if another operand
// follows.
inline void set_optional(Call& call, ffi::RemainingArgs rest, ffi::AnyBuffer main, int64_t axis, size_t next = 0) {
  if (call.problem.initial) {
    if (rest.size() == 0) throw invalid("h0 is missing although `initial` is set");
    const ffi::AnyBuffer h0 = require_buffer("h0", rest, next++);
    const DType dtype = call.problem.dtype;
    require_type("h0", h0,
                 h0_dtype(call.problem) != dtype ? ffi::DataType::F32
                 : dtype == DType::kBool         ? ffi::DataType::U8
                                                 : main.element_type());
    require_shape("h0", h0, with_axis(dims_of(main), axis, 1));
    call.buffers.h0 = h0.untyped_data();
  }
  call.problem.segmented = rest.size() > next;
  if (call.problem.segmented) {
    const ffi::AnyBuffer starts = require_buffer("starts", rest, next++);
    require_type("starts", starts, ffi::DataType::PRED);
    call.problem.starts = require_broadcast("starts", starts, dims_of(main), axis);
    if (starts.dimensions()[axis] != main.dimensions()[axis])
      throw invalid("starts has length ", starts.dimensions()[axis], " at the axis, expected ",
                    main.dimensions()[axis]);
    call.buffers.starts = static_cast<const uint8_t*>(starts.untyped_data());
  }
  if (rest.size() > next) throw invalid("there are ", rest.size() - next, " operands too many");
}

inline Call cumulative_call(Op op, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, int64_t axis,
                            bool reverse, bool exclusive) {
  Call call;
  call.problem.kind = Kind::kCumulative;
  call.problem.op = op;
  set_main(call.problem, "x", x, axis);
  call.problem.reverse = reverse;
  call.problem.exclusive = exclusive;
  call.buffers.x = x.untyped_data();
  call.buffers.out = require_like("y", y, x);
  // No attribute says so, as most calls have no h0, and it never has the type of starts.
  call.problem.initial = rest.size() > 0 && require_buffer("h0", rest, 0).element_type() != ffi::DataType::PRED;
  set_optional(call, rest, x, axis);
  return call;
}

// y may be missing. No attribute says so, as starts never have the type of y.
inline Call tangent_call(Op op, ffi::AnyBuffer t, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer out,
                         int64_t axis, bool reverse, bool exclusive, bool transpose) {
  Call call;
  call.problem.kind = Kind::kTangent;
  call.problem.op = op;
  set_main(call.problem, "t", t, axis);
  call.problem.reverse = reverse;
  call.problem.exclusive = exclusive;
  call.problem.transpose = transpose;
  call.buffers.x = t.untyped_data();
  call.buffers.a = require_like("x", x, t);
  call.buffers.out = require_like("out", out, t);
  call.problem.from_x = rest.size() == 0 || require_buffer("y", rest, 0).element_type() == ffi::DataType::PRED;
  if (!call.problem.from_x) call.buffers.y = require_like("y", require_buffer("y", rest, 0), t);
  set_optional(call, rest, t, axis, call.problem.from_x ? 0 : 1);
  return call;
}

inline Call linear_call(ffi::AnyBuffer b, ffi::AnyBuffer a, ffi::RemainingArgs rest, ffi::AnyBuffer h, int64_t axis,
                        bool reverse, bool transpose, bool initial) {
  if (transpose && initial) throw invalid("a transposed recurrence has no h0");
  Call call;
  call.problem.kind = Kind::kLinear;
  set_main(call.problem, "b", b, axis);
  call.problem.reverse = reverse;
  call.problem.transpose = transpose;
  call.problem.initial = initial;
  require_type("a", a, b.element_type());
  call.problem.a = require_broadcast("a", a, dims_of(b), axis);
  call.buffers.x = b.untyped_data();
  call.buffers.a = a.untyped_data();
  call.buffers.out = require_like("h", h, b);
  set_optional(call, rest, b, axis);
  return call;
}

inline Call linear_vjp_call(ffi::AnyBuffer g, ffi::AnyBuffer a, ffi::AnyBuffer h, ffi::RemainingArgs rest,
                            ffi::AnyBuffer da, ffi::AnyBuffer db, int64_t axis, bool reverse, bool initial) {
  Call call;
  call.problem.kind = Kind::kLinearVjp;
  set_main(call.problem, "g", g, axis);
  call.problem.reverse = reverse;
  call.problem.initial = initial;
  call.buffers.x = g.untyped_data();
  call.buffers.a = require_like("a", a, g);
  call.problem.a = require_broadcast("a", a, dims_of(g), axis);
  call.buffers.y = require_like("h", h, g);
  call.buffers.out = require_like("da", da, g);
  call.buffers.out2 = require_like("db", db, g);
  set_optional(call, rest, g, axis);
  return call;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto cumulative_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .RemainingArgs()                  // h0, starts
                              .template Ret<ffi::AnyBuffer>())  // y
      .template Attr<int64_t>("axis")
      .template Attr<bool>("reverse")
      .template Attr<bool>("exclusive");
}

template <class Backend>
auto tangent_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // t
                              .template Arg<ffi::AnyBuffer>()   // x
                              .RemainingArgs()                  // y, starts
                              .template Ret<ffi::AnyBuffer>())  // the tangent of y; transposed, the cotangent of x
      .template Attr<int64_t>("axis")
      .template Attr<bool>("reverse")
      .template Attr<bool>("exclusive")
      .template Attr<bool>("transpose");
}

template <class Backend>
auto linear_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // b
                              .template Arg<ffi::AnyBuffer>()   // a
                              .RemainingArgs()                  // h0, starts
                              .template Ret<ffi::AnyBuffer>())  // h
      .template Attr<int64_t>("axis")
      .template Attr<bool>("reverse")
      .template Attr<bool>("transpose")
      .template Attr<bool>("initial");
}

template <class Backend>
auto linear_vjp_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // g
                              .template Arg<ffi::AnyBuffer>()   // a
                              .template Arg<ffi::AnyBuffer>()   // h
                              .RemainingArgs()                  // h0, starts
                              .template Ret<ffi::AnyBuffer>()   // da
                              .template Ret<ffi::AnyBuffer>())  // db
      .template Attr<int64_t>("axis")
      .template Attr<bool>("reverse")
      .template Attr<bool>("initial");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::scan
