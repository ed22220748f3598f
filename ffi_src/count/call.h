// Turns the buffers and attributes of a target into a checked problem. The handlers of both backends start here.
#pragma once

#include "count/count.h"
#include "ffi.h"

namespace jaxgpuops::count {

// The number of bins, which is the size of `counts` along the axis. Its other sizes must be those of x.
inline int64_t require_counts(ffi::AnyBuffer x, ffi::AnyBuffer counts, int64_t axis) {
  require_rank_of("counts", counts, x);
  const int64_t bins = require_rows("counts", counts, axis).length;
  require_type("counts", counts, ffi::DataType::S32);
  require_shape("counts", counts, with_axis(dims_of(x), axis, bins));
  return bins;
}

inline Bincount bincount_of(ffi::AnyBuffer x, ffi::AnyBuffer counts, int64_t axis) {
  Bincount problem;
  const Element element = require_ordered("x", x);
  if (element.kind == KeyKind::kFloat || x.element_type() == ffi::DataType::PRED)
    throw invalid("x has element type ", printable(x.element_type()), ", expected integers");
  problem.bytes = element.bits / 8;
  problem.is_signed = element.kind == KeyKind::kSigned;
  problem.rows = require_rows("x", x, axis);
  problem.bins = require_counts(x, counts, axis);
  return problem;
}

inline Histogram histogram_of(ffi::AnyBuffer x, ffi::AnyBuffer edges, ffi::AnyBuffer counts, int64_t axis) {
  Histogram problem;
  problem.dtype = require_dtype("x", x);
  if (!is_float(problem.dtype) || bytes_of(problem.dtype) == 1)
    throw invalid("x has element type ", printable(x.element_type()), ", which is not supported here");
  problem.rows = require_rows("x", x, axis);
  problem.bins = require_counts(x, counts, axis);
  require_type("edges", edges, x.element_type());
  require_rank_of("edges", edges, x);
  if (require_rows("edges", edges, axis).length != problem.bins + 1 || rows_of("edges", edges, axis).inner != 1)
    throw invalid("edges has shape ", text_of(dims_of(edges)), ": it must have ", problem.bins + 1, " along axis ",
                  axis, " and nothing after it");
  problem.edges = require_broadcast("edges", edges, with_axis(dims_of(x), axis, problem.bins + 1), axis).outer;
  return problem;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.

template <class Backend>
auto bincount_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Ret<ffi::AnyBuffer>())  // counts
      .template Attr<int64_t>("axis");
}

template <class Backend>
auto histogram_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // edges
                              .template Ret<ffi::AnyBuffer>())  // counts
      .template Attr<int64_t>("axis");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::count
