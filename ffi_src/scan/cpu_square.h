// Squares of elements, which are transposed in registers of 16 bytes: no CPU is too old for those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/simd.h"

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)  // GCC 12, clang
#define JAXGPUOPS_SQUARES
#endif
#endif

namespace jaxgpuops::scan::cpu {

#ifdef JAXGPUOPS_SQUARES
template <class T>
constexpr int64_t kSide = sizeof(T) < 16 ? 16 / sizeof(T) : 1;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(16)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

// a0 b0 a1 b1 ...
template <class V, size_t... i>
JAXGPUOPS_INLINE void interleave(const V& a, const V& b, V* ab, std::index_sequence<i...>) {
  constexpr size_t n = sizeof...(i);
  ab[0] = __builtin_shufflevector(a, b, (i / 2 + i % 2 * n)...);
  ab[1] = __builtin_shufflevector(a, b, (n / 2 + i / 2 + i % 2 * n)...);
}

template <int64_t kRows, class V>
JAXGPUOPS_INLINE void transpose(V* rows) {
  V mixed[kRows];
  for (int64_t n = 1; n < kRows; n *= 2) {
    for (int64_t i = 0; i < kRows / 2; ++i)
      interleave(rows[i], rows[i + kRows / 2], mixed + 2 * i, std::make_index_sequence<kRows>());
    for (int64_t i = 0; i < kRows; ++i) rows[i] = mixed[i];
  }
}
#else
template <class T>
constexpr int64_t kSide = 1;  // none
#endif

}  // namespace jaxgpuops::scan::cpu
