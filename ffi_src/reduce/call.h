// Turns the buffers and attributes of a reduction target into a checked problem. The handlers of both backends start
// here. The length of the axis may exceed 2^31.
#pragma once

#include "ffi.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce {

struct Call {
  Problem problem;
  Buffers buffers;
};

inline const char* target_name(Op op) {
  switch (op) {
    case Op::kSum: return "jaxgpuops.sum";
    case Op::kMax: return "jaxgpuops.max";
    case Op::kMin: return "jaxgpuops.min";
    case Op::kDot: return "jaxgpuops.dot";
  }
  return "";
}

// Whether the operation is defined for elements of this dtype.
inline bool accepts(Op op, DType dtype) {
  if (is_complex(dtype)) return false;
  return dtype != DType::kBool || op == Op::kMax || op == Op::kMin;
}

// `y` is the second array of kDot, and null for the other operations.
inline Call reduce_call(Op op, ffi::AnyBuffer x, const ffi::AnyBuffer* y, ffi::RemainingArgs arguments,
                        ffi::AnyBuffer out, int64_t axis, bool masked, int64_t divisor = 1) {
  Call call;
  Problem& problem = call.problem;
  problem.op = op;
  problem.dtype = require_dtype("x", x);
  if (!accepts(op, problem.dtype))
    throw invalid("x has element type ", printable(x.element_type()), ", which is not supported here");
  problem.rows = rows_of("x", x, axis);
  if (problem.rows.length == 0 && (op == Op::kMax || op == Op::kMin))
    throw invalid("x has length 0 at the axis, where there is no maximum or minimum");
  call.buffers.x = x.untyped_data();
  if (y) {
    require_type("y", *y, x.element_type());
    require_shape("y", *y, dims_of(x));
    call.buffers.y = y->untyped_data();
  }
  Rest rest(arguments);
  problem.masked = masked;
  if (masked) {
    const ffi::AnyBuffer where = rest.next("where");
    require_type("where", where, ffi::DataType::PRED);
    problem.where = require_broadcast("where", where, dims_of(x), axis);
    call.buffers.where = static_cast<const uint8_t*>(where.untyped_data());
  }
  rest.require_end();
  const bool sum = op == Op::kSum || op == Op::kDot;
  const bool narrow = is_float(problem.dtype) && bytes_of(problem.dtype) <= 2;
  problem.wide_result = sum && narrow && out.element_type() == ffi::DataType::F32;
  problem.divisor = divisor;
  if (divisor != 1 && (divisor < 1 || op != Op::kSum || !is_float(problem.dtype) || problem.wide_result))
    throw invalid("divisor is ", divisor, ": it must be 1, or more where the sums are floats of the type of x");
  require_type("out", out, problem.wide_result ? ffi::DataType::F32 : x.element_type());
  require_shape("out", out, without_axis(dims_of(x), axis));
  call.buffers.out = out.untyped_data();
  return call;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto reduce_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .RemainingArgs()                  // where
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<bool>("masked");
}

template <class Backend>
auto sum_binding() {
  return reduce_binding<Backend>().template Attr<int64_t>("divisor");
}

template <class Backend>
auto dot_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // y
                              .RemainingArgs()                  // where
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<bool>("masked");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::reduce
