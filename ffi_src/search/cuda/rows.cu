// searchsorted in short rows along the last axis. A block has several rows and all their queries, or some queries of
// one row. It keeps the keys of its rows in shared memory, and its threads search there for four queries at a time.
// Rows begin an odd number of keys apart, so that lanes with neighbouring rows read different banks.
//
// Bytes moved: queries are read once and places written once; rows are read once, or once a block if they have many
// queries.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "search/cuda/launch.h"
#include "search/cuda/search.cuh"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    search_rows_kernel(const __grid_constant__ Search problem, const __grid_constant__ SearchPlan plan,
                       const T* __restrict__ queries, const T* __restrict__ sorted, int32_t* __restrict__ places) {
  T* const keys = reinterpret_cast<T*>(dynamic_shared_memory());
  const auto length = static_cast<uint32_t>(problem.length);
  const auto blocks = static_cast<uint32_t>(plan.blocks), group = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const int64_t first_row = int64_t{group} * plan.group_rows;
  const auto rows = static_cast<uint32_t>(min(int64_t{plan.group_rows}, plan.rows - first_row));
  const T* const own = sorted + first_row * problem.length;
  const int64_t first = first_row * plan.queries + part * plan.chunk;
  const int64_t count = min(plan.chunk, rows * plan.queries - part * plan.chunk);
  const uint32_t padding = plan.length_reciprocal;  // 0 if rows stand without gaps
  const auto prepare = [&] {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < rows * length; i += kThreads)
      keys[i + __umulhi(i, padding)] = sort_key(own[i], problem.order);
    __syncthreads();
  };
  find_places<1>(queries + first, places + first, count, prepare, [&](const auto& query, int64_t at, auto& place) {
    constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(query)>>;
    Bound<T> bound[kCount];
    uint32_t row[kCount], found[kCount];  // where the rows begin, and a place in each
    make_bounds(query, problem, bound);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      found[i] = row[i] = __umulhi(2 * static_cast<uint32_t>(at + i), plan.reciprocal) * (length + (padding > 0));
    for (uint32_t left = length; left > 0;) {  // a result is in [found, found + left]
      const uint32_t half = (left + 1) / 2;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (keys[found[i] + half - 1] < bound[i].key) found[i] += half;
      left -= half;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) place[i] = static_cast<int32_t>(bound[i].all ? length : found[i] - row[i]);
  });
}

}  // namespace

cudaError_t launch_search_rows(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>((plan.rows + plan.group_rows - 1) / plan.group_rows * plan.blocks));
  config.block = dim3(kThreads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, search_rows_kernel<T>, problem, plan, static_cast<const T*>(queries),
                  static_cast<const T*>(sorted), places);
  });
}

}  // namespace jaxgpuops::search
