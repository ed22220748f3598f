// unique of rows of less than 2^16 elements of 8 or 16 bits: a block counts each possible element of a row in shared
// memory, by keys, and writes those that are there in the order of their keys.
//
// Counts have 16 bits, so that those of all elements of 16 bits take 128 KB. A warp has neighbouring keys, two in each
// word of a lane, and keeps its words in registers between the sums and the results. Which zero and which NaN comes
// first is found when elements are counted, as their key does not tell it.
//
// Bytes moved: every element is read once, and every result is written once.
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
  constexpr int kWords = (1 << 8 * sizeof(T)) / 2, kSteps = kWords > 32 * kWarps ? kWords / (32 * kWarps) : 1;
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  __shared__ uint32_t sums[kWarps], first_zero, first_nan, least;
  const SortOrder& order = problem.order;
  const auto length = static_cast<uint32_t>(problem.rows.length), size = static_cast<uint32_t>(problem.size);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* const x = static_cast<const T*>(buffers.x) + blockIdx.x * problem.rows.length;
  const bool is_float = order.ascending.sign != 0;
  const T zero = static_cast<T>(order.ascending.order.flip), nan = static_cast<T>(~T{0});  // keys
#pragma unroll 8
  for (int w = threadIdx.x; w < kWords / 4; w += kThreads) reinterpret_cast<uint4*>(counts)[w] = uint4{0, 0, 0, 0};
  if (threadIdx.x == 0) first_zero = first_nan = least = ~0u;
  __syncthreads();

  uint32_t own_zero = ~0u, own_nan = ~0u;
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
    const T key = sort_key(x[i], order);
    if (is_float && key == zero) own_zero = min(own_zero, i);
    if (is_float && key == nan) own_nan = min(own_nan, i);
    atomicAdd(counts + key / 2, key % 2 ? 1u << 16 : 1u);
  }
  if (own_zero != ~0u) atomicMin(&first_zero, own_zero);
  if (own_nan != ~0u) atomicMin(&first_nan, own_nan);
  __syncthreads();

  // Step s of a warp has the words from (warp * kSteps + s) * 32 on.
  uint32_t words[kSteps], found = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint32_t at = (warp * kSteps + s) * 32 + lane;
    words[s] = at < kWords ? counts[at] : 0;
    found += (words[s] >> 16 != 0) + (words[s] % (1 << 16) != 0);
  }
  uint32_t total = 0;
  uint32_t before = sum_before(found, sums, kWarps, total);
  before = shuffle_from(before, 0);  // of the warp
  const auto element_of = [&](T key) {
    if (is_float && key == zero) return x[first_zero];
    if (is_float && key == nan) return x[first_nan];
    return decode(static_cast<T>(key ^ static_cast<T>(order.invert)), order.ascending.order);
  };
  auto* const out = static_cast<T*>(buffers.out) + blockIdx.x * problem.size;
  int32_t* const out_counts = buffers.counts + blockIdx.x * problem.size;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint32_t low = words[s] % (1 << 16), high = words[s] >> 16;
    const unsigned lows = __ballot_sync(kEveryLane, low != 0), highs = __ballot_sync(kEveryLane, high != 0);
    if ((lows | highs) == 0) continue;
    const unsigned lower = (1u << lane) - 1;
    uint32_t at = before + __popc(lows & lower) + __popc(highs & lower);
    before += __popc(lows) + __popc(highs);
    const uint32_t key = ((warp * kSteps + s) * 32 + lane) * 2;
    const auto write = [&](uint32_t count, uint32_t key) {
      if (count == 0) return;
      if (at == 0) least = key;
      if (at < size) out[at] = element_of(static_cast<T>(key)), out_counts[at] = static_cast<int32_t>(count);
      ++at;
    };
    write(low, key);
    write(high, key + 1);
  }
  if (total >= size) return;
  __syncthreads();
  const T fill = problem.has_fill ? static_cast<const T*>(buffers.fill)[problem.fill(blockIdx.x)]
                                  : element_of(static_cast<T>(least));
#pragma unroll 4
  for (uint32_t i = total + threadIdx.x; i < size; i += kThreads) out[i] = fill, out_counts[i] = 0;
}

template <class T>
cudaError_t run(cudaStream_t stream, const UniquePlan& plan, const Unique& problem, const UniqueBuffers& buffers) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kThreads);
  config.shared_bytes = plan.shared_bytes;
  return launch(stream, config, unique_counts_kernel<T>, problem, buffers);
}

}  // namespace

cudaError_t launch_unique_counts(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                 const UniqueBuffers& buffers) {
  return problem.bits == 8 ? run<uint8_t>(stream, plan, problem, buffers)
                           : run<uint16_t>(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::search
