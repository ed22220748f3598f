// Loops over the elements of a block, for the compiler to vectorise. Each is there twice: for rows, whose elements are
// neighbours and whose numbers (maximum, factor ..) are one for all elements; and for columns, whose numbers repeat
// over `lanes`.
#pragma once

#include <cstdint>
#include <limits>

#include "common/narrow_float.h"
#include "common/simd_reduce.h"
#include "common/strips.h"

namespace jaxgpuops::softmax::cpu {

// Rows in scratch memory: row r has count[r] elements from r * stride on.
struct RowBlock {
  int64_t rows, stride;
  const int64_t* count;
};

constexpr StripShape kShape = {1 << 12, 1 << 14, 256, 1024, 1 << 18};
constexpr int64_t kMaxLanes = kShape.most_width;

template <class C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();

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
// Of t and a probability p. At most one is above a half, and what it lacks to 1 is the sum of the others.
struct ProductOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return p > C(0.5) || p == C(0) ? C(0) : p * t;
  }
};
struct TangentOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return p > C(0.5) ? C(0) : t;
  }
};
struct ProbabilityOfOthers {
  template <class C>
  static JAXGPUOPS_INLINE C of(C, C p) {
    return p > C(0.5) ? C(0) : p;
  }
};
struct TangentOfLikely {
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p) {
    return p > C(0.5) ? t : C(0);
  }
};

// Of one row. No terms: null.
template <class Term, class C>
JAXGPUOPS_INLINE C sum_row(const C* z, const C* y, C maximum, int64_t count, C* terms) {
  constexpr int64_t kChain = 256;  // an element goes through few additions
  C total = 0;
  for (int64_t at = 0; at < count; at += kChain) {
    const int64_t end = std::min(at + kChain, count);
    C sum = 0;
    if (terms) {
      JAXGPUOPS_SUM(sum)
      for (int64_t i = at; i < end; ++i) {
        const C term = Term::of(z[i] - maximum, y[i]);
        terms[i] = term;
        sum += term;
      }
    } else {
      JAXGPUOPS_SUM(sum)
      for (int64_t i = at; i < end; ++i) sum += Term::of(z[i] - maximum, y[i]);
    }
    total += sum;
  }
  return total;
}

// The terms go to `terms` where kKeep, which may be z, else they may. y is z where a Term does not look at it; no m: 0.
template <class Term, bool kKeep, class C>
JAXGPUOPS_SIMD_FMA void sum_rows(const C* z, const C* y, RowBlock block, const C* m, C* terms, C* result) {
  constexpr int64_t kShort = 128;  // a loop a row costs as much as its elements
  if (block.stride > kShort) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t at = r * block.stride;
      result[r] = sum_row<Term>(z + at, y + at, m ? m[r] : C(0), block.count[r], kKeep ? terms + at : nullptr);
    }
    return;
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    const C* x = z + r * block.stride;
    C* to = terms + r * block.stride;
    const C maximum = m ? m[r] : C(0);
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < block.stride; ++i) to[i] = x[i] - maximum;
  }
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < block.rows * block.stride; ++i) terms[i] = Term::of(terms[i], y[i]);
  reduce_rows<Add>(terms, block.rows, block.stride, [&](int64_t r) { return block.count[r]; }, C(0), result);
}

template <class Term, class C>
JAXGPUOPS_SIMD_FMA void sum_columns(const C* z, const C* y, int64_t count, int64_t width, int64_t lanes, const C* m,
                                    C* terms, C* result) {
  for (int64_t at = 0; at < count; at += lanes) {
    const C *x = z + at, *x2 = y + at;
    C* term = terms + at;
    const int64_t n = std::min(lanes, count - at);
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) term[i] = Term::of(x[i] - m[i], x2[i]);
  }
  C lane[kMaxLanes];
  reduce_dense<Add>(terms, count, width, lanes, C(0), lane);
  std::copy(lane, lane + width, result);
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
  for (int64_t i = 0; i < count; ++i) {
    const C e = label[i] == m[i] ? C(1) : exp_negative(label[i] - m[i]), whole = rest[i] + e;
    at_label[i] = e;
    sum[i] = whole;
    log_sum[i] = log_above_one(whole) + (label[i] == m[i] ? (rest[i] - (whole - C(1))) / whole : C(0));
  }
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
struct LogSoftmaxCotangent {  // of t, of p but for the one above a half, and of t but for that
  template <class C>
  static JAXGPUOPS_INLINE C of(C t, C p, C factor, C total, C rest, C others) {
    return (p > C(0.5) ? rest * total - others : t - p * total) * factor;
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
