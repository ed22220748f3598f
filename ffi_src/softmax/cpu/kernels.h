// Loops over the elements of a block, for the compiler to vectorise. Each is there twice: for rows, whose elements are
// neighbours and whose numbers (maximum, factor ..) are one for all elements; and for columns, whose numbers repeat
// over `lanes`.
#pragma once

#include <cstdint>
#include <limits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd_reduce.h"
#include "common/cpu/strips.h"

namespace jaxgpuops::softmax::cpu {

// Rows in scratch memory: row r has count[r] elements from r * stride on.
struct RowBlock {
  int64_t rows, stride;
  const int64_t* count;
};

constexpr StripShape kShape = {24, 1 << 12, 1 << 16, 2048, 2048, 1 << 18};
constexpr int64_t kTurnedEntropy = 64;  // .. of cross-entropy: a label would have its row copied anyway
constexpr int64_t kTask = 1 << 14;      // elements of a task
constexpr int64_t kMaxLanes = kShape.most_width;
constexpr int64_t kMaxColumns = std::max(Units::kMaxColumns, kMaxLanes);  // of a unit

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

// What is added up, of an element relative to the row's maximum.
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
// What a probability that is near 1 lacks to it is the sum of the others. Two of a half may both be above it, where
// they come from rounded logarithms; two that are likely there are not.
template <class C>
JAXGPUOPS_INLINE bool is_likely(C p) {
  return p > C(0.75);
}

// x or 0, by its bits: of a condition the compiler makes two sums, of which the one that adds 0 takes as long.
template <class C>
JAXGPUOPS_INLINE C only_if(bool condition, C x) {
  using Bits = typename FloatFormat<C>::Bits;
  return bits_as<C>(static_cast<Bits>(bits_as<Bits>(x) & -static_cast<Bits>(condition)));
}

// Of t and a probability p.
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

// Adds Terms of element i to a lane of their sums, and keeps the last one where kKeep.
template <bool kKeep, class... Term, class C, size_t kLanes>
JAXGPUOPS_INLINE void add_terms(const C* z, const C* y, C m, int64_t i, C* terms, C (&sums)[sizeof...(Term)][kLanes],
                                int64_t lane) {
  const C x = z[i] - m, x2 = y[i];
  C term = 0;
  int k = 0;
  ((term = Term::of(x, x2), sums[k++][lane] += term), ...);
  if (kKeep) terms[i] = term;
}

// Asks for what comes `ahead` elements after x, if it is in memory.
template <class C>
JAXGPUOPS_INLINE void ask(const C* x, int64_t count, int64_t ahead) {
  if (ahead) prefetch(x, count, ahead * static_cast<int64_t>(sizeof(C)));
}

constexpr int64_t kFewAdditions = 16;  // that a number of a sum goes through, then as many of their sums

// Sums of one row in lanes.
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

// Sums of rows for which a loop a row would cost as much as their elements.
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

// Sums of several Terms, and the terms themselves where kKeep (then there is one Term), which may replace z; short rows
// need room for them anyway. y is z where no Term looks at it; no m: 0.
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

// The same of columns, to result[k] + first. m repeats over lanes.
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

// Of numbers from 1 on.
template <class C>
JAXGPUOPS_SIMD_FMA void logarithms(const C* from, int64_t count, C* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = log_above_one(from[i]);
}

// Of rows with maximum m, whose sum lacks e^(label - m) (label: -inf where there is none): that number, the whole sum,
// and its logarithm, which is that of 1 + rest to the last digit where the label is the maximum.
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

// Whether a row has no finite maximum, or NaN.
template <class C>
JAXGPUOPS_INLINE bool is_special(C m, C sum) {
  return !(m < kInfinity<C> && m > -kInfinity<C>) | (sum != sum);
}

// Rows of a cross-entropy.
template <class C>
struct Entropy {
  double smoothing, z_loss, length;
  const int64_t* position;  // of the label; -1: no class
  const C *label, *m;       // its logit, or -inf; the maximum
  const C* rest;            // the sum without the label
  const C *at_label, *sum, *log_sum;
  const C* mean;  // of the logits, where there is smoothing
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

// a and b of a e^(z - m) - b, and the gradient of the label.
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

// The parts of such a logarithm: the maximum, 0 where it is not finite, and the rest.
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

// What exponentials are relative to: e^(-inf) is 0 also where there is nothing else.
template <class C>
JAXGPUOPS_SIMD_FMA void guard(const C* maxima, int64_t count, C* m) {
  for (int64_t i = 0; i < count; ++i) m[i] = maxima[i] == -kInfinity<C> ? C(0) : maxima[i];
}

// e^(m - whole), where m <= whole are maxima, and what it makes of a sum.
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

// What is written, of an element (t and p for derivatives) and numbers of its row.
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
struct ExpProduct {  // e^(z - m), times a number
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
struct SoftmaxTangent {  // sum: of p (t - origin)
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
struct LogSoftmaxCotangent {  // of t, of p but for the likely one, and of t but for that
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

// `rows` times `count` elements, that many apart in scratch memory.
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
