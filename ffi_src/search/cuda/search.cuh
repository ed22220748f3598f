// What the kernels of searchsorted share: how a query is compared, and how queries that stand one after another are
// read and their places written.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "search/search.h"

namespace jaxgpuops::search {

// Elements whose keys are below `key` come before a query. If even the largest key comes before it, no such bound
// exists, and `all` is true.
template <class T>
struct Bound {
  using Key = std::conditional_t<sizeof(T) < 4, uint32_t, T>;
  Key key;
  bool all;
};

template <class T, int kCount>
__device__ __forceinline__ void make_bounds(const T (&queries)[kCount], const Search& problem,
                                            Bound<T> (&bounds)[kCount]) {
  T keys[kCount];
  if (problem.order.ascending.sign) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) keys[i] = sort_key(queries[i], problem.order);
  } else {  // integers need less
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      keys[i] = encode(queries[i], problem.order.ascending.order) ^ static_cast<T>(problem.order.invert);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const typename Bound<T>::Key own = keys[i];
    bounds[i].key = own + static_cast<typename Bound<T>::Key>(problem.right);
    bounds[i].all = bounds[i].key < own;
  }
}

// Returns how many elements of a row have keys below a bound, if the first `first` are known to do so, and at most
// `left` of those behind them. The number of steps does not depend on the elements.
template <class T>
__device__ __forceinline__ uint32_t search_row(const Search& problem, const T* row, typename Bound<T>::Key bound,
                                               uint32_t first, uint32_t left) {
  const int64_t stride = problem.sorted.axis_stride;
  const T* from = row + first * stride;
  while (left > 0) {  // the result is in [first, first + left]
    const uint32_t half = (left + 1) / 2;
    const T* const next = from + half * stride;
    if (sort_key(next[-stride], problem.order) < bound) first += half, from = next;
    left -= half;
  }
  return first;
}

// Finds the places of queries that stand one after another, by all threads of a block. find(queries, at, places) does
// so for an array of four queries, or of one, of which the first has number `at`; all threads call prepare() before. A
// thread loads kTogether fours at a time, while it finds those that it loaded before.
template <int kTogether, class T, class Prepare, class Find>
__device__ __forceinline__ void find_places(const T* queries, int32_t* places, int64_t count, Prepare prepare,
                                            Find find) {
  using Vector = std::conditional_t<sizeof(T) == 1, uint32_t, std::conditional_t<sizeof(T) == 2, uint2, uint4>>;
  struct Queries {
    T query[4];
  };
  constexpr int kParts = sizeof(Queries) / sizeof(Vector);
  struct Four {
    Vector part[kParts];
  };
  // Fours begin where four places begin at a multiple of 16 bytes, if that suits the queries, too. If there is a thread
  // for each query, there are no fours.
  const int64_t head = min(count, static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(places) % 16) % 16 / 4));
  const bool suits = reinterpret_cast<uintptr_t>(queries + head) % sizeof(Vector) == 0;
  const int64_t threads = blockDim.x, fours = suits && count > threads ? (count - head) / 4 : 0;
  Four next[kTogether];
  const auto load = [&](int64_t start) {
    if (start >= fours) return;
    const auto* const from = reinterpret_cast<const Vector*>(queries + head);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = min(start + i * threads, fours - 1) * kParts;
#pragma unroll
      for (int part = 0; part < kParts; ++part) next[i].part[part] = __ldcs(from + at + part);
    }
  };
  // Loose queries come before the first four and after the last one; each is searched alone. A thread loads its first
  // one now, so as not to wait for memory again.
  const int64_t loose = count - 4 * fours;
  const auto place_of = [&](int64_t i) { return i < head ? i : i + 4 * fours; };
  T query[1] = {};
  if (threadIdx.x < loose) query[0] = queries[place_of(threadIdx.x)];
  load(threadIdx.x);
  prepare();
#pragma unroll 1
  for (int64_t start = threadIdx.x; start < fours; start += kTogether * threads) {
    Queries own[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) own[i] = bits_as<Queries>(next[i]);
    load(start + kTogether * threads);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t four = start + i * threads;
      if (kTogether > 1 && four >= fours) break;
      int32_t place[4];
      find(own[i].query, head + 4 * four, place);
      __stcs(reinterpret_cast<int4*>(places + head) + four, int4{place[0], place[1], place[2], place[3]});
    }
  }
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < loose; i += threads) {
    if (i >= threads) query[0] = queries[place_of(i)];
    int32_t place[1];
    find(query, place_of(i), place);
    places[place_of(i)] = place[0];
  }
}

}  // namespace jaxgpuops::search
