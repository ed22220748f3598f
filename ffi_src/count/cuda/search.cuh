// What the kernels of searchsorted share: how a query is compared, and how queries that stand one after another are
// read and their places written.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "count/count.h"

namespace jaxgpuops::count {

// The elements whose keys are below a query's bound come before it; if no key is so large, all do.
template <class T>
struct Bound {
  using Key = std::conditional_t<sizeof(T) < 4, uint32_t, T>;
  Key key;
  bool all;

  Bound() = default;
  __device__ __forceinline__ Bound(T query, const Search& problem) {
    const Key own = sort_key(query, problem.order);
    key = own + static_cast<Key>(problem.right);
    all = key < own;
  }
};

// Returns how many elements of a row come before a query of this key. A search takes the same steps whatever it finds.
template <class T>
__device__ __forceinline__ int64_t search_row(const Search& problem, const T* row, T key) {
  const int64_t stride = problem.sorted.axis_stride;
  int64_t first = 0, left = problem.length;  // the result is in [first, first + left]
  while (left > 1) {
    const int64_t half = left / 2;
    if (problem.before(row[(first + half - 1) * stride], key)) first += half;
    left -= half;
  }
  return first + (left == 1 && problem.before(row[first * stride], key));
}

// Finds the places of queries that stand one after another, by all threads of a block. find(queries, at, places) does so
// for an array of four queries, or of one, of which the first has number `at`; a thread loads kTogether fours at a time.
template <int kTogether, class T, class Find>
__device__ __forceinline__ void find_places(const T* queries, int32_t* places, int64_t count, Find find) {
  using Vector = std::conditional_t<sizeof(T) == 1, uint32_t, std::conditional_t<sizeof(T) == 2, uint2, uint4>>;
  struct Four {
    Vector part[sizeof(T) == 8 ? 2 : 1];
  };
  struct Queries {
    T query[4];
  };
  // Fours begin where four places begin at a multiple of 16 bytes, if that suits the queries, too.
  const int64_t head = min(count, static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(places) % 16) % 16 / 4));
  const bool suits = reinterpret_cast<uintptr_t>(queries + head) % sizeof(Vector) == 0;
  const int64_t fours = suits ? (count - head) / 4 : 0, threads = blockDim.x;
  const auto* const from = reinterpret_cast<const Vector*>(queries + head);
  auto* const to = reinterpret_cast<int4*>(places + head);
  for (int64_t start = threadIdx.x; start < fours; start += kTogether * threads) {
    Four four[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      constexpr int kParts = sizeof(Four) / sizeof(Vector);
      const int64_t at = min(start + i * threads, fours - 1);
#pragma unroll
      for (int part = 0; part < kParts; ++part) four[i].part[part] = __ldcs(from + at * kParts + part);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = start + i * threads;
      if (kTogether > 1 && at >= fours) break;
      const auto own = bits_as<Queries>(four[i]);
      int32_t place[4];
      find(own.query, head + 4 * at, place);
      __stcs(to + at, int4{place[0], place[1], place[2], place[3]});
    }
  }
  // The others stand before the fours and behind them.
  for (int64_t i = threadIdx.x; i < count - 4 * fours; i += threads) {
    const int64_t at = i < head ? i : i + 4 * fours;
    const T query[1] = {queries[at]};
    int32_t place[1];
    find(query, at, place);
    places[at] = place[0];
  }
}

}  // namespace jaxgpuops::count
