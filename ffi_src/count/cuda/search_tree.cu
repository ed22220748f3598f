// searchsorted of many queries of 16 or 32 bits in rows along the last axis. A block keeps splitters of its row in
// shared memory: its elements, or the last of each group of 2^group_bits neighbours. They form a search tree that
// stands level by level, so that the lanes of a warp, which search in different subtrees, mostly read different banks.
// The group that a query belongs to is then searched in global memory.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kOwn = 4;  // queries that a thread searches for at a time

template <class T>
__global__ void __launch_bounds__(1024)
    search_tree_kernel(const __grid_constant__ Search problem, const __grid_constant__ SearchPlan plan,
                       const T* __restrict__ queries, const T* __restrict__ sorted, int32_t* __restrict__ places) {
  constexpr T kAll = static_cast<T>(~T{0});
  T* const tree = reinterpret_cast<T*>(dynamic_shared_memory());
  const int64_t row = blockIdx.x / plan.blocks, part = blockIdx.x % plan.blocks;
  const int threads = blockDim.x, levels = plan.levels, bits = plan.group_bits;
  const auto length = static_cast<int>(problem.length);
  const T* const own = sorted + problem.sorted(row, 0, 0);
  // Node k of a level is the k-th splitter of those that are in odd places when the levels below are left out.
  for (uint32_t node = threadIdx.x; node < 1u << levels; node += threads) {
    const int level = node ? 31 - __clz(static_cast<int>(node)) : 0;
    const int64_t splitter = (2 * int64_t{node - (1u << level)} + 1) << (levels - 1 - level);  // the first one is 1
    const int64_t at = (splitter << bits) - 1;
    tree[node] = node && at < length ? sort_key(own[at], problem.order) : kAll;
  }
  __syncthreads();

  const int64_t first_query = part * plan.chunk, count = min(plan.chunk, plan.queries - first_query);
  queries += row * plan.queries + first_query;
  places += row * plan.queries + first_query;
  for (int64_t start = threadIdx.x; start < count; start += kOwn * threads) {
    T bound[kOwn];  // elements below it come before the query
    bool all[kOwn];
    uint32_t node[kOwn];
    T query[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) query[i] = queries[min(start + i * threads, count - 1)];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const T key = sort_key(query[i], problem.order);
      all[i] = problem.right && key == kAll;
      bound[i] = static_cast<T>(key + (problem.right && !all[i]));
      node[i] = 1;
    }
    for (int level = 0; level < levels; ++level)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) node[i] = 2 * node[i] + (tree[node[i]] < bound[i]);
    int place[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) place[i] = static_cast<int>((node[i] - (1u << levels)) << bits);
    const auto step = [&](int i, int at, int size) {
      if (at < length && sort_key(own[at], problem.order) < bound[i]) place[i] += size;
    };
    for (int size = 1 << bits >> 1; size; size /= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) step(i, place[i] + size - 1, size);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (place[i] == length - 1) step(i, length - 1, 1);  // it may be no splitter, and no step is for it
      if (start + i * threads < count) places[start + i * threads] = all[i] ? length : place[i];
    }
  }
}

}  // namespace

cudaError_t launch_search_tree(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.rows * plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  const auto run = [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, search_tree_kernel<T>, problem, plan, static_cast<const T*>(queries),
                  static_cast<const T*>(sorted), places);
  };
  return problem.bits == 16 ? run(uint16_t{}) : run(uint32_t{});
}

}  // namespace jaxgpuops::count
