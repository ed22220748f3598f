// Turns the buffers and attributes of a target into a checked problem. The handlers of both backends start here.
#pragma once

#include "ffi.h"
#include "search/search.h"

namespace jaxgpuops::search {

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

struct UniqueCall {
  Unique problem;
  UniqueBuffers buffers = {};
};

// The second operand, if there is one, is the fill. The results are the elements, the places where they are first (with
// `index`), the numbers of all elements among them (with `inverse`), and their counts; others are left to the caller.
inline UniqueCall unique_call(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results, int64_t axis,
                              bool index, bool inverse) {
  UniqueCall call;
  Unique& problem = call.problem;
  const Element element = require_ordered("x", x);
  problem.bits = element.bits;
  problem.order = sort_order_of(element, false);
  problem.rows = require_rows("x", x, axis);
  problem.index = index;
  problem.inverse = inverse;
  if (problem.rows.inner != 1) throw invalid("x has dimensions after axis ", axis);
  call.buffers.x = x.untyped_data();
  const ffi::AnyBuffer out = require_buffer("result", results, 0);
  require_type("result", out, x.element_type());
  require_rank_of("result", out, x);
  problem.size = require_rows("result", out, axis).length;
  const Dims wanted = with_axis(dims_of(x), axis, problem.size);
  require_shape("result", out, wanted);
  call.buffers.out = out.untyped_data();
  const auto integers = [&](const char* name, int i, const Dims& dims) {
    const ffi::AnyBuffer buffer = require_buffer(name, results, i);
    require_type(name, buffer, ffi::DataType::S32);
    require_shape(name, buffer, dims);
    return static_cast<int32_t*>(buffer.untyped_data());
  };
  if (index) call.buffers.index = integers("index", 1, wanted);
  if (inverse) call.buffers.inverse = integers("inverse", 1 + index, dims_of(x));
  call.buffers.counts = integers("counts", 1 + index + inverse, wanted);
  problem.has_fill = rest.size() > 0;
  if (problem.has_fill) {
    Rest fills(rest);
    const ffi::AnyBuffer fill = fills.next("fill");
    fills.require_end();
    require_type("fill", fill, x.element_type());
    require_rank_of("fill", fill, x);
    problem.fill = require_broadcast("fill", fill, with_axis(dims_of(x), axis, 1), axis).outer;
    call.buffers.fill = fill.untyped_data();
  } else if (problem.rows.length == 0 && problem.size > 0) {
    throw invalid("x has no elements and there is no fill");
  }
  return call;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.

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
auto unique_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x
      .RemainingArgs()                 // fill
      .RemainingRets()                 // elements, index, inverse, counts; on CUDA, the workspace
      .template Attr<int64_t>("axis")
      .template Attr<bool>("index")
      .template Attr<bool>("inverse");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::search
