// Softmax along an axis, what is made of it, and its derivatives. All of them see logits
//
//   z = factor * scale * x + bias     (scale and bias may be missing; they broadcast), and -inf where `where` is 0 or,
//                                     causal, where the position along the axis is after the query's,
//
// and a row's maximum m and sum of e^(z - m), which no number in between overflows or makes NaN of.
//
//   softmax           e^(z - m) / sum; a masked entry is 0, also in a row that is masked whole
//   log_softmax       z - m - log(sum); a masked entry is -inf
//   logsumexp         m + log(sum), or the two apart; -inf for a row that is masked whole, or empty
//   cross_entropy     (1 - smoothing) (lse - z_label) + smoothing (lse - mean of z) + z_loss lse^2, a number a row, and
//                     the parts of lse; with gradient: that of sum(cotangent * loss) instead, for all logits, in the
//                     same pass
//   softmax_jvp       factor scale y (t - sum of y t): the tangent of y, and the cotangent of x: it is its own
//   transpose log_softmax_jvp   factor scale (t - sum of e^y t); transposed factor scale (t - e^y sum of t)
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::softmax {

enum class Op { kSoftmax, kLogSoftmax, kLogSumExp, kCrossEntropy, kCrossEntropyGrad, kSoftmaxJvp, kLogSoftmaxJvp };

struct Problem {
  Op op = Op::kSoftmax;
  DType dtype = DType::kFloat32;  // float16, bfloat16, float32, float64
  Rows rows;
  double factor = 1;
  bool transpose = false;      // kLogSoftmaxJvp
  double label_smoothing = 0;  // kCrossEntropy, kCrossEntropyGrad
  double z_loss = 0;           // the same
  int64_t queries = 0;         // causal: the query of an outer index is outer / query_stride % queries; 0: not causal
  int64_t query_stride = 1;
  bool general =
      false;  // logits are more than a positive multiple of x, or some are masked: other kernels are compiled
  Broadcast scale, bias, where;  // where the elements of these operands are. One scale a row: its axis_stride is 0
  Broadcast row_where;           // kCrossEntropy*: which rows count; the loss and the gradient of others are 0
  Broadcast cotangent;           // kCrossEntropyGrad
};

// Operands that a call does not have are null. x, t, y and full results have the shape of the problem, row-major; row
// operands and results (outer, 1, inner).
struct Buffers {
  const void* x = nullptr;          // jvp: t
  const void* y = nullptr;          // jvp: the forward result
  const void* scale = nullptr;      // float32 (float64 where the dtype is)
  const void* bias = nullptr;       // of the dtype of x
  const uint8_t* where = nullptr;   // PRED
  const int32_t* labels = nullptr;  // kCrossEntropy*: one that is no class (negative or too large): z_label is NaN
  const uint8_t* row_where = nullptr;
  const void* cotangent = nullptr;  // float32 (float64 where the dtype is)
  void* out = nullptr;              // the full result; kCrossEntropyGrad: may be x itself
  void* loss = nullptr;             // kCrossEntropy*: float32 (float64 where the dtype is)
  void* lse = nullptr;              // kLogSumExp: of the dtype of x, or null
  // kCrossEntropy, and kLogSumExp without lse: two numbers that add up to lse. What is computed from them is as
  // accurate for large logits as for small ones; the sum is rounded to multiples of 1/16 at 10^6. Types as of the loss.
  void* maximum = nullptr;  // 0 where log_sum is not finite
  void* log_sum = nullptr;
};

}  // namespace jaxgpuops::softmax
