// What select's kernels make of the elements beside a rank, if quantiles are wanted.
#pragma once

#include <limits>

#include "select/cuda/select.cuh"
#include "select/quantile.h"

namespace jaxgpuops::select {
namespace {

// A quantile of a row: how far it is from the element below it to the one above it. `Word`: a word of 64 bits, or one
// of 32 bits for smaller elements.
template <class Word>
struct Quantile {
  using Number = std::conditional_t<sizeof(Word) == 8, double, float>;
  Number share;
  bool is_between;  // else it is the element below

  // Loads that of number j of a row, whose ranks begin at `ranks`.
  __device__ __forceinline__ void load(const Select& problem, const void* shares, const int32_t* ranks, uint32_t outer,
                                       uint32_t column, uint32_t j) {
    const auto rank_of = [&](int64_t r) { return problem.rank_of(ranks[r * problem.ranks.axis_stride]); };
    share =
        static_cast<const Number*>(shares)[ranks_at(problem.shares, outer, column) + j * problem.shares.axis_stride];
    is_between = rank_of(j) != rank_of(problem.upper(j));
  }

  // `last`: the last element of the row, which is NaN if any element is.
  template <class Element>
  __device__ __forceinline__ Word as(bool midpoint, Word low, Word high, Word last) const {
    using Bits = typename Element::Bits;
    Number number = Element::load(static_cast<Bits>(low));
    const Number above = Element::load(static_cast<Bits>(high)), end = Element::load(static_cast<Bits>(last));
    if (is_between) number = number_between(number, above, share, midpoint);
    if (share != share || end != end) number = std::numeric_limits<Number>::quiet_NaN();
    return Element::store(number);
  }
  __device__ __forceinline__ Word of(const Select& problem, Word low, Word high, Word last) const {
    if constexpr (sizeof(Word) == 8) {
      return as<Float64>(problem.midpoint, low, high, last);
    } else {
      if (problem.dtype == DType::kFloat16) return as<Float16>(problem.midpoint, low, high, last);
      if (problem.dtype == DType::kBFloat16) return as<BFloat16>(problem.midpoint, low, high, last);
      return as<Float32>(problem.midpoint, low, high, last);
    }
  }
};

// Whether a key tells its element, which then need not be read again. (Zeros of both signs have one key, and so have
// all NaNs. To quantiles all NaNs are the same.)
template <class T>
__device__ __forceinline__ bool tells_element(const Select& problem, T key) {
  if (problem.order.ascending.sign == 0) return true;
  return key != sort_key(T{0}, problem.order) && (problem.quantiles || key != static_cast<T>(~T{0}));
}
template <class T>
__device__ __forceinline__ bool is_told_by_key(const Select& problem, T key) {
  return problem.quantiles && tells_element(problem, key);
}

// The element that has a key that tells it.
template <class T>
__device__ __forceinline__ T element_of_key(const Select& problem, T key) {
  return decode(key, problem.order.ascending.order);
}

// What a block or a warp keeps of a row until it writes the quantiles: these, and the elements of the ranks.
template <class Word>
struct Quantiles {
  Quantile<Word> own[kMostRanks];
  Word taken[kMostRanks];

  // The element of quantile j.
  __device__ __forceinline__ Word operator()(const Select& problem, uint32_t j) const {
    return own[j].of(problem, taken[j], taken[problem.upper(j)], taken[problem.count - 1]);
  }
};

}  // namespace
}  // namespace jaxgpuops::select
