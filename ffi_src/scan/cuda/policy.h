// The policies: each says, for one kind of scan, what a position contributes and what its result is. A policy has
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

// ---- Cumulative operators -------------------------------------------------------------------------------------------

template <class E>
struct Sum {
  using Element = E;
  static constexpr Op kOp = Op::kSum;
  using State = typename E::Acc;
  JAXGPUOPS_FN static State identity(const Options&) { return Constant<State>::of(0); }
  JAXGPUOPS_FN static State element(State x, const Options&) { return x; }
  JAXGPUOPS_FN static State combine(State l, State r) { return add(l, r); }
  JAXGPUOPS_FN static State result(State s, const Options&) { return s; }
};

template <class E>
struct Product {
  using Element = E;
  static constexpr Op kOp = Op::kProd;
  using State = typename E::Acc;
  JAXGPUOPS_FN static State identity(const Options&) { return Constant<State>::of(1); }
  JAXGPUOPS_FN static State element(State x, const Options&) { return x; }
  JAXGPUOPS_FN static State combine(State l, State r) { return multiply(l, r); }
  JAXGPUOPS_FN static State result(State s, const Options&) { return s; }
};

// The maximum. For min, floats are multiplied by -1 before and after, and the mask reverses the order of integers.
template <class E>
struct Extreme {
  using Element = E;
  static constexpr Op kOp = Op::kMax;
  using State = float;
  JAXGPUOPS_FN static float flip(float x, const Options& o) { return x * o.sign; }
  JAXGPUOPS_FN static State identity(const Options&) { return E::lowest(); }
  JAXGPUOPS_FN static State element(float x, const Options& o) { return flip(x, o); }
  JAXGPUOPS_FN static State combine(State l, State r) { return larger(l, r); }
  JAXGPUOPS_FN static float result(State s, const Options& o) { return flip(s, o); }
};

// float64 numbers are compared as integers of the same order, in which NaN is the largest.
template <>
struct Extreme<Float64> {
  using Element = Float64;
  static constexpr Op kOp = Op::kMax;
  using State = int64_t;
  static constexpr int64_t kMagnitude = 0x7fffffffffffffff;
  JAXGPUOPS_FN static uint64_t sign(const Options& o) { return o.smaller ? ~static_cast<uint64_t>(kMagnitude) : 0; }
  JAXGPUOPS_FN static State element(double x, const Options& o) {
    if (x != x) return kMagnitude;
    const auto bits = static_cast<int64_t>(bits_as<uint64_t>(x) ^ sign(o));
    return bits < 0 ? bits ^ kMagnitude : bits;
  }
  JAXGPUOPS_FN static State identity(const Options&) { return element(Float64::lowest(), {}); }
  JAXGPUOPS_FN static State combine(State l, State r) { return l > r ? l : r; }
  JAXGPUOPS_FN static double result(State s, const Options& o) {
    return bits_as<double>(static_cast<uint64_t>(s < 0 ? s ^ kMagnitude : s) ^ sign(o));
  }
};

template <class Unsigned>
struct Extreme<Integer<Unsigned>> {
  using Element = Integer<Unsigned>;
  static constexpr Op kOp = Op::kMax;
  using Acc = typename Element::Acc;
  using State = std::conditional_t<sizeof(Unsigned) == 8, int64_t, int32_t>;
  using Signed = std::make_signed_t<Unsigned>;
  JAXGPUOPS_FN static State identity(const Options&) { return std::numeric_limits<Signed>::min(); }
  JAXGPUOPS_FN static State element(Acc x, const Options& o) {
    return static_cast<Signed>(static_cast<Unsigned>(x ^ static_cast<Acc>(o.mask)));
  }
  JAXGPUOPS_FN static State combine(State l, State r) { return l > r ? l : r; }
  JAXGPUOPS_FN static Acc result(State s, const Options& o) { return static_cast<Acc>(s) ^ static_cast<Acc>(o.mask); }
};

template <>
struct Extreme<Boolean> {
  using Element = Boolean;
  static constexpr Op kOp = Op::kMax;
  using State = uint32_t;
  JAXGPUOPS_FN static State identity(const Options&) { return 0; }
  JAXGPUOPS_FN static State element(uint32_t x, const Options& o) { return (x != 0) != o.smaller; }
  JAXGPUOPS_FN static State combine(State l, State r) { return l | r; }
  JAXGPUOPS_FN static uint32_t result(State s, const Options& o) { return (s != 0) != o.smaller; }
};

