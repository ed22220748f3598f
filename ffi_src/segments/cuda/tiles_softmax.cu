// Softmax, and the logarithm of the sum of exponentials, of segments in the order of their ids: the kernels of tiles
// fold rows to the largest element and the sum of exponentials of the differences from it, so that the data is read
// once for both. The workspace has these pairs; the logarithms follow from them, and softmax reads the data once more.
#include "segments/cuda/tiles.cuh"

namespace jaxgpuops::segments {
namespace {

using OfFloats = Exponentials<Float32>;
using Pair = OfFloats::Acc;  // of narrower elements, too

// Computes the logarithms from the pairs in `a.out`.
template <class Element>
__global__ void __launch_bounds__(kThreads) segment_logs_kernel(Args a, typename Element::Bits* logs) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads, cells = a.outer * a.segments * a.inner;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < cells; i += stride) {
    logs[i] = Element::store(OfFloats::log_of(static_cast<const Pair*>(a.out)[i]));
  }
}

// Rows of a block: 64, or as many as give each thread a vector.
__host__ __device__ constexpr int share_rows(int64_t vectors) {
  return static_cast<int>(vectors < kThreads / 64 ? kThreads / vectors : 64);
}

// Computes softmax from the pairs. Here ids and data are in the order of the rows, not sorted.
template <class Element, int kCount>
__global__ void __launch_bounds__(kThreads)
    segment_shares_kernel(Args a, const int32_t* all_ids, typename Element::Bits* shares) {
  using Bits = typename Element::Bits;
  const int rows = share_rows(a.inner / kCount);
  const int64_t blocks = (a.length + rows - 1) / rows, o = blockIdx.x / blocks;
  const int64_t first = (blockIdx.x - o * blocks) * rows;
  const int32_t* const ids = all_ids + a.ids_at(o);
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(o);
  const Pair* const pairs = static_cast<const Pair*>(a.out) + o * a.segments * a.inner;
  Bits* const out = shares + o * a.length * a.inner;
  const auto vectors = static_cast<uint32_t>(a.inner / kCount);
  const auto count = static_cast<uint32_t>(min(int64_t{rows}, a.length - first)) * vectors;
  for (uint32_t v = threadIdx.x; v < count; v += kThreads) {
    const uint32_t row = v / vectors;
    const int64_t column = static_cast<int64_t>(v - row * vectors) * kCount, at = (first + row) * a.inner + column;
    const int32_t id = ids[first + row];
    Elements<Bits, kCount> y = {};
    if (a.is_segment(id)) {
      const auto x = *reinterpret_cast<const Elements<Bits, kCount>*>(data + at);
      const auto of = *reinterpret_cast<const Elements<Pair, kCount>*>(pairs + id * a.inner + column);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        y.value[i] = Element::store(OfFloats::share_of(Element::load(x.value[i]), of.value[i]));
    }
    *reinterpret_cast<Elements<Bits, kCount>*>(out + at) = y;
  }
}

template <class Element>
cudaError_t run_softmax(cudaStream_t stream, Args& a, const SegmentsPlan& plan, const SegmentsBuffers& buffers,
                        bool logs) {
  using Bits = typename Element::Bits;
  a.keys.empty = 0xff800000;  // the pair of a segment without rows: -infinity, and a sum of 0
  a.out = buffers.workspace + a.outer * plan.pairs;
  const cudaError_t status = run<Exponentials<Element>>(stream, a);
  if (status != cudaSuccess) return status;
  auto* const out = static_cast<Bits*>(buffers.out);
  if (logs) {
    const int64_t blocks = (a.outer * a.segments * a.inner + kThreads - 1) / kThreads;
    return launch(stream, {dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 132 * 8))), dim3(kThreads)},
                  segment_logs_kernel<Element>, a, out);
  }
  const auto places = reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(out);
  const bool vectors = places % (4 * sizeof(Bits)) == 0 && a.inner % 4 == 0;
  const int rows = share_rows(vectors ? a.inner / 4 : a.inner);
  const int64_t blocks = a.outer * ((a.length + rows - 1) / rows);
  return launch(stream, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                vectors ? segment_shares_kernel<Element, 4> : segment_shares_kernel<Element, 1>, a, buffers.ids, out);
}

}  // namespace

cudaError_t launch_tiles_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers, bool logs) {
  cudaError_t status;
  Args a(stream, plan, problem, buffers, status);
  if (status != cudaSuccess) return status;
  if (problem.dtype == DType::kFloat16) return run_softmax<Float16>(stream, a, plan, buffers, logs);
  if (problem.dtype == DType::kBFloat16) return run_softmax<BFloat16>(stream, a, plan, buffers, logs);
  return run_softmax<Float32>(stream, a, plan, buffers, logs);
}

}  // namespace jaxgpuops::segments
