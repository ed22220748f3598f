// The policies of tangents of cumulative operations.
//
// Each position has a factor c and a weight w, which are computed from x and y. Then
//   inclusive:  v = c v + w t; dy = v           transposed:  q = v + t; dx = w q; v = c q
//   exclusive:  dy = v; v = c v + w t           transposed:  dx = w v; v = c v + t
//
// Factors of logsumexps, which are near 1, are multiplied by adding their logarithms, which are differences of results:
// along an axis of n positions, the rounding errors of n products would add up. So a state has the factor, or, where
// by_log() says so, its logarithm.
#pragma once

#include "scan/cuda/operators.h"
#include "scan/cuda/policy.h"
#include "scan/cuda/recurrences.h"

namespace jaxgpuops::scan {

template <class Acc>
struct Weights {
  Acc factor, weight;
  Acc log;  // the logarithm of the factor, where by_log() says so
};

// e^x for x <= 0, or little more. (CUDA's exponential of float64 would be a call for each of several numbers.)
JAXGPUOPS_FN float exp_of_difference(float x) { return exp_below_one(x); }
JAXGPUOPS_FN double exp_of_difference(double x) { return x == x ? exp_of_term(x) : x; }

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
    return {exp_of_difference(log), nothing ? Acc{0} : exp_of_difference(difference(in.a, after(in, o), o)), log};
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

// The logarithm of `product`: -inf stands for 0.
template <class Acc>
JAXGPUOPS_FN Acc log_product(Acc l, Acc r) {
  const Acc zero = -std::numeric_limits<Acc>::infinity();
  return l == zero || r == zero ? zero : l + r;
}

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
      if (W::by_log(o))
        return {log_product(l.factor, r.factor), Base::applied(exp_of_difference(r.factor), l.value, r.value)};
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
    const Acc log = s.factor;
    const Acc q = Base::advance(s, w.factor, input(w.weight, in.x, o), o.transpose && !o.exclusive);
    if constexpr (!is_complex(Element::kDType))
      if (W::by_log(o)) s.factor = log_product(log, w.log);
    const Acc taken = o.exclusive ? before : q;
    return {o.transpose ? scaled(w.weight, taken) : taken, {}};
  }
};

}  // namespace jaxgpuops::scan