// The logarithm of a sum of exponentials, kept as the maximum m of the numbers and the sum of e^(x - m) over them.
template <class E>
struct LogSumExp {
  using Element = E;
  static constexpr Op kOp = Op::kLogSumExp;
  using Real = typename E::Acc;
  struct State {
    Real maximum, sum;
  };
  JAXGPUOPS_FN static State identity(const Options&) { return {-std::numeric_limits<Real>::infinity(), Real{0}}; }
  JAXGPUOPS_FN static State element(Real x, const Options&) { return {x, Real{1}}; }
  // If an element is NaN, the maximum is NaN, and so is the result, whatever the sum is.
  JAXGPUOPS_FN static State combine(State l, State r) {
    const Real apart = l.maximum - r.maximum;  // NaN also if both are the same infinity
    const bool left = l.maximum >= r.maximum;
    const Real factor = exp_below_one(not_nan(-std::fabs(apart)));
    return {larger(l.maximum, r.maximum), multiply_add(left ? r.sum : l.sum, factor, left ? l.sum : r.sum)};
  }
  JAXGPUOPS_FN static Real result(State s, const Options&) { return log_of_sum(s.sum, s.maximum); }

  // Folds n numbers x(i) and computes one exponential for each. sums[i] is the sum of e^(x - m) over the first i + 1
  // numbers, where m is the maximum of all n.
  template <int n, class X>
  JAXGPUOPS_FN static State fold(X x, Real* sums) {
    const Real maximum = maximum_of<n>(x);
    sums[0] = exp_below_one(x(0) - maximum);
#pragma unroll
    for (int i = 1; i < n; ++i) sums[i] = sums[i - 1] + exp_below_one(x(i) - maximum);
    return {maximum, std::fabs(maximum) == std::numeric_limits<Real>::infinity() ? Real{1} : sums[n - 1]};
  }

  // Adds n numbers, which fold() has folded to `maximum` and `sums`, to `state`; x0 is the first of them. If the
  // maximum rises far within the n numbers, it adds nothing and returns false: the sums are relative to the maximum of
  // all n, so the first results would lose digits.
  template <int n>
  JAXGPUOPS_FN static bool add(State& state, Real x0, Real maximum, const Real* sums, Real (&results)[n],
                               const Options& o) {
    const Real rise = maximum - (o.exclusive ? state.maximum : larger(state.maximum, x0));
    if (!(rise <= 4 && rise > -std::numeric_limits<Real>::infinity())) return false;
    const Real last = larger(state.maximum, maximum), factor = exp_below_one(maximum - last);
    const Real before = state.sum * exp_below_one(state.maximum - last);
    state = {last, multiply_add(sums[n - 1], factor, before)};
    if (o.exclusive) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        results[i] = log_of_sum(i == 0 ? before : multiply_add(sums[i - 1], factor, before), last);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) results[i] = log_of_sum(multiply_add(sums[i], factor, before), last);
    }
    return true;
  }

 private:
  template <int n, class X>
  JAXGPUOPS_FN static Real maximum_of(X x) {
    Real maximum = x(0);
#pragma unroll
    for (int i = 1; i < n; ++i) maximum = larger(maximum, x(i));
    return maximum;
  }
};

template <class Op, bool kSegmented>
struct Cumulative;

template <class Op>
struct Cumulative<Op, false> {
  using Element = typename Op::Element;
  using Acc = typename Element::Acc;
  using State = typename Op::State;
  static constexpr int kOperands = 1, kResults = 1;
  static constexpr bool kNeighbour = false, kBroadcast = false, kStarts = false, kInitial = true;
  static constexpr Kind kKind = Kind::kCumulative;
  static constexpr scan::Op kOp = Op::kOp;
  static constexpr bool kCut = false;

  JAXGPUOPS_FN static State identity(const Options& o) { return Op::identity(o); }
  JAXGPUOPS_FN static State initial(Acc h0, const Options& o) { return Op::element(h0, o); }
  JAXGPUOPS_FN static State combine(State l, State r, const Options&) { return Op::combine(l, r); }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) { return Op::element(in.x, o); }
  JAXGPUOPS_FN static Out<Acc> step(State& state, const In<Acc>& in, const Options& o) {
    const State before = state;
    state = Op::combine(before, Op::element(in.x, o));
    return {Op::result(o.exclusive ? before : state, o), {}};
  }
};

