// How the labs' C interfaces take an operand that broadcasts: as words, in the order in which they are read here.
#pragma once

#include "common/broadcast.h"

namespace jaxgpuops {

inline const int64_t* read(const int64_t* from, IndexMap& map) {
  map.groups = static_cast<int>(*from++);
  for (int g = 0; g < IndexMap::kMaxGroups; ++g) map.size[g] = *from++;
  for (int g = 0; g < IndexMap::kMaxGroups; ++g) map.stride[g] = *from++;
  return from;
}

inline Broadcast read(const int64_t* from) {
  Broadcast broadcast;
  from = read(from, broadcast.outer);
  from = read(from, broadcast.inner);
  broadcast.axis_stride = *from;
  return broadcast;
}

}  // namespace jaxgpuops
