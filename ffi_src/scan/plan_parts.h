// The parts of a plan: what plan.cc, which cuts an axis into tiles, takes from plan_few.cc.
#pragma once

#include <algorithm>

#include "scan/plan.h"

namespace jaxgpuops::scan {

inline int operands_of(Kind kind) {
  switch (kind) {
    case Kind::kCumulative: return 1;
    case Kind::kLinear: return 2;
    case Kind::kTangent:
    case Kind::kLinearVjp: break;
  }
  return 3;
}

// An upper bound of the number of 32-bit words in the State of the problem's policy.
inline int state_words(const Problem& problem, int bytes) {
  const int value = std::max(1, bytes / 4);
  if (problem.kind != Kind::kCumulative) return 2 * value;
  const int words = problem.op == Op::kLogSumExp ? 2 * value : value;
  const bool cut = problem.segmented || is_general(problem) || bytes == 1;
  return cut ? words + (bytes >= 8 ? 2 : 1) : words;
}

// Whether states have the same bits whatever the order of folding.
inline bool is_exact(const Problem& problem) {
  if (problem.kind != Kind::kCumulative) return false;
  if (!is_float(problem.dtype) && !is_complex(problem.dtype)) return true;
  return !is_general(problem) && (problem.op == Op::kMax || problem.op == Op::kMin);
}

// Plans a short axis, where one lane has the whole axis of a column. If the columns of an outer index are less than a
// line of memory, a block first loads whole outer indices into shared memory.
Plan plan_short(const Problem& problem, const Gpu& gpu, Plan plan, int forced);

// Whether kFew, kLaneRows or kSmall takes a longer axis, whose tiles `plan` has; then sets `plan`.
bool plan_few_elements(const Problem& problem, int forced, Plan& plan);

// Plans kPieces for few elements along an axis that is not short. Whoever else took the problem would fold it in the
// order of `plan`, and so does kPieces, unless the order does not matter. Returns `plan` where there are too many
// elements.
Plan plan_pieces(const Problem& problem, const Gpu& gpu, const Plan& plan);

// Whether a gradient in kPieces can make y of x: in the order of the forward call, of which a lane also has a run.
bool makes_y(const Problem& gradient, const Plan& plan);

}  // namespace jaxgpuops::scan