// The same operators with segments. The fold of positions of several segments is the fold of the last segment.
template <class Op>
struct Cumulative<Op, true> {
  using Uncut = Cumulative<Op, false>;
  using Element = typename Op::Element;
  using Acc = typename Element::Acc;
  struct State {
    typename Op::State value;  // fold of the last segment
    uint32_t cut;              // whether that segment began within these positions
  };
  static constexpr int kOperands = 1, kResults = 1;
  static constexpr bool kNeighbour = false, kBroadcast = false, kStarts = true, kInitial = true;
  static constexpr Kind kKind = Kind::kCumulative;
  static constexpr scan::Op kOp = Op::kOp;
  static constexpr bool kCut = true;

  JAXGPUOPS_FN static bool is_uncut(const Options&) { return true; }
  JAXGPUOPS_FN static State identity(const Options& o) { return {Op::identity(o), 0}; }
  JAXGPUOPS_FN static State initial(Acc h0, const Options& o) { return {Op::element(h0, o), 0}; }
  JAXGPUOPS_FN static State combine(State l, State r, const Options&) {
    return {r.cut ? r.value : Op::combine(l.value, r.value), l.cut | r.cut};
  }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) { return {Op::element(in.x, o), in.start}; }
  JAXGPUOPS_FN static Out<Acc> step(State& state, const In<Acc>& in, const Options& o) {
    const typename Op::State before = in.start ? Op::identity(o) : state.value;
    state.value = Op::combine(before, Op::element(in.x, o));
    state.cut |= in.start;
    return {Op::result(o.exclusive ? before : state.value, o), {}};
  }
};

// Sums, products, minima and maxima, with segments. The operator is in the options and in each state, so one kernel
// serves all of them. Rare element types use this policy without segments, too.
template <class E>
struct General {
  using Uncut = Cumulative<Sum<E>, false>;
  using Element = E;
  using Acc = typename E::Acc;
  struct State {
    Acc value;     // fold of the last segment; for min and max, the bits of a state of Extreme
    uint32_t cut;  // bit 0: whether that segment began within these positions; higher bits: the operator
  };
  static constexpr int kOperands = 1, kResults = 1;
  static constexpr bool kNeighbour = false, kBroadcast = false, kStarts = true, kInitial = true;
  static constexpr Kind kKind = Kind::kCumulative;
  static constexpr Op kOp = Op::kProd;  // is_rare() in shape.h decides by this operator, the rarest of them
  static constexpr bool kCut = true, kOrdered = !is_complex(E::kDType);

  JAXGPUOPS_FN static bool is_uncut(const Options& o) { return o.op == Options::kSum; }
  JAXGPUOPS_FN static uint32_t tag(const Options& o) { return static_cast<uint32_t>(o.op) << 1; }
  JAXGPUOPS_FN static Acc fold(uint32_t op, Acc l, Acc r) {
    if constexpr (kOrdered) {
      if (op == Options::kExtreme) {
        using Bits = typename Extreme<E>::State;
        return bits_as<Acc>(Extreme<E>::combine(bits_as<Bits>(l), bits_as<Bits>(r)));
      }
    }
    return op == Options::kSum ? add(l, r) : multiply(l, r);
  }
  JAXGPUOPS_FN static Acc none(const Options& o) {
    if constexpr (kOrdered)
      if (o.op == Options::kExtreme) return bits_as<Acc>(Extreme<E>::identity(o));
    return Constant<Acc>::of(o.op == Options::kSum ? 0 : 1);
  }
  JAXGPUOPS_FN static Acc element(Acc x, const Options& o) {
    if constexpr (kOrdered)
      if (o.op == Options::kExtreme) return bits_as<Acc>(Extreme<E>::element(x, o));
    return x;
  }
  JAXGPUOPS_FN static Acc result(Acc value, const Options& o) {
    if constexpr (kOrdered)
      if (o.op == Options::kExtreme) return Extreme<E>::result(bits_as<typename Extreme<E>::State>(value), o);
    return value;
  }

