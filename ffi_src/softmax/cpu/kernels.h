// Loops over the elements of a block, written for the compiler to vectorise. Most exist twice: for rows, whose elements
// are contiguous and share one maximum, factor and so on; and for columns, where these numbers repeat every `lanes`
// elements.
#pragma once

#include <cstdint>
#include <limits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd_reduce.h"
#include "common/cpu/strips.h"

namespace jaxgpuops::softmax::cpu {

// Rows in scratch memory: row r has count[r] elements, starting at r * stride.
struct RowBlock {
  int64_t rows, stride;
  const int64_t* count;
};

constexpr StripShape kShape = {24, 1 << 12, 1 << 16, 2048, 2048, 1 << 18};
// The longest row that cross-entropy transposes. It is shorter than kShape.turned because labels make such rows be
// copied anyway.
constexpr int64_t kTurnedEntropy = 64;
constexpr int64_t kTask = 1 << 14;  // target number of elements of a task
constexpr int64_t kMaxLanes = kShape.most_width;
constexpr int64_t kMaxColumns = std::max(Units::kMaxColumns, kMaxLanes);  // the most columns that a unit has

template <class C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();
template <class C>
constexpr C kNaN = std::numeric_limits<C>::quiet_NaN();

// ---- Loads ----------------------------------------------------------------------------------------------------------

template <class Format, class C>
JAXGPUOPS_SIMD_FMA void decode_rows(const typename Format::Bits* from, int64_t from_stride, int64_t rows, int64_t count,
                                    C* to, int64_t to_stride) {
  constexpr int64_t kPiece = 256;
  const int64_t ahead = rows == 1 ? kPrefetchBytes : bytes_ahead<typename Format::Bits>(count, from_stride);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t at = 0; at < count; at += kPiece) {
      const auto* x = from + r * from_stride + at;
      C* z = to + r * to_stride + at;
      const int64_t n = std::min(kPiece, count - at);
      prefetch(x, n, ahead);
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) z[i] = Format::decode(x[i]);
    }
  }
}

template <class C>
JAXGPUOPS_SIMD_FMA void scale_row(C* z, int64_t count, C factor) {
  for (int64_t i = 0; i < count; ++i) z[i] *= factor;
}

template <class C>
JAXGPUOPS_SIMD_FMA void scale_columns(C* z, int64_t count, int64_t lanes, const C* factor) {
  for (int64_t at = 0; at < count; at += lanes) {
    const int64_t n = std::min(lanes, count - at);
    for (int64_t i = 0; i < n; ++i) z[at + i] *= factor[i];
  }
}

template <class Format, class C>
JAXGPUOPS_SIMD_FMA void add_bias(C* z, int64_t count, const typename Format::Bits* bias) {
  for (int64_t i = 0; i < count; ++i) z[i] += Format::decode(bias[i]);
}

template <class C>
JAXGPUOPS_SIMD_FMA void exponentials(const C* z, int64_t count, C* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) to[i] = exp_negative(z[i]);
}

template <class C>
JAXGPUOPS_SIMD_FMA void apply_mask(C* z, int64_t count, const uint8_t* where, C masked) {
  for (int64_t i = 0; i < count; ++i) z[i] = where[i] ? z[i] : masked;
}

// ---- Maxima ---------------------------------------------------------------------------------------------------------

template <class C>
JAXGPUOPS_SIMD_FMA void row_maxima(const C* z, RowBlock block, C* result) {
  reduce_rows<Largest>(z, block.rows, block.stride, [&](int64_t r) { return block.count[r]; }, -kInfinity<C>, result);
}

