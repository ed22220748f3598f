// Reductions with vector registers, called packs. The order of additions depends only on the number of elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/cpu/simd.h"

namespace jaxgpuops {

#if defined(__GNUC__)
constexpr int64_t kPackBytes = 32;
template <class T>
struct PackOf {
  typedef T type __attribute__((vector_size(kPackBytes)));
};
#else
template <class T>
struct PackOf {
  typedef T type;
};
#endif
template <class T>
using Pack = typename PackOf<T>::type;
template <class T>
constexpr int64_t kPack = sizeof(Pack<T>) / sizeof(T);

struct Add {
  template <class T>
  static JAXGPUOPS_INLINE void into(T& a, const T& b) {
    a = static_cast<T>(a + b);
  }
};
struct Largest {  // keeps the larger number; NaN counts as less than every number
  template <class T>
  static JAXGPUOPS_INLINE void into(T& a, const T& b) {
    a = b > a ? b : a;
  }
};
template <bool kLargest>
struct Extremum {  // keeps the larger (or smaller) number, or NaN if there is one
  template <class T>
  static JAXGPUOPS_INLINE void into(T& a, const T& b) {
    const T larger = kLargest ? (b > a ? b : a) : (b < a ? b : a);  // this is a if a or b is NaN
    a = b != b ? b : larger;
  }
};
template <bool kAnd>
struct Bitwise {
  template <class T>
  static JAXGPUOPS_INLINE void into(T& a, const T& b) {
    a = kAnd ? a & b : a | b;
  }
};

template <class T>
JAXGPUOPS_INLINE void load_pack(const T* from, Pack<T>& to) {
  std::memcpy(&to, from, sizeof to);
}

template <class T>
JAXGPUOPS_INLINE void fill_packs(T value, Pack<T> (&packs)[4]) {
  T lanes[kPack<T>];
  for (T& lane : lanes) lane = value;
  for (auto& pack : packs) std::memcpy(&pack, lanes, sizeof lanes);
}

// Reduces `steps` times four packs to four packs. Partial sums of 16 steps bound the rounding error.
template <class Op, class T, class Load>
JAXGPUOPS_INLINE void reduce_packs(int64_t steps, const Load& load, Pack<T> (&total)[4]) {
  constexpr int64_t kChain = 16;
  for (int64_t s = 0; s < steps;) {
    Pack<T> part[4];
    for (int k = 0; k < 4; ++k) load_pack(load(s, k), part[k]);
    const int64_t end = std::min(steps, s + kChain);
    for (++s; s < end; ++s) {
      for (int k = 0; k < 4; ++k) {
        Pack<T> next;
        load_pack(load(s, k), next);
        Op::into(part[k], next);
      }
    }
    for (int k = 0; k < 4; ++k) Op::into(total[k], part[k]);
  }
}

// Combines four packs to one, the first.
template <class Op, class T>
JAXGPUOPS_INLINE void combine_packs(Pack<T> (&packs)[4]) {
  Op::into(packs[0], packs[2]);
  Op::into(packs[1], packs[3]);
  Op::into(packs[0], packs[1]);
}

// Combines the lanes of each row. The lanes of one row are followed by those of the next.
template <class Op, class T>
JAXGPUOPS_INLINE void combine_lanes(const T* lanes, int64_t rows, T* result) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* lane = lanes + r * kPack<T>;
    T total = lane[0];
    for (int64_t i = 1; i < kPack<T>; ++i) Op::into(total, lane[i]);
    result[r] = total;
  }
}

// Reduces `count` neighbouring elements to kPack lanes.
template <class Op, class T>
JAXGPUOPS_INLINE void reduce_to_pack(const T* x, int64_t count, T identity, T* lanes) {
  constexpr int64_t kStep = 4 * kPack<T>;
  Pack<T> total[4];
  fill_packs(identity, total);
  const int64_t steps = count / kStep;
  reduce_packs<Op, T>(
      steps,
      [&](int64_t s, int k) {
        const T* from = x + s * kStep + k * kPack<T>;
        if (k % 2 == 0) prefetch(from, 2 * kPack<T>);
        return from;
      },
      total);
  combine_packs<Op, T>(total);
  int64_t at = steps * kStep;
  Pack<T> next;
  for (; at + kPack<T> <= count; at += kPack<T>) {
    load_pack(x + at, next);
    Op::into(total[0], next);
  }
  if (at < count) {
    T rest[kPack<T>];
    for (int64_t i = 0; i < kPack<T>; ++i) rest[i] = identity;
    for (int64_t i = 0; at + i < count; ++i) rest[i] = x[at + i];
    load_pack(rest, next);
    Op::into(total[0], next);
  }
  std::memcpy(lanes, &total[0], sizeof total[0]);
}