  JAXGPUOPS_FN static State identity(const Options& o) { return {none(o), tag(o)}; }
  JAXGPUOPS_FN static State initial(Acc h0, const Options& o) { return {element(h0, o), tag(o)}; }
  JAXGPUOPS_FN static State combine(State l, State r, const Options&) {
    return {r.cut & 1 ? r.value : fold(r.cut >> 1, l.value, r.value), l.cut | r.cut};
  }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) { return {element(in.x, o), in.start | tag(o)}; }
  JAXGPUOPS_FN static Out<Acc> step(State& state, const In<Acc>& in, const Options& o) {
    const Acc before = in.start ? none(o) : state.value;
    state.value = fold(o.op, before, element(in.x, o));
    state.cut |= in.start;
    return {result(o.exclusive ? before : state.value, o), {}};
  }
};

// ---- Linear recurrences ---------------------------------------------------------------------------------------------
// A state is the map v -> factor v + value. If the factor is 0, the result does not depend on v, even if v is NaN or
// infinite. The states of all policies below are such maps. Where a segment begins, the factor is 0.

template <class Acc>
JAXGPUOPS_FN Acc scaled(Acc factor, Acc v) {
  return is_zero(factor) ? factor : multiply(factor, v);
}

template <class E>
struct Affine {
  using Element = E;
  using Acc = typename E::Acc;
  struct State {
    Acc factor, value;
  };
  JAXGPUOPS_FN static State identity(const Options&) { return {Constant<Acc>::of(1), Constant<Acc>::of(0)}; }
  JAXGPUOPS_FN static State combine(State l, State r, const Options&) {
    return {multiply(l.factor, r.factor), applied(r.factor, l.value, r.value)};
  }
  // Returns factor v + value. A v of 0 stays 0, even if the factor, a product, has overflowed.
  JAXGPUOPS_FN static Acc applied(Acc factor, Acc v, Acc value) {
    return is_zero(factor) || is_zero(v) ? value : multiply_add(factor, v, value);
  }
  // The map whose result is always h0.
  JAXGPUOPS_FN static State initial(Acc h0, const Options&) { return {Constant<Acc>::of(0), h0}; }

  // Takes one step of a recurrence and returns q. Sets q = factor v + u and then v = q; if `passed`, sets q = v + u and
  // then v = factor q.
  JAXGPUOPS_FN static Acc advance(State& s, Acc factor, Acc u, bool passed) {
    const Acc one = Constant<Acc>::of(1);
    const Acc before = passed ? one : factor, after = passed ? factor : one;
    const Acc q = is_zero(before) ? u : multiply_add(before, s.value, u);
    s.value = scaled(after, q);
    s.factor = multiply(s.factor, factor);
    return q;
  }
  JAXGPUOPS_FN static State begin(Acc factor, Acc u, bool passed) { return {factor, passed ? scaled(factor, u) : u}; }
};

// The recurrence h_k = a_k h_{k-1} + b_k; transposed, h_k = a_{k-1} h_{k-1} + b_k.
template <class E>
struct Linear : Affine<E> {
  using Base = Affine<E>;
  using typename Base::Acc;
  using typename Base::State;
  static constexpr int kOperands = 2, kResults = 1;
  static constexpr bool kNeighbour = false, kBroadcast = true, kStarts = true, kInitial = true;
  static constexpr Kind kKind = Kind::kLinear;
  static constexpr Op kOp = Op::kSum;
  static constexpr bool kCut = false;

  JAXGPUOPS_FN static Acc factor(const In<Acc>& in) { return in.start ? Constant<Acc>::of(0) : in.a; }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) {
    return Base::begin(factor(in), in.x, o.transpose);
  }
  JAXGPUOPS_FN static Out<Acc> step(State& s, const In<Acc>& in, const Options& o) {
    return {Base::advance(s, factor(in), in.x, o.transpose), {}};
  }
};

// The cotangent of b is the transposed recurrence over the cotangent of h. The cotangent of a_k is that of b_k times
// h_{k-1}.
template <class E>
struct LinearVjp : Affine<E> {
  using Base = Affine<E>;
  using typename Base::Acc;
  using typename Base::State;
  static constexpr int kOperands = 3, kResults = 2;
  static constexpr bool kNeighbour = true, kBroadcast = false, kStarts = true, kInitial = false;
  static constexpr Kind kKind = Kind::kLinearVjp;
  static constexpr Op kOp = Op::kSum;
  static constexpr bool kCut = false;