template <class C>
JAXGPUOPS_SIMD_FMA void column_maxima(const C* z, int64_t count, int64_t width, int64_t lanes, C* result) {
  C lane[kMaxLanes];
  reduce_dense<Largest>(z, count, width, lanes, -kInfinity<C>, lane);
  std::copy(lane, lane + width, result);
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// The Terms that are summed. Their arguments are an element z, relative to the row's maximum where there is one, and
// the element of a second operand.
struct Exp {
  template <class C>
  static JAXGPUOPS_INLINE C of(C z, C) {
    return exp_negative(z);
  }
};
struct Identity {
  template <class C>
  static JAXGPUOPS_INLINE C of(C z, C) {
    return z;
  }
};
// Whether p is so near 1 that 1 - p is better computed as the sum of the other probabilities. The threshold is above a
// half because rounded logarithms can give two probabilities slightly above a half, and never two above 0.75.
template <class C>
JAXGPUOPS_INLINE bool is_likely(C p) {
  return p > C(0.75);
}

// Returns x or 0 by a bit mask. With a conditional the compiler would make two sums, one of which adds zeros and takes
// as long as the other.
template <class C>
JAXGPUOPS_INLINE C only_if(bool condition, C x) {
  using Bits = typename FloatFormat<C>::Bits;
  return bits_as<C>(static_cast<Bits>(bits_as<Bits>(x) & -static_cast<Bits>(condition)));
}

// The Terms of derivatives: t is the tangent, p a probability. "Others" are the elements that are not likely.
struct ProductOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return only_if(!is_likely(p) & (p != C(0)), p * t);
  }
};
struct TangentOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return only_if(!is_likely(p), t);
  }
};
struct ProbabilityOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C, C p) {
    return only_if(!is_likely(p), p);
  }
};
struct TangentOfLikely {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return only_if(is_likely(p), t);
  }
};

// Adds each Term of element i to lane `lane` of its sum. If kKeep, also stores the last Term in terms[i].
template <bool kKeep, class... Term, class C, size_t kLanes>
JAXGPUOPS_INLINE void add_terms(const C* z, const C* y, C m, int64_t i, C* terms, C (&sums)[sizeof...(Term)][kLanes],
                                int64_t lane) {
  const C x = z[i] - m, x2 = y[i];
  C term = 0;
  int k = 0;
  ((term = Term::of(x, x2), sums[k++][lane] += term), ...);
  if (kKeep) terms[i] = term;
}

// Prefetches `count` elements at x + ahead, unless ahead is 0.
template <class C>
JAXGPUOPS_INLINE void ask(const C* x, int64_t count, int64_t ahead) {
  if (ahead) prefetch(x, count, ahead * static_cast<int64_t>(sizeof(C)));
}

// The most additions that a partial sum goes through, to bound the rounding error.
constexpr int64_t kFewAdditions = 16;

// Sums one row in 16 lanes.
template <bool kKeep, class... Term, class C>
JAXGPUOPS_INLINE void sum_row(const C* z, const C* y, C m, int64_t count, C* terms, C* const (&result)[sizeof...(Term)],
                              int64_t row, int64_t ahead) {
  constexpr int64_t kLanes = 16, kChain = kFewAdditions * kLanes;
  constexpr int kTerms = sizeof...(Term);
  C total[kTerms][kLanes] = {};
  for (int64_t at = 0; at < count; at += kChain) {
    C part[kTerms][kLanes] = {};
    const int64_t end = std::min(at + kChain, count);
    ask(z + at, end - at, ahead);
    int64_t i = at;
    for (; i + kLanes <= end; i += kLanes) {
      JAXGPUOPS_INDEPENDENT
      for (int64_t lane = 0; lane < kLanes; ++lane) add_terms<kKeep, Term...>(z, y, m, i + lane, terms, part, lane);
    }
    for (int64_t lane = 0; i + lane < end; ++lane) add_terms<kKeep, Term...>(z, y, m, i + lane, terms, part, lane);
    for (int k = 0; k < kTerms; ++k)
      for (int64_t lane = 0; lane < kLanes; ++lane) total[k][lane] += part[k][lane];
  }
  for (int k = 0; k < kTerms; ++k) {
    for (int64_t lanes = kLanes / 2; lanes; lanes /= 2)
      for (int64_t lane = 0; lane < lanes; ++lane) total[k][lane] += total[k][lane + lanes];
    result[k][row] = total[k][0];
  }
}

// Sums rows so short that a separate loop for each row would cost as much as its elements.
template <class Term, class C>
JAXGPUOPS_INLINE void sum_short_rows(const C* z, const C* y, RowBlock block, const C* m, C* terms, C* result) {
  for (int64_t r = 0; m && r < block.rows; ++r) {
    const C* x = z + r * block.stride;
    C* to = terms + r * block.stride;
    const C maximum = m[r];
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < block.stride; ++i) to[i] = x[i] - maximum;
  }
  if (m) z = terms;
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < block.rows * block.stride; ++i) terms[i] = Term::of(z[i], y[i]);
  reduce_rows<Add>(terms, block.rows, block.stride, [&](int64_t r) { return block.count[r]; }, C(0), result);
}

