// The reductions, as policies of the row engine (row_engine/cuda/policy.cuh explains the members), and the selection of
// the kernels compiled for an element type. The engine's kernels decide the regime. They read every operand once and
// write one number for each row.
#pragma once

#include "common/cuda/dispatch.cuh"
#include "row_engine/cuda/engine.cuh"
#include "reduce/cuda/kernels.h"
#include "reduce/plan.h"

namespace jaxgpuops::reduce {

using row_engine::Stat;

// The part that all reductions share. kMasks: the call has a `where` operand.
template <class E, bool kMasks>
struct Reduction : row_engine::PlainArgs {
  using Element = E;
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  static constexpr bool kDecoded = false, kMasked = kMasks, kHole = false, kPlainSum = false, kKeeps = false;
  static constexpr bool kFast =
      !kMasks && (E::kDType == DType::kFloat16 || E::kDType == DType::kBFloat16 || E::kDType == DType::kFloat32);
  static constexpr bool kPackColumns = false, kAlong = kFast, kSingleColumns = kMasks, kAlignedRows = kFast,
                        kOutput = false;
  static constexpr bool kNarrowIntegers = !kMasks && std::is_integral_v<Acc> && sizeof(Bits) < 4;
  static constexpr bool kPackedPeak = kNarrowIntegers || (kFast && sizeof(Bits) == 2), kPackedSum = false;
  static constexpr bool kStoredPeak = false;
  static constexpr bool kShort = false;  // short_rows.cu has that kernel

  struct Args {
    void* out;
    bool wide;
    Bits mask;    // used by Extreme: value ^ mask is larger for elements that the operation prefers
    Bits none;    // the identity, which stands in for missing elements
    Acc inverse;  // used by Sum of floats: 1 / divisor
  };
  struct Row {};
  struct Final {
    Acc value;
  };

  __device__ static Row row(const Args&, int64_t, int64_t, int64_t, int64_t) { return {}; }
  __device__ static bool skip(const Row&) { return false; }
  __device__ static Args of_statistics(const Args& args) { return args; }
  __device__ static Bits pad(const Args& args, int) { return args.none; }
  __device__ static Acc guard(Acc peak) { return peak; }
  __device__ static Acc scaled(int, Acc sum, Acc) { return sum; }
  __device__ static Acc output(const Args&, const Row&, const Final&, Acc, Acc) { return Acc(0); }
  __device__ static Acc masked_output(const Args&) { return Acc(0); }
};

template <class E, bool kMasks>
struct Sum : Reduction<E, kMasks> {
  using Base = Reduction<E, kMasks>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Final;
  using typename Base::Row;
  static constexpr int kOperands = 1, kSums = 1;
  static constexpr bool kPeak = false, kLarge = Base::kFast, kPackedSum = Base::kNarrowIntegers;

  // Adds up the bytes or halves of a word by products with ones. Only the low bits, which are stored, have to be right.
  __device__ static Acc add_word(Acc sum, uint32_t word) {
    return sizeof(typename E::Bits) == 1 ? __dp4a(word, 0x01010101u, sum) : __dp2a_lo(word, 0x0101u, sum);
  }
  __device__ static Acc value(const Args&, Acc x) { return x; }
  __device__ static Acc add(const Args&, int, Acc sum, Acc x, Acc, Acc) { return sum + x; }
  __device__ static Final finish(const Args& args, const Row&, const Stat<Sum>& stat) {
    if constexpr (std::is_floating_point_v<Acc>) return {rounded_product(stat.sum(0), args.inverse)};
    return {stat.sum(0)};
  }
  __device__ static void write_row(const Args& args, int64_t index, const Row&, const Final& final) {
    if (args.wide) {
      static_cast<Acc*>(args.out)[index] = final.value;
    } else {
      static_cast<typename E::Bits*>(args.out)[index] = E::store(final.value);
    }
  }
};

template <class Acc>
__device__ __forceinline__ Acc multiply_add(Acc a, Acc b, Acc c) {
  if constexpr (std::is_floating_point_v<Acc>) {
    return fused_multiply_add(a, b, c);
  } else {
    return a * b + c;
  }
}

template <class E, bool kMasks>
struct Dot : Sum<E, kMasks> {
  using Base = Reduction<E, kMasks>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Final;
  using typename Base::Row;
  static constexpr int kOperands = 2;
  static constexpr bool kLarge = false, kPackedSum = false;

