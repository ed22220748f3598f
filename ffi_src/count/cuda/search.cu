// searchsorted: each thread searches for one query, in the sorted row that the query belongs to.
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
#include "count/cuda/launch.h"
#include "count/cuda/search.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kLeastNarrowed = 64;  // elements of the shortest row in which lanes first search together

template <class T>  // a shuffle moves at least 32 bits
using Wide = std::conditional_t<sizeof(T) < 4, uint32_t, T>;

// Division of numbers that mostly have 32 bits, where it takes a fifth of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Narrows the interval [first, first + left] of places to one that has the places of two keys, where `low` is not above
// `high`. All lanes of a warp call this with the same arguments.
template <class T>
__device__ __forceinline__ void narrow(const Search& problem, const T* row, T low, T high, uint32_t& first,
                                       uint32_t& left) {
  const uint32_t end = first + left;
  while (left > 4) {
    const uint32_t step = (left + 31) / 32, at = first + (threadIdx.x % 32 + 1) * step - 1;
    const T element = row[min(at, end - 1) * problem.sorted.axis_stride];
    const int of_low = __popc(__ballot_sync(kEveryLane, at < first + left && problem.before(element, low)));
    const int of_high = __popc(__ballot_sync(kEveryLane, at < first + left && problem.before(element, high)));
    const uint32_t last = min(first + step * of_high + step - 1, first + left);
    first += step * of_low;
    left = last - first;
    if (of_low != of_high) break;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 8)
    search_kernel(const __grid_constant__ Search problem, const T* __restrict__ queries, const T* __restrict__ sorted,
                  int32_t* __restrict__ places) {
  // Whole warps search: a thread behind the last query searches for the last query again.
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t at = min(number, problem.rows.elements() - 1);
  const T query = queries[at];
  const int64_t inner = problem.rows.inner, size = problem.rows.length * inner;
  int64_t offset = 0;
  if (problem.rows.count() > 1) {
    const int64_t outer = quotient(at, size), rest = at - outer * size;
    offset = problem.sorted(outer, 0, inner == 1 ? 0 : rest - quotient(rest, inner) * inner);
  }
  const T key = sort_key(query, problem.order);
  uint32_t first = 0, left = static_cast<uint32_t>(problem.length);
  if (left >= kLeastNarrowed) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const T next = static_cast<T>(shuffle_from(Wide<T>{key}, min(lane + 1, 31)));
    const bool ascend = __all_sync(kEveryLane, key <= next), descend = __all_sync(kEveryLane, key >= next);
    const bool together = __all_sync(kEveryLane, offset == shuffle_from(offset, 0));
    if (together && (ascend || descend)) {
      const T begin = static_cast<T>(shuffle_from(Wide<T>{key}, 0)),
              end = static_cast<T>(shuffle_from(Wide<T>{key}, 31));
      narrow(problem, sorted + offset, ascend ? begin : end, ascend ? end : begin, first, left);
    }
  }
  const uint32_t place = search_row(problem, sorted + offset, key, first, left);
  if (number == at) places[at] = static_cast<int32_t>(place);
}

}  // namespace

cudaError_t launch_search(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                          const void* sorted, int32_t* places) {
  if (plan.algorithm == Searching::kEmpty) return cudaSuccess;
  if (plan.algorithm == Searching::kTree) return launch_search_tree(stream, plan, problem, queries, sorted, places);
  if (plan.algorithm == Searching::kRows) return launch_search_rows(stream, plan, problem, queries, sorted, places);
  if (plan.algorithm == Searching::kTable) return launch_search_table(stream, plan, problem, queries, sorted, places);
  const int64_t count = problem.rows.elements();
  Launch config;
  config.grid = dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  config.block = dim3(kThreads);
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, search_kernel<T>, problem, static_cast<const T*>(queries),
                  static_cast<const T*>(sorted), places);
  });
}

}  // namespace jaxgpuops::count
