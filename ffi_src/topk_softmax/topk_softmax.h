// The k experts that a router scores highest, and their weights: what both backends implement, in plain pointers.
//
//   score    softmax or sigmoid of the logits, in float32
//   chosen   the k largest scores + bias, descending, ties to the lower index; without bias the k largest logits, which
//            come in the total order of their bits
//   weight   the score of a chosen one (without bias), divided by the sum of these if `normalize`, which makes softmax
//            that of the chosen logits alone
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::topk_softmax {

struct Problem {
  DType dtype = DType::kFloat32;  // of logits and weights: float16, bfloat16, float32
  Rows rows;
  int64_t k = 0;  // 0 <= k <= rows.length < 2^31
  bool sigmoid = false;
  bool normalize = true;
  Broadcast bias;
};

struct Buffers {
  const void* logits = nullptr;
  const float* bias = nullptr;  // null: none
  void* weights = nullptr;
  int32_t* indices = nullptr;
};

}  // namespace jaxgpuops::topk_softmax
