// Scans along an axis. All of them are first-order recurrences of the same form: each position makes an element of a
// monoid from its own operands (and those of one neighbour), the elements are folded along the axis, and each position
// makes its result from the fold up to it.
//
//   cumulative   y_k = x_0 . x_1 . .. . x_k for an associative operator
//   tangent      the derivative of a cumulative operator as a linear map of t, or the transpose of that map
//   linear       h_k = a_k h_{k-1} + b_k
//   linear_vjp   the cotangents of a and b, from that of h
//
// "Before" and k - 1 refer to the direction of the scan: `reverse` scans run from the end of the axis to its start.
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::scan {

enum class Kind { kCumulative, kTangent, kLinear, kLinearVjp };

enum class Op {
  kSum,
  kProd,
  kMax,
  kMin,
  kLogSumExp
};  // operators of kCumulative and kTangent; the tangent of a sum is a sum, so kTangent has no kSum

struct Problem {
  Kind kind = Kind::kCumulative;
  Op op = Op::kSum;
  DType dtype = DType::kFloat32;
  Rows rows;
  bool reverse = false;    // kTangent, kLinearVjp: whether the forward call was reversed
  bool exclusive = false;  // kCumulative, kTangent: y_k is the fold before k; it starts with the identity
  bool transpose = false;  // kTangent: the transposed map. kLinear: h_k = a_{k-1} h_{k-1} + b_k, the transpose of the
                           // recurrence in the other direction
  bool from_x = false;     // kTangent: there is no y; the kernel makes it of x
  // There is an operand h0, the state before the first step, even if a segment starts there. Without it, that state is
  // 0, or the identity of the operator. kTangent has no h0.
  bool initial = false;
  // There is an operand `starts`: a segment begins at each position where it is not 0, and nothing passes from one
  // segment to the next. Positions are those of the array, also if the scan runs backward.
  bool segmented = false;
  Broadcast a;  // kLinear: where the elements of a are. In kLinearVjp, a has the whole shape
  Broadcast starts;
};

// The type of h0: a sum of elements has more digits than an element.
constexpr DType h0_dtype(const Problem& problem) {
  const bool sums = problem.kind == Kind::kCumulative && problem.op != Op::kMax && problem.op != Op::kMin;
  return sums && is_float(problem.dtype) && bytes_of(problem.dtype) < 4 ? DType::kFloat32 : problem.dtype;
}

// Operands that a kind does not have are null. All but a, h0 and starts have the shape of the problem, row-major; h0 is
// (outer, 1, inner).
struct Buffers {
  // Cumulative: x.  tangent: t, or the cotangent of y.  linear: b.  linear_vjp: cotangent of h.
  const void* x = nullptr;
  const void* a = nullptr;  // tangent: x.     linear, linear_vjp: a
  const void* y = nullptr;  // tangent: y (null if from_x).     linear_vjp: h
  const void* h0 = nullptr;
  const uint8_t* starts = nullptr;
  void* out = nullptr;   // linear_vjp: the cotangent of a
  void* out2 = nullptr;  // linear_vjp: the cotangent of b
};

}  // namespace jaxgpuops::scan
