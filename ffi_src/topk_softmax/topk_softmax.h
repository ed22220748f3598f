// The k experts that a router scores highest, and their weights: what both backends implement, in plain pointers.
//
//   score    softmax, sigmoid or sqrt(log(1 + e^z)) of the logits z, in float32
//   chosen   the k largest scores + bias, descending, ties to the lower index; without bias the k largest logits, which
//            come in the total order of their bits. Of several groups of neighbouring experts, only those of the
//            topk_groups best, by the sum of their two best scores + bias, or by their best logit
//   weight   the score of a chosen one (without bias), divided by the sum of these if `normalize`, which makes softmax
//            that of the chosen logits alone; times scale
//   log_sum  the logarithm of the sum of e^z over the whole row, in float32
#pragma once

#include <cstdint>

#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace jaxgpuops::topk_softmax {

enum class Score { kSoftmax, kSigmoid, kSqrtSoftplus };

constexpr float kFar = -40;  // for z below this, log(1 + e^z) equals e^z in every dtype

struct Problem {
  DType dtype = DType::kFloat32;  // dtype of logits and weights: float16, bfloat16, float32
  Rows rows;
  int64_t k = 0;  // 0 <= k <= rows.length < 2^31
  Score score = Score::kSoftmax;
  bool normalize = true;
  // Groups have rows.length / groups experts each; `topk_groups` of them are chosen, with at least k experts in all.
  int64_t groups = 1, topk_groups = 1;
  float scale = 1;
  Broadcast bias;

  int64_t group_size() const { return rows.length / groups; }
  // Whether a result needs a sum over a whole row, whose bits depend on which lanes add what.
  bool sums_rows(bool biased, bool log_sums) const {
    return log_sums || (score == Score::kSoftmax && (biased || !normalize));
  }
};

struct Buffers {
  const void* logits = nullptr;
  const float* bias = nullptr;  // null: the call has no bias
  void* weights = nullptr;
  int32_t* indices = nullptr;
  float* log_sums = nullptr;  // one number for each row; null: not asked for
};

}  // namespace jaxgpuops::topk_softmax