  // Returns the h before the first position if there is no h0.
  JAXGPUOPS_FN static Acc edge(const Options&) { return Constant<Acc>::of(0); }
  JAXGPUOPS_FN static Acc factor(const In<Acc>& in) { return in.start ? Constant<Acc>::of(0) : in.a; }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options&) { return Base::begin(factor(in), in.x, true); }
  JAXGPUOPS_FN static Out<Acc> step(State& s, const In<Acc>& in, const Options&) {
    const Acc db = Base::advance(s, factor(in), in.x, true);
    return {in.start ? Constant<Acc>::of(0) : multiply(db, in.neighbour), db};
  }
};

// ---- Tangents of cumulative operators -------------------------------------------------------------------------------
// Each position has a factor c and a weight w, which are computed from x and y. Then
//   inclusive:  v = c v + w t; dy = v           transposed:  q = v + t; dx = w q; v = c q
//   exclusive:  dy = v; v = c v + w t           transposed:  dx = w v; v = c v + t

// Factors of logsumexps, which are near 1, are multiplied by adding their logarithms, which are differences of results:
// along an axis of n positions, the rounding errors of n products would add up. So a state has the factor, or, where
// by_log() says so, its logarithm.

template <class Acc>
struct Weights {
  Acc factor, weight;
  Acc log;  // the logarithm of the factor, where by_log() says so
};

template <class E>
struct ProductWeights {
  using Element = E;
  using Acc = typename E::Acc;
  static constexpr bool kNeighbour = true;
  JAXGPUOPS_FN static bool by_log(const Options&) { return false; }
  JAXGPUOPS_FN static Acc edge(const Options&) { return Constant<Acc>::of(1); }
  JAXGPUOPS_FN static Weights<Acc> of(const In<Acc>& in, const Options& o) {
    if (o.exclusive) return {in.a, in.y, {}};
    return {in.a, in.start ? Constant<Acc>::of(1) : in.neighbour, {}};
  }
};

template <class E>
struct ExtremeWeights {
  using Element = E;
  using Acc = typename E::Acc;
  static constexpr bool kNeighbour = false;
  JAXGPUOPS_FN static bool by_log(const Options&) { return false; }
  JAXGPUOPS_FN static Acc edge(const Options&) { return Acc{0}; }
  JAXGPUOPS_FN static Weights<Acc> of(const In<Acc>& in, const Options& o) {
    const bool beyond = o.exclusive && (o.smaller ? in.a < in.y : in.a > in.y);
    const bool taken = in.a == in.y || in.a != in.a || beyond;
    return {taken ? Acc{0} : Acc{1}, taken ? Acc{1} : Acc{0}, {}};
  }
};

template <class E>
struct LogSumExpWeights {
  using Element = E;
  using Acc = typename E::Acc;
  static constexpr bool kNeighbour = true;
  JAXGPUOPS_FN static bool by_log(const Options&) { return true; }
  JAXGPUOPS_FN static Acc edge(const Options& o) {
    const Acc infinity = std::numeric_limits<Acc>::infinity();
    return o.exclusive ? infinity : -infinity;
  }
  // low - high, where low <= high except for rounding errors. These must not be cut off: along a long axis, results
  // that rise by less than their rounding also fall at many positions. Differences above 1 are only those to another
  // segment, which nothing uses.
  JAXGPUOPS_FN static Acc difference(Acc low, Acc high, const Options& o) {
    const Acc d = low == high ? Acc{0} : low - high;
    return o.segmented && d > 1 ? Acc{1} : d;
  }
  // The results before and after a position, in the direction of the forward call.
  JAXGPUOPS_FN static Acc before(const In<Acc>& in, const Options& o) { return o.exclusive ? in.y : in.neighbour; }
  JAXGPUOPS_FN static Acc after(const In<Acc>& in, const Options& o) { return o.exclusive ? in.neighbour : in.y; }
  JAXGPUOPS_FN static Weights<Acc> of(const In<Acc>& in, const Options& o) {
    const bool nothing = in.a == -std::numeric_limits<Acc>::infinity();
    const Acc log = difference(before(in, o), after(in, o), o);
    return {exp_below_one(log), nothing ? Acc{0} : exp_below_one(difference(in.a, after(in, o), o)), log};
  }
  // The logarithm of the factor of a run of n positions: the differences between them add up to that of its ends.
  template <int n, class At>
  JAXGPUOPS_FN static Acc log_of_run(At at, const Options& o) {
    if (o.segmented) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (at(i).start) return -std::numeric_limits<Acc>::infinity();
    }
    return o.transpose ? difference(before(at(n - 1), o), after(at(0), o), o)
                       : difference(before(at(0), o), after(at(n - 1), o), o);
  }
};

