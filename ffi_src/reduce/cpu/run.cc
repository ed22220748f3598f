// Reductions on the CPU. Each operation is a monoid: its loops reduce the elements of a block, then the blocks of a
// row. Every element is read once.
#include <cmath>
#include <limits>
#include <type_traits>

#include "common/cpu/narrow_float.h"
#include "common/ordered_key.h"
#include "common/cpu/simd_reduce.h"
#include "common/cpu/strips.h"
#include "common/cpu/transpose.h"
#include "reduce/cpu/run.h"

namespace jaxgpuops::reduce::cpu {
namespace {

// ---- Monoids --------------------------------------------------------------------------------------------------------
// A monoid reduces elements of a block as type Value, and blocks of a row as type Total.

template <class Format_>
struct Sum {
  using Op = Add;
  using Format = Format_;
  using Bits = typename Format::Bits;
  using Value = decltype(Format::decode(Bits{}));
  using Total = std::conditional_t<std::is_floating_point_v<Value>, double, Value>;
  static constexpr bool kDirect = std::is_same_v<Bits, Value>;  // elements can be used as values without a conversion
  static constexpr bool kPairs = false, kZeros = false;

  Value identity = 0;
  Value inverse = 1;  // 1 / divisor, for sums of floats
  JAXGPUOPS_INLINE Value value(Bits x, Bits) const { return Format::decode(x); }
  JAXGPUOPS_INLINE Bits result(Value total) const {
    if constexpr (std::is_floating_point_v<Value>) total *= inverse;
    return Format::encode(total);
  }
};

// Takes two neighbouring bfloat16 elements as one element of 32 bits. Splitting such a word costs less than widening
// two 16-bit numbers.
struct SumOfPairs : Sum<BFloat16> {
  using Bits = uint32_t;
  JAXGPUOPS_INLINE float value(Bits x, Bits) const { return bits_as<float>(x << 16) + bits_as<float>(x & 0xffff0000u); }
};

template <class Format>
struct Dot : Sum<Format> {
  using typename Sum<Format>::Bits;
  using typename Sum<Format>::Value;
  static constexpr bool kDirect = false, kPairs = true;

  JAXGPUOPS_INLINE Value value(Bits x, Bits y) const {
    // a product of two uint16 would be an int and could overflow
    if constexpr (std::is_same_v<Value, uint16_t>) return static_cast<Value>(1u * x * y);
    return static_cast<Value>(Format::decode(x) * Format::decode(y));
  }
};

// Maximum or minimum of floats of 32 and 64 bits, compared as numbers. The comparison takes -0 and +0 as equal, so
// where a block's result is zero, a second reduction over the bits decides the sign (+0 is the larger).
template <class T, bool kLargest>
struct FloatExtreme {
  using Op = Extremum<kLargest>;
  using Signs = Bitwise<kLargest>;  // the monoid that combines the signs of zeros
  using Bits = T;
  using Value = T;
  using Total = T;
  static constexpr bool kDirect = true, kPairs = false, kZeros = true;

  Value identity = kLargest ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::infinity();
  JAXGPUOPS_INLINE Value value(Bits x, Bits) const { return x; }
  JAXGPUOPS_INLINE Bits result(Value total) const { return total; }
};

// The maximum (or minimum) of elements, taken as the largest key. Any NaN has the largest key, and -0 is less than +0.
template <class Key>
struct Extreme {
  using Op = Largest;
  using Bits = Key;
  using Value = Key;
  using Total = Key;
  static constexpr bool kDirect = false, kPairs = false, kZeros = false;

  Extreme(DType dtype, bool largest) {
    constexpr int kBits = 8 * sizeof(Key);
    const Key sign = static_cast<Key>(Key{1} << (kBits - 1));
    order = key_order(kind(dtype), kBits, largest);
    if (is_float(dtype)) {
      magnitude = static_cast<Key>(sign - 1);
      nan_above = static_cast<Key>(greatest(dtype));
      identity = encode(static_cast<Key>(largest ? nan_above | sign : nan_above), order);
    } else if (dtype == DType::kBool && !largest) {
      identity = encode(Key{1}, order);
    }
  }

  static KeyKind kind(DType dtype) {
    if (is_float(dtype)) return KeyKind::kFloat;
    return dtype >= DType::kInt8 && dtype <= DType::kInt64 ? KeyKind::kSigned : KeyKind::kUnsigned;
  }

