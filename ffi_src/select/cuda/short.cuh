// What select's kernels for short rows share: their arguments, and where a row's elements and results are.
#pragma once

#include "select/cuda/quantile.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kThreads = kShortSelectThreads, kWarps = kThreads / 32;

// Sorts words upwards. (Batcher's merge exchange.) Minima and maxima run on the pipe that most other instructions need.
// So two of three comparators take the maximum from the sum, by multiply-adds with `one` and `minus_one`, which run on
// another pipe.
struct Network {
  uint32_t one, minus_one;

  template <int kRoom, int kRun = 1, int kStep = kRun>
  __device__ __forceinline__ void sort(uint32_t (&v)[kRoom]) const {
    constexpr int kFrom = kStep == kRun ? 0 : kStep;
#pragma unroll
    for (int i = kFrom; i + kStep < kRoom; ++i) {
      if ((i - kFrom) % (2 * kStep) >= kStep || i / (2 * kRun) != (i + kStep) / (2 * kRun)) continue;
      uint32_t &a = v[i], &b = v[i + kStep];
      const uint32_t least = min(a, b);
      if (i % 3 == 0) {
        b = max(a, b);
      } else {
        asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(b) : "r"(a), "r"(one));
        asm("mad.lo.u32 %0, %1, %2, %0;" : "+r"(b) : "r"(least), "r"(minus_one));
      }
      a = least;
    }
    if constexpr (kStep > 1) {
      sort<kRoom, kRun, kStep / 2>(v);
    } else if constexpr (2 * kRun < kRoom) {
      sort<kRoom, 2 * kRun>(v);
    }
  }
};

struct Args {
  Select problem;
  const void* x;
  const int32_t* ranks;
  SelectResults results;
  Network network;
  uint32_t pitch, words_at;  // keys of a row in shared memory; and, for threads, the word where they begin
  uint32_t stride;           // for warps: from one element of a row to the next
};

inline Args args_of(const SelectPlan& plan, const Select& problem, const void* x, const int32_t* ranks,
                    const SelectResults& results) {
  return {problem,
          x,
          ranks,
          results,
          {1, ~0u},
          static_cast<uint32_t>(plan.pitch),
          static_cast<uint32_t>(plan.table_at / 4),
          static_cast<uint32_t>(plan.turns ? 1 : problem.rows.inner)};
}

// Where the elements of a row, its ranks and its results begin.
struct Place {
  uint32_t row, outer, column;
  int64_t x, ranks, to;

  __device__ __forceinline__ Place(const Select& problem, uint32_t row) : row(row) {
    const auto inner = static_cast<uint32_t>(problem.rows.inner);
    outer = row / inner, column = row - outer * inner;
    x = outer * problem.rows.length * inner + column;
    ranks = ranks_at(problem.ranks, outer, column);
    to = outer * problem.results() * inner + column;
  }
};

// Returns the rank number j of a row.
__device__ __forceinline__ uint32_t rank_at(const Args& a, const Place& place, int j) {
  return static_cast<uint32_t>(a.problem.rank_of(a.ranks[place.ranks + j * a.problem.ranks.axis_stride]));
}

// Returns element number `place` of a warp's row, which begins at `x`.
template <class Word>
__device__ __forceinline__ Word element_at(const Args& a, int64_t x, uint32_t place) {
  const int64_t at = x + int64_t{place} * a.stride;
  if constexpr (sizeof(Word) == 8) return static_cast<const uint64_t*>(a.x)[at];
  return a.problem.bits == 8    ? static_cast<const uint8_t*>(a.x)[at]
         : a.problem.bits == 16 ? static_cast<const uint16_t*>(a.x)[at]
                                : static_cast<const uint32_t*>(a.x)[at];
}
template <class Word>
__device__ __forceinline__ void write_element(const Args& a, int64_t to, Word element) {
  if constexpr (sizeof(Word) == 8) {
    static_cast<uint64_t*>(a.results.values)[to] = element;
  } else {
    if (a.problem.bits == 8) static_cast<uint8_t*>(a.results.values)[to] = static_cast<uint8_t>(element);
    if (a.problem.bits == 16) static_cast<uint16_t*>(a.results.values)[to] = static_cast<uint16_t>(element);
    if (a.problem.bits == 32) static_cast<uint32_t*>(a.results.values)[to] = element;
  }
}

// Calls `visit(warp, i, element)` for all elements of the columns of a block's warps. Neighbouring threads load those
// of neighbouring columns. The whole block calls this.
template <class T, class Visit>
__device__ __forceinline__ void for_columns(const Args& a, Visit visit) {
  const uint32_t warp = threadIdx.x % kWarps, last = static_cast<uint32_t>(a.problem.rows.count()) - 1;
  const Place place(a.problem, min(blockIdx.x * kWarps + warp, last));
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const T* const from = static_cast<const T*>(a.x) + place.x;
  constexpr uint32_t kAhead = 16, kStep = kThreads / kWarps;
#pragma unroll 1
  for (uint32_t start = threadIdx.x / kWarps; start < length; start += kAhead * kStep) {
    T element[kAhead];
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j)
      if (start + j * kStep < length) element[j] = from[int64_t{start + j * kStep} * a.stride];
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j)
      if (start + j * kStep < length) visit(warp, start + j * kStep, element[j]);
  }
}

// Begins a row: loads its quantiles, if these are wanted. A warp calls this.
template <class Word>
__device__ __forceinline__ void begin_row(const Args& a, const Place& place, Quantiles<Word>& quantiles) {
  const uint32_t j = threadIdx.x & 31;
  if (j < a.problem.quantiles)
    quantiles.own[j].load(a.problem, a.results.shares, a.ranks + place.ranks, place.outer, place.column, j);
}

// Writes the element of rank number j of a row, which is number `at` in it, and its index. Of quantiles, it is kept for
// end_row(). One thread calls this.
template <class Word>
__device__ __forceinline__ void put_element(const Args& a, const Place& place, Quantiles<Word>& quantiles, int j,
                                            Word element, uint32_t at) {
  if (a.problem.quantiles) {
    quantiles.taken[j] = element;
    return;
  }
  const int64_t to = place.to + j * a.problem.rows.inner;
  write_element(a, to, element);
  a.results.indices[to] = static_cast<int32_t>(at);
}

// Writes the quantiles. A warp calls this.
template <class Word>
__device__ __forceinline__ void end_row(const Args& a, const Place& place, const Quantiles<Word>& quantiles) {
  const uint32_t j = threadIdx.x & 31;
  if (a.problem.quantiles) __syncwarp();
  if (j < a.problem.quantiles)
    write_element(a, quantile_at(place.row, j, a.problem.quantiles, a.results.beside), quantiles(a.problem, j));
}

}  // namespace
}  // namespace jaxgpuops::select