// The factors and weights of the operator that the options name. One kernel serves all three operators.
template <class E>
struct AnyWeights {
  using Element = E;
  using Acc = typename E::Acc;
  static constexpr bool kNeighbour = true;
  JAXGPUOPS_FN static bool by_log(const Options& o) { return o.op == Options::kLogSumExp; }
  JAXGPUOPS_FN static Acc edge(const Options& o) {
    return o.op == Options::kProduct ? ProductWeights<E>::edge(o) : LogSumExpWeights<E>::edge(o);
  }
  JAXGPUOPS_FN static Weights<Acc> of(const In<Acc>& in, const Options& o) {
    switch (o.op) {
      case Options::kProduct: return ProductWeights<E>::of(in, o);
      case Options::kExtreme: return ExtremeWeights<E>::of(in, o);
      default: return LogSumExpWeights<E>::of(in, o);
    }
  }
};

// Factors and weights that were computed before and are passed as a and y. (The logarithm is that of a whole run.)
template <class E>
struct ReadyWeights {
  using Element = E;
  using Acc = typename E::Acc;
  static constexpr bool kNeighbour = false;
  JAXGPUOPS_FN static bool by_log(const Options&) { return false; }
  JAXGPUOPS_FN static Acc edge(const Options&) { return Acc{0}; }
  JAXGPUOPS_FN static Weights<Acc> of(const In<Acc>& in, const Options&) { return {in.a, in.y, {}}; }
};

template <class W>
struct Tangent : Affine<typename W::Element> {
  using Base = Affine<typename W::Element>;
  using typename Base::Acc;
  using typename Base::Element;
  using typename Base::State;
  static constexpr int kOperands = 3, kResults = 1;
  static constexpr bool kNeighbour = W::kNeighbour, kBroadcast = false, kStarts = true, kInitial = false;
  static constexpr Kind kKind = Kind::kTangent;
  static constexpr Op kOp = Op::kSum;
  static constexpr bool kCut = false;

  JAXGPUOPS_FN static Acc edge(const Options& o) { return W::edge(o); }
  JAXGPUOPS_FN static State identity(const Options& o) {
    return {Constant<Acc>::of(W::by_log(o) ? 0 : 1), Constant<Acc>::of(0)};
  }
  JAXGPUOPS_FN static State combine(State l, State r, const Options& o) {
    if constexpr (!is_complex(Element::kDType))
      if (W::by_log(o)) return {l.factor + r.factor, Base::applied(exp_below_one(r.factor), l.value, r.value)};
    return Base::combine(l, r, o);
  }
  JAXGPUOPS_FN static Weights<Acc> weights(const In<Acc>& in, const Options& o) {
    Weights<Acc> w = W::of(in, o);
    if (in.start) {
      w.factor = Constant<Acc>::of(0);
      if constexpr (!is_complex(Element::kDType)) w.log = -std::numeric_limits<Acc>::infinity();
    }
    return w;
  }
  JAXGPUOPS_FN static Acc input(Acc weight, Acc t, const Options& o) { return o.transpose ? t : scaled(weight, t); }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) {
    const Weights<Acc> w = weights(in, o);
    State s = Base::begin(w.factor, input(w.weight, in.x, o), o.transpose && !o.exclusive);
    if (W::by_log(o)) s.factor = w.log;
    return s;
  }
  JAXGPUOPS_FN static Out<Acc> step(State& s, const In<Acc>& in, const Options& o) {
    const Weights<Acc> w = weights(in, o);
    const Acc before = in.start ? Constant<Acc>::of(0) : s.value;
    const Acc log = add(s.factor, w.log);
    const Acc q = Base::advance(s, w.factor, input(w.weight, in.x, o), o.transpose && !o.exclusive);
    if (W::by_log(o)) s.factor = log;
    const Acc taken = o.exclusive ? before : q;
    return {o.transpose ? scaled(w.weight, taken) : taken, {}};
  }
};

// ---- Runs of positions ----------------------------------------------------------------------------------------------
// These functions apply first() and step() to n positions, whose operands at(i) returns. They are faster than a loop
// where a policy has a special form for runs, or where the call has only the most common options.

