// Reductions of segments, as a plain struct that both backends take: out[o, s, i] = the sum, the largest or the
// smallest of data[o, j, i] over all j with ids[o, j] = s. Ids out of range are dropped. Outer indices may share data:
// the sums of gradients by bin, for each of many features.
#pragma once

#include <cstdint>
#include <string>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::segments {

enum class Op { kSum, kMax, kMin };

struct Segments {
  Op op = Op::kSum;
  Rows rows;  // outer indices of the results, the length and the columns of the data
  int64_t segments = 0;
  DType dtype = DType::kFloat32;
  bool sorted = false;    // ids ascend
  bool byte_ids = false;  // ids are uint8, not int32
  int64_t id_rows = 1;    // rows of ids, which outer indices may share
  IndexMap ids, data;     // from an outer index to its first id and its first number; outer indices may share both
};

inline std::string target_name(Op op) {
  return op == Op::kSum ? "jaxgpuops.segment_sum" : op == Op::kMax ? "jaxgpuops.segment_max" : "jaxgpuops.segment_min";
}

constexpr bool accepts(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
    case DType::kComplex64:
    case DType::kComplex128: return false;
    default: return true;
  }
}

}  // namespace jaxgpuops::segments
