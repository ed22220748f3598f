// Top-k for k of hundreds to thousands, of rows that the shared memory of a block or of a cluster holds whole. It does
// the same for all data: radix select and radix sort.
//
// Each block loads its part of the row and counts the highest digits of the keys. The blocks of a cluster add up their
// counts, each those of some digits, and find the digit of the k-th key. Then they count the next digit of the keys
// that have it, until the k-th key is known, or until only a few more than k elements reach the digits that are known.
// The elements that reach them are listed in the order of their indices: counts of each warp and each block show where
// its elements go. Results in the order of indices are written at once. Others are listed in the first block of the
// cluster, which sorts them, stably, by digits of the difference to the largest key.
//
// Bytes moved: the input once, k results (value and index).
#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "topk/cuda/digits_team.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(digits_block(kThreads), 1024 / digits_block(kThreads))
    digits_kernel(const __grid_constant__ Digits a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr bool kWarp = kThreads == kDigitsWarp;
  const uint32_t team = kWarp ? threadIdx.x / kThreads : 0;
  const int64_t row = kWarp ? int64_t{blockIdx.x} * kDigitsTeams + team : blockIdx.x / a.blocks;
  if (kWarp && row >= a.rows) return;
  Team<Key, kThreads, kItems> t(a, dynamic_shared_memory() + team * a.team_bytes, row,
                                kWarp ? 0 : blockIdx.x % a.blocks);
  t.select(t.load());
  t.list_selected();
  if constexpr (kItems > 0) t.sort_list();
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

template <class Key>
cudaError_t run(cudaStream_t stream, const Launch& config, const Digits& a, int threads, int items) {
  constexpr int kItems = kDigitsItems;
  if (threads == kDigitsWarp)
    return items == 16  ? start<Key, kDigitsWarp, 16>(stream, config, a)
           : items == 4 ? start<Key, kDigitsWarp, 4>(stream, config, a)
                        : start<Key, kDigitsWarp, 0>(stream, config, a);
  if (threads == 256) return items ? start<Key, 256, kItems>(stream, config, a) : start<Key, 256, 0>(stream, config, a);
  return items ? start<Key, 512, kItems>(stream, config, a) : start<Key, 512, 0>(stream, config, a);
}

}  // namespace

cudaError_t launch_digits(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Digits a = {call_of(problem, buffers)};
  a.blocks = static_cast<uint32_t>(plan.digits.blocks);
  a.part = static_cast<uint32_t>(plan.digits.part);
  a.reach = static_cast<uint32_t>(plan.digits.reach);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(digits_block(plan.digits.threads));
  a.team_bytes =
      static_cast<uint32_t>(plan.digits.shared_bytes / (plan.digits.threads == kDigitsWarp ? kDigitsTeams : 1));
  a.rows = problem.rows.count();
  config.shared_bytes = plan.digits.shared_bytes;
  config.cluster = plan.digits.blocks;
  config.packed = true;
  switch (problem.key_bits) {
    case 8: return run<uint8_t>(stream, config, a, plan.digits.threads, plan.digits.items);
    case 16: return run<uint16_t>(stream, config, a, plan.digits.threads, plan.digits.items);
    case 32: return run<uint32_t>(stream, config, a, plan.digits.threads, plan.digits.items);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::topk
