// Top-k for k of hundreds to thousands, of rows and columns that the shared memory of a block or of a cluster holds
// whole: a radix select and a radix sort, which take about as long for all data.
//
// Each block loads its part of the row. A sample of the row gives a digit (the top 11 or 12 bits of a key) that
// somewhat more than k elements reach. These elements are marked, and their digits counted; the blocks of a cluster add
// up their counts and find the digit of the k-th key. Then they count the next digit of the marked elements that have
// this one, until the k-th key is known, or, for results in the order of keys, until not many more than k elements
// reach the digits that are known. The elements that reach them are listed in the order of their indices: counts show
// where those of each warp and block go. Results in the order of indices are written at once. Others are sorted,
// stably, by digits of eight bits of their keys' differences to the largest one; the blocks of a cluster share that
// list.
//
// If fewer than k elements reach the guess, all elements are marked. Digits of 32-bit keys are those of their distance
// from the least key of the sample, so that integers of a small range, or floats of a few magnitudes, need fewer.
//
// Bytes moved: the input once, k results (value and index). Columns are read one by one.
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "topk/cuda/digits_block.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) digits_kernel(const __grid_constant__ Digits a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  DigitsBlock<Key, kThreads, kItems> block(a);
  block.select(block.load());
  block.list_selected();
  if constexpr (kItems > 0) block.sort_list();
#endif
}

template <class Key, int kThreads, int kItems>
cudaError_t start(cudaStream_t stream, const Launch& config, const Digits& a) {
  const auto kernel = digits_kernel<Key, kThreads, kItems>;
  if (config.cluster > 8) {
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), config.cluster);
    if (status != cudaSuccess) return status;
  }
  return launch(stream, config, kernel, a);
}

template <class Key, int kThreads>
cudaError_t run(cudaStream_t stream, const Launch& config, const Digits& a) {
  return a.sorted ? start<Key, kThreads, kDigitsItems>(stream, config, a) : start<Key, kThreads, 0>(stream, config, a);
}

}  // namespace

cudaError_t launch_digits(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Digits a = {call_of(problem, buffers)};
  a.blocks = static_cast<uint32_t>(plan.digits.blocks);
  a.part = static_cast<uint32_t>(plan.digits.part);
  a.reach = static_cast<uint32_t>(plan.digits.reach);
  // Fewer than k elements are above all of so many samples, almost certainly.
  a.narrows = problem.k * plan.digits.threads * kDigitsSamples >= 8 * problem.rows.length;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.digits.threads);
  config.shared_bytes = plan.digits.shared_bytes;
  config.cluster = plan.digits.blocks;
  config.packed = true;
  return dispatch_key(problem.key_bits, [&](auto key) -> cudaError_t {
    using Key = decltype(key);
    if constexpr (sizeof(Key) < 8) {
      switch (plan.digits.threads) {
        case 256: return run<Key, 256>(stream, config, a);
        case 512: return run<Key, 512>(stream, config, a);
      }
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxgpuops::topk
