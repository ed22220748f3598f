// Turns the buffers and attributes of take and put into a checked problem. The handlers of both backends start here.
// The values of the indices are not checked; along_axis.h says what they must be.
#pragma once

#include "along_axis/along_axis.h"
#include "ffi.h"

namespace jaxgpuops::along_axis {

// `whole` is x of take and out of put; `part` is out of take and updates of put.
inline Problem problem_of(const char* whole_name, ffi::AnyBuffer whole, const char* part_name, ffi::AnyBuffer part,
                          ffi::AnyBuffer indices, int64_t axis) {
  Problem problem;
  problem.bytes = require_movable(whole_name, whole);
  problem.rows = require_rows(whole_name, whole, axis);
  require_rank_of(part_name, part, whole);
  problem.k = part.dimensions()[axis];
  require_type(part_name, part, whole.element_type());
  require_type("indices", indices, ffi::DataType::S32);
  require_shape(part_name, part, with_axis(dims_of(whole), axis, problem.k));
  require_shape("indices", indices, dims_of(part));
  return problem;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x or updates
      .template Arg<ffi::AnyBuffer>()  // indices
      .template Ret<ffi::AnyBuffer>()  // out
      .template Attr<int64_t>("axis");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::along_axis