// Sums each Term over each row. If kKeep, there is one Term, whose values are stored in `terms`; `terms` may be z, and
// must have room for all elements if rows are short. If no Term uses y, pass z for it. If m is null, the maximum is 0.
template <bool kKeep, class... Term, class C>
JAXGPUOPS_SIMD_FMA void sum_rows(const C* z, const C* y, RowBlock block, const C* m, C* terms,
                                 C* const (&result)[sizeof...(Term)], int64_t ahead) {
  static_assert(!kKeep || sizeof...(Term) == 1);
  constexpr int64_t kShort = 128;
  if (block.stride > kShort) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t at = r * block.stride;
      sum_row<kKeep, Term...>(z + at, y + at, m ? m[r] : C(0), block.count[r], terms + at, result, r, ahead);
    }
    return;
  }
  int k = 0;
  (sum_short_rows<Term>(z, y, block, m, terms, result[k++]), ...);
}

// Sums columns instead of rows, and writes the sums to result[k] + first. m repeats every `lanes` elements.
template <bool kKeep, class... Term, class C>
JAXGPUOPS_SIMD_FMA void sum_columns(const C* z, const C* y, int64_t count, int64_t width, int64_t lanes, const C* m,
                                    C* terms, C* const (&result)[sizeof...(Term)], int64_t first, int64_t ahead) {
  constexpr int kTerms = sizeof...(Term);
  C total[kTerms][kMaxLanes], part[kTerms][kMaxLanes];
  for (int k = 0; k < kTerms; ++k) std::fill(total[k], total[k] + lanes, C(0));
  for (int64_t at = 0; at < count;) {
    for (int k = 0; k < kTerms; ++k) std::fill(part[k], part[k] + lanes, C(0));
    for (const int64_t end = std::min(at + kFewAdditions * lanes, count); at < end; at += lanes) {
      const int64_t n = std::min(lanes, end - at);
      ask(z + at, n, ahead);
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) add_terms<kKeep, Term...>(z + at, y + at, m[i], i, terms + at, part, i);
    }
    for (int k = 0; k < kTerms; ++k)
      for (int64_t i = 0; i < lanes; ++i) total[k][i] += part[k][i];
  }
  for (int k = 0; k < kTerms; ++k) {
    for (int64_t at = width; at < lanes; at += width)
      for (int64_t i = 0; i < width; ++i) total[k][i] += total[k][at + i];
    std::copy(total[k], total[k] + width, result[k] + first);
  }
}

// The logarithms of numbers that are at least 1.
template <class C>
JAXGPUOPS_SIMD_FMA void logarithms(const C* from, int64_t count, C* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = log_above_one(from[i]);
}

// For rows whose sum `rest` excludes the label, computes the label's term e^(label - m) (label is -inf if it is no
// class), the sum with the label, and the logarithm of that sum. Where the label is the maximum, the sum is 1 + rest,
// and its logarithm is corrected by what the addition rounded off.
template <class C>
JAXGPUOPS_SIMD_FMA void add_labels(const C* rest, const C* label, const C* m, int64_t count, C* at_label, C* sum,
                                   C* log_sum) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const C e = label[i] == m[i] ? C(1) : exp_negative(label[i] - m[i]), whole = rest[i] + e;
    at_label[i] = e;
    sum[i] = whole;
    log_sum[i] = log_above_one(whole) + (label[i] == m[i] ? (rest[i] - (whole - C(1))) / whole : C(0));
  }
}

// Whether a row has a NaN or an infinite maximum.
template <class C>
JAXGPUOPS_INLINE bool is_special(C m, C sum) {
  return !(m < kInfinity<C> && m > -kInfinity<C>) | (sum != sum);
}

// The rows of a cross-entropy, an array of numbers for each field.
template <class C>
struct Entropy {
  double smoothing, z_loss, length;
  const int64_t* position;  // position of the label along the axis; -1 if the label is no class
  const C *label, *m;       // the label's logit, or -inf; the row's maximum
  const C* rest;            // the sum of exponentials without the label
  const C *at_label, *sum, *log_sum;
  const C* mean;  // mean of the logits; set if there is smoothing
};