  // The largest value of the dtype that is not NaN.
  static uint64_t greatest(DType dtype) {
    switch (dtype) {
      case DType::kFloat8E4M3FN: return 0x7e;
      case DType::kFloat8E5M2: return 0x7c;
      case DType::kFloat16: return 0x7c00;
      case DType::kBFloat16: return 0x7f80;
      case DType::kFloat32: return 0x7f800000;
      default: return 0x7ff0000000000000;
    }
  }

  JAXGPUOPS_INLINE Value value(Bits x, Bits) const {
    const Key key = encode(x, order);
    return static_cast<Key>(x & magnitude) > nan_above ? static_cast<Key>(~Key{0}) : key;
  }
  JAXGPUOPS_INLINE Bits result(Value total) const { return decode(total, order); }

  KeyOrder order;
  Key magnitude = 0, nan_above = 0;  // both are 0 for integers, which have no NaN
  Key identity = 0;
};

// ---- Loops ----------------------------------------------------------------------------------------------------------

// The elements of a block in memory: `segments` runs of `count` elements each, `stride` apart.
template <class Monoid>
struct Elements {
  const typename Monoid::Bits *x, *y;
  int64_t segments, count, stride;
};

// Writes the values of the elements to scratch memory without gaps. The flags of `where` are also without gaps.
template <bool kMasked, class Monoid>
JAXGPUOPS_SIMD_FMA void evaluate(Monoid monoid, Elements<Monoid> from, const uint8_t* where,
                                 typename Monoid::Value* to) {
  constexpr int64_t kPiece = 256;
  const bool contiguous = from.segments == 1 || from.stride == from.count;
  for (int64_t s = 0; s < from.segments; ++s) {
    for (int64_t at = 0; at < from.count; at += kPiece) {
      const int64_t first = s * from.count + at, n = std::min(kPiece, from.count - at);
      const auto* x = from.x + s * from.stride + at;
      const auto* y = (Monoid::kPairs ? from.y : from.x) + s * from.stride + at;
      if (contiguous && !Monoid::kPairs) prefetch(x, n);
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) {
        const auto value = monoid.value(x[i], y[i]);
        to[first + i] = kMasked && !where[first + i] ? monoid.identity : value;
      }
    }
  }
}

// Reduces long rows whose elements need a conversion, without writing the converted values to memory.
template <class Monoid>
JAXGPUOPS_SIMD_FMA void reduce_values(Monoid monoid, Elements<Monoid> from, typename Monoid::Value* result) {
  using Op = typename Monoid::Op;
  using Value = typename Monoid::Value;
  // A partial sum gets few additions, so its rounding error stays small.
  constexpr int64_t kLanes = 4 * kPack<Value>, kChain = 16 * kLanes;
  Value lanes[kGroup * kPack<Value>];
  for (int64_t r = 0; r < from.segments; ++r) {
    const auto* x = from.x + r * from.stride;
    const auto* y = (Monoid::kPairs ? from.y : from.x) + r * from.stride;
    Value total[kLanes];
    std::fill(total, total + kLanes, monoid.identity);
    for (int64_t at = 0; at < from.count; at += kChain) {
      Value part[kLanes];
      std::fill(part, part + kLanes, monoid.identity);
      const int64_t end = std::min(at + kChain, from.count);
      prefetch(x + at, end - at);
      if (Monoid::kPairs) prefetch(y + at, end - at);
      int64_t i = at;
      for (; i + kLanes <= end; i += kLanes) {
        JAXGPUOPS_INDEPENDENT
        for (int64_t lane = 0; lane < kLanes; ++lane) Op::into(part[lane], monoid.value(x[i + lane], y[i + lane]));
      }
      for (int64_t lane = 0; i + lane < end; ++lane) Op::into(part[lane], monoid.value(x[i + lane], y[i + lane]));
      JAXGPUOPS_INDEPENDENT
      for (int64_t lane = 0; lane < kLanes; ++lane) Op::into(total[lane], part[lane]);
    }
    Pack<Value> packs[4];
    std::memcpy(packs, total, sizeof packs);
    combine_packs<Op, Value>(packs);
    std::memcpy(lanes + r % kGroup * kPack<Value>, packs, sizeof packs[0]);
    const int64_t group = r % kGroup + 1;
    if (group == kGroup || r + 1 == from.segments) combine_lanes<Op>(lanes, group, result + r + 1 - group);
  }
}

template <class Op, class T>
JAXGPUOPS_SIMD_FMA void rows_of_block(const T* x, int64_t rows, int64_t count, int64_t stride, T identity, T* result) {
  reduce_rows<Op>(x, rows, stride, [&](int64_t) { return count; }, identity, result);
}

template <class Op, class T>
JAXGPUOPS_SIMD_FMA void columns_of_block(const T* x, int64_t steps, int64_t stride, int64_t width, T identity,
                                         T* result) {
  T lane[kWidest];
  if (stride == width) {
    reduce_dense<Op>(x, steps * width, width, Strips::lanes(width), identity, lane);
  } else {
    reduce_strided<Op>(x, steps, stride, width, identity, lane);
  }
  std::copy(lane, lane + width, result);
}

// Reduces the columns of a block of transposed rows. Each column is added strictly in order, so that its result does
// not depend on the width.
template <class Op, class T>
JAXGPUOPS_SIMD_FMA void turned_block(const T* x, int64_t steps, int64_t width, T identity, T* result) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < width; ++i) {
    T first = identity;
    Op::into(first, x[i]);
    result[i] = first;
  }
  for (int64_t s = 1; s < steps; ++s) {
    const T* next = x + s * width;
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < width; ++i) Op::into(result[i], next[i]);
  }
}

