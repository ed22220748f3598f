// Turns the buffers and attributes of the sort target into a checked problem. The handlers of both backends start here.
#pragma once

#include "ffi.h"
#include "sort/keys.h"
#include "sort/sort.h"

namespace jaxgpuops::sort {

struct Call {
  Problem problem;
  const void* x = nullptr;
  void* values = nullptr;            // null if not wanted
  int32_t* indices = nullptr;        // null if not wanted
  const int32_t* offsets = nullptr;  // of segments, if there are any
  const int32_t* carried = nullptr;  // numbers in place of indices, if there are any
};

// The results are the values, the indices, or both in this order. Results that follow them (on CUDA, the workspace) are
// left to the caller.
inline Call sort_call(ffi::AnyBuffer x, ffi::RemainingRets results, int64_t axis, bool descending, bool values,
                      bool indices, int64_t kth) {
  if (!values && !indices) throw invalid("neither values nor indices are asked for");
  const Element element = require_ordered("x", x);
  Call call;
  Problem& problem = call.problem;
  problem.rows = require_rows("x", x, axis);
  problem.k = problem.rows.length;
  problem.kth = kth;
  if (kth >= 0 && kth >= problem.rows.length)
    throw invalid("kth is ", kth, ", x has ", problem.rows.length, " elements along axis ", axis);
  problem.key_bits = element.bits;
  problem.order = sort_order_of(element, descending);
  problem.values = values;
  problem.indices = indices;
  call.x = x.untyped_data();
  if (values) {
    const ffi::AnyBuffer out = require_buffer("values", results, 0);
    require_type("values", out, x.element_type());
    require_shape("values", out, dims_of(x));
    call.values = out.untyped_data();
  }
  if (indices) {
    const ffi::AnyBuffer out = require_buffer("indices", results, values ? 1 : 0);
    require_type("indices", out, ffi::DataType::S32);
    require_shape("indices", out, dims_of(x));
    call.indices = static_cast<int32_t*>(out.untyped_data());
  }
  return call;
}

// The handler of a sort may have a second operand: numbers that are moved with the elements. They stand in place of the
// indices.
inline Call carrying_call(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results, int64_t axis,
                          bool descending, bool values, bool indices, int64_t kth) {
  Call call = sort_call(x, results, axis, descending, values, indices, kth);
  if (rest.size() == 0) return call;
  if (!indices || kth >= 0) throw invalid("carried numbers take the place of the indices of a whole sort");
  Rest numbers(rest);
  const ffi::AnyBuffer carried = numbers.next("carried");
  numbers.require_end();
  require_type("carried", carried, ffi::DataType::S32);
  require_shape("carried", carried, dims_of(x));
  call.problem.carries = true;
  call.carried = static_cast<const int32_t*>(carried.untyped_data());
  return call;
}

inline Call segments_call(ffi::AnyBuffer x, ffi::AnyBuffer offsets, ffi::RemainingRets results, int64_t axis,
                          bool descending, bool values, bool indices) {
  Call call = sort_call(x, results, axis, descending, values, indices, -1);
  require_type("offsets", offsets, ffi::DataType::S32);
  require_rank_of("offsets", offsets, x);
  call.problem.offsets = require_rows("offsets", offsets, axis).length;
  if (call.problem.offsets == 0) throw invalid("offsets is empty along axis ", axis);
  call.problem.offsets_at =
      require_broadcast("offsets", offsets, with_axis(dims_of(x), axis, call.problem.offsets), axis);
  call.offsets = static_cast<const int32_t*>(offsets.untyped_data());
  return call;
}

struct KeysCall {
  KeysProblem problem;
  const uint32_t *high, *low;
  int32_t* indices;
};

inline KeysCall keys_call(ffi::AnyBuffer high, ffi::AnyBuffer low, ffi::AnyBuffer indices, int64_t axis,
                          bool descending) {
  KeysCall call;
  call.problem.rows = require_rows("high", high, axis);
  const auto order_of = [&](const char* name, ffi::AnyBuffer key) {
    const Element element = require_ordered(name, key);
    if (element.bits != 32) throw invalid(name, " has elements of ", element.bits, " bits, expected 32");
    return sort_order_of(element, descending);
  };
  call.problem.high = order_of("high", high);
  call.problem.low = order_of("low", low);
  require_shape("low", low, dims_of(high));
  require_type("indices", indices, ffi::DataType::S32);
  require_shape("indices", indices, dims_of(high));
  call.high = static_cast<const uint32_t*>(high.untyped_data());
  call.low = static_cast<const uint32_t*>(low.untyped_data());
  call.indices = static_cast<int32_t*>(indices.untyped_data());
  return call;
}

template <class Backend>
auto keys_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // the key that counts most
                              .template Arg<ffi::AnyBuffer>()   // the other one
                              .template Ret<ffi::AnyBuffer>())  // indices
      .template Attr<int64_t>("axis")
      .template Attr<bool>("descending");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::sort