template <class C>
JAXGPUOPS_SIMD_FMA void losses(Entropy<C> rows, int64_t count, C* loss, C* maximum, C* log_sums) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const C m = rows.m[i], log_sum = rows.log_sum[i], label = rows.position[i] < 0 ? kNaN<C> : rows.label[i];
    const bool special = is_special(m, rows.sum[i]);
    const bool nan = (rows.rest[i] != rows.rest[i]) | (rows.label[i] != rows.label[i]);
    maximum[i] = nan | special ? C(0) : m;
    log_sums[i] = nan ? kNaN<C> : special ? m : log_sum;
    const C whole = maximum[i] + log_sums[i];
    double result = special ? whole - label : log_sum - (label - m);
    if (rows.smoothing != 0) {
      const C mean = rows.mean[i];
      result = (1 - rows.smoothing) * result + rows.smoothing * (special ? whole - mean : log_sum - (mean - m));
    }
    if (rows.z_loss != 0) result += rows.z_loss * whole * whole;
    loss[i] = static_cast<C>(result);
  }
}

// Sets the coefficients of the gradient a e^(z - m) - b, and the gradient of the label.
template <class C>
JAXGPUOPS_SIMD_FMA void gradients(Entropy<C> rows, const C* maximum, const C* log_sums, const C* cotangents,
                                  int64_t count, C* a, C* b, C* of_label) {
  const double share = rows.smoothing / rows.length;
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const C lse = maximum[i] + log_sums[i];
    const double cotangent = cotangents[i], z_factor = 2 * rows.z_loss * lse, sum = rows.sum[i];
    const bool valid = !is_special(rows.m[i], rows.sum[i]) & (rows.position[i] >= 0);
    const double rest = (z_factor * rows.at_label[i] - rows.rest[i]) / sum + (rows.smoothing - share);
    a[i] = valid ? static_cast<C>(cotangent * (1 + z_factor) / sum) : kNaN<C>;
    b[i] = static_cast<C>(cotangent * share);
    of_label[i] = valid ? static_cast<C>(cotangent * rest) : kNaN<C>;
  }
}

template <class C>
JAXGPUOPS_SIMD_FMA bool any_is(const C* x, int64_t count, C value) {
  int any = 0;
  for (int64_t i = 0; i < count; ++i) any |= x[i] == value;
  return any;
}

template <class C>
JAXGPUOPS_SIMD_FMA bool any_is_special(const C* m, const C* sum, int64_t count) {
  int any = 0;
  for (int64_t i = 0; i < count; ++i) any |= is_special(m[i], sum[i]);
  return any;
}

template <class C>
JAXGPUOPS_SIMD_FMA void reciprocals(const C* from, int64_t count, C* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = 1 / from[i];
}

template <class Format, class C>
JAXGPUOPS_SIMD_FMA void log_sum_exps(const C* m, const C* sum, const C* log_sum, int64_t count,
                                     typename Format::Bits* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const C special = sum[i] != sum[i] ? kNaN<C> : m[i];
    to[i] = Format::encode(is_special(m[i], sum[i]) ? special : m[i] + log_sum[i]);
  }
}

// The summands of logsumexp: the maximum, or 0 where it is not finite, and the rest.
template <class C>
JAXGPUOPS_SIMD_FMA void log_sum_exp_parts(const C* m, const C* sum, const C* log_sum, int64_t count, C* maximum,
                                          C* rest) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const bool special = is_special(m[i], sum[i]);
    maximum[i] = special ? C(0) : m[i];
    rest[i] = sum[i] != sum[i] ? kNaN<C> : special ? m[i] : log_sum[i];
  }
}

// The shift of the exponentials: the maximum, or 0 where the maximum is -inf, so that e^(-inf - m) is 0 and not NaN.
template <class C>
JAXGPUOPS_SIMD_FMA void guard(const C* maxima, int64_t count, C* m) {
  for (int64_t i = 0; i < count; ++i) m[i] = maxima[i] == -kInfinity<C> ? C(0) : maxima[i];
}

// e^(m - whole), the factor that converts a sum relative to m into one relative to whole >= m.
template <class C>
JAXGPUOPS_INLINE C relative(C m, C whole) {
  return exp_negative(m == whole ? C(0) : m - whole);
}

