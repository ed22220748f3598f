// What the kernels that move rows share: where the indices, weights and rows of a token are, how they are read, and
// zeros for rows that have no token.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/cuda/element.h"
#include "common/cuda/warp.cuh"
#include "common/rounding.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

constexpr int64_t kFilled = 32;  // rows that a warp searches for rows without a token

// Tokens, assignments and rows are counted over all outer indices. There are fewer than 2^32 of each, so that divisions
// are short: code that a small call has to load takes as long as what it does.
inline bool countable(const MoveProblem& p) {
  return p.outer * std::max(p.assignments(), p.rows) <= UINT32_MAX && p.inner * bytes_of(p.dtype) <= UINT32_MAX;
}

// Not inlined: only batches call it, and the compiler does not move loads that should begin early behind a call.
__device__ inline __noinline__ int64_t offset_in(const IndexMap& map, uint32_t index) {
  int64_t offset = 0;
#pragma unroll 1
  for (int g = 0; g < map.groups; ++g) {
    const auto size = static_cast<uint32_t>(map.size[g]), next = index / size;
    offset += (index - next * size) * map.stride[g];
    index = next;
  }
  return offset;
}

// Outer indices may share indices and weights, and have rows of their own. So this must be added to the place of an
// index or weight of a token, and to a row of its outer index. Only batches call this, so it is not inlined.
struct Shift {
  int64_t index = 0, weight = 0, row = 0;
};
__device__ inline __noinline__ Shift shift_of_batch(const MoveProblem& p, uint32_t token) {
  const uint32_t o = token / static_cast<uint32_t>(p.tokens);
  const int64_t before = o * p.tokens * p.choices;
  return {offset_in(p.index, o) - before, offset_in(p.weight, o) - before, o * p.rows};
}
__device__ __forceinline__ Shift shift_of(const MoveProblem& p, uint32_t token) {
  return p.outer == 1 ? Shift{} : shift_of_batch(p, token);
}

__device__ inline __noinline__ int64_t shift_of_batched_rows(const MoveProblem& p, uint32_t line) {
  const uint32_t o = line / static_cast<uint32_t>(p.rows);
  return offset_in(p.other, o) - o * p.rows;
}
__device__ __forceinline__ int64_t shift_of_rows(const MoveProblem& p, uint32_t line) {
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
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x * blockDim.y / 32);  // those that have all lanes
  if (warp >= warps) return;
  const int64_t first = (block * warps + warp) * kFilled, line = first + lane;
  const bool there = line < p.outer * p.rows;
  unsigned empty = __ballot_sync(kEveryLane, there && index[line + shift_of_rows(p, static_cast<uint32_t>(line))] < 0);
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
