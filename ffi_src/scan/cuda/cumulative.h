// The policies of cumulative operations: of one operator, without and with segments, and of any that is not a
// logsumexp.
#pragma once

#include "scan/cuda/operators.h"
#include "scan/cuda/policy.h"

namespace jaxgpuops::scan {

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
  // The element whose state is the identity (not of logsumexps).
  JAXGPUOPS_FN static Acc neutral(const Options& o) { return Op::result(Op::identity(o), o); }
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

template <class E>
struct AnyOperator;

// Sums, products, minima and maxima, with segments. The operator is in the options and in each state, so one kernel
// serves all of them. Rare element types use this policy without segments, too.
template <class E>
struct General {
  using Uncut = AnyOperator<E>;
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

// The same without segments, for whole rows of integers that have no kernel for their operator alone, and for runs of
// small integers in which no segment begins.
template <class E>
struct AnyOperator {
  using Of = General<E>;
  using Element = E;
  using Acc = typename E::Acc;
  using State = Acc;
  static constexpr int kOperands = 1, kResults = 1;
  static constexpr bool kNeighbour = false, kBroadcast = false, kStarts = false, kInitial = true;
  static constexpr Kind kKind = Kind::kCumulative;
  static constexpr Op kOp = Op::kProd;
  static constexpr bool kCut = false;

  JAXGPUOPS_FN static State identity(const Options& o) { return Of::none(o); }
  JAXGPUOPS_FN static Acc neutral(const Options& o) { return Of::result(Of::none(o), o); }
  JAXGPUOPS_FN static State initial(Acc h0, const Options& o) { return Of::element(h0, o); }
  JAXGPUOPS_FN static State combine(State l, State r, const Options& o) { return Of::fold(o.op, l, r); }
  JAXGPUOPS_FN static State first(const In<Acc>& in, const Options& o) { return Of::element(in.x, o); }
  JAXGPUOPS_FN static Out<Acc> step(State& state, const In<Acc>& in, const Options& o) {
    const State before = state;
    state = combine(before, first(in, o), o);
    return {Of::result(o.exclusive ? before : state, o), {}};
  }
};

}  // namespace jaxgpuops::scan

namespace jaxgpuops {

template <>
JAXGPUOPS_FN Pack reversed<uint8_t>(const Pack& pack) {
  Pack to;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t word = pack.word[3 - w], halves = word >> 16 | word << 16;
    to.word[w] = (halves >> 8 & 0xff00ff) | (halves << 8 & 0xff00ff00);
  }
  return to;
}

}  // namespace jaxgpuops
