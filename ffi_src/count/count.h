// What the family counts, as plain structs that both backends take.
//   bincount: out[o, b, i] = how many of x[o, :, i] are b. Ids out of range are dropped.
//   histogram: counts[o, b, i] = how many of x[o, :, i] are in bin b, which begins with edges[o, b]; the last bin also
//     has its upper edge.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::count {

struct Bincount {
  Rows rows;
  int64_t bins = 0;
  int bytes = 4;  // bytes of an id
  bool is_signed = true;

  // Ids below this are counted. Ids are compared as unsigned numbers, so negative ones are not below it.
  uint64_t limit() const {
    const int bits = 8 * bytes - is_signed;
    const auto count = static_cast<uint64_t>(bins);
    return bits >= 32 ? count : std::min(count, uint64_t{1} << bits);
  }
};

struct Histogram {
  Rows rows;
  int64_t bins = 0;
  DType dtype = DType::kFloat32;
  IndexMap edges;  // from an outer index to its first edge; outer indices may share edges
};

}  // namespace jaxgpuops::count
