// What a call of take or put asks for: buffers and attributes in, a checked problem out. Both backends' handlers start
// here. The values of the indices are not checked; see along_axis.h.
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
  if (part.dimensions().size() != whole.dimensions().size())
    throw invalid(part_name, " has rank ", part.dimensions().size(), ", expected ", whole.dimensions().size());
  problem.k = part.dimensions()[axis];
  require_type(part_name, part, whole.element_type());
  require_type("indices", indices, ffi::DataType::S32);
  require_shape(part_name, part, with_axis(dims_of(whole), axis, problem.k));
  require_shape("indices", indices, dims_of(part));
  return problem;
}

// What the targets take, in the order of the handlers' parameters.
template <class Backend>
auto binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x or updates
      .template Arg<ffi::AnyBuffer>()  // indices
      .template Ret<ffi::AnyBuffer>()  // out
      .template Attr<int64_t>("axis");
}

// The tables of cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::along_axis
