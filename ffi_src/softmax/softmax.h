// Softmax along an axis, the operations derived from it, and their derivatives. All of them start from the logits
//
//   z = factor * scale * x + bias
//
// where scale and bias are optional and broadcast. z is -inf where `where` is 0 and, in a causal call, where the
// position along the axis is after the query's position. The operations use the maximum m of a row and the sum of
// e^(z - m). Both are computed so that no intermediate result overflows or introduces a NaN.
//
//   softmax             e^(z - m) / sum; a masked entry is 0, also in a row whose entries are all masked
//   log_softmax         z - m - log(sum); a masked entry is -inf
//   logsumexp           lse = m + log(sum), or its two summands as separate results; -inf for a row that is empty or
//                       whose entries are all masked
//   cross_entropy       one loss for each row, and the two summands of lse. The loss is
//                       (1 - smoothing) (lse - z_label) + smoothing (lse - mean of z) + z_loss lse^2
//   cross_entropy_grad  the same loss, and for all logits the gradient of sum(cotangent * loss)
//   softmax_jvp         factor scale y (t - sum of y t), the tangent of y for a tangent t of x. The map is symmetric,
//                       so the same formula makes the cotangent of x from that of y
//   log_softmax_jvp     factor scale (t - sum of e^y t); transposed: factor scale (t - e^y sum of t)
//   logsumexp_grad      cotangent e^(x - m) / sum, the cotangent of x from that of its row's lse; 0 where x is -inf
//                       or the probability rounds to 0
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::softmax {

enum class Op {
  kSoftmax,
  kLogSoftmax,
  kLogSumExp,
  kCrossEntropy,
  kCrossEntropyGrad,
  kSoftmaxJvp,
  kLogSoftmaxJvp,
  kLogSumExpGrad
};

struct Problem {
  Op op = Op::kSoftmax;
  DType dtype = DType::kFloat32;  // float16, bfloat16, float32, float64
  Rows rows;
  double factor = 1;
  bool transpose = false;      // kLogSoftmaxJvp: apply the transposed map
  bool of_logits = false;      // derivatives: y is the operand of the forward pass, not its result
  double label_smoothing = 0;  // used by kCrossEntropy and kCrossEntropyGrad
  double z_loss = 0;           // used by kCrossEntropy and kCrossEntropyGrad
  int64_t queries = 0;  // number of queries of a causal call, 0 if not causal; query = outer / query_stride % queries
  int64_t query_stride = 1;
  // Whether z is anything but a positive multiple of x, or some entries are masked. Kernels are compiled for either
  // case.
  bool general = false;
  Broadcast scale, bias, where;  // where the elements of these operands are; one scale for each row: axis_stride is 0
  Broadcast row_where;           // kCrossEntropy*: the rows that count; the loss and the gradient of other rows are 0
  Broadcast cotangent;           // used by kCrossEntropyGrad and kLogSumExpGrad
};

// Pointers of operands and results that a call does not have are null. x, t, y and `out` have the shape of the problem,
// row-major. Arrays with one element for each row have the shape (outer, 1, inner).
struct Buffers {
  const void* x = nullptr;         // derivatives: the tangent t
  const void* y = nullptr;         // derivatives: the forward result; if of_logits, x
  const void* scale = nullptr;     // float32; float64 if x is float64
  const void* bias = nullptr;      // the same dtype as x
  const uint8_t* where = nullptr;  // PRED, that is bytes of 0 or 1
  // kCrossEntropy*: a label that is negative or too large is no class; its z_label is NaN
  const int32_t* labels = nullptr;
  const uint8_t* row_where = nullptr;
  // kCrossEntropyGrad: float32; float64 if x is float64. kLogSumExpGrad: the same dtype as x
  const void* cotangent = nullptr;
  void* out = nullptr;   // the result of full shape; kCrossEntropyGrad: may be the buffer of x
  void* loss = nullptr;  // kCrossEntropy*: float32; float64 if x is float64
  void* lse = nullptr;   // kLogSumExp: the same dtype as x, or null
  // kCrossEntropy, and kLogSumExp if lse is null: the two summands of lse, in the same dtype as the loss. A loss
  // computed from the summands is as accurate for large logits as for small ones; their float32 sum would be rounded to
  // multiples of 1/16 at 10^6.
  void* maximum = nullptr;  // 0 where log_sum is not finite
  void* log_sum = nullptr;
};

}  // namespace jaxgpuops::softmax
