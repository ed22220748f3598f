// searchsorted: each thread searches for one query, in the sorted row that the query belongs to.
//
// This kernel takes all shapes: queries may share rows or have rows of their own, along any axis.
// Neighbouring threads read queries and write results once. A search reads about log2(length) elements, one after the
// other. They come from L1 or L2, since all searches in a row start with the same elements; nearby queries, as in a
// sorted array, also end with the same cache lines.
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"
#include "count/cuda/search.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;

// Division of numbers that mostly have 32 bits, where it takes a fifth of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    search_kernel(const __grid_constant__ Search problem, const T* __restrict__ queries, const T* __restrict__ sorted,
                  int32_t* __restrict__ places) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= problem.rows.elements()) return;
  const T query = queries[at];
  const int64_t inner = problem.rows.inner, size = problem.rows.length * inner;
  int64_t offset = 0;
  if (problem.rows.count() > 1) {
    const int64_t outer = quotient(at, size), rest = at - outer * size;
    offset = problem.sorted(outer, 0, inner == 1 ? 0 : rest - quotient(rest, inner) * inner);
  }
  places[at] = static_cast<int32_t>(search_row(problem, sorted + offset, sort_key(query, problem.order)));
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
