// Segments of up to some hundred rows of few columns, in one launch without tables. A block has a range of kMatchRange
// segments and one column; its lanes share the rows. A lane has an accumulator in a register for each segment of the
// range, and compares each of its ids with all of them. So there is nothing to clear, loads wait for nothing, and the
// code is short, which counts where a kernel takes little longer than its launch. Accumulators are folded over the
// lanes of a warp, then over the warps, in a fixed order.
//
// Passes: one. Bytes moved: each range reads all ids and numbers, from L2.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/args.cuh"

namespace jaxgpuops::segments {
namespace {

struct Args : SegmentArgs {
  using SegmentArgs::SegmentArgs;
  int64_t before = 0;  // outer indices of the launches before
  int rows;
};

template <class Monoid>
__global__ void __launch_bounds__(32 * kMostMatchWarps) segment_match_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  __shared__ Acc parts[kMostMatchWarps][kMatchRange];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), lane = thread & 31;
  const int64_t o = a.before + blockIdx.x;
  const uint32_t first = blockIdx.y * kMatchRange, column = blockIdx.z;
  const int32_t* const ids = a.ids + (o > 0 ? a.ids_at(o) : 0);
  const Bits* const data = static_cast<const Bits*>(a.data) + (o > 0 ? a.data_at(o) : 0) + column;
  Acc acc[kMatchRange];
#pragma unroll
  for (Acc& own : acc) own = Monoid::identity();

#pragma unroll 1
  for (int at = thread; at < a.rows; at += kMatchRows * threads) {
    uint32_t place[kMatchRows];  // of the row's segment in the range
    Bits bits[kMatchRows];
#pragma unroll
    for (int i = 0; i < kMatchRows; ++i) {
      const int row = at + i * threads;
      place[i] = row < a.rows ? static_cast<uint32_t>(ids[row]) - first : ~0u;
      bits[i] = row < a.rows ? data[row * a.inner] : Bits{0};
    }
#pragma unroll
    for (int i = 0; i < kMatchRows; ++i) {
      const Acc number = Monoid::load(bits[i], a.keys);
#pragma unroll
      for (uint32_t k = 0; k < kMatchRange; ++k)
        if (place[i] == k) acc[k] = Monoid::fold(acc[k], number);
    }
  }

  // Each step halves the segments that a lane has, until it has the one of its highest three bits.
#pragma unroll
  for (int half = kMatchRange / 2, lanes = 16; half > 0; half /= 2, lanes /= 2) {
    const bool upper = lane & lanes;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const Acc other = shuffle_xor(upper ? acc[k] : acc[k + half], lanes);
      acc[k] = Monoid::fold(upper ? acc[k + half] : acc[k], other);
    }
  }
#pragma unroll
  for (int lanes = 16 / kMatchRange; lanes > 0; lanes /= 2) acc[0] = Monoid::fold(acc[0], shuffle_xor(acc[0], lanes));
  if (lane % (32 / kMatchRange) == 0) parts[thread / 32][lane / (32 / kMatchRange)] = acc[0];
  __syncthreads();
  if (thread >= kMatchRange || first + thread >= a.segments) return;
  Acc total = parts[0][thread];
#pragma unroll 4
  for (int w = 1; w < threads / 32; ++w) total = Monoid::fold(total, parts[w][thread]);
  static_cast<Bits*>(a.out)[(o * a.segments + first + thread) * a.inner + column] = Monoid::store(total, a.keys);
}

}  // namespace

cudaError_t launch_segment_match(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers) {
  Args a(problem, buffers);
  a.rows = static_cast<int>(a.length);
  Launch config;
  config.block = dim3(32 * plan.warps);
  return dispatch_monoid(problem, [&](auto monoid) {
    cudaError_t status = cudaSuccess;
    for (; a.before < a.outer && status == cudaSuccess; a.before += kMostBlocks) {
      config.grid = dim3(static_cast<unsigned>(std::min(kMostBlocks, a.outer - a.before)),
                         static_cast<unsigned>(plan.tiles), static_cast<unsigned>(a.inner));
      status = launch(stream, config, segment_match_kernel<decltype(monoid)>, a);
    }
    return status;
  });
}

}  // namespace jaxgpuops::segments
