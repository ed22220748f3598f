// The parts that kernels for arrays of few elements share. Most of the time of such a kernel goes into fetching its
// code, which no multiprocessor has yet, and into waiting for memory once. So these kernels have little code, load all
// elements at once, and take only the parameters that they read, since each cache line of parameters is one more wait.
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"
#include "common/small.h"

namespace jaxgpuops {

// Returns the value, but hides from the compiler how it was computed. So the value stays in a register; otherwise ptxas
// computes what follows from kernel parameters again at each use.
template <class T>
__device__ __forceinline__ T once(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// Divides by a number that the host knows. The product of the number and the divisor must be at most 2^40.
struct Quotient {
  uint64_t inverse = 0;  // 2^40 / divisor, rounded up

  Quotient() = default;
  explicit Quotient(int64_t divisor) : inverse(((int64_t{1} << 40) + divisor - 1) / divisor) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return static_cast<uint32_t>(number * inverse >> 40);
  }
};

// The columns of a call of at most 2^21 elements, how many of them share a warp, and how many threads share a column.
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

// The part of a column that a thread has, as small_shape() says. A thread without a column reads the last one, but does
// not own it.
struct SmallPlace {
  uint32_t beside, parts, part, column;
  bool owns;
  uint32_t first, step;  // index of the column's first element; distance from one element of the column to the next

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

  // Folds the values of the threads of a column. Returns true only to the thread that has to write the result.
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
      // If there are fewer warps than lanes, several lanes read the same value, which does not change the result.
      mine = warps[threadIdx.x & (count - 1)];
      lanes(count);
    }
    return part == 0 && owns;
  }
};

}  // namespace jaxgpuops
