// The number between two neighbouring elements, for both backends.
#pragma once

#include <cmath>

#include "common/ordered_key.h"

namespace jaxgpuops::select {

// Returns x * y + z with the roundings of XLA, which fuses the two on CPUs only.
template <class Number>
JAXGPUOPS_HD Number multiply_add(Number x, Number y, Number z) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Number) == 8) return __dadd_rn(__dmul_rn(x, y), z);
  return __fadd_rn(__fmul_rn(x, y), z);
#else
  return std::fma(x, y, z);
#endif
}

// Returns the number that is `share` of the way from one element to another; of a midpoint, their mean.
template <class Number>
JAXGPUOPS_HD Number number_between(Number low, Number high, Number share, bool midpoint) {
  constexpr auto one = Number{1}, half = one / 2;
  if (midpoint) return multiply_add(low, half, high * half);
  if (share == one) low = high;  // no infinity times 0, where the share has been rounded to 1
  const Number step = high - low, rest = one - share;
  // The step is not finite if an end is infinite, or if it overflows.
  if (!(step - step == 0)) return multiply_add(low, rest, high * share);
  return share < half ? multiply_add(step, share, low) : multiply_add(-step, rest, high);
}

// Where a quantile of a row is among the results, if those of so many neighbouring rows lie beside each other: the
// first quantile of each of these rows, then the second one of each, and so on.
template <class Row>
JAXGPUOPS_HD int64_t quantile_at(Row row, int64_t quantile, int64_t quantiles, int64_t beside) {
  const auto group = static_cast<Row>(beside), in_group = row % group;
  return (row - in_group) * quantiles + quantile * group + in_group;
}

}  // namespace jaxgpuops::select