  __device__ static Acc add(const Args&, int, Acc sum, Acc x, Acc y, Acc) { return multiply_add(x, y, sum); }
  __device__ static Final finish(const Args&, const Row&, const Stat<Dot>& stat) { return {stat.sum(0)}; }
};

// The larger of two values. NaN is larger than any number, and -0 is less than +0. All NaNs become the same one, so
// that the result does not depend on the order. A minimum is the maximum of the negated values.
// For doubles there is no branch: nvcc would branch on a comparison by cases, and the lanes of a warp would diverge.
__device__ __forceinline__ double larger(double a, double b) {
  const int64_t of_a = bits_as<int64_t>(a), of_b = bits_as<int64_t>(b);
  int64_t all = a > b ? of_a : of_b;
  if (a == b) all &= of_a;  // unless they are zeros of both signs, these are the same bits
  if (!(a <= b || a > b)) all = bits_as<int64_t>(std::numeric_limits<double>::quiet_NaN());
  return bits_as<double>(all);
}
__device__ __forceinline__ float larger(float a, float b) { return jaxgpuops::larger(a, b); }
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <class E, bool kMasks>
struct Extreme : Reduction<E, kMasks> {
  using Base = Reduction<E, kMasks>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Bits;
  using typename Base::Final;
  using typename Base::Row;
  static constexpr int kOperands = 1, kSums = 0;
  static constexpr bool kPeak = true, kNumericPeak = false, kLarge = Base::kFast;
  static constexpr bool kAlong = Base::kFast || (!kMasks && std::is_integral_v<Acc> && sizeof(Bits) == 4);
  static constexpr bool kFloats = std::is_floating_point_v<Acc>;

  __device__ static Acc ordered(const Args& args, Acc x) {
    if constexpr (kFloats) {
      return args.mask ? -x : x;
    } else {
      return x ^ args.mask;
    }
  }
  __device__ static Acc value(const Args& args, Acc x) { return ordered(args, x); }
  __device__ static Acc lowest() {
    if constexpr (kFloats) {
      return -std::numeric_limits<Acc>::infinity();
    } else {
      return Acc(0);
    }
  }
  __device__ static Acc larger(Acc a, Acc b) { return reduce::larger(a, b); }
  __device__ static uint32_t ordered_pair(const Args& args, uint32_t word) {
    if constexpr (kFloats) return word ^ (args.mask ? 0x80008000u : 0);
    return word ^ static_cast<uint32_t>(args.mask) * (sizeof(Bits) == 1 ? 0x01010101u : 0x00010001u);
  }
  __device__ static uint32_t larger_pair(uint32_t a, uint32_t b) {
    if constexpr (kFloats) return jaxgpuops::larger_pair<E, true>(a, b);
    return sizeof(Bits) == 1 ? __vmaxu4(a, b) : __vmaxu2(a, b);
  }
  __device__ static Acc ordered_value(const Args&, Acc x) { return x; }
  __device__ static Final finish(const Args& args, const Row&, const Stat<Extreme>& stat) {
    return {ordered(args, stat.peak())};
  }
  __device__ static void write_row(const Args& args, int64_t index, const Row&, const Final& final) {
    static_cast<Bits*>(args.out)[index] = E::store(final.value);
  }
};

// ---- Dispatch -------------------------------------------------------------------------------------------------------

// Calls f with the element class of the dtype.
template <class F>
cudaError_t with_element(DType dtype, F f) {
  if (is_float8(dtype)) return with_float8(dtype, f);
  return is_float(dtype) ? with_float(dtype, f) : with_integer(dtype, f);
}

// The mask for which x ^ mask, compared as an unsigned integer, has the order of the values (reversed if `smaller`).
// For floats the mask only says whether to negate: it is 0 or 1.
inline uint64_t order_mask(DType dtype, bool smaller) {
  if (is_float(dtype)) return smaller;
  const int bits = 8 * bytes_of(dtype);
  const uint64_t all = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1, sign = uint64_t{1} << (bits - 1);
  const bool is_signed = dtype >= DType::kInt8 && dtype <= DType::kInt64;
  return (smaller ? all : 0) ^ (is_signed ? sign : 0);
}

template <class P>
row_engine::Parameters<P> parameters_of(const Problem& problem, const Buffers& buffers) {
  using Bits = typename P::Bits;
  row_engine::Parameters<P> p = {};
  p.operands[0] = buffers.x;
  p.operands[1] = buffers.y;
  p.args.out = buffers.out;
  p.args.wide = problem.wide_result;
  p.args.inverse = 1 / static_cast<typename P::Acc>(problem.divisor);
  if (problem.op == Op::kMax || problem.op == Op::kMin) {
    const bool smaller = problem.op == Op::kMin;
    p.args.mask = static_cast<Bits>(order_mask(problem.dtype, smaller));
    if constexpr (std::is_floating_point_v<typename P::Acc>) {
      using Limits = std::numeric_limits<typename P::Acc>;
      const auto largest = problem.dtype == DType::kFloat8E4M3FN ? typename P::Acc(448) : Limits::infinity();
      p.args.none = P::Element::store(smaller ? largest : -largest);
    } else {
      p.args.none = p.args.mask;
    }
  }
  p.extras.where = buffers.where;
  p.extras.where_at = problem.where;
  return p;
}

template <template <class, bool> class Op>
cudaError_t launch_reduction(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                             void* workspace) {
  return with_element(problem.dtype, [&](auto element) {
    const auto run = [&](auto policy) {
      using P = decltype(policy);
      return row_engine::run<P>(stream, plan, problem.rows, parameters_of<P>(problem, buffers), workspace);
    };
    using E = decltype(element);
    return problem.masked ? run(Op<E, true>{}) : run(Op<E, false>{});
  });
}

}  // namespace jaxgpuops::reduce
