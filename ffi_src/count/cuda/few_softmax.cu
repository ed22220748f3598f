// Softmax, and the logarithm of the sum of exponentials, of segments of few rows of float32, in one launch; step by
// step there would be four.
//
// A first pass finds the largest number of each segment and column, a second one adds up exponentials as integers, of
// which 2^50 stand for 1. No exponential is above 1, so sums of all rows fit in 64 bits, and they are the same in any
// order. For softmax, a third pass writes the results.
#include "count/cuda/atomics.cuh"
#include "count/cuda/few_rows.cuh"

namespace jaxgpuops::count {
namespace {

using Key = Extreme<uint32_t>;

constexpr float kUnit = 1 << 25;  // kUnit * kUnit is the integer that stands for 1

template <bool kLogs>
__global__ void __launch_bounds__(1024) segment_few_softmax_kernel(const __grid_constant__ FewArgs a) {
  FewBlock<uint32_t> block(a);
  const int count = block.cells();
  auto* const keys = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  uint32_t* const sums = keys + count;
  for (int w = threadIdx.x; w < kSoftmaxCellBytes / 4 * count; w += blockDim.x) keys[w] = 0;
  __syncthreads();
  block.each_row([&](int, int cell, uint32_t bits) {
    if (cell >= 0) atomic_fold<true>(keys + cell, Key::load(bits, a.keys));
  });
  const auto largest = [&](int cell) { return bits_as<float>(Key::store(keys[cell], a.keys)); };
  block.each_row([&](int, int cell, uint32_t bits) {
    if (cell < 0) return;
    const float most = largest(cell);
    if (!isfinite(most)) return;
    add_wide<2>(sums + cell, count, __float2ll_rn(expf(bits_as<float>(bits) - most) * kUnit * kUnit));
  });
  const auto sum_of = [&](int cell) {
    const uint64_t words = static_cast<uint64_t>(sums[count + cell]) << 32 | sums[cell];
    return static_cast<float>(static_cast<double>(words) / (static_cast<double>(kUnit) * kUnit));
  };
  auto* const out = static_cast<float*>(a.out) + block.column;
  if constexpr (kLogs) {
    block.each_segment([&](int s, int cell) {
      const float most = largest(cell);
      out[(block.o * a.segments + block.first + s) * a.inner] = isfinite(most) ? logf(sum_of(cell)) + most : most;
    });
  } else {
    for (int cell = threadIdx.x; cell < count; cell += blockDim.x) sums[cell] = bits_as<uint32_t>(sum_of(cell));
    __syncthreads();
    block.each_row<true>([&](int row, int cell, uint32_t bits) {
      float y = 0;
      if (cell >= 0) {
        const float x = bits_as<float>(bits), most = largest(cell);
        y = isfinite(most) ? expf(x - most) / bits_as<float>(sums[cell]) : most == INFINITY && x != most ? 0.0f : NAN;
      } else {
        if (row < 0) return;
        const auto id = static_cast<uint32_t>(block.ids[row]);
        // The first block writes the rows whose id is no segment.
        if (block.first > 0 || id < static_cast<uint32_t>(a.segments)) return;
      }
      out[(block.o * a.length + row) * a.inner] = y;
    });
  }
}

}  // namespace

cudaError_t launch_few_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                               const SegmentsBuffers& buffers, bool logs) {
  const FewArgs a(plan, problem, buffers);
  return launch_few(stream, plan, a, kSoftmaxCellBytes,
                    logs ? segment_few_softmax_kernel<true> : segment_few_softmax_kernel<false>);
}

}  // namespace jaxgpuops::count
