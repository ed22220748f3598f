// The operations of the softmax family (but for cross_entropy.cuh), as policies of the row engine
// (row_engine/cuda/policy.cuh explains the members). The engine's kernels decide the regime and the number of passes.
// Each operation reads x (derivatives: t and y) and, if it has a full result, writes as many bytes; only rows that do
// not fit on the chip are read twice.
//
// A row's logits z have a maximum, called the peak, and a sum of e^(z - peak). Threads compute both for parts of the
// row, each sum relative to the peak of its part, and merge them. guard() replaces an infinite peak by the largest
// finite number, so that e^(-inf - peak) is 0, e^(inf - peak) is infinite, and no NaN appears that was not in the row.
// The maximum may ignore NaN, since the sum does not.
#pragma once

#include <limits>

#include "row_engine/cuda/engine.cuh"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

using row_engine::exponential;
using row_engine::Stat;

template <class Acc>
__device__ __forceinline__ Acc infinity() {
  return std::numeric_limits<Acc>::infinity();
}
template <class Acc>
__device__ __forceinline__ Acc nan() {
  return std::numeric_limits<Acc>::quiet_NaN();
}

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return called_log(x); }
__device__ __forceinline__ float logarithm_beyond_1(float x) { return log1pf(x); }
__device__ __forceinline__ double logarithm_beyond_1(double x) { return log1p(x); }
__device__ __forceinline__ float larger_number(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger_number(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float smaller_number(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double smaller_number(double a, double b) { return fmin(a, b); }

// The maximum as a result. It must be finite, so it is 0 where log_sum is not.
template <class Acc>
__device__ __forceinline__ Acc maximum_of(Acc peak, Acc log_sum) {
  return log_sum - log_sum == 0 ? peak : Acc(0);
}

// Computes factor * scale of a row.
template <class Acc>
struct Scale {
  Acc factor;
  const Acc* scale;  // null if the call has no scale
  Broadcast at;

  __device__ Acc operator()(int64_t outer, int64_t i) const {
    return scale ? rounded_product(factor, scale[at(outer, 0, i)]) : factor;
  }
};

// The constants by which e^(z - peak) of a part is computed for 16-bit logits: as 2^(base z - offset), with one
// multiply-add. offset is base * peak, rounded; the rounding error is the same for the whole part and less than 2, and
// log_of() takes it out again. From 2^24 on neighbouring logits are at least 2^12 apart, so that base can be 1, which
// needs no rounding.
template <class Acc>
struct FusedShift {
  Acc peak, base, offset;
};

// Arguments whose flag() is a compile-time constant, so that no element has to test it.
template <class Args, bool kFlag>
struct Known : Args {
  __device__ explicit Known(const Args& args) : Args(args) {}
  static constexpr bool flag() { return kFlag; }
};
// Arguments for which unscaled() is a compile-time constant: the factor of the logits is 1.
template <class Args>
struct Unscaled : Args {
  __device__ explicit Unscaled(const Args& args) : Args(args) {}
  static constexpr bool unscaled() { return true; }
};
template <class Args, class F>
__device__ __forceinline__ void with_known(const Args& args, F f) {
  if (args.flag()) {
    f(Known<Args, true>(args));
  } else {
    f(Known<Args, false>(args));
  }
}

template <class E, bool kFused>
struct ExponentialSum {
  using Element = E;
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  using Shift = std::conditional_t<kFused, FusedShift<Acc>, Acc>;
  static constexpr int kOperands = 1;
  static constexpr bool kPeak = true, kNumericPeak = true, kPackedPeak = kFused, kPackedSum = false;
  static constexpr bool kAlignedRows = true, kOutput = true;

  __device__ static Acc lowest() { return -infinity<Acc>(); }
  __device__ static Acc larger(Acc a, Acc b) { return larger_number(a, b); }
  __device__ static uint32_t larger_pair(uint32_t a, uint32_t b) { return jaxgpuops::larger_pair<E, false>(a, b); }
  template <class Args>
  __device__ static uint32_t ordered_pair(const Args&, uint32_t word) {
    return word;
  }
  __device__ static Shift guard(Acc peak) {
    constexpr Acc kLargest = std::numeric_limits<Acc>::max();
    const Acc guarded = larger_number(smaller_number(peak, kLargest), -kLargest);
    if constexpr (kFused) {
      const Acc base = fabsf(guarded) < 0x1p24f ? 1.44269504f : 1.f;
      return {guarded, base, rounded_product(base, guarded)};
    } else {
      return guarded;
    }
  }
  __device__ static Acc peak_of(const Shift& shift) {
    if constexpr (kFused) {
      return shift.peak;
    } else {
      return shift;
    }
  }
  __device__ static Acc exponential(Acc z, const Shift& shift) {
    if constexpr (kFused) {
      return fast_exp2(fused_multiply_add(z, shift.base, -shift.offset));
    } else {
      return row_engine::exponential<E>(z - shift);
    }
  }
  __device__ static Acc weight(Acc peak, const Shift& shift) {
    if constexpr (kFused) {
      return fast_exp2(rounded_sum(rounded_product(peak, shift.base), -shift.offset));
    } else {
      return exponential(peak, shift);
    }
  }
  // The logarithm of a sum of e^(z - peak).
  __device__ static Acc log_of(Acc sum, const Shift& shift) {
    if constexpr (kFused) {
      const Acc rounding = fused_multiply_add(shift.peak, shift.base, -shift.offset);
      return fused_multiply_add(rounding, -0.693147181f, logarithm(sum));
    } else {
      return logarithm(sum);
    }
  }
  template <class Args>
  __device__ static Acc add(const Args&, int, Acc sum, Acc z, Acc, const Shift& shift) {
    if constexpr (sizeof(Bits) == 4) {
      // The relative error of fast_exp2 grows with the distance from the peak, but such an element's share of the sum
      // shrinks faster, so that the sum stays accurate.
      return sum + fast_exp2(rounded_product(z - shift, 1.44269504f));
    } else {
      return sum + exponential(z, shift);
    }
  }
};

// The policy of softmax, log_softmax and logsumexp.
template <class E, bool kGeneral>
struct Softmax : ExponentialSum<E, sizeof(typename E::Bits) == 2 && !kGeneral> {
  using Base = ExponentialSum<E, sizeof(typename E::Bits) == 2 && !kGeneral>;
  using typename Base::Acc;
  using typename Base::Bits;
  using typename Base::Shift;
  static constexpr int kSums = 1;
  static constexpr bool kDecoded = kGeneral, kMasked = kGeneral, kHole = false, kPlainSum = false;
  static constexpr bool kKeeps = !kGeneral && sizeof(Bits) == 8;  // exponentials of float64 take most of the time
  static constexpr bool kStoredPeak = !kGeneral;                  // the factor is positive, so it keeps the order
  static constexpr bool kShort = false;                           // short_rows.cu has those kernels
  static constexpr bool kFast = !kGeneral && sizeof(Bits) < 8, kLarge = kFast, kPackColumns = kFast, kAlong = kFast,
                        kSingleColumns = kGeneral;

  struct Args {
    Op op;
    Bits* lse;  // null if the two summands of lse are asked for
    Acc *maximum, *log_sum;
    Scale<Acc> scale;

    __device__ bool flag() const { return op == Op::kSoftmax; }
    static constexpr bool unscaled() { return false; }
  };
  struct Row {
    Acc factor;  // used only if kGeneral
  };
  struct Final {
    Shift shift;
    Acc sum;  // kSoftmax: the inverse of the sum; kLogSoftmax, kLogSumExp: its logarithm
  };

  __device__ static Row row(const Args& args, int64_t outer, int64_t i, int64_t, int64_t) {
    return {kGeneral ? args.scale(outer, i) : args.scale.factor};
  }
  __device__ static bool skip(const Row&) { return false; }
  __device__ static Args of_statistics(Args args) {
    args.op = Op::kLogSumExp;
    return args;
  }
  template <class F>
  __device__ static void with_args(const Args& args, F f) {
    with_known(args, f);
  }
  template <class F>
  __device__ static void with_sum_args(const Args& args, F f) {
    if (!kGeneral && args.scale.factor == 1) {
      f(Unscaled<Args>(args));
    } else {
      f(args);
    }
  }
  __device__ static Bits pad(const Args&, int) { return E::store(-infinity<Acc>()); }
  template <class A>
  __device__ static Acc value(const A& args, Acc x) {
    return args.unscaled() ? x : rounded_product(x, args.scale.factor);
  }
  // This is in the order of the stored elements, because the factor is positive.
  __device__ static Acc ordered_value(const Args& args, Acc x) { return value(args, x); }
  __device__ static Acc decode(const Args&, const Row& row, Acc x) { return rounded_product(x, row.factor); }
  __device__ static Acc scaled(int, Acc sum, Acc weight) { return rounded_product(sum, weight); }

  __device__ static Final finish(const Args& args, const Row&, const Stat<Softmax>& stat) {
    const Shift shift = Base::guard(stat.peak());
    const Acc sum = stat.sum(0);
    if (args.op == Op::kLogSumExp) return {shift, Base::log_of(sum, shift)};
    if (!(sum < infinity<Acc>())) return {shift, nan<Acc>()};  // the row has an infinity or a NaN
    return {shift, args.op == Op::kSoftmax ? Acc(1) / sum : Base::log_of(sum, shift)};
  }
  __device__ static void write_row(const Args& args, int64_t index, const Row&, const Final& final) {
    if (args.op != Op::kLogSumExp) return;
    const Acc peak = Base::peak_of(final.shift);
    if (args.lse) {
      args.lse[index] = E::store(peak + final.sum);
    } else {
      args.maximum[index] = maximum_of(peak, final.sum);
      args.log_sum[index] = final.sum;
    }
  }
  template <class A>
  __device__ static Acc output(const A& args, const Row&, const Final& final, Acc z, Acc) {
    return args.flag() ? rounded_product(Base::exponential(z, final.shift), final.sum)
                       : (z - Base::peak_of(final.shift)) - final.sum;
  }
  // Kept are e^(z - peak of the span).
  template <class A>
  __device__ static bool keeps(const A& args) {
    return args.flag();
  }
  __device__ static Acc factor_of_kept(const Final& final, Acc peak) {
    return rounded_product(Base::weight(peak, final.shift), final.sum);
  }
  __device__ static Acc output_of_kept(const Final&, Acc factor, Acc kept) { return rounded_product(kept, factor); }
  __device__ static Acc masked_output(const Args& args) { return args.op == Op::kSoftmax ? Acc(0) : -infinity<Acc>(); }
};

// The part that the policies of all derivatives share. Their operand x is the tangent t.
//
// For a probability p near 1 the result depends on 1 - p, which rounding has removed from p but which the other
// probabilities still have. So a likely element is excluded from the sums: with its t as the origin, the other elements
// alone make t - sum of p t. 16-bit results cannot show the difference, so for them there is just one sum.
template <class E>
struct Tangent : row_engine::PlainArgs {
  using Element = E;
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  static constexpr bool kTails = sizeof(Bits) > 2;
  static constexpr int kOperands = 2, kSums = kTails ? 3 : 1;
  static constexpr bool kPeak = false, kDecoded = false, kHole = false, kPlainSum = false, kKeeps = false;
  static constexpr bool kPackedPeak = false, kPackedSum = false, kStoredPeak = false, kAlignedRows = true,
                        kOutput = true;
  static constexpr bool kFast = sizeof(Bits) < 8, kLarge = false, kPackColumns = kFast, kAlong = false,
                        kSingleColumns = false;

  struct Args {
    Scale<Acc> scale;
    bool transpose;

    __device__ bool flag() const { return transpose; }
  };
  struct Row {
    Acc factor;
  };
  struct Final {
    Acc origin, sum;    // the sum of p (t - origin); transposed log_softmax: the sum of p without the likely one
    Acc others, total;  // transposed log_softmax: the sum of t without the likely one, and with it
  };

  // However the p were rounded, at most one of a row is above 0.75.
  __device__ static bool is_likely(Acc p) { return p > Acc(0.75); }

  // Sum 0 adds up p t and sum 1 adds up p, both without the likely element; sum 2 is the t of the likely element.
  __device__ static Acc add_term(int k, Acc sum, Acc t, Acc p) {
    if (!kTails) return fused_multiply_add(p, t, sum);
    const bool likely = is_likely(p);
    if (k == 2) return likely ? sum + t : sum;
    return likely ? sum : k == 1 ? sum + p : fused_multiply_add(p, t, sum);
  }
  template <class S>
  __device__ static Final finish_terms(const S& stat) {
    if constexpr (!kTails) {
      return {Acc(0), stat.sum(0), Acc(0), Acc(0)};
    } else {
      return {stat.sum(2), fused_multiply_add(-stat.sum(2), stat.sum(1), stat.sum(0)), Acc(0), Acc(0)};
    }
  }

  __device__ static Row row(const Args& args, int64_t outer, int64_t i, int64_t, int64_t) {
    return {args.scale(outer, i)};
  }
  __device__ static bool skip(const Row&) { return false; }
  __device__ static Bits pad(const Args&, int) { return Bits{}; }
  __device__ static Acc value(const Args&, Acc x) { return x; }
  __device__ static Acc guard(Acc) { return Acc(0); }
  __device__ static Acc scaled(int, Acc sum, Acc) { return sum; }
  __device__ static void write_row(const Args&, int64_t, const Row&, const Final&) {}
};

// Where y is 0 the result is 0, even if t is infinite.
template <class E>
struct SoftmaxTangent : Tangent<E> {
  using typename Tangent<E>::Acc;
  using typename Tangent<E>::Args;
  using typename Tangent<E>::Row;
  using typename Tangent<E>::Final;
  static constexpr bool kMasked = false;

  __device__ static Acc add(const Args&, int k, Acc sum, Acc t, Acc y, Acc) {
    return y == 0 ? sum : Tangent<E>::add_term(k, sum, t, y);
  }
  __device__ static Final finish(const Args&, const Row&, const Stat<SoftmaxTangent>& stat) {
    return Tangent<E>::finish_terms(stat);
  }
  __device__ static Acc output(const Args&, const Row& row, const Final& final, Acc t, Acc y) {
    return y == 0 ? Acc(0) : rounded_product(rounded_product(y, (t - final.origin) - final.sum), row.factor);
  }
};

template <class E, bool kMasks>
struct LogSoftmaxTangent : Tangent<E> {
  using typename Tangent<E>::Acc;
  using typename Tangent<E>::Args;
  using typename Tangent<E>::Row;
  using typename Tangent<E>::Final;
  static constexpr bool kMasked = kMasks, kFast = Tangent<E>::kFast && !kMasks, kPackColumns = kFast,
                        kSingleColumns = kMasks;

  // Without masks, only the transpose is compiled, which gradients need (see is_general() in softmax/plan.h).
  template <class F>
  __device__ static void with_args(const Args& args, F f) {
    if constexpr (kMasks) {
      f(args);
    } else {
      f(Known<Args, true>(args));
    }
  }
  template <class F>
  __device__ static void with_sum_args(const Args& args, F f) {
    with_args(args, f);
  }
  // If transposed, sum 0 adds up t and sum 1 adds up p, both without the likely element; sum 2 is the t of the likely
  // element.
  template <class A>
  __device__ static Acc add(const A& args, int k, Acc sum, Acc t, Acc y, Acc) {
    if (!args.flag()) return Tangent<E>::add_term(k, sum, t, exponential<E>(y));
    if (!Tangent<E>::kTails) return sum + t;
    const Acc p = exponential<E>(y);
    return Tangent<E>::is_likely(p) == (k == 2) ? sum + (k == 1 ? p : t) : sum;
  }
  __device__ static Final finish(const Args& args, const Row&, const Stat<LogSoftmaxTangent>& stat) {
    if (!args.flag()) return Tangent<E>::finish_terms(stat);
    if constexpr (!Tangent<E>::kTails) {
      return {Acc(0), Acc(0), Acc(0), stat.sum(0)};
    } else {
      return {Acc(0), stat.sum(1), stat.sum(0), stat.sum(0) + stat.sum(2)};
    }
  }
  template <class A>
  __device__ static Acc output(const A& args, const Row& row, const Final& final, Acc t, Acc y) {
    Acc value;
    if (!args.flag()) {
      value = (t - final.origin) - final.sum;
    } else {
      const Acc p = exponential<E>(y);
      value = t - rounded_product(p, final.total);
      if (Tangent<E>::kTails && Tangent<E>::is_likely(p))
        value = fused_multiply_add(final.sum, final.total, -final.others);
    }
    return rounded_product(value, row.factor);
  }
  __device__ static Acc masked_output(const Args&) { return Acc(0); }
};

}  // namespace jaxgpuops::softmax
