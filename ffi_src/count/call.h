// Turns the buffers and attributes of a target of counts, segments, searches or selections into a checked problem. The
// handlers of both backends start here.
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
  if (data.element_type() != ffi::DataType::F64) require_type("data", data, ffi::DataType::F32);
  require_type("ids", ids, ffi::DataType::S32);
  if (segments < 0) throw invalid("length is ", segments, ", expected 0 or more");
  const Segments problem = segments_of(Op::kMax, data, ids, out, axis, sorted, logs ? -1 : segments);
  if (problem.segments != segments)
    throw invalid("out has ", problem.segments, " along axis ", axis, ", expected ", segments);
  return problem;
}

inline Search search_of(ffi::AnyBuffer queries, ffi::AnyBuffer sorted, ffi::AnyBuffer places, int64_t axis,
                        bool right) {
  Search problem;
  const Element element = require_ordered("queries", queries);
  problem.bits = element.bits;
  problem.order = sort_order_of(element, false);
  problem.right = right;
  problem.rows = rows_of("queries", queries, axis);
  require_type("sorted", sorted, queries.element_type());
  require_rank_of("sorted", sorted, queries);
  problem.length = require_rows("sorted", sorted, axis).length;
  problem.sorted = require_broadcast("sorted", sorted, with_axis(dims_of(queries), axis, problem.length), axis);
  require_type("places", places, ffi::DataType::S32);
  require_shape("places", places, dims_of(queries));
  return problem;
}

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
                          int64_t axis, bool midpoint) {
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
  const Dims dims = with_axis(dims_of(x), axis, problem.quantiles);
  problem.shares = require_broadcast("shares", shares, dims, axis);
  require_type("out", out, x.element_type());
  require_shape("out", out, dims);
  return problem;
}

struct ChooseCall {
  Choose problem;
  ChooseBuffers buffers = {};
};

// The first result of a call that chooses says how many elements of a row are wanted.
inline ChooseCall choosing(ffi::AnyBuffer x, const char* name, ffi::AnyBuffer first, int64_t axis, bool starts) {
  ChooseCall call;
  Choose& problem = call.problem;
  problem.starts = starts;
  const Element element = require_ordered("x", x);
  if (!starts) require_type("x", x, ffi::DataType::PRED);
  problem.bits = element.bits;
  problem.order = sort_order_of(element, false);
  problem.rows = require_rows("x", x, axis);
  if (problem.rows.inner != 1) throw invalid("x has dimensions after axis ", axis);
  call.buffers.x = x.untyped_data();
  require_rank_of(name, first, x);
  problem.size = require_rows(name, first, axis).length;
  return call;
}

inline ChooseCall choose_call(ffi::AnyBuffer x, ffi::AnyBuffer fill, ffi::AnyBuffer places, int64_t axis) {
  ChooseCall call = choosing(x, "places", places, axis, false);
  require_type("places", places, ffi::DataType::S32);
  require_shape("places", places, with_axis(dims_of(x), axis, call.problem.size));
  require_type("fill", fill, ffi::DataType::S32);
  require_rank_of("fill", fill, x);
  call.problem.fill[0] = require_broadcast("fill", fill, with_axis(dims_of(x), axis, 1), axis).outer;
  call.buffers.fill[0] = fill.untyped_data();
  call.buffers.out[0] = places.untyped_data();
  return call;
}

// The operands after x are arrays of rows, and then their fills: elements, or rows as long as those of x. The results
// are the arrays' chosen elements and, with `starts`, the counts; others are left to the caller.
inline ChooseCall pick_call(ffi::AnyBuffer x, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t axis,
                            bool starts) {
  const auto arrays = static_cast<int>(operands.size() / 2);
  if (operands.size() % 2 || arrays < 1 || arrays > Choose::kMostArrays)
    throw invalid("there are ", operands.size(), " operands after x, expected 2 or ", 2 * Choose::kMostArrays);
  ChooseCall call = choosing(x, "result", require_buffer("result", results, 0), axis, starts);
  Choose& problem = call.problem;
  ChooseBuffers& buffers = call.buffers;
  problem.arrays = arrays;
  const Dims whole = dims_of(x), wanted = with_axis(whole, axis, problem.size);
  for (int i = 0; i < arrays; ++i) {
    const ffi::AnyBuffer array = require_buffer("array", operands, i);
    const ffi::AnyBuffer fill = require_buffer("fill", operands, arrays + i);
    const ffi::AnyBuffer out = require_buffer("result", results, i);
    problem.bytes[i] = require_movable("array", array);
    require_shape("array", array, whole);
    require_type("fill", fill, array.element_type());
    require_rank_of("fill", fill, x);
    const int64_t length = fill.dimensions()[axis];
    if (length != 1 && (length != problem.rows.length || length == 0))
      throw invalid("fill has ", length, " elements along axis ", axis, ", expected 1 or as many as x");
    problem.is_row[i] = length != 1;
    problem.fill[i] = require_broadcast("fill", fill, with_axis(whole, axis, length), axis).outer;
    require_type("result", out, array.element_type());
    require_shape("result", out, wanted);
    buffers.array[i] = array.untyped_data();
    buffers.fill[i] = fill.untyped_data();
    buffers.out[i] = out.untyped_data();
  }
  if (!starts) return call;
  const ffi::AnyBuffer counts = require_buffer("counts", results, arrays);
  require_type("counts", counts, ffi::DataType::S32);
  require_shape("counts", counts, wanted);
  buffers.counts = static_cast<int32_t*>(counts.untyped_data());
  return call;
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

template <class Backend>
auto search_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // queries
      .template Arg<ffi::AnyBuffer>()  // sorted
      .template Ret<ffi::AnyBuffer>()  // places
      .template Attr<int64_t>("axis")
      .template Attr<bool>("right");
}

template <class Backend>
auto choose_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // x
                              .template Arg<ffi::AnyBuffer>()   // fill
                              .template Ret<ffi::AnyBuffer>())  // places
      .template Attr<int64_t>("axis");
}

template <class Backend>
auto pick_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x
      .RemainingArgs()                 // arrays, and their fills
      .RemainingRets()                 // of each array; counts; on CUDA, the workspace
      .template Attr<int64_t>("axis")
      .template Attr<bool>("starts");
}

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
      .template Attr<bool>("midpoint");
}

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

}  // namespace jaxgpuops::count