template <class Policy>
constexpr bool kByParts = false;
template <class E>
constexpr bool kByParts<Cumulative<LogSumExp<E>, false>> = true;
// Whether a policy with segments treats a run in which no segment begins as its operator without segments would (see
// kByParts).
template <class Policy>
constexpr bool kCutParts = false;
template <class E>
constexpr bool kCutParts<Cumulative<LogSumExp<E>, true>> = true;
// So do sums of bytes without segments, to which the choice of an operator would be most of the work.
template <>
constexpr bool kCutParts<General<Integer<uint8_t>>> = true;
constexpr int kPart = 16;

template <class Policy>
constexpr bool kAnyWeights = false;
template <class E>
constexpr bool kAnyWeights<Tangent<AnyWeights<E>>> = true;
// Whether fold_run() keeps factors and weights for step_run(): of more positions there are too few registers for that.
template <class Policy, int n>
constexpr bool kKeepsWeights = kAnyWeights<Policy> && n <= 8;

// What fold_run() keeps for step_run() of the same n positions: exponentials, or factors and weights. To compute them
// again would cost more than the registers do.
template <class Policy, int n>
struct Kept {};
template <class E, int n>
struct Kept<Cumulative<LogSumExp<E>, false>, n> {
  static constexpr int kOne = n < kPart ? n : kPart;
  typename E::Acc maximum[n / kOne], sums[n];
};
template <class E, int n>
struct Kept<Tangent<AnyWeights<E>>, n> {
  In<typename E::Acc> in[kKeepsWeights<Tangent<AnyWeights<E>>, n> ? n : 1];
};

template <class Policy>
constexpr bool kRare = is_rare(Policy::kKind, Policy::kOp, Policy::kCut, Policy::Element::kDType);

template <class W, int n, class At>
JAXGPUOPS_FN void make_ready(In<typename W::Acc> (&in)[n], At at, const Options& o) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    in[i] = at(i);
    const auto weights = W::of(in[i], o);
    in[i].a = weights.factor;
    in[i].y = weights.weight;
  }
}

// Calls body(policy, at, options) for a run of n positions. For AnyWeights, it first computes the factors and weights
// of all n positions, so that the operator is tested once and not for each position.
template <class Policy, int n, class At, class Body>
JAXGPUOPS_FN void with_policy(At at, const Options& o, Body body) {
  if constexpr (kAnyWeights<Policy>) {
    using E = typename Policy::Element;
    In<typename E::Acc> in[n];
    switch (o.op) {
      case Options::kProduct: make_ready<ProductWeights<E>, n>(in, at, o); break;
      case Options::kExtreme: make_ready<ExtremeWeights<E>, n>(in, at, o); break;
      default: make_ready<LogSumExpWeights<E>, n>(in, at, o);
    }
    body(Tangent<ReadyWeights<E>>{}, [&](int i) { return in[i]; }, o);
  } else {
    body(Policy{}, at, o);
  }
}

// Calls body(policy, at, options) as above, but with the most common options as compile-time constants. So body() is
// compiled twice, for these options and for all others. Tangents are compiled only for the common options, since others
// take Layout::kSpans; rare policies only for all options, to keep the code small.
template <class Policy, int n, bool kSpans, class At, class Body>
JAXGPUOPS_FN void with_constants(At at, const Options& o, Body body) {
  if constexpr (Policy::kKind == Kind::kCumulative || kRare<Policy> || kSpans) {
    with_policy<Policy, n>(at, o, body);
  } else if (Policy::kKind != Kind::kTangent && !is_plain(Policy::kKind, o)) {
    with_policy<Policy, n>(at, o, body);
  } else {
    const auto uncut = [&](int i) {
      auto in = at(i);
      in.start = false;
      return in;
    };
    Options simple = {};
    simple.op = o.op;
    simple.smaller = o.smaller;
    // Two calls make o.transpose a constant in each.
    if (Policy::kKind == Kind::kLinear && !o.transpose) {
      with_policy<Policy, n>(uncut, simple, body);
    } else {
      simple.transpose = true;
      with_policy<Policy, n>(uncut, simple, body);
    }
  }
}

// Sets the logarithm of the factor of `state` after n positions more than `before`, if its factor is one.
template <class Policy, int n, class State, class At>
JAXGPUOPS_FN void set_log(State& state, const State& before, At at, const Options& o) {
  if constexpr (kAnyWeights<Policy>)
    if (AnyWeights<typename Policy::Element>::by_log(o))
      state.factor = before.factor + LogSumExpWeights<typename Policy::Element>::template log_of_run<n>(at, o);
}

