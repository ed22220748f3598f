// Runs of positions. These functions apply first() and step() to n positions, whose operands at(i) returns. They are
// faster than a loop where a policy has a special form for runs, or where the call has only the most common options.
#pragma once

#include "scan/cuda/cumulative.h"
#include "scan/cuda/policy.h"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {

template <class Policy>
constexpr bool kByParts = false;
template <class E>
constexpr bool kByParts<Cumulative<LogSumExp<E>, false>> = true;
// Whether a policy with segments treats a run in which no segment begins as the operator without segments would
// (see kByParts).
template <class Policy>
constexpr bool kCutParts = false;
template <class E>
constexpr bool kCutParts<Cumulative<LogSumExp<E>, true>> = true;
// So do small integers, of which the choice of an operator and the tests for segments would be most of the work.
template <>
constexpr bool kCutParts<General<Integer<uint8_t>>> = true;
template <>
constexpr bool kCutParts<General<Integer<uint16_t>>> = true;
constexpr int kPart = 16;

template <class Policy>
constexpr bool kAnyWeights = false;
template <class E>
constexpr bool kAnyWeights<Tangent<AnyWeights<E>>> = true;
template <class Policy>
constexpr bool kLogWeights = false;
template <class E>
constexpr bool kLogWeights<Tangent<LogSumExpWeights<E>>> = true;
template <class Policy>
constexpr bool kAnyOperator = false;
template <class E>
constexpr bool kAnyOperator<AnyOperator<E>> = true;
// Whether states have the same bits whatever the order of folding.
template <class Policy>
constexpr bool kExact = false;
template <class E>
constexpr bool kExact<Cumulative<Extreme<E>, false>> = true;
template <class Unsigned>
constexpr bool kExact<Cumulative<Sum<Integer<Unsigned>>, false>> = true;
template <class Unsigned>
constexpr bool kExact<AnyOperator<Integer<Unsigned>>> = true;
template <>
constexpr bool kExact<General<Boolean>> = true;
// Whether tiles of rows begin where vectors of memory do, not where the row does. Then all rows are copied as whole
// vectors. Only where results have the same bits wherever tiles begin.
template <class Policy>
constexpr bool kCutAtVectors = kExact<Policy>;
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
// of all n positions, so that the operator is tested once and not for each position. For AnyOperator, it makes the
// operator a constant in each of three calls.
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
  } else if constexpr (kAnyOperator<Policy>) {
    Options one = o;
    switch (o.op) {
      case Options::kSum: one.op = Options::kSum; return body(Policy{}, at, one);
      case Options::kProduct: one.op = Options::kProduct; return body(Policy{}, at, one);
      default: one.op = Options::kExtreme; return body(Policy{}, at, one);
    }
  } else {
    body(Policy{}, at, o);
  }
}

// Calls body(policy, at, options) as above, but with the most common options as compile-time constants. So body() is
// compiled twice, for these options and for all others; to keep the code small, rare policies are compiled only for all
// options, and so are gradients of recurrences where kSpans. Tangents with other options take Layout::kSpans, so in
// other layouts they are compiled only for the common ones.
template <class Policy, int n, bool kSpans, class At, class Body>
JAXGPUOPS_FN void with_constants(At at, const Options& o, Body body) {
  if constexpr (Policy::kKind == Kind::kCumulative || kRare<Policy> || (kSpans && !kAnyWeights<Policy>)) {
    with_policy<Policy, n>(at, o, body);
  } else if ((Policy::kKind != Kind::kTangent || kSpans) && !is_plain(Policy::kKind, o)) {
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

// Calls body(options) for calls without segments, of recurrences with the direction of the factors as a constant, and
// of AnyOperator with the operator. So body() is compiled two or three times for them.
template <class Policy, class Body>
JAXGPUOPS_FN void with_call(const Options& options, Body body) {
  if constexpr (Policy::kKind == Kind::kLinear) {
    Options constant = {};
    if (options.transpose) {
      constant.transpose = true;
      body(constant);
    } else {
      body(constant);
    }
  } else if constexpr (kAnyOperator<Policy>) {
    with_policy<Policy, 1>([](int) { return 0; }, options, [&](auto, auto, const Options& o) { body(o); });
  } else {
    body(options);
  }
}

// Sets the logarithm of the factor of `state` after n positions more than `before`, if its factor is one.
template <class Policy, int n, class State, class At>
JAXGPUOPS_FN void set_log(State& state, const State& before, At at, const Options& o) {
  if constexpr (kAnyWeights<Policy> || kLogWeights<Policy>)
    if (kLogWeights<Policy> || AnyWeights<typename Policy::Element>::by_log(o))
      state.factor =
          log_product(before.factor, LogSumExpWeights<typename Policy::Element>::template log_of_run<n>(at, o));
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

// Whether rows of one tile are folded pack by pack, so that a lane may have a run of four packs (rows.cuh) or one pack
// (few.cuh): four packs are folded as two pairs. (Other policies have the same bits in any order, or have no few.)
template <class Policy>
constexpr bool kByQuads = (Policy::kKind == Kind::kCumulative || Policy::kKind == Kind::kLinear) && !Policy::kCut &&
                          !kByParts<Policy> && !kExact<Policy>;

// Folds four packs of n positions. `before` are the folds of what comes before the second, third and fourth of them.
template <class Policy, int n, class At, class State>
JAXGPUOPS_FN State fold_quad(At at, const Options& options, State (&before)[3]) {
  State packs[4];
  with_constants<Policy, 4 * n, false>(at, options, [&](auto policy, auto ready, const Options& o) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      packs[j] = policy.first(ready(j * n), o);
#pragma unroll
      for (int i = 1; i < n; ++i) policy.step(packs[j], ready(j * n + i), o);
    }
  });
  before[0] = packs[0];
  before[1] = Policy::combine(packs[0], packs[1], options);
  before[2] = Policy::combine(before[1], packs[2], options);
  return Policy::combine(before[1], Policy::combine(packs[2], packs[3], options), options);
}

// Goes over the same positions from `state` on, and calls put(i, result) for each.
template <class Policy, int n, class At, class Put, class State>
JAXGPUOPS_FN void step_quad(const State& state, At at, const Options& options, Put put, const State (&before)[3]) {
  State states[4] = {state};
#pragma unroll
  for (int j = 1; j < 4; ++j) states[j] = Policy::combine(state, before[j - 1], options);
  with_constants<Policy, 4 * n, false>(at, options, [&](auto policy, auto at, const Options& o) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < n; ++i) put(j * n + i, policy.step(states[j], at(j * n + i), o));
  });
}

