// What a policy is: it says, for one kind of scan, what a position contributes and what its result is. The policies are
// in cumulative.h, recurrences.h and tangents.h. A policy has
//
//   State                      an element of the policy's monoid; also the fold of several elements
//   identity, combine          the identity and the operation of the monoid; combine(identity, s, options) is s
//   initial(h0)                if kInitial: the state before the first position
//   first(in)                  the element of one position
//   step(state, in)            folds one more position into `state`, and returns the result of that position
//
// A run of positions is therefore folded twice: once for its sum and, when the fold of everything before the run is
// known, once more for its results. Between the two, a lane keeps only the operands.
#pragma once

#include "common/cuda/element.h"
#include "scan/cuda/shape.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

// What a policy must know about the problem.
struct Options {
  enum Operator : uint32_t { kSum, kProduct, kExtreme, kLogSumExp };
  Operator op = kSum;  // the operator, for policies that serve several (General, AnyWeights)
  bool exclusive = false;
  bool transpose = false;
  bool segmented = false;
  bool smaller = false;  // min rather than max
  float sign = 1;        // floats are multiplied by this before a maximum is taken; -1 for min
  // Integers are replaced by x ^ mask, as signed numbers, before a maximum is taken. The mask makes unsigned numbers
  // signed, and reverses the order for min.
  uint64_t mask = 0;
};

// The operands of one position.
template <class Acc>
struct In {
  Acc x, a, y;    // elements of the operands of the same names in Buffers
  Acc neighbour;  // the y of the position before or after (the policy says which); edge() if there is no such position
  bool start;     // whether a segment begins here, or right after (the policy says which)
};

template <class Acc>
struct Out {
  Acc first, second;
};

}  // namespace jaxgpuops::scan