// Folds a run of n positions. Layout::kSpans does not use it.
template <class Policy, int n, class At>
JAXGPUOPS_FN typename Policy::State fold_run(At at, const Options& options, Kept<Policy, n>& kept) {
  typename Policy::State state;
  if constexpr (kByParts<Policy>) {
    constexpr int kOne = Kept<Policy, n>::kOne;
#pragma unroll
    for (int begin = 0; begin < n; begin += kOne) {
      const auto part = LogSumExp<typename Policy::Element>::template fold<kOne>([&](int i) { return at(begin + i).x; },
                                                                                 kept.sums + begin);
      kept.maximum[begin / kOne] = part.maximum;
      state = begin == 0 ? part : Policy::combine(state, part, options);
    }
  } else {
    with_constants<Policy, n, false>(at, options, [&](auto policy, auto ready, const Options& o) {
      state = policy.first(ready(0), o);
#pragma unroll
      for (int i = 1; i < n; ++i) policy.step(state, ready(i), o);
      set_log<Policy, n>(state, Policy::identity(o), at, o);
      if constexpr (kKeepsWeights<Policy, n>) {
#pragma unroll
        for (int i = 0; i < n; ++i) kept.in[i] = ready(i);
      }
    });
  }
  return state;
}

template <class Policy, int n, class At>
JAXGPUOPS_FN typename Policy::State fold_run(At at, const Options& options) {
  Kept<Policy, n> kept;
  return fold_run<Policy, n>(at, options, kept);
}

// Folds n positions into `state`.
template <class Policy, int n, bool kSpans = false, class At>
JAXGPUOPS_FN void fold_on(typename Policy::State& state, At at, const Options& options) {
  if constexpr (kByParts<Policy>) {
    state = Policy::combine(state, fold_run<Policy, n>(at, options), options);
  } else {
    const typename Policy::State before = state;
    with_constants<Policy, n, kSpans>(at, options, [&](auto policy, auto ready, const Options& o) {
#pragma unroll
      for (int i = 0; i < n; ++i) policy.step(state, ready(i), o);
      set_log<Policy, n>(state, before, at, o);
    });
  }
}

// Folds n positions into `state`, and calls put(i, result) for each.
template <class Policy, int n, bool kSpans = false, class At, class Put>
JAXGPUOPS_FN void step_run(typename Policy::State& state, At at, const Options& options, Put put) {
  if constexpr (kByParts<Policy>) {
    Kept<Policy, n> kept;
    fold_run<Policy, n>(at, options, kept);
    step_run<Policy, n>(state, at, options, put, kept);
  } else {
    with_constants<Policy, n, kSpans>(at, options, [&](auto policy, auto at, const Options& o) {
#pragma unroll
      for (int i = 0; i < n; ++i) put(i, policy.step(state, at(i), o));
    });
  }
}

// The same after fold_run() of these positions. Layout::kSpans does not use it.
template <class Policy, int n, class At, class Put>
JAXGPUOPS_FN void step_run(typename Policy::State& state, At at, const Options& options, Put put,
                           const Kept<Policy, n>& kept) {
  if constexpr (kByParts<Policy>) {
    using Fold = LogSumExp<typename Policy::Element>;
    constexpr int kOne = Kept<Policy, n>::kOne;
#pragma unroll
    for (int begin = 0; begin < n; begin += kOne) {
      typename Policy::Acc results[kOne];
      if (!Fold::template add<kOne>(state, at(begin).x, kept.maximum[begin / kOne], kept.sums + begin, results,
                                    options)) {
#pragma unroll
        for (int i = 0; i < kOne; ++i) results[i] = Policy::step(state, at(begin + i), options).first;
      }
#pragma unroll
      for (int i = 0; i < kOne; ++i) put(begin + i, Out<typename Policy::Acc>{results[i], {}});
    }
  } else if constexpr (kKeepsWeights<Policy, n>) {
    Options plain = {};  // other tangents take Layout::kSpans
    plain.transpose = true;
#pragma unroll
    for (int i = 0; i < n; ++i) put(i, Tangent<ReadyWeights<typename Policy::Element>>::step(state, kept.in[i], plain));
  } else {
    step_run<Policy, n>(state, at, options, put);
  }
}

}  // namespace jaxgpuops::scan