// The values of a block: neighbours along the axis are `stride` elements apart, and neighbouring outer indices
// `outer_stride`.
template <class T>
struct Block {
  const T* x;
  int64_t outers, outer_stride, steps, stride, width;
  bool turned;

  template <class Op>
  void reduce(T identity, T* result) const {
    if (turned) return turned_block<Op>(x, steps, width, identity, result);
    if (width == 1 && stride == 1) return rows_of_block<Op>(x, outers, steps, outer_stride, identity, result);
    for (int64_t r = 0; r < outers; ++r)
      columns_of_block<Op>(x + r * outer_stride, steps, stride, width, identity, result + r * width);
  }
};

// Compares bits, because XLA's threads treat denormals as zeros in float comparisons.
template <class T>
JAXGPUOPS_INLINE bool is_zero(T value) {
  using Bits = std::make_unsigned_t<typename FloatFormat<T>::Bits>;
  return static_cast<Bits>(bits_as<Bits>(value) << 1) == 0;
}

// Sets the sign of results that are zero. A maximum is +0 if any element of the row is +0; a minimum is -0 if any is
// -0.
template <class Signs, class T>
void sign_zeros(const Block<T>& block, T* result) {
  using Bits = std::make_unsigned_t<typename FloatFormat<T>::Bits>;
  const int64_t columns = block.outers * block.width;
  if (std::none_of(result, result + columns, [](T value) { return is_zero(value); })) return;
  constexpr bool kAnd = std::is_same_v<Signs, Bitwise<true>>;
  std::vector<Bits> bits(columns);
  const Block<Bits> same{reinterpret_cast<const Bits*>(block.x),
                         block.outers,
                         block.outer_stride,
                         block.steps,
                         block.stride,
                         block.width,
                         block.turned};
  same.template reduce<Signs>(kAnd ? static_cast<Bits>(~Bits{0}) : Bits{0}, bits.data());
  for (int64_t c = 0; c < columns; ++c)
    if (is_zero(result[c])) result[c] = std::copysign(T(0), bits_as<T>(bits[c]));
}

// Combines the results of a block with those of the blocks before it.
template <class Monoid>
JAXGPUOPS_SIMD_FMA void merge_block(const typename Monoid::Value* values, int64_t columns,
                                    typename Monoid::Total* totals) {
  using Total = typename Monoid::Total;
  for (int64_t c = 0; c < columns; ++c) {
    const Total a = totals[c], b = static_cast<Total>(values[c]);
    Total merged = a;
    Monoid::Op::into(merged, b);
    if constexpr (Monoid::kZeros) {
      using Bits = std::make_unsigned_t<typename FloatFormat<Total>::Bits>;
      Bits signs = bits_as<Bits>(a);
      Monoid::Signs::into(signs, bits_as<Bits>(b));
      merged = is_zero(a) & is_zero(b) ? bits_as<Total>(signs) : merged;
    }
    totals[c] = merged;
  }
}

