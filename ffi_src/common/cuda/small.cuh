// What the kernels for few elements have in common. Their calls last as long as it takes to fetch the code, which no
// multiprocessor has yet, and to wait for memory once. So they have little code, load every element at once, and their
// parameters are only those that they read, side by side: each cache line of parameters is one more trip to memory.
#pragma once

#include <cstdint>

namespace jaxgpuops {

// ptxas computes anew, in front of each use, what follows from parameters. Not behind this.
template <class T>
__device__ __forceinline__ T once(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// Divides by a number that the host knows: numbers and divisors of which the product is at most 2^32.
struct Quotient {
  uint64_t inverse = 0;  // 2^32 / divisor, rounded up

  Quotient() = default;
  explicit Quotient(int64_t divisor) : inverse(((int64_t{1} << 32) + divisor - 1) / divisor) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return static_cast<uint32_t>(number * inverse >> 32);
  }
};

}  // namespace jaxgpuops
