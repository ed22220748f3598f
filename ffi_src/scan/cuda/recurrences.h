// The policies of linear recurrences and of their gradients.
//
// A state is the map v -> factor v + value. If the factor is 0, the result does not depend on v, even if v is NaN or
// infinite. The states of tangents are such maps, too. Where a segment begins, the factor is 0.
#pragma once

#include "common/cuda/element.h"
#include "scan/cuda/policy.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

template <class Acc>
JAXGPUOPS_FN Acc scaled(Acc factor, Acc v) {
  return is_zero(factor) ? factor : multiply(factor, v);
}

// Returns the factor of two maps in turn. If one of their factors is 0, so is the result, even if the other one is NaN
// or infinite.
template <class Acc>
JAXGPUOPS_FN Acc product(Acc l, Acc r) {
  return is_zero(l) ? l : scaled(r, l);
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
    return {product(l.factor, r.factor), applied(r.factor, l.value, r.value)};
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
    s.factor = product(s.factor, factor);
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

}  // namespace jaxgpuops::scan