template <class Monoid, class Result>
JAXGPUOPS_SIMD_FMA void store_results(Monoid monoid, const typename Monoid::Value* values, int64_t count, Result* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) to[i] = monoid.result(values[i]);
}

// ---- The job --------------------------------------------------------------------------------------------------------

template <class Monoid>
class Reduction {
 public:
  using Bits = typename Monoid::Bits;
  using Value = typename Monoid::Value;
  static constexpr int64_t kTaskElements = 1 << 16, kLongRow = 128;

  Reduction(const Problem& problem, const Buffers& buffers, const Strips& strips, const Monoid& monoid)
      : problem_(problem), buffers_(buffers), strips_(strips), monoid_(monoid) {}

  struct Stats {
    Stats(const Reduction& job, const Unit& unit)
        : unit(unit), values(new Value[job.strips_.blocks * unit.columns()]) {}

    Unit unit;
    std::unique_ptr<Value[]> values;  // the results of each block
  };

  struct Scratch {
    explicit Scratch(const Reduction& job)
        : where(job.buffers_.where, job.problem_.where, job.strips_),
          where_block(where ? new uint8_t[job.strips_.elements] : nullptr),
          values(new Value[job.strips_.elements]),
          columns(job.strips_.turned ? new Bits[2 * job.strips_.elements] : nullptr) {}

    StripOperand<uint8_t> where;
    std::unique_ptr<uint8_t[]> where_block;
    std::unique_ptr<Value[]> values;
    std::unique_ptr<Bits[]> columns;  // if turned: the transposed elements of x, then of y
  };

  bool has_output() const { return false; }
  void output(Stats&, int64_t, Scratch&, bool) const {}

  void partial(Stats& stats, int64_t block, Scratch& scratch, bool) const {
    const Unit& unit = stats.unit;
    const Rows& rows = strips_.rows;
    const int64_t first = block * strips_.steps, steps = std::min(strips_.steps, rows.length - first);
    const int64_t count = steps * unit.width;  // elements of an outer index
    Value* result = &stats.values[block * unit.columns()];
    if constexpr (!Monoid::kDirect) {
      static_assert(!Monoid::kZeros);
      if (!strips_.turned && rows.inner == 1 && steps >= kLongRow && !scratch.where)
        return reduce_values(monoid_, elements(unit, first, steps, unit.outer, unit.outers, scratch), result);
    }
    Block<Value> values{scratch.values.get(), unit.outers, count, steps, unit.width, unit.width, strips_.turned};
    if (!Monoid::kDirect || scratch.where) {
      evaluate_block(unit, first, steps, scratch);
    } else {
      values.x = reinterpret_cast<const Value*>(elements(unit, first, steps, unit.outer, unit.outers, scratch).x);
      if (!strips_.turned) values.outer_stride = rows.length * rows.inner, values.stride = rows.inner;
    }
    values.template reduce<typename Monoid::Op>(monoid_.identity, result);
    if constexpr (Monoid::kZeros) sign_zeros<typename Monoid::Signs>(values, result);
  }

  void finish(Stats& stats) const {
    const Unit& unit = stats.unit;
    const int64_t columns = unit.columns();
    Value* values = stats.values.get();
    if (strips_.blocks > 1) {
      std::vector<Total> totals(values, values + columns);
      for (int64_t b = 1; b < strips_.blocks; ++b) merge_block<Monoid>(values + b * columns, columns, totals.data());
      std::transform(totals.begin(), totals.end(), values, [](Total total) { return static_cast<Value>(total); });
    }
    const int64_t first = unit.first_row(strips_.rows);
    using Result = decltype(monoid_.result(Value{}));
    if (problem_.wide_result) {
      std::copy(values, values + columns, static_cast<Value*>(buffers_.out) + first);
    } else {
      store_results(monoid_, values, columns, static_cast<Result*>(buffers_.out) + first);
    }
  }

 private:
  using Total = typename Monoid::Total;

