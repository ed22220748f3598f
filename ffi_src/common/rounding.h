// Divisions and logarithms that round up.
#pragma once

#include <cstdint>

namespace jaxgpuops {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The exponent of the least power of two that is not below n.
constexpr int bits_for(int64_t n) {
  int bits = 0;
  while (int64_t{1} << bits < n) ++bits;
  return bits;
}

constexpr int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

// Parts of a workspace begin at multiples of 256 bytes.
constexpr int64_t aligned(int64_t bytes) { return round_up(bytes, 256); }

}  // namespace jaxgpuops
