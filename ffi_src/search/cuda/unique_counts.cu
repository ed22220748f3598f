// unique of rows of up to 2^14 elements of 8 or 16 bits, by keys: each block of a row counts the elements that have
// the keys of its range, in shared memory, and writes them in the order of their keys.
//
// Blocks do not wait for each other. Each reads the whole row and also marks, as bits, which lower keys there are,
// since the number of these tells where its own results begin. Few equal keys take no longer than many different ones:
// an increment of a count in shared memory takes as long wherever it goes, and a bit that is set is not set again.
// Which zero and which NaN comes first is found on the way, as their keys do not tell it.
//
// Bytes moved: every element is read once by each block, from the L2 cache but for the first time, and every result is
// written once.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = kCountsThreads, kWarps = kThreads / 32;

template <class T>
__global__ void __launch_bounds__(kThreads)
    unique_counts_kernel(const __grid_constant__ Unique problem, const __grid_constant__ UniqueBuffers buffers) {
  constexpr int kKeys = 1 << 8 * sizeof(T), kRange = kKeys < kCountsRange ? kKeys : kCountsRange;
  constexpr int kBlocks = kKeys / kRange, kEach = kRange > kThreads ? kRange / kThreads : 1;  // keys of a thread
  __shared__ uint32_t counts[kRange], lower[kKeys / 32];  // `lower`: a bit for each key
  __shared__ uint32_t sums[kWarps], first_zero, first_nan, least;
  const SortOrder& order = problem.order;
  const auto length = static_cast<uint32_t>(problem.rows.length), size = static_cast<uint32_t>(problem.size);
  const uint32_t row = blockIdx.x / kBlocks, block = blockIdx.x % kBlocks, begin = block * kRange;
  const T* const x = static_cast<const T*>(buffers.x) + row * length;
  const bool is_float = order.ascending.sign != 0;
  const T zero = static_cast<T>(order.ascending.order.flip), nan = static_cast<T>(~T{0});  // keys
  for (int k = threadIdx.x; k < kRange; k += kThreads) counts[k] = 0;
  for (int w = threadIdx.x; w < kKeys / 32; w += kThreads) lower[w] = 0;
  if (threadIdx.x == 0) first_zero = first_nan = least = ~0u;
  __syncthreads();

  uint32_t own_zero = ~0u, own_nan = ~0u;
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
    const T key = sort_key(x[i], order);
    if (key == zero) own_zero = min(own_zero, i);
    if (key == nan) own_nan = min(own_nan, i);
    const uint32_t place = key - begin, bit = 1u << key % 32;
    if (place < kRange)
      atomicAdd(counts + place, 1u);
    else if (key < begin && !(*static_cast<const volatile uint32_t*>(lower + key / 32) & bit))
      atomicOr(lower + key / 32, bit);
  }
  if (is_float && own_zero != ~0u) atomicMin(&first_zero, own_zero);
  if (is_float && own_nan != ~0u) atomicMin(&first_nan, own_nan);
  __syncthreads();

  const uint32_t first = threadIdx.x * kEach;
  uint32_t marked = 0, found = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) found += first < kRange && counts[first + k] != 0;
  for (uint32_t w = threadIdx.x; w < begin / 32; w += kThreads) {
    marked += __popc(lower[w]);
    if (lower[w]) atomicMin(&least, w * 32 + __ffs(static_cast<int>(lower[w])) - 1);
  }
  uint32_t before = 0, total = 0;
  sum_before(marked, sums, kWarps, before);
  uint32_t at = before + sum_before(found, sums, kWarps, total);
  const auto element_of = [&](T key) {
    if (is_float && key == zero) return x[first_zero];
    if (is_float && key == nan) return x[first_nan];
    return decode(static_cast<T>(key ^ static_cast<T>(order.invert)), order.ascending.order);
  };
  T* const out = static_cast<T*>(buffers.out) + row * size;
  int32_t* const out_counts = buffers.counts + row * size;
#pragma unroll 1
  for (int k = 0; k < kEach; ++k) {
    const uint32_t count = first < kRange ? counts[first + k] : 0, key = begin + first + k;
    if (count == 0) continue;
    if (at == 0) least = key;
    if (at < size) out[at] = element_of(static_cast<T>(key)), out_counts[at] = static_cast<int32_t>(count);
    ++at;
  }
  // The last block knows where the fills begin.
  if (block + 1 < kBlocks || before + total >= size) return;
  __syncthreads();
  const T fill =
      problem.has_fill ? static_cast<const T*>(buffers.fill)[problem.fill(row)] : element_of(static_cast<T>(least));
#pragma unroll 4
  for (uint32_t i = before + total + threadIdx.x; i < size; i += kThreads) out[i] = fill, out_counts[i] = 0;
}

template <class T>
cudaError_t run(cudaStream_t stream, const UniquePlan& plan, const Unique& problem, const UniqueBuffers& buffers) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kThreads);
  return launch(stream, config, unique_counts_kernel<T>, problem, buffers);
}

}  // namespace

cudaError_t launch_unique_counts(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                 const UniqueBuffers& buffers) {
  return problem.bits == 8 ? run<uint8_t>(stream, plan, problem, buffers)
                           : run<uint16_t>(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::search
