// What the kernels of tables.cu and tables_wide.cu keep in shared memory.
#pragma once

#include <type_traits>

#include "segments/cuda/atomics.cuh"
#include "segments/cuda/slices.cuh"

namespace jaxgpuops::segments {

// What a table holds for a segment. Atomics need words of 32 or 64 bits. Shared memory has no atomic addition of 64
// bits, so a table of such sums has all their lower halves first, then all upper ones.
template <class Monoid>
using TableWord =
    std::conditional_t<is_extreme<Monoid> && sizeof(typename Monoid::Acc) < 4, uint32_t, typename Monoid::Acc>;
// Whether any order of folding gives the same, so that a block has one table.
template <class Monoid>
constexpr bool has_one_table = !is_exact<Monoid>;
template <class Monoid>
constexpr bool has_halves = has_one_table<Monoid> && !is_extreme<Monoid> && sizeof(typename Monoid::Acc) == 8;

}  // namespace jaxgpuops::segments