template <class C>
JAXGPUOPS_SIMD_FMA void add_relative(const C* sums, const C* m, const C* whole, int64_t count, double* totals) {
  for (int64_t i = 0; i < count; ++i) totals[i] += static_cast<double>(sums[i] * relative(m[i], whole[i]));
}

template <class C>
JAXGPUOPS_SIMD_FMA void scale_relative(const C* a, const C* m, const C* whole, int64_t count, C* result) {
  for (int64_t i = 0; i < count; ++i) result[i] = a[i] * relative(m[i], whole[i]);
}

template <class C>
JAXGPUOPS_SIMD_FMA void maximum_of(const C* m, int64_t count, C* whole) {
  for (int64_t i = 0; i < count; ++i) whole[i] = m[i] > whole[i] ? m[i] : whole[i];
}

// ---- Results --------------------------------------------------------------------------------------------------------

// The Results that are written. Their arguments are an element (for derivatives t and p) and coefficients of its row.
struct Product {
  template <class C>
  static JAXGPUOPS_INLINE C of(C e, C, C a, C) {
    return e * a;
  }
};
struct Affine {
  template <class C>
  static JAXGPUOPS_INLINE C of(C e, C, C a, C b) {
    return e * a - b;
  }
};
struct ExpProduct {  // e^(z - m) a, for blocks whose exponentials were not kept
  template <class C>
  static JAXGPUOPS_INLINE C of(C z, C, C a, C m) {
    return exp_negative(z - m) * a;
  }
};
struct ExpAffine {
  template <class C>
  static JAXGPUOPS_INLINE C of(C z, C, C a, C b, C m) {
    return exp_negative(z - m) * a - b;
  }
};
struct Difference {
  template <class C>
  static JAXGPUOPS_INLINE C of(C z, C, C a, C b) {
    return (z - a) - b;
  }
};
struct SoftmaxTangent {  // `sum` is that of p (t - origin) over the row
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p, C factor, C origin, C sum, C) {
    return p == C(0) ? C(0) : p * ((t - origin) - sum) * factor;
  }
};
struct LogSoftmaxTangent {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C, C factor, C origin, C sum, C) {
    return ((t - origin) - sum) * factor;
  }
};
struct LogSoftmaxCotangent {  // sums: total of t; rest of the p that are not likely; others of the t of these
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p, C factor, C total, C rest, C others) {
    return (is_likely(p) ? rest * total - others : t - p * total) * factor;
  }
};

template <class Format, class Result, class C, class... Number>
JAXGPUOPS_SIMD_FMA void store_rows(const C* z, const C* y, RowBlock block, typename Format::Bits* to, int64_t to_stride,
                                   const Number*... of_row) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const C *x = z + r * block.stride, *x2 = y + r * block.stride;
    typename Format::Bits* out = to + r * to_stride;
    const int64_t count = block.count[r];
    const auto store = [=](const auto... number) {
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) out[i] = Format::encode(Result::of(x[i], x2[i], number...));
    };
    store(of_row[r]...);
  }
}

// Stores `rows` times `count` elements, which are contiguous in scratch memory and to_stride apart in memory.
template <class Format, class Result, class C, class... Number>
JAXGPUOPS_SIMD_FMA void store_columns(const C* z, const C* y, int64_t rows, int64_t count, int64_t lanes,
                                      typename Format::Bits* to, int64_t to_stride, const Number*... of_lane) {
  const int64_t ahead = bytes_ahead<typename Format::Bits>(count, to_stride);
  for (int64_t r = 0; r < rows; ++r) {
    const C *x = z + r * count, *x2 = y + r * count;
    typename Format::Bits* out = to + r * to_stride;
    for (int64_t at = 0; at < count; at += lanes) {
      const int64_t n = std::min(lanes, count - at);
      if (rows > 1) prefetch<true>(out + at, n, ahead);
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) out[at + i] = Format::encode(Result::of(x[at + i], x2[at + i], of_lane[i]...));
    }
  }
}

template <class Bits>
JAXGPUOPS_SIMD_FMA void clear_masked(Bits* to, int64_t count, const uint8_t* where) {
  for (int64_t i = 0; i < count; ++i) to[i] = where[i] ? to[i] : Bits{};
}

}  // namespace jaxgpuops::softmax::cpu
