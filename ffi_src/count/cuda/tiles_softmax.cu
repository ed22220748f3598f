// Softmax, and the logarithm of the sum of exponentials, of segments in the order of their ids: the kernels of tiles
// fold rows to the largest element and the sum of exponentials of the differences from it, so that the data is read
// once for both. The workspace has these pairs; the logarithms follow from them, and softmax reads the data once more.
#include "count/cuda/tiles.cuh"

namespace jaxgpuops::count {
namespace {

using Pair = Exponentials::Acc;

// Computes the logarithms from the pairs in `a.out`.
__global__ void __launch_bounds__(kThreads) segment_logs_kernel(Args a, float* logs) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads, cells = a.outer * a.segments * a.inner;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < cells; i += stride) {
    logs[i] = Exponentials::log_of(static_cast<const Pair*>(a.out)[i]);
  }
}

constexpr int kShares = 4;  // vectors that a thread has at a time

// Computes softmax from the logarithms. Here ids and data are in the order of the rows, not sorted. A block has `rows`
// neighbouring rows.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    segment_shares_kernel(const __grid_constant__ Args a, const int32_t* all_ids, float* shares, int64_t rows) {
  const int64_t blocks = (a.length + rows - 1) / rows, o = blockIdx.x / blocks;
  const int64_t first = (blockIdx.x - o * blocks) * rows;
  const int32_t* const ids = all_ids + a.ids_at(o) + first;
  const float* const data = static_cast<const float*>(a.data) + a.data_at(o) + first * a.inner;
  const Pair* const pairs = static_cast<const Pair*>(a.out) + o * a.segments * a.inner;
  float* const out = shares + (o * a.length + first) * a.inner;
  const auto vectors = static_cast<uint32_t>(a.inner / kCount);
  const auto count = static_cast<uint32_t>(min(rows, a.length - first)) * vectors;
#pragma unroll 1
  for (uint32_t start = threadIdx.x; start < count; start += kShares * kThreads) {
    Elements<float, kCount> x[kShares] = {};
    Elements<Pair, kCount> of[kShares];
    int32_t id[kShares];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const uint32_t v = start + i * kThreads;
      id[i] = v < count ? ids[v / vectors] : -1;
      if (a.is_segment(id[i])) x[i] = *reinterpret_cast<const Elements<float, kCount>*>(data + int64_t{v} * kCount);
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const uint32_t column = (start + i * kThreads) % vectors * kCount;
      if (a.is_segment(id[i]))
        of[i] = *reinterpret_cast<const Elements<Pair, kCount>*>(pairs + id[i] * a.inner + column);
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const uint32_t v = start + i * kThreads;
      if (v >= count) break;
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        if (a.is_segment(id[i])) x[i].value[e] = Exponentials::share_of(x[i].value[e], of[i].value[e]);
      *reinterpret_cast<Elements<float, kCount>*>(out + int64_t{v} * kCount) = x[i];
    }
  }
}

}  // namespace

cudaError_t launch_tiles_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers, bool logs) {
  cudaError_t status;
  Args a(stream, plan, problem, buffers, status);
  if (status != cudaSuccess) return status;
  a.keys.empty = 0xff800000;  // the pair of a segment without rows: -infinity, and a sum of 0
  a.out = buffers.workspace + a.outer * plan.pairs;
  status = run<Exponentials>(stream, a);
  if (status != cudaSuccess) return status;
  auto* const out = static_cast<float*>(buffers.out);
  if (logs) {
    const int64_t blocks = (a.outer * a.segments * a.inner + kThreads - 1) / kThreads;
    return launch(stream, {dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 132 * 8))), dim3(kThreads)},
                  segment_logs_kernel, a, out);
  }
  const bool vectors =
      (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(out)) % 16 == 0 && a.inner % 4 == 0;
  // Enough blocks for the GPU first, then enough vectors for each.
  const int64_t most = std::max<int64_t>(1, kShares * kThreads * (vectors ? 4 : 1) / a.inner);
  const int64_t rows = std::clamp<int64_t>(a.outer * a.length / 2112, 1, most);
  const int64_t blocks = a.outer * ((a.length + rows - 1) / rows);
  return launch(stream, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                vectors ? segment_shares_kernel<4> : segment_shares_kernel<1>, a, buffers.ids, out, rows);
}

}  // namespace jaxgpuops::count
