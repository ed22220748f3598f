// Turns the buffers and attributes of a top-k or argmax target into a checked problem. The handlers of both backends
// start here.
#pragma once

#include "ffi.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

inline Problem topk_problem(ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer indices, int64_t axis, bool largest,
                            bool sorted) {
  const Element element = require_ordered("x", x);
  Problem problem;
  problem.rows = require_rows("x", x, axis);
  require_rank_of("values", values, x);
  problem.k = values.dimensions()[axis];
  if (problem.k > problem.rows.length) throw invalid("k is ", problem.k, " but x has length ", problem.rows.length);
  require_type("values", values, x.element_type());
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("values", values, with_axis(dims_of(x), axis, problem.k));
  require_shape("indices", indices, dims_of(values));
  problem.key_bits = element.bits;
  problem.order = key_order(element.kind, element.bits, largest);
  problem.sorted = sorted;
  return problem;
}

inline ArgProblem argmax_problem(ffi::AnyBuffer x, ffi::AnyBuffer indices, int64_t axis, bool largest) {
  const Element element = require_ordered("x", x);
  ArgProblem problem;
  problem.rows = require_rows("x", x, axis);
  if (problem.rows.length == 0) throw invalid("the axis is empty");
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("indices", indices, without_axis(dims_of(x), axis));
  problem.key_bits = element.bits;
  problem.order = arg_order_of(element, largest);
  return problem;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto topk_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Ret<ffi::AnyBuffer>()   // values
                              .template Ret<ffi::AnyBuffer>())  // indices
      .template Attr<int64_t>("axis")
      .template Attr<bool>("largest")
      .template Attr<bool>("sorted");
}

template <class Backend>
auto argmax_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Ret<ffi::AnyBuffer>())  // indices
      .template Attr<int64_t>("axis")
      .template Attr<bool>("largest");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::topk
