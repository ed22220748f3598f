// Moving the rows of a mixture of experts. An assignment is one choice of one token: assignment t * choices + j is the
// j-th expert of token t. A row is a place in expert order: the kept assignments of an expert, in order, then padding,
// then the next expert.
//   plan:     which assignment is in each row, which row each assignment has (-1: none), and how long groups are.
//   dispatch: out[o, r, :] = scale[o, a] x[o, a / choices, :], a = the assignment of row r; zeros if there is none.
//   combine:  out[o, t, :] = sum over j of weight[o, t * choices + j] y[o, row of that, :], in the order of j.
// One is the other's transpose.
//   combine_vjp: what combine's cotangent ct[o, t, :] gives y and the weights: dy = dispatch of ct by the weights, and
//                dw[o, t * choices + j] = sum over i of ct[o, t, i] y[o, row of that, i].
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"

namespace jaxgpuops::moe {

struct PlanProblem {
  int64_t outer = 1;        // independent plans
  int64_t assignments = 0;  // of each
  int64_t experts = 0;
  int64_t rows = 0;       // room in expert order: enough for any routing
  int64_t capacity = -1;  // assignments that an expert keeps: its first ones; negative: all
  int64_t align = 1;      // groups begin at multiples of this

  JAXGPUOPS_HOST_DEVICE int64_t kept(int64_t count) const {
    return capacity >= 0 && count > capacity ? capacity : count;
  }
  JAXGPUOPS_HOST_DEVICE int64_t padded(int64_t count) const { return (kept(count) + align - 1) / align * align; }
};

struct MoveProblem {
  int64_t outer = 1, tokens = 0, rows = 0, choices = 1;
  int64_t inner = 1;  // elements of a token or row
  DType dtype = DType::kFloat32;
  IndexMap index, weight;  // from an outer index to the first of its indices, and of its scales or weights
  IndexMap other;          // of the indices of rows, where both are followed

  int64_t assignments() const { return tokens * choices; }
};

// Computed with, as weights are.
constexpr bool accepts(DType dtype) { return is_float(dtype); }

}  // namespace jaxgpuops::moe