constexpr int64_t kGroup = 64;  // rows whose lanes are combined in one call

// Reduces rows that are `stride` elements apart; count(row) is the number of elements of a row.
template <class Op, class T, class Count>
JAXGPUOPS_INLINE void reduce_rows(const T* x, int64_t rows, int64_t stride, const Count& count, T identity, T* result) {
  T lanes[kGroup * kPack<T>];
  for (int64_t first = 0; first < rows; first += kGroup) {
    const int64_t group = std::min(kGroup, rows - first);
    for (int64_t r = 0; r < group; ++r)
      reduce_to_pack<Op>(x + (first + r) * stride, count(first + r), identity, lanes + r * kPack<T>);
    combine_lanes<Op>(lanes, group, result + first);
  }
}

constexpr int64_t kWidest = 4096;

// Reduces each lane over `steps` lines, which it reads in the order of memory.
template <class Op, class T>
JAXGPUOPS_INLINE void reduce_wide(const T* x, int64_t steps, int64_t stride, int64_t lanes, T identity, T* result) {
  constexpr int64_t kTogether = 4, kChain = 16 * kTogether;
  T part[kWidest];
  std::fill(result, result + lanes, identity);
  for (int64_t first = 0; first < steps; first += kChain) {
    const int64_t end = std::min(steps, first + kChain);
    std::fill(part, part + lanes, identity);
    int64_t s = first;
    for (; s + kTogether <= end; s += kTogether) {
      const T *x0 = x + s * stride, *x1 = x0 + stride, *x2 = x1 + stride, *x3 = x2 + stride;
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < lanes; ++i) {
        T a = x0[i], b = x2[i];
        Op::into(a, x1[i]);
        Op::into(b, x3[i]);
        Op::into(a, b);
        Op::into(part[i], a);
      }
    }
    for (; s < end; ++s) {
      const T* next = x + s * stride;
      JAXGPUOPS_INDEPENDENT
      for (int64_t i = 0; i < lanes; ++i) Op::into(part[i], next[i]);
    }
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = 0; i < lanes; ++i) Op::into(result[i], part[i]);
  }
}

// The same as reduce_wide(), but with the sums in registers.
template <class Op, class T>
JAXGPUOPS_INLINE void reduce_lanes(const T* x, int64_t steps, int64_t stride, int64_t lanes, T identity, T* result) {
  int64_t c = 0;
  for (; c + 4 * kPack<T> <= lanes; c += 4 * kPack<T>) {
    Pack<T> total[4];
    fill_packs(identity, total);
    reduce_packs<Op, T>(steps, [&](int64_t s, int k) { return x + s * stride + c + k * kPack<T>; }, total);
    std::memcpy(result + c, total, sizeof total);
  }
  reduce_wide<Op>(x + c, steps, stride, lanes - c, identity, result + c);
}

// Reduces columns whose positions along the axis are `stride` elements apart.
template <class Op, class T>
JAXGPUOPS_INLINE void reduce_strided(const T* x, int64_t steps, int64_t stride, int64_t width, T identity, T* result) {
  constexpr int64_t kWide = 128;
  if (width >= kWide) return reduce_wide<Op>(x, steps, stride, width, identity, result);
  reduce_lanes<Op>(x, steps, stride, width, identity, result);
}

// Reduces columns that are stored without gaps. Element i belongs to lane i % lanes, where lanes is a multiple of
// `width`. `result` must have room for all lanes.
template <class Op, class T>
JAXGPUOPS_INLINE void reduce_dense(const T* x, int64_t count, int64_t width, int64_t lanes, T identity, T* result) {
  const int64_t steps = count / lanes;
  reduce_strided<Op>(x, steps, lanes, lanes, identity, result);
  const T* rest = x + steps * lanes;
  for (int64_t i = 0; i < count - steps * lanes; ++i) Op::into(result[i], rest[i]);
  for (int64_t at = width; at < lanes; at += width)
    for (int64_t i = 0; i < width; ++i) Op::into(result[i], result[at + i]);
}

}  // namespace jaxgpuops
