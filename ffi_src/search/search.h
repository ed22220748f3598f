// What the family looks for, as plain structs that both backends take.
//   searchsorted: places[o, j, i] = how many of sorted[o, :, i] come before queries[o, j, i].
//   choose: places[o, :] = where mask[o, :] is true, in order, and after the last of these fill[o].
//   pick: the elements of arrays at those places, or where elements of x[o, :] differ from the one before.
//   unique: the different elements of x[o, :] in ascending order, and after the last of these fill[o].
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/rows.h"
#include "common/sort_order.h"

namespace jaxgpuops::search {

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

struct Unique {
  Rows rows;             // of x; inner is 1
  int64_t size = 0;      // how many different elements of a row are wanted
  bool index = false;    // whether the place where each occurs first is wanted, too
  bool inverse = false;  // whether the number of each element among the different ones is wanted, too
  int bits = 32;         // bits of an element
  SortOrder order;
  bool has_fill = false;  // else the smallest element of a row is its fill
  IndexMap fill;          // where the fill of a row is; rows may share it
};

struct UniqueBuffers {
  const void* x;
  const void* fill;  // null if there is none
  void* out;
  int32_t* index;    // null if not wanted
  int32_t* inverse;  // null if not wanted
  int32_t* counts;   // how often each different element is there, 0 for fills
};

struct ChooseBuffers {
  const void* x;
  const void* array[Choose::kMostArrays];
  const void* fill[Choose::kMostArrays];
  void* out[Choose::kMostArrays];
  int32_t* counts;
};

}  // namespace jaxgpuops::search
