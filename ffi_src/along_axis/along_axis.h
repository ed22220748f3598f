// take: out[o, j, i] = x[o, indices[o, j, i], i].   put: zeros of the full length, then out[o, indices[o, j, i], i] =
// updates[o, j, i]. Indices are int32. Those of take are in range. Those of put are distinct along the axis, so that no
// atomics are needed; updates whose index is out of range are dropped: if the axis is split over devices, they belong
// to another device.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::along_axis {

struct Problem {
  Rows rows;      // dimensions of the long side: x of take, out of put
  int64_t k = 0;  // length of the axis on the short side: out of take, updates of put
  int bytes = 4;  // bytes of an element: 1, 2, 4 or 8
};

}  // namespace jaxgpuops::along_axis
