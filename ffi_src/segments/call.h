// Turns the buffers and attributes of a target into a checked problem. The handlers of both backends start here.
#pragma once

#include "ffi.h"
#include "segments/segments.h"

namespace jaxgpuops::segments {

// If the number of segments is given, the result is as long as the data.
inline Segments segments_of(Op op, ffi::AnyBuffer data, ffi::AnyBuffer ids, ffi::AnyBuffer out, int64_t axis,
                            bool sorted, int64_t segments = -1) {
  Segments problem;
  problem.op = op;
  problem.sorted = sorted;
  problem.dtype = require_dtype("data", data);
  if (!accepts(problem.dtype))
    throw invalid("data has element type ", printable(data.element_type()), ", which is not supported here");
  const Rows own = require_rows("data", data, axis);
  require_rank_of("out", out, data);
  problem.rows = require_rows("out", out, axis);
  const int64_t results = segments < 0 ? problem.rows.length : own.length;
  problem.segments = segments < 0 ? results : segments;
  problem.rows.length = own.length;
  require_type("out", out, data.element_type());
  problem.byte_ids = ids.element_type() == ffi::DataType::U8;
  if (!problem.byte_ids) require_type("ids", ids, ffi::DataType::S32);
  require_rank_of("ids", ids, data);
  Dims whole = dims_of(data);
  for (int64_t d = 0; d < axis; ++d)
    if (whole[d] == 1) whole[d] = ids.dimensions()[d];
  require_shape("out", out, with_axis(whole, axis, results));
  problem.data = require_broadcast("data", data, whole, axis).outer;
  problem.ids = require_broadcast("ids", ids, whole, axis).outer;
  const Rows rows = rows_of("ids", ids, axis);
  if (rows.inner != 1 || rows.length != own.length)
    throw invalid("ids has shape ", text_of(dims_of(ids)), ": it must have all of axis ", axis,
                  " and nothing after it");
  problem.id_rows = rows.outer;
  return problem;
}

// Softmax of segments, or the logarithms of their sums of exponentials.
inline Segments softmax_of(ffi::AnyBuffer data, ffi::AnyBuffer ids, ffi::AnyBuffer out, int64_t axis, int64_t segments,
                           bool sorted, bool logs) {
  require_type("ids", ids, ffi::DataType::S32);
  if (segments < 0) throw invalid("length is ", segments, ", expected 0 or more");
  const Segments problem = segments_of(Op::kMax, data, ids, out, axis, sorted, logs ? -1 : segments);
  if (!is_float(problem.dtype))
    throw invalid("data has element type ", printable(data.element_type()), ", which is not supported here");
  if (problem.segments != segments)
    throw invalid("out has ", problem.segments, " along axis ", axis, ", expected ", segments);
  return problem;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.

template <class Backend>
auto segments_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // data
                              .template Arg<ffi::AnyBuffer>()   // ids
                              .template Ret<ffi::AnyBuffer>())  // out
      .template Attr<int64_t>("axis")
      .template Attr<bool>("sorted");
}

template <class Backend>
auto softmax_binding() {
  return segments_binding<Backend>().template Attr<int64_t>("length");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::segments
