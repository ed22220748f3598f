// What the kernels that move rows share: where the indices, weights and rows of a token are, how they are read, and
// zeros for rows that have no token.
#pragma once

#include <type_traits>

#include "common/cuda/element.h"
#include "common/cuda/warp.cuh"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kFilled = 32;  // rows that a warp searches for rows without a token

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divisions of 64 bits are long and rarely needed. So they are functions that are not inlined, which keeps the code
// short that small calls have to load.
__device__ inline __noinline__ int64_t wide_quotient(int64_t a, int64_t b) { return a / b; }
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? wide_quotient(a, b) : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Tokens are counted over all outer indices, but these may share indices and weights, and have rows of their own. So
// this must be added to the place of an index or weight of a token, and to a row of its outer index.
struct Shift {
  int64_t index = 0, weight = 0, row = 0;
};
__device__ inline __noinline__ Shift shift_of_batch(const MoveProblem& p, int64_t token) {
  const int64_t o = token / p.tokens, before = o * p.tokens * p.choices;
  return {p.index(o) - before, p.weight(o) - before, o * p.rows};
}
__device__ __forceinline__ Shift shift_of(const MoveProblem& p, int64_t token) {
  return p.outer == 1 ? Shift{} : shift_of_batch(p, token);
}

__device__ inline __noinline__ int64_t shift_of_batched_rows(const MoveProblem& p, int64_t line) {
  const int64_t o = line / p.rows;
  return p.other(o) - o * p.rows;
}
__device__ __forceinline__ int64_t shift_of_rows(const MoveProblem& p, int64_t line) {
  return p.outer == 1 ? 0 : shift_of_batched_rows(p, line);
}

// A weight as it was loaded. It becomes a number where it is used: to convert it means to wait for it, and loads that
// follow should begin before that.
template <class Element>
struct Weight {
  using Acc = typename Element::Acc;
  static constexpr bool kMayBeNarrow = sizeof(typename Element::Bits) == 2;
  std::conditional_t<kMayBeNarrow, uint32_t, Acc> bits;

  __device__ __forceinline__ static Weight load(const MoveProblem& p, const void* weights, int64_t i) {
    if constexpr (kMayBeNarrow) {
      if (p.narrow) return {static_cast<const typename Element::Bits*>(weights)[i]};
      return {static_cast<const uint32_t*>(weights)[i]};
    } else {
      return {static_cast<const Acc*>(weights)[i]};
    }
  }
  __device__ __forceinline__ Acc number(const MoveProblem& p) const {
    if constexpr (kMayBeNarrow)
      return p.narrow ? Element::load(static_cast<typename Element::Bits>(bits)) : __uint_as_float(bits);
    else
      return bits;
  }
};
template <class Element>
__device__ __forceinline__ void put_weight(const MoveProblem& p, void* weights, int64_t i,
                                           typename Element::Acc weight) {
  if constexpr (sizeof(typename Element::Bits) == 2) {
    if (p.narrow) {
      static_cast<typename Element::Bits*>(weights)[i] = Element::store(weight);
      return;
    }
  }
  static_cast<typename Element::Acc*>(weights)[i] = weight;
}

// Writes zeros to the rows that have no token. `block`: the number of this block among those that do this.
template <class V>
__device__ __forceinline__ void fill(const MoveProblem& p, int64_t block, const int32_t* index, int64_t units, V* out) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (block * (blockDim.x / 32) + threadIdx.x / 32) * kFilled, line = first + lane;
  unsigned empty = __ballot_sync(kEveryLane, line < p.outer * p.rows && index[line + shift_of_rows(p, line)] < 0);
#pragma unroll 1
  for (; empty; empty &= empty - 1) {
    V* const row = out + (first + __ffs(empty) - 1) * units;
#pragma unroll 1
    for (int64_t u = lane; u < units; u += 32) row[u] = V{};
  }
}

inline int64_t fill_blocks(const MoveProblem& p, int64_t threads) {
  return ceil_div(p.outer * p.rows, threads / 32 * kFilled);
}

// Neighbouring elements that are loaded and stored together.
template <class Element, int kVector>
struct alignas(kVector * sizeof(typename Element::Bits)) Vector {
  typename Element::Bits bits[kVector];
};

}  // namespace jaxgpuops::moe
