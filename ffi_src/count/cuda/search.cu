// searchsorted: each thread searches for one query, in the sorted row that the query belongs to.
//
// This kernel takes all shapes: queries may share rows or have rows of their own, along any axis.
// Neighbouring threads read queries and write results once. A search reads about log2(length) elements, one after the
// other. They come from L1 or L2, since all searches in a row start with the same elements; nearby queries, as in a
// sorted array, also end with the same cache lines.
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;

// A search takes the same steps whatever it finds. Its result is in [first, first + left].
template <class T>
__global__ void __launch_bounds__(kThreads) search_kernel(Search problem, const T* __restrict__ queries,
                                                          const T* __restrict__ sorted, int32_t* __restrict__ places) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= problem.rows.elements()) return;
  const int64_t inner = problem.rows.inner, size = problem.rows.length * inner, stride = problem.sorted.axis_stride;
  const int64_t outer = at / size;
  const T* row = sorted + problem.sorted(outer, 0, inner == 1 ? 0 : (at - outer * size) % inner);
  const T key = sort_key(queries[at], problem.order);
  int64_t first = 0, left = problem.length;
  while (left > 1) {
    const int64_t half = left / 2;
    if (problem.before(row[(first + half - 1) * stride], key)) first += half;
    left -= half;
  }
  if (left == 1 && problem.before(row[first * stride], key)) ++first;
  places[at] = static_cast<int32_t>(first);
}

}  // namespace

cudaError_t launch_search(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                          const void* sorted, int32_t* places) {
  if (plan.algorithm == Searching::kEmpty) return cudaSuccess;
  if (plan.algorithm == Searching::kTree) return launch_search_tree(stream, plan, problem, queries, sorted, places);
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