  // Returns the elements of a block at some outer indices, transposed if the strips are.
  Elements<Monoid> elements(const Unit& unit, int64_t first, int64_t steps, int64_t outer, int64_t outers,
                            Scratch& scratch) const {
    const Rows& rows = strips_.rows;
    if (strips_.turned) {
      Bits *x = scratch.columns.get(), *y = x + strips_.elements;
      const int64_t run = strips_.memory.inner, outers = unit.width / run, at = unit.inner * steps;
      const auto turn = [&](const void* from, Bits* to) {
        transpose(static_cast<const Bits*>(from) + at, steps * run, outers, steps, run, to, unit.width);
      };
      turn(buffers_.x, x);
      if (Monoid::kPairs) turn(buffers_.y, y);
      return {x, y, 1, steps * unit.width, 0};
    }
    const int64_t at = strips_.at(outer, first, unit.inner);
    const bool dense = unit.width == rows.inner;
    Elements<Monoid> from;
    from.x = static_cast<const Bits*>(buffers_.x) + at;
    from.y = Monoid::kPairs ? static_cast<const Bits*>(buffers_.y) + at : nullptr;
    from.segments = dense ? outers : steps;
    from.count = dense ? steps * unit.width : unit.width;
    from.stride = dense ? rows.length * rows.inner : rows.inner;
    return from;
  }

  // Writes the values of a block to scratch memory.
  void evaluate_block(const Unit& unit, int64_t first, int64_t steps, Scratch& scratch) const {
    Value* values = scratch.values.get();
    if (!scratch.where)
      return evaluate<false>(monoid_, elements(unit, first, steps, unit.outer, unit.outers, scratch), nullptr, values);
    for (int64_t r = 0; r < unit.outers; ++r) {
      const uint8_t* where = scratch.where.block(unit, unit.outer + r, first, steps, scratch.where_block.get());
      evaluate<true>(monoid_, elements(unit, first, steps, unit.outer + r, 1, scratch), where,
                     values + r * steps * unit.width);
    }
  }

  const Problem& problem_;
  const Buffers& buffers_;
  const Strips& strips_;
  const Monoid monoid_;
};

template <class Body>
void with_unsigned(DType dtype, const Body& body) {
  switch (bytes_of(dtype)) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    default: return body(uint64_t{});
  }
}

}  // namespace

void run(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.rows.count() == 0) return;
  const auto reduce = [&](const auto& monoid, const Problem& problem) {
    using Monoid = std::decay_t<decltype(monoid)>;
    // Values that are copied to scratch memory need smaller blocks, which stay in the cache.
    const Strips strips(problem.rows, {12, Monoid::kDirect ? 1 << 14 : 1 << 12, 1 << 17, kWidest, kWidest});
    run_strips(Reduction<Monoid>(problem, buffers, strips, monoid), strips, workers);
  };
  if (problem.op == Op::kSum && problem.dtype == DType::kBFloat16 && problem.rows.inner == 1 &&
      problem.rows.length % 2 == 0 && !buffers.where) {
    Problem pairs = problem;
    pairs.rows.length /= 2;
    SumOfPairs sum;
    sum.inverse = 1 / static_cast<float>(problem.divisor);
    return reduce(sum, pairs);
  }
  const auto add = [&](auto format) {
    if (problem.op == Op::kDot) return reduce(Dot<decltype(format)>(), problem);
    Sum<decltype(format)> sum;
    sum.inverse = 1 / static_cast<decltype(sum.inverse)>(problem.divisor);
    reduce(sum, problem);
  };
  if (problem.op == Op::kMax || problem.op == Op::kMin) {
    const bool largest = problem.op == Op::kMax;
    if (problem.dtype == DType::kFloat32)
      return largest ? reduce(FloatExtreme<float, true>(), problem) : reduce(FloatExtreme<float, false>(), problem);
    if (problem.dtype == DType::kFloat64)
      return largest ? reduce(FloatExtreme<double, true>(), problem) : reduce(FloatExtreme<double, false>(), problem);
    with_unsigned(problem.dtype, [&](auto zero) { reduce(Extreme<decltype(zero)>(problem.dtype, largest), problem); });
  } else if (is_float(problem.dtype)) {
    with_any_format(problem.dtype, add);
  } else {  // integers wrap, so signed and unsigned sums have the same bits
    with_unsigned(problem.dtype, [&](auto zero) { add(Whole<decltype(zero)>()); });
  }
}

}  // namespace jaxgpuops::reduce::cpu
