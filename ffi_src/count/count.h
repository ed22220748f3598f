// What the family counts, adds up and looks for, as plain structs that both backends take.
//   bincount: out[o, b, i] = how many of x[o, :, i] are b.
//   histogram: counts[o, b, i] = how many of x[o, :, i] are in bin b, which begins with edges[o, b]; the last bin has
//   its end. segments: out[o, s, i] = the sum, the largest or the smallest of data[o, j, i] over all j with ids[o, j] =
//   s. Outer
//     indices may share data: the sums of gradients by bin, for each of many features.
//   searchsorted: places[o, j, i] = how many of sorted[o, :, i] come before queries[o, j, i].
//   select: the element of x[o, :, i] of rank ranks[o, j, i], and its index: of equal ones the j-th in order of
//   appearance.
// Ids out of range are dropped; ranks out of range are moved into it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "common/sort_order.h"

namespace jaxgpuops::count {

struct Bincount {
  Rows rows;
  int64_t bins = 0;
  int bytes = 4;  // of an id
  bool is_signed = true;

  // Ids below this are counted. As unsigned numbers of their width, negative ones are not below it.
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
  IndexMap edges;  // from an outer index to its first edge; others may share them
};

enum class Op { kSum, kMax, kMin };

struct Segments {
  Op op = Op::kSum;
  Rows rows;  // outer indices of the results, the length and the columns of the data
  int64_t segments = 0;
  DType dtype = DType::kFloat32;
  bool sorted = false;  // ids ascend
  bool shared = false;  // every outer index has the same ids
  IndexMap ids, data;   // from an outer index to the first of its ids and numbers, which others may share
};

struct Search {
  Rows rows;           // of the queries
  int64_t length = 0;  // of the sorted rows
  int bits = 32;       // of an element
  SortOrder order;
  bool right = false;  // elements equal to the query come before it, too
  Broadcast sorted;    // where a query has its sorted row, which others may share

  // Whether an element comes before a query of this key.
  template <class Key>
  JAXGPUOPS_HD bool before(Key element, Key query_key) const {
    const Key key = sort_key(element, order);
    return key < query_key || (right && key == query_key);
  }
};

struct Select {
  Rows rows;
  int64_t count = 0;  // of ranks
  int bits = 32;      // of an element
  SortOrder order;
  Broadcast ranks;  // where a row has its ranks, which others may share
  // Not negative: instead of ranks. The results are whole rows: what is before the element of this rank in the order,
  // this element, and the others, all in order of appearance.
  int64_t kth = -1;

  // As a place in the row, of which there is at least one.
  JAXGPUOPS_HD int64_t rank_of(int32_t rank) const {
    return rank < 0 ? 0 : rank < rows.length ? static_cast<int64_t>(rank) : rows.length - 1;
  }
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

}  // namespace jaxgpuops::count
