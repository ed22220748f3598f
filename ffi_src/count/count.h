// What the family counts, adds up and looks for, as plain structs that both backends take.
//   bincount: out[o, b, i] = how many of x[o, :, i] are b.
//   histogram: counts[o, b, i] = how many of x[o, :, i] are in bin b, which begins with edges[o, b]; the last bin also
//     has its upper edge.
//   segments: out[o, s, i] = the sum, the largest or the smallest of data[o, j, i] over all j with ids[o, j] = s. Outer
//     indices may share data: the sums of gradients by bin, for each of many features.
//   choose: places[o, :] = where mask[o, :] is true, in order, and after the last of these fill[o].
//   pick: the elements of arrays at those places, or where elements of x[o, :] differ from the one before.
//   searchsorted: places[o, j, i] = how many of sorted[o, :, i] come before queries[o, j, i].
//   select: the element of x[o, :, i] of rank ranks[o, j, i], and its index; equal elements rank in order of
//   appearance.
// Ids out of range are dropped; ranks out of range count as the first or the last.
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

struct Search {
  Rows rows;           // rows of the queries
  int64_t length = 0;  // length of a sorted row
  int bits = 32;       // bits of an element
  SortOrder order;
  bool right = false;  // elements equal to the query come before it, too
  Broadcast sorted;    // where the sorted row of a query is; queries may share it

  // Whether an element comes before a query of this key.
  template <class Key>
  JAXGPUOPS_HD bool before(Key element, Key query_key) const {
    const Key key = sort_key(element, order);
    return key < query_key || (right && key == query_key);
  }
};

struct Choose {
  Rows rows;            // of x; inner is 1
  int64_t size = 0;     // how many places of a row are wanted
  bool starts = false;  // x has elements, of which those are chosen that differ from the one before; else it is a mask
  int bits = 8;         // bits of an element
  SortOrder order;
  // The results are the chosen elements of so many arrays of rows, each with fills, or places if there are none. With
  // `starts`, there is one result more: how far it is from each place to the next one, or to the end, and 0 for fills.
  static constexpr int kMostArrays = 2;
  int arrays = 0;
  int bytes[kMostArrays] = {4, 4};  // of an element of a result
  IndexMap fill[kMostArrays];       // where the fill of a row is; rows may share it
  bool is_row[kMostArrays] = {};    // whether that is a row, of which the element at the first chosen place is the fill
};

struct ChooseBuffers {
  const void* x;
  const void* array[Choose::kMostArrays];
  const void* fill[Choose::kMostArrays];
  void* out[Choose::kMostArrays];
  int32_t* counts;
};

struct Select {
  Rows rows;
  int64_t count = 0;  // how many ranks
  int bits = 32;      // bits of an element
  SortOrder order;
  Broadcast ranks;  // where the ranks of a row are; rows may share them
  // If not 0, the results are so many quantiles: of the elements of the first ranks and, if there are twice as many, of
  // those of the next ones. The last rank is that of the last element of the row, which shows whether there is a NaN.
  int64_t quantiles = 0;
  bool midpoint = false;          // the mean of both elements; else the number that is a share of the way between them
  Broadcast shares;               // where the shares of a row are; a share of NaN gives NaN
  DType dtype = DType::kFloat32;  // of quantiles
  // If not negative, this rank replaces `ranks`, and the results are whole rows: the elements before the one of this
  // rank in the order, that one, and all others, each group in order of appearance.
  int64_t kth = -1;

  // Returns the rank, or the nearest one that the row has. The row is not empty.
  JAXGPUOPS_HD int64_t rank_of(int32_t rank) const {
    return rank < 0 ? 0 : rank < rows.length ? static_cast<int64_t>(rank) : rows.length - 1;
  }
  JAXGPUOPS_HD int64_t results() const { return quantiles ? quantiles : count; }  // of a row
  // The number of the rank of the upper one of the two elements of a quantile.
  JAXGPUOPS_HD int64_t upper(int64_t quantile) const { return count > quantiles + 1 ? quantile + quantiles : quantile; }
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
