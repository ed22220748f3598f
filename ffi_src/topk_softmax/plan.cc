#include "topk_softmax/plan.h"

#include <stdexcept>
#include <string>

namespace jaxgpuops::topk_softmax {
namespace {

// Few rows: up to so many, the latency of a row counts. A bias or groups take the other kernel longer.
constexpr int64_t kFewRows = 1024, kFewHardRows = 2048;
constexpr int64_t kFewLength = 256;  // the most logits of a warp
constexpr int64_t kFewK = 16;        // k rounds take time, and sums of more terms have another order

bool are_few(Rows rows, int64_t k, int64_t groups, bool biased, bool sums_rows) {
  if (rows.length > kFewLength || k > kFewK || sums_rows) return false;
  if (biased || groups > 1) return rows.count() <= kFewHardRows;
  // Networks are faster for 64 logits, and so is the kernel that looks for one of more than 128.
  return rows.count() <= kFewRows && (rows.length > 64 || k > 8) && (rows.length <= 128 || k > 1);
}

// Rows of so few logits that a lane for each takes less time than eight, if there are many.
constexpr int64_t kManyRows = 8192, kManyLongerRows = 12288;  // of up to 8 logits, and of more

bool are_short(Rows rows, int64_t k, int64_t groups, bool biased, bool sums_rows) {
  return rows.length <= kShortLength && k <= kShortK && groups == 1 && !biased && !sums_rows &&
         rows.count() > (rows.length <= 8 ? kManyRows : kManyLongerRows);
}

// Rows of so few logits that comparing all with all takes less time than networks or thresholds. It takes as long for
// any k, so networks are better for small k in many rows.
bool are_ranked(Rows rows, int64_t k, int64_t groups, bool biased, bool sums_rows) {
  if (rows.length > kRankedLength || groups > 1 || biased || sums_rows) return false;
  if (k > kShortK) return rows.length <= kRankedLength / 2 || rows.count() <= 2048;
  return rows.length <= kShortLength && rows.count() <= kManyRows;
}

}  // namespace

// Chooses few lanes for a row, so that a shuffle serves several rows at once; but a lane must have registers for its
// elements, and a row needs two maxima of lanes for each of k. Lanes of eight elements sort them by networks. With
// groups, each team size has one number of elements.
Plan plan_topk_softmax(Rows rows, int64_t k, int64_t groups, bool biased, bool sums_rows) {
  Plan plan;
  if (rows.count() == 0 || k == 0) return plan;
  if (rows.length > kMaxLength || k > kMaxK || groups > kMaxGroups)
    throw std::invalid_argument("no kernel takes k = " + std::to_string(k) + " of " + std::to_string(rows.length) +
                                " in " + std::to_string(groups) + " groups");
  plan.empty = false;
  if (are_ranked(rows, k, groups, biased, sums_rows)) {
    plan.ranked = true;
    plan.team = rows.length <= 8 ? 8 : rows.length <= 16 ? 16 : 32;
    plan.elements = static_cast<int>((rows.length + plan.team - 1) / plan.team);
    return plan;
  }
  if (are_few(rows, k, groups, biased, sums_rows)) {
    plan.elements = rows.length <= 128 ? 4 : 8;
    plan.few = groups == 1 || rows.length / groups % plan.elements == 0;  // no lane has logits of two groups
    plan.team = 32;
    if (plan.few) return plan;
  }
  if (are_short(rows, k, groups, biased, sums_rows)) {
    plan.team = 1;
    plan.elements = rows.length <= 8 ? 8 : 16;
    return plan;
  }
  plan.team = rows.length <= 256 && k <= 16 ? 8 : rows.length <= 512 && k <= 32 ? 16 : 32;
  plan.elements = plan.team > 8 || rows.length > 128 || groups > 1 ? 32 : rows.length > 64 || k > 8 ? 16 : 8;
  return plan;
}

}  // namespace jaxgpuops::topk_softmax
