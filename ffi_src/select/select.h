// Selection by rank, as a plain struct that both backends take: the element of x[o, :, i] of rank ranks[o, j, i], and
// its index. Equal elements rank in order of appearance; ranks out of range count as the first or the last.
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "common/sort_order.h"

namespace jaxgpuops::select {

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

}  // namespace jaxgpuops::select
