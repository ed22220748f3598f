// Moves the rows of a mixture of experts. An assignment is one choice of one token: assignment t * choices + j is the
// j-th expert of token t. Rows are in the order of experts: the kept assignments of an expert, in order, then padding,
// then those of the next expert.
//
//   plan:     the assignment of each row, the row of each assignment (-1: none), and the length of each expert's group
//   dispatch: out[o, r, :] = scale[o, a] x[o, a / choices, :] with a = the assignment of row r; zeros if it has none
//   combine:  out[o, t, :] = sum over j of weight[o, t * choices + j] y[o, row of that, :], in the order of j
//
// dispatch and combine are the transposes of each other.
//
//   combine_vjp: for combine's cotangent ct, the cotangents of y and of the weights: dy is the dispatch of ct by the
//                weights, and dw[o, t * choices + j] = sum over i of ct[o, t, i] y[o, row of that, i]
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"

namespace jaxgpuops::moe {

struct PlanProblem {
  int64_t outer = 1;        // number of independent plans
  int64_t assignments = 0;  // assignments of each plan
  int64_t experts = 0;
  int64_t rows = 0;       // rows in the order of experts: enough for any routing
  int64_t capacity = -1;  // an expert keeps this many assignments, the first ones; negative: all
  int64_t align = 1;      // the group of each expert begins at a multiple of this

  JAXGPUOPS_HOST_DEVICE int64_t kept(int64_t count) const {
    return capacity >= 0 && count > capacity ? capacity : count;
  }
  JAXGPUOPS_HOST_DEVICE int64_t padded(int64_t count) const {
    return align == 1 ? kept(count) : (kept(count) + align - 1) / align * align;
  }
};

struct MoveProblem {
  int64_t outer = 1, tokens = 0, rows = 0, choices = 1;
  int64_t inner = 1;  // elements of a token or row
  DType dtype = DType::kFloat32;
  // Whether weights have the dtype of the rows, which has 16 bits. Else they are float32, or float64 if the rows are.
  bool narrow = false;
  IndexMap index, weight;  // from an outer index to the first of its indices, and to its first scale or weight
  IndexMap other;          // where the assignment of each row is, if a call follows both kinds of indices

  JAXGPUOPS_HOST_DEVICE int64_t assignments() const { return tokens * choices; }
};

// Elements are multiplied by weights, so they must be floats.
constexpr bool accepts(DType dtype) { return is_float(dtype); }

}  // namespace jaxgpuops::moe
