// Radix sort of rows that fit into the registers of a block. All passes, each by a digit of eight bits from the lowest
// up, run in shared memory. A pass in which all elements of the row have the same digit is skipped.
//
// Bytes moved: every element is read once, and every result is written once.
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

template <class Key, int kThreads, int kItems>
struct BlockShared {
  uint32_t counts[kThreads / 32 * kDigits];
  Key keys[kThreads * kItems];
  uint16_t indices[kThreads * kItems];
  uint32_t warps[kDigits / 32];
};

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    block_kernel(const Key* __restrict__ x, Key* __restrict__ values, int32_t* __restrict__ indices, uint32_t length,
                 uint32_t k, const __grid_constant__ SortOrder order) {
  static_assert(kThreads >= kDigits);
  auto& shared = *reinterpret_cast<BlockShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  const int64_t row = int64_t{blockIdx.x} * length;
  const uint32_t warp = threadIdx.x / 32, first = warp * 32 * kItems + threadIdx.x % 32;
  const auto is_there = [&](int i) { return first + i * 32 < length; };
  Key bits[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) bits[i] = is_there(i) ? x[row + first + i * 32] : Key{0};
  const Key some = sort_key(x[row], order);
  Key differ = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (is_there(i)) differ |= static_cast<Key>(sort_key(bits[i], order) ^ some);
  differ = fold_lanes(differ, [](Key a, Key b) { return static_cast<Key>(a | b); });
  if (threadIdx.x % 32 == 0) shared.counts[warp] = static_cast<uint32_t>(differ);
  if (sizeof(Key) == 8 && threadIdx.x % 32 == 0)
    shared.counts[kThreads / 32 + warp] = static_cast<uint32_t>(static_cast<uint64_t>(differ) >> 32);
  __syncthreads();
  differ = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    uint64_t word = shared.counts[w];
    if (sizeof(Key) == 8) word |= static_cast<uint64_t>(shared.counts[kThreads / 32 + w]) << 32;
    differ |= static_cast<Key>(word);
  }
  __syncthreads();
  bool moved = false;
#pragma unroll 1
  for (int shift = 0; shift < static_cast<int>(8 * sizeof(Key)); shift += kDigitBits) {
    if (digit_of(differ, shift) == 0) continue;
    uint32_t digit[kItems], index[kItems / 2], begin;  // `index`: two indices in each word
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      digit[i] = digit_of(sort_key(bits[i], order), shift) | (is_there(i) ? 0 : kDigits - 1);
    uint32_t* const counts = shared.counts + warp * kDigits;
    rank_in_warp(digit, counts);
    if (indices) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t own = moved ? shared.indices[first + i * 32] : first + i * 32;
        index[i / 2] = i % 2 ? index[i / 2] | own << 16 : own;
      }
    }
    __syncthreads();
    begin_of_digits<kThreads / 32>(shared.counts, shared.warps, begin);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t to = place_of(digit[i], counts);
      shared.keys[to] = bits[i];
      if (indices) shared.indices[to] = static_cast<uint16_t>(index[i / 2] >> (i % 2 * 16));
    }
    moved = true;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) bits[i] = shared.keys[first + i * 32];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t at = first + i * 32;
    if (at >= k) continue;
    const int64_t to = int64_t{blockIdx.x} * k + at;
    if (values) values[to] = bits[i];
    if (indices) indices[to] = static_cast<int32_t>(moved ? shared.indices[at] : at);
  }
}

template <class Key, int kThreads, int kItems>
cudaError_t run(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(kThreads);
  static_assert(sizeof(BlockShared<Key, kThreads, kItems>) <= block_shared_bytes(sizeof(Key), kThreads));
  config.shared_bytes = block_shared_bytes(sizeof(Key), kThreads);
  return launch(stream, config, block_kernel<Key, kThreads, kItems>, static_cast<const Key*>(buffers.x),
                static_cast<Key*>(buffers.values), buffers.indices, static_cast<uint32_t>(problem.rows.length),
                static_cast<uint32_t>(problem.k), problem.order);
}

}  // namespace

cudaError_t launch_block(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    constexpr int kItems = block_items(sizeof(Key));
    switch (plan.threads) {
      case 256: return run<Key, 256, kItems>(stream, problem, buffers);
      case 512: return run<Key, 512, kItems>(stream, problem, buffers);
      case 1024: return run<Key, 1024, kItems>(stream, problem, buffers);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxgpuops::sort
