#pragma once

#include <cstdint>

namespace jaxgpuops {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Parts of a workspace begin at multiples of 256 bytes.
constexpr int64_t aligned(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

}  // namespace jaxgpuops
