// What the kernels for few elements have in common. Their calls last as long as it takes to fetch the code, which no
// multiprocessor has yet, and to wait for memory once. So they have little code, load every element at once, and their
// parameters are only those that they read, side by side: each cache line of parameters is one more trip to memory.
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"
#include "common/small.h"

namespace jaxgpuops {

// Returns the value, of which the compiler then knows nothing. So it is kept in a register; what follows from
// parameters of a kernel, ptxas would otherwise compute again at each use.
template <class T>
__device__ __forceinline__ T once(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// Divides by a number that the host knows: numbers and divisors of which the product is at most 2^40.
struct Quotient {
  uint64_t inverse = 0;  // 2^40 / divisor, rounded up

  Quotient() = default;
  explicit Quotient(int64_t divisor) : inverse(((int64_t{1} << 40) + divisor - 1) / divisor) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return static_cast<uint32_t>(number * inverse >> 40);
  }
};

// The columns of a call of at most 2^21 elements, and how many of them share a warp, or threads share one.
struct SmallColumns {
  uint32_t columns, length, inner;
  int column_bits, part_bits;
  Quotient outer_of;

  SmallColumns() = default;
  SmallColumns(const Rows& rows, int column_bits, int part_bits)
      : columns(static_cast<uint32_t>(rows.count())),
        length(static_cast<uint32_t>(rows.length)),
        inner(static_cast<uint32_t>(rows.inner)),
        column_bits(column_bits),
        part_bits(part_bits),
        outer_of(rows.inner) {}
};

// What a thread has of them, as small_shape() says. Who has no column has the last one, but does not own it.
struct SmallPlace {
  uint32_t beside, parts, part, column;
  bool owns;
  uint32_t first, step;  // elements: of the column's first, and from one of the column to the next

  __device__ explicit SmallPlace(const SmallColumns& c) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    beside = once(1u << c.column_bits);
    parts = once(1u << c.part_bits);
    part = once(thread >> c.column_bits & (parts - 1));
    const uint32_t own = (thread >> (c.column_bits + c.part_bits) << c.column_bits) + (thread & (beside - 1));
    column = once(own < c.columns ? own : c.columns - 1);
    owns = own == column;
    step = once(c.inner);
    first = once(c.outer_of(column) * (c.length - 1) * step + column);
  }

  // Folds what the threads of a column have. False: this thread is not the one that has to do with the result.
  template <class T, class Merge>
  __device__ __forceinline__ bool merge(T& mine, Merge merge) const {
    const auto lanes = [&](uint32_t count) {
#pragma unroll 1
      for (uint32_t d = count / 2; d >= beside; d /= 2) mine = merge(mine, shuffle_xor(mine, d));
    };
    lanes(parts * beside < 32 ? parts * beside : 32);
    if (parts > 32) {
      __shared__ T warps[32];
      const uint32_t count = blockDim.x / 32;
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
      __syncthreads();
      if (threadIdx.x >= 32) return false;
      mine = warps[threadIdx.x & (count - 1)];  // each again and again, if they are less than lanes
      lanes(count);
    }
    return part == 0 && owns;
  }
};

}  // namespace jaxgpuops