// Whether row_look_ahead, whose lanes have runs of 16 bits, takes a run pack by pack (logsumexps: part by part), in a
// loop, from shared memory. That needs fewer registers. (Shorter calls, and other elements, take longer then.)
template <class Policy>
constexpr bool kByPacks =
    sizeof(typename Policy::Element::Bits) == 2 && Policy::kOperands <= 2 && !kAnyOperator<Policy>;
// How many packs it takes at a time.
template <class Policy>
constexpr int kPacksAtOnce =
    kByParts<Policy> ? kPart * static_cast<int>(sizeof(typename Policy::Element::Bits)) / 16 : 1;

// The operands of element i of `packs`, some of each operand. Bit i of `starts` says whether a segment begins.
template <class Policy, int packs_at_once>
JAXGPUOPS_FN In<typename Policy::Acc> input_of(const Pack (&packs)[packs_at_once][Policy::kOperands], uint32_t starts,
                                               int i) {
  using Element = typename Policy::Element;
  constexpr int n = 16 / sizeof(typename Element::Bits);
  const auto load = [&](int operand) {
    return Element::load(get<typename Element::Bits>(packs[i / n][operand], i % n));
  };
  In<typename Policy::Acc> in = {};
  in.x = load(0);
  if constexpr (Policy::kOperands > 1) in.a = load(1);
  in.start = Policy::kStarts && (starts >> i & 1);
  return in;
}

// Folds a run of kPacks packs: take(j, packs) loads the j-th of each operand.
template <class Policy, int kPacks, class Take>
JAXGPUOPS_FN typename Policy::State fold_packs(Take take, uint32_t starts, const Options& options) {
  constexpr int kOnce = kPacksAtOnce<Policy>, n = kOnce * 16 / sizeof(typename Policy::Element::Bits);
  typename Policy::State state = Policy::identity(options);
#pragma unroll 1
  for (int j = 0; j < kPacks; j += kOnce) {
    Pack packs[kOnce][Policy::kOperands];
#pragma unroll
    for (int k = 0; k < kOnce; ++k) take(j + k, packs[k]);
    const auto at = [&](int i) { return input_of<Policy>(packs, starts >> (j * n / kOnce), i); };
    if constexpr (kByParts<Policy>) {
      const auto part = fold_run<Policy, n>(at, options);
      state = j == 0 ? part : Policy::combine(state, part, options);
    } else {
      with_constants<Policy, n, false>(at, options, [&](auto policy, auto ready, const Options& o) {
        if (j == 0) {
          state = policy.first(ready(0), o);
        } else {
          policy.step(state, ready(0), o);
        }
#pragma unroll
        for (int i = 1; i < n; ++i) policy.step(state, ready(i), o);
      });
    }
  }
  return state;
}

// Goes over the same run from `state` on, and calls put(j, results of pack j).
template <class Policy, int kPacks, class Take, class Put>
JAXGPUOPS_FN void step_packs(typename Policy::State state, Take take, uint32_t starts, const Options& options,
                             Put put) {
  using Element = typename Policy::Element;
  constexpr int kOnce = kPacksAtOnce<Policy>, of_pack = 16 / sizeof(typename Element::Bits), n = kOnce * of_pack;
#pragma unroll 1
  for (int j = 0; j < kPacks; j += kOnce) {
    Pack packs[kOnce][Policy::kOperands];
#pragma unroll
    for (int k = 0; k < kOnce; ++k) take(j + k, packs[k]);
    typename Policy::Acc results[n];
    step_run<Policy, n>(
        state, [&](int i) { return input_of<Policy>(packs, starts >> (j * of_pack), i); }, options,
        [&](int i, const auto& out) { results[i] = out.first; });
#pragma unroll
    for (int k = 0; k < kOnce; ++k) put(j + k, pack_of<Element>(results + k * of_pack));
  }
}

}  // namespace jaxgpuops::scan
