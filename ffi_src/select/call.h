// Turns the buffers and attributes of a target into a checked problem. The handlers of both backends start here.
#pragma once

#include <algorithm>

#include "ffi.h"
#include "select/select.h"

namespace jaxgpuops::select {

inline Select ranks_of(ffi::AnyBuffer x, ffi::AnyBuffer ranks, int64_t axis) {
  Select problem;
  const Element element = require_ordered("x", x);
  problem.bits = element.bits;
  problem.order = sort_order_of(element, false);
  problem.rows = require_rows("x", x, axis);
  require_type("ranks", ranks, ffi::DataType::S32);
  require_rank_of("ranks", ranks, x);
  problem.count = require_rows("ranks", ranks, axis).length;
  problem.ranks = require_broadcast("ranks", ranks, with_axis(dims_of(x), axis, problem.count), axis);
  if (problem.rows.length == 0 && problem.count > 0) throw invalid("x has no elements along axis ", axis);
  return problem;
}

inline Select select_of(ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::AnyBuffer values, ffi::AnyBuffer indices,
                        int64_t axis) {
  const Select problem = ranks_of(x, ranks, axis);
  const Dims dims = with_axis(dims_of(x), axis, problem.count);
  require_type("values", values, x.element_type());
  require_shape("values", values, dims);
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("indices", indices, dims);
  return problem;
}

inline Select quantile_of(ffi::AnyBuffer x, ffi::AnyBuffer ranks, ffi::AnyBuffer shares, ffi::AnyBuffer out,
                          int64_t axis, bool midpoint, int64_t before) {
  Select problem = ranks_of(x, ranks, axis);
  problem.dtype = require_dtype("x", x);
  if (!is_float(problem.dtype) || problem.bits == 8)
    throw invalid("x has element type ", printable(x.element_type()), ", which is not supported here");
  require_type("shares", shares, problem.bits == 64 ? ffi::DataType::F64 : ffi::DataType::F32);
  require_rank_of("shares", shares, x);
  problem.quantiles = require_rows("shares", shares, axis).length;
  problem.midpoint = midpoint;
  if (problem.count != problem.quantiles + 1 && problem.count != 2 * problem.quantiles + 1)
    throw invalid("ranks has ", problem.count, " along axis ", axis, ", expected one or two for each of ",
                  problem.quantiles, " shares, and one more");
  if (problem.quantiles == 0) problem.count = 0;
  Dims dims = with_axis(dims_of(x), axis, problem.quantiles);
  problem.shares = require_broadcast("shares", shares, dims, axis);
  require_type("out", out, x.element_type());
  if (before < 0 || before > axis) throw invalid("before must be between 0 and ", axis, ", got ", before);
  std::rotate(dims.begin() + before, dims.begin() + axis, dims.begin() + axis + 1);
  require_shape("out", out, dims);
  return problem;
}

// Returns how many neighbouring rows have their quantiles beside each other (quantile.h), if the axis of the results is
// before this dimension of x.
inline int64_t beside_of(ffi::AnyBuffer x, int64_t axis, int64_t before) {
  int64_t beside = 1;
  for (int64_t d = before; d < static_cast<int64_t>(x.dimensions().size()); ++d)
    if (d != axis) beside *= x.dimensions()[d];
  return beside;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.

template <class Backend>
auto select_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // ranks
                              .template Ret<ffi::AnyBuffer>()   // values
                              .template Ret<ffi::AnyBuffer>())  // indices
      .template Attr<int64_t>("axis");
}

template <class Backend>
auto quantile_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // ranks
                              .template Arg<ffi::AnyBuffer>()   // shares
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<bool>("midpoint")
      .template Attr<int64_t>("before");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::select
