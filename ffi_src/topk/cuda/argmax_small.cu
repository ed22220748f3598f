// The forms "small" and "blocks" of argmax.cu.
#include "common/cuda/residents.cuh"
#include "common/cuda/small.cuh"
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

struct SmallCall {
  const void* x;
  int32_t* indices;
  void* values;  // null where only indices are wanted
  SmallColumns columns;
};

// A thread takes kEach elements at a time. Beyond the end of the column it takes the last element again, which changes
// nothing.
template <class Key, int kEach>
__global__ void __launch_bounds__(kMostSmallThreads)
    argmax_small(const __grid_constant__ SmallCall a, const __grid_constant__ Ranks<Key> ranks) {
  const SmallPlace place(a.columns);
  const Key* x = static_cast<const Key*>(a.x) + place.first;
  const uint32_t last = once(a.columns.length - 1);
  Candidate<Key> best = {0, smaller(place.part, last)};
#pragma unroll 1
  for (uint32_t i = place.part; i <= last; i += kEach * place.parts) {
    Key loaded[kEach];
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) loaded[u] = __ldg(x + smaller(i + u * place.parts, last) * place.step);
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) best.see(ranks(ranks.word(loaded[u])), i + u * place.parts);
  }
  const auto better = [](Candidate<Key> one, const Candidate<Key>& other) {
    one.merge(other);
    return one;
  };
  if (!place.merge(best, better)) return;
  a.indices[place.column] = static_cast<int32_t>(best.index);
  if (a.values) static_cast<Key*>(a.values)[place.column] = x[best.index * place.step];
}

struct BlocksCall {
  const void* x;
  int32_t* indices;
  void* values;  // null where only indices are wanted
  Quotient outer_of;
  uint32_t length, inner, slice;  // `slice`: elements of a block
  int slice_bits;                 // 2^slice_bits blocks share a column
};

// A column has a block, or a cluster of them.
template <class Key>
__global__ void __launch_bounds__(kArgmaxMostThreads)
    argmax_blocks(const __grid_constant__ BlocksCall a, const __grid_constant__ Ranks<Key> ranks) {
  const bool cluster = a.slice_bits > 0;
  if (cluster) arrive_at_cluster_start();
  const uint32_t column = blockIdx.x >> a.slice_bits, rank = blockIdx.x - (column << a.slice_bits);
  const uint32_t inner = once(a.inner), threads = once(blockDim.x);
  const Key* const x = static_cast<const Key*>(a.x) + a.outer_of(column) * (a.length - 1) * inner + column;
  const uint32_t begin = smaller(rank * a.slice, a.length - 1), last = smaller(begin + a.slice, a.length) - 1;
  Candidate<Key> best = {0, smaller(begin + threadIdx.x, last)};
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i <= last; i += kArgmaxEach * threads) {
    Key loaded[kArgmaxEach];
#pragma unroll
    for (uint32_t u = 0; u < kArgmaxEach; ++u) loaded[u] = __ldg(x + smaller(i + u * threads, last) * inner);
#pragma unroll
    for (uint32_t u = 0; u < kArgmaxEach; ++u) best.see(ranks(ranks.word(loaded[u])), smaller(i + u * threads, last));
  }
  merge_team(best, threads);
  if (cluster && !merge_cluster(best, rank, 1u << a.slice_bits)) return;
  if (threadIdx.x != 0) return;
  a.indices[column] = static_cast<int32_t>(best.index);
  if (a.values) static_cast<Key*>(a.values)[column] = x[best.index * inner];
}

}  // namespace

cudaError_t launch_argmax_small(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                const Argmax& a) {
  const SmallCall call = {a.x, a.indices, a.values, SmallColumns(problem.rows, shape.column_bits, shape.lane_bits)};
  const Launch blocks = {dim3(static_cast<unsigned>(shape.tiles)), dim3(static_cast<unsigned>(shape.threads))};
  const bool few = argmax_small_each(problem.rows, problem.key_bits / 8) == kSmallEach;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return launch(stream, blocks, few ? argmax_small<Key, kSmallEach> : argmax_small<Key, kArgmaxEach>, call,
                  Ranks<Key>(problem.order));
  });
}

cudaError_t launch_argmax_blocks(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                 const Argmax& a) {
  const Rows& rows = problem.rows;
  const int slice_bits = bits_for(a.slices);
  const BlocksCall call = {a.x,
                           a.indices,
                           a.values,
                           Quotient(rows.inner),
                           a.length,
                           static_cast<uint32_t>(rows.inner),
                           ((a.length - 1) >> slice_bits) + 1,
                           slice_bits};
  Launch blocks = {dim3(static_cast<unsigned>(rows.count() << slice_bits)), dim3(static_cast<unsigned>(shape.threads))};
  blocks.cluster = 1 << slice_bits;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    const auto kernel = argmax_blocks<Key>;
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), blocks.cluster);
    return status == cudaSuccess ? launch(stream, blocks, kernel, call, Ranks<Key>(problem.order)) : status;
  });
}

}  // namespace jaxgpuops::topk
