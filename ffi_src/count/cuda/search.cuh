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
};

template <class T>
__device__ __forceinline__ void make_bounds(const T (&queries)[4], const Search& problem, Bound<T> (&bounds)[4]) {
  T keys[4];
  if (problem.order.ascending.sign) {
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[i] = sort_key(queries[i], problem.order);
  } else {  // integers need less
#pragma unroll
    for (int i = 0; i < 4; ++i)
      keys[i] = encode(queries[i], problem.order.ascending.order) ^ static_cast<T>(problem.order.invert);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const typename Bound<T>::Key own = keys[i];
    bounds[i].key = own + static_cast<typename Bound<T>::Key>(problem.right);
    bounds[i].all = bounds[i].key < own;
  }
}

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
// for four queries, of which the first has number `at`, or for one of them alone, which is there four times. A thread
// loads kTogether fours at a time.
template <int kTogether, class T, class Find>
__device__ __forceinline__ void find_places(const T* queries, int32_t* places, int64_t count, Find find) {
  using Vector = std::conditional_t<sizeof(T) == 1, uint32_t, std::conditional_t<sizeof(T) == 2, uint2, uint4>>;
  struct Four {
    T query[4];
  };
  struct Vectors {
    Vector part[sizeof(Four) / sizeof(Vector)];
  };
  // Fours begin where four places begin at a multiple of 16 bytes, if that suits the queries, too. The other queries
  // stand before them and behind.
  const int64_t head = min(count, static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(places) % 16) % 16 / 4));
  const bool suits = reinterpret_cast<uintptr_t>(queries + head) % sizeof(Vector) == 0;
  const int64_t fours = suits ? (count - head) / 4 : 0, units = count - 3 * fours, threads = blockDim.x;
  for (int64_t start = threadIdx.x; start < units; start += kTogether * threads) {
    Four four[kTogether];
    int64_t at[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t unit = min(start + i * threads, units - 1), other = unit - fours;
      if (other < 0) {
        at[i] = head + 4 * unit;
        const auto* const from = reinterpret_cast<const Vector*>(queries + at[i]);
        Vectors vectors;
#pragma unroll
        for (int part = 0; part < static_cast<int>(sizeof(Four) / sizeof(Vector)); ++part)
          vectors.part[part] = __ldcs(from + part);
        four[i] = bits_as<Four>(vectors);
      } else {
        at[i] = other < head ? other : other + 4 * fours;
        const T query = queries[at[i]];
        four[i] = {query, query, query, query};
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t unit = start + i * threads;
      if (kTogether > 1 && unit >= units) break;
      int32_t place[4];
      find(four[i].query, at[i], place);
      if (unit < fours) {
        __stcs(reinterpret_cast<int4*>(places + at[i]), int4{place[0], place[1], place[2], place[3]});
      } else {
        places[at[i]] = place[0];
      }
    }
  }
}

}  // namespace jaxgpuops::count
