// searchsorted: each thread searches for one query, in the sorted row that the query belongs to. Few queries have a
// warp each, which looks at 32 elements in a step and so takes a fifth of the steps.
//
// This kernel takes all shapes: queries may share rows or have rows of their own, along any axis.
// Neighbouring threads read queries and write results once. A search reads about log2(length) elements, one after the
// other. They come from L1 or L2, since all searches in a row start with the same elements.
//
// If the queries of a warp are in order, the searches of the least and the largest query begin with the same steps, and
// so do all searches between them. The lanes first take these steps together, for which they read 32 elements at a
// time.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "search/cuda/launch.h"
#include "search/cuda/search.cuh"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kLeastNarrowed = 64;  // elements of the shortest row in which lanes first search together

// Division of numbers that mostly have 32 bits, where it takes a fifth of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Narrows the interval [first, first + left] of places to one that has the places of two bounds, where `low` is not
// above `high`, as long as both take the same steps and more than `enough` places are left. All lanes of a warp call
// this with the same arguments.
template <class T, class Key>
__device__ __forceinline__ void narrow(const Search& problem, const T* row, Key low, Key high, uint32_t& first,
                                       uint32_t enough, uint32_t& left) {
  const uint32_t end = first + left;
  while (left > enough) {
    const uint32_t step = (left + 31) / 32, at = first + (threadIdx.x % 32 + 1) * step - 1;
    const Key element = sort_key(row[min(at, end - 1) * problem.sorted.axis_stride], problem.order);
    const int of_low = __popc(__ballot_sync(kEveryLane, at < first + left && element < low));
    const int of_high = __popc(__ballot_sync(kEveryLane, at < first + left && element < high));
    const uint32_t last = min(first + step * of_high + step - 1, first + left);
    first += step * of_low;
    left = last - first;
    if (of_low != of_high) break;
  }
}

template <class T, bool kWarps>
__global__ void __launch_bounds__(kThreads, 8)
    search_kernel(const __grid_constant__ Search problem, const T* __restrict__ queries, const T* __restrict__ sorted,
                  int32_t* __restrict__ places) {
  // Whole warps search: a thread behind the last query searches for the last query again.
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> (kWarps ? 5 : 0);
  const int64_t at = min(number, problem.rows.elements() - 1);
  const T query[1] = {queries[at]};
  const int64_t inner = problem.rows.inner, size = problem.rows.length * inner;
  int64_t offset = 0;
  if (problem.rows.count() > 1) {
    const int64_t outer = quotient(at, size), rest = at - outer * size;
    offset = problem.sorted(outer, 0, inner == 1 ? 0 : rest - quotient(rest, inner) * inner);
  }
  Bound<T> bound[1];
  make_bounds(query, problem, bound);
  const bool all = bound[0].all;
  const auto key =
      all ? static_cast<typename Bound<T>::Key>(bound[0].key - 1) : bound[0].key;  // in the order of queries
  uint32_t first = 0, left = static_cast<uint32_t>(problem.length);
  if constexpr (kWarps) {
    narrow(problem, sorted + offset, key, key, first, 0, left);
  } else if (left >= kLeastNarrowed) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto next = shuffle_from(key, min(lane + 1, 31));
    const bool ascend = __all_sync(kEveryLane, key <= next), descend = __all_sync(kEveryLane, key >= next);
    const bool together = __all_sync(kEveryLane, offset == shuffle_from(offset, 0));
    if (together && (ascend || descend)) {
      const auto begin = shuffle_from(key, 0), end = shuffle_from(key, 31);
      narrow(problem, sorted + offset, ascend ? begin : end, ascend ? end : begin, first, 4, left);
    }
  }
  const uint32_t place =
      all ? static_cast<uint32_t>(problem.length) : search_row(problem, sorted + offset, key, first, left);
  if (number == at) places[at] = static_cast<int32_t>(place);
}

}  // namespace

cudaError_t launch_search(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                          const void* sorted, int32_t* places) {
  if (plan.algorithm == Searching::kEmpty) return cudaSuccess;
  if (plan.algorithm == Searching::kTree) return launch_search_tree(stream, plan, problem, queries, sorted, places);
  if (plan.algorithm == Searching::kRows) return launch_search_rows(stream, plan, problem, queries, sorted, places);
  if (plan.algorithm == Searching::kTable) return launch_search_table(stream, plan, problem, queries, sorted, places);
  const int64_t count = problem.rows.elements() * plan.team;
  Launch config;
  config.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  config.block = dim3(kThreads);
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, plan.team > 1 ? search_kernel<T, true> : search_kernel<T, false>, problem,
                  static_cast<const T*>(queries), static_cast<const T*>(sorted), places);
  });
}

}  // namespace jaxgpuops::search
