// Transposition on the CPU, by squares of elements in 16-byte registers, which every CPU has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/cpu/simd.h"

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)  // GCC 12 and later, clang
#define JAXGPUOPS_SQUARES
#endif
#endif

namespace jaxgpuops {

#ifdef JAXGPUOPS_SQUARES
template <class T>
constexpr int64_t kSide = sizeof(T) < 16 ? 16 / sizeof(T) : 1;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(16)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

// Interleaves two vectors: ab is a0 b0 a1 b1 and so on.
template <class V, size_t... i>
JAXGPUOPS_INLINE void interleave(const V& a, const V& b, V* ab, std::index_sequence<i...>) {
  constexpr size_t n = sizeof...(i);
  ab[0] = __builtin_shufflevector(a, b, (i / 2 + i % 2 * n)...);
  ab[1] = __builtin_shufflevector(a, b, (n / 2 + i / 2 + i % 2 * n)...);
}

template <int64_t kRows, class V>
JAXGPUOPS_INLINE void transpose_square(V* rows) {
  V mixed[kRows];
  for (int64_t n = 1; n < kRows; n *= 2) {
    for (int64_t i = 0; i < kRows / 2; ++i)
      interleave(rows[i], rows[i + kRows / 2], mixed + 2 * i, std::make_index_sequence<kRows>());
    for (int64_t i = 0; i < kRows; ++i) rows[i] = mixed[i];
  }
}
#else
template <class T>
constexpr int64_t kSide = 1;  // squares need __builtin_shufflevector, so this value turns them off
#endif

template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> : std::common_type<uint8_t> {};
template <>
struct UnsignedOf<2> : std::common_type<uint16_t> {};
template <>
struct UnsignedOf<4> : std::common_type<uint32_t> {};
template <>
struct UnsignedOf<8> : std::common_type<uint64_t> {};

// Transposes a square: to(j)[i] = from(i)[j], where from(i) and to(j) return pointers.
template <class T, class From, class To>
JAXGPUOPS_INLINE void move_square([[maybe_unused]] const From& from, [[maybe_unused]] const To& to) {
#ifdef JAXGPUOPS_SQUARES
  if constexpr (kSide<T> > 1) {
    using V = Vector<typename UnsignedOf<sizeof(T)>::type>;
    V rows[kSide<T>];
    for (int64_t i = 0; i < kSide<T>; ++i) std::memcpy(&rows[i], from(i), sizeof(V));
    transpose_square<kSide<T>>(rows);
    for (int64_t i = 0; i < kSide<T>; ++i) std::memcpy(to(i), &rows[i], sizeof(V));
  }
#endif
}

// Transposes few columns, or few rows. The number is a compile-time constant, so that the compiler can vectorise the
// loop.
template <class T, class Few>
JAXGPUOPS_INLINE void transpose_few(const T* from, int64_t rows, Few columns, T* to, int64_t to_stride) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * columns + c];
}
template <class T, class Few>
JAXGPUOPS_INLINE void transpose_few(const T* from, int64_t from_stride, Few rows, int64_t columns, T* to) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * from_stride + c];
}

// Transposes: to[c * to_stride + r] = from[r * from_stride + c].
template <class T>
JAXGPUOPS_SIMD void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                              int64_t to_stride) {
  constexpr int64_t kLast = kSide<T> - 1;
  if (kSide<T> > 1 && rows > kLast && columns > kLast) {
    for (int64_t r = 0; r < rows; r += kSide<T>) {
      const int64_t row = std::min(r, rows - kSide<T>);  // the last squares may overlap those before them
      for (int64_t c = 0; c < columns; c += kSide<T>) {
        const int64_t column = std::min(c, columns - kSide<T>);
        const T* x = from + row * from_stride + column;
        T* y = to + column * to_stride + row;
        move_square<T>([&](int64_t i) { return x + i * from_stride; }, [&](int64_t i) { return y + i * to_stride; });
      }
    }
    return;
  }
  const auto few = [&](auto n) {
    if (columns == n && from_stride == n) {
      transpose_few(from, rows, n, to, to_stride);
    } else if (rows == n && to_stride == n) {
      transpose_few(from, from_stride, n, columns, to);
    } else {
      return false;
    }
    return true;
  };
  if (few(std::integral_constant<int64_t, 2>()) || few(std::integral_constant<int64_t, 3>())) return;
  if (rows > columns) {
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

// An element of kBytes bytes, to transpose short runs as if each were one element.
template <int64_t kBytes>
struct Bytes {
  unsigned char bytes[kBytes];
};

// Copies a run in pieces of kPiece bytes; the last two pieces may overlap.
template <int64_t kPiece>
JAXGPUOPS_INLINE void copy_run(const unsigned char* from, int64_t bytes, unsigned char* to) {
  for (int64_t at = 0; at < bytes - kPiece; at += kPiece) std::memcpy(to + at, from + at, kPiece);
  std::memcpy(to + bytes - kPiece, from + bytes - kPiece, kPiece);
}

template <int64_t kPiece, class T>
void transpose_runs(const T* from, int64_t from_stride, int64_t rows, int64_t columns, int64_t run, T* to,
                    int64_t to_stride) {
  const int64_t bytes = run * sizeof(T);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      copy_run<kPiece>(reinterpret_cast<const unsigned char*>(from + r * from_stride + c * run), bytes,
                       reinterpret_cast<unsigned char*>(to + c * to_stride + r * run));
  }
}

// Transposes runs of `run` neighbouring elements; both strides must be multiples of `run`.
template <class T>
void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, int64_t run, T* to,
               int64_t to_stride) {
  // Treats a run of few bytes as one element.
  const auto as = [&](auto element) {
    using E = decltype(element);
    transpose(reinterpret_cast<const E*>(from), from_stride / run, rows, columns, reinterpret_cast<E*>(to),
              to_stride / run);
  };
  const int64_t bytes = run * sizeof(T);
  if (run == 1) return transpose(from, from_stride, rows, columns, to, to_stride);
  if (bytes == 2) return as(Bytes<2>());
  if (bytes == 4) return as(Bytes<4>());
  if (bytes == 8) return as(Bytes<8>());
  if (bytes >= 16) return transpose_runs<16>(from, from_stride, rows, columns, run, to, to_stride);
  if (bytes >= 8) return transpose_runs<8>(from, from_stride, rows, columns, run, to, to_stride);
  if (bytes >= 4) return transpose_runs<4>(from, from_stride, rows, columns, run, to, to_stride);
  transpose_runs<1>(from, from_stride, rows, columns, run, to, to_stride);
}

}  // namespace jaxgpuops
