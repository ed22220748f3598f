// unique of elements of 8 or 16 bits, by keys: each block of a row has the counts of a range of keys, and writes the
// elements in the order of their keys.
//
// In rows of up to 2^14 elements, blocks do not wait for each other. Each reads the whole row, counts the elements of
// its range in shared memory, and also marks, as bits, which lower keys there are, since the number of these tells
// where its own results begin. Few equal keys take no longer than many different ones: an increment of a count in
// shared memory takes as long wherever it goes, and a bit that is set is not set again. Which zero and which NaN comes
// first is found on the way, as their keys do not tell it.
//
// The blocks of a kernel before count a longer row, each a part of it in shared memory, and add up their counts in
// global memory. Then each block reads the counts of all lower keys. Blocks behind those of the last range write fills.
//
// Bytes moved: every element of a short row is read once by each block, from the L2 cache but for the first time; every
// element of a long row is read once. Every result is written once.
#include "common/cuda/counting.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/set_words.h"
#include "common/cuda/warp.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = kCountsThreads, kWarps = kThreads / 32;

template <class T>
constexpr int kKeys = 1 << 8 * sizeof(T);

// Counts of a long row, in the workspace.
struct Counted {
  uint32_t first_zero, first_nan;  // the complements of where the first ones are; 0 if there is none
  uint32_t unused[2];
  uint32_t counts[1];  // of each key
};

// Counts of 16-bit keys share words, so a block adds them to those in global memory before one can overflow.
template <class T>
__global__ void __launch_bounds__(kThreads)
    count_keys_kernel(const T* __restrict__ x, int64_t length, int64_t chunk, const SortOrder order, Counted* counted) {
  constexpr int kKeysOfWord = sizeof(T) == 2 ? 2 : 1, kWords = kKeys<T> / kKeysOfWord, kPack = 16 / sizeof(T);
  constexpr int64_t kRound = sizeof(T) == 2 ? (1 << 16) - kPack : int64_t{1} << 30;
  auto* const words = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  __shared__ uint32_t first_zero, first_nan;
  let_dependents_start();
  const bool is_float = order.ascending.sign != 0, aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const T zero = static_cast<T>(order.ascending.order.flip), nan = static_cast<T>(~T{0});  // keys
  if (threadIdx.x == 0) first_zero = first_nan = 0;
  for (int w = threadIdx.x; w < kWords; w += kThreads) words[w] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * chunk, end = min(begin + chunk, length);
  uint32_t own_zero = ~0u, own_nan = ~0u;
  wait_for_predecessor();  // it sets `counted` to zero
#pragma unroll 1
  for (int64_t round = begin; round < end; round += kRound) {
    const int64_t round_end = min(round + kRound, end);
#pragma unroll 2
    for (int64_t at = round + threadIdx.x * kPack; at < round_end; at += kThreads * kPack) {
      struct alignas(16) {
        T element[kPack];
      } pack;
      const auto there = static_cast<int>(min(int64_t{kPack}, round_end - at));
      if (aligned && there == kPack) {
        *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(x + at));
      } else {
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack.element[e] = x[min(at + e, length - 1)];
      }
      const auto count = [&](int e, uint32_t times) {
        const uint32_t key = sort_key(pack.element[e], order), place = static_cast<uint32_t>(at) + e;
        if (key == zero) own_zero = min(own_zero, place);
        if (key == nan) own_nan = min(own_nan, place);
        atomicAdd(words + key / kKeysOfWord, kKeysOfWord == 2 && key % 2 ? times << 16 : times);
      };
      // Lanes that count the same key wait for each other. So the elements of a vector are counted together where all
      // are equal, as in ordered rows.
      if (there == kPack && all_equal<T>(pack)) {
        count(0, kPack);
        continue;
      }
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        if (e >= there) break;
        count(e, 1);
      }
    }
    __syncthreads();
    for (int w = threadIdx.x; w < kWords; w += kThreads) {
      const uint32_t word = words[w];
      if (word == 0) continue;
      words[w] = 0;
      if (kKeysOfWord == 1)
        atomicAdd(counted->counts + w, word);
      else  // both counts at once: a sum of counts has no carry, since there are less than 2^31 elements
        atomicAdd(reinterpret_cast<unsigned long long*>(counted->counts + 2 * w),
                  (word & 0xffff) | uint64_t{word >> 16} << 32);
    }
    __syncthreads();
  }
  if (!is_float) return;
  if (own_zero != ~0u) atomicMax(&first_zero, ~own_zero);
  if (own_nan != ~0u) atomicMax(&first_nan, ~own_nan);
  __syncthreads();
  if (threadIdx.x > 0) return;
  if (first_zero) atomicMax(&counted->first_zero, first_zero);
  if (first_nan) atomicMax(&counted->first_nan, first_nan);
}

// `counted`: null, or the counts of a long row. `blocks`: those of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    unique_counts_kernel(const __grid_constant__ Unique problem, const __grid_constant__ UniqueBuffers buffers,
                         const Counted* counted, uint32_t blocks) {
  constexpr int kKeys = search::kKeys<T>, kRange = kKeys < kCountsRange ? kKeys : kCountsRange;
  constexpr int kBlocks = kKeys / kRange, kEach = kRange > kThreads ? kRange / kThreads : 1;  // keys of a thread
  __shared__ uint32_t counts[kRange], lower[kKeys / 32];  // `lower`: a bit for each key
  __shared__ uint32_t sums[kWarps], first_zero, first_nan, least;
  const SortOrder& order = problem.order;
  const auto length = static_cast<uint32_t>(problem.rows.length), size = static_cast<uint32_t>(problem.size);
  const uint32_t row = blockIdx.x / blocks, block = blockIdx.x % blocks, begin = min(block, uint32_t{kBlocks}) * kRange;
  const T* const x = static_cast<const T*>(buffers.x) + row * length;
  const bool is_float = order.ascending.sign != 0;
  const T zero = static_cast<T>(order.ascending.order.flip), nan = static_cast<T>(~T{0});  // keys
  uint32_t marked = 0;  // lower keys that the thread has found
  if (threadIdx.x == 0) first_zero = first_nan = least = ~0u;
  if (counted) {
    wait_for_predecessor();
    if (threadIdx.x == 0) first_zero = ~counted->first_zero, first_nan = ~counted->first_nan;
    __syncthreads();
    for (uint32_t k = threadIdx.x; k < kRange; k += kThreads)
      counts[k] = block < kBlocks ? counted->counts[begin + k] : 0;
    uint32_t own_least = ~0u;
#pragma unroll 4
    for (uint32_t k = 4 * threadIdx.x; k < begin; k += 4 * kThreads) {
      const uint4 four = *reinterpret_cast<const uint4*>(counted->counts + k);
      const uint32_t set = (four.x != 0) | (four.y != 0) << 1 | (four.z != 0) << 2 | (four.w != 0) << 3;
      marked += __popc(set);
      if (set) own_least = min(own_least, k + __ffs(static_cast<int>(set)) - 1);
    }
    if (own_least != ~0u) atomicMin(&least, own_least);
  } else {
    for (int k = threadIdx.x; k < kRange; k += kThreads) counts[k] = 0;
    for (int w = threadIdx.x; w < kKeys / 32; w += kThreads) lower[w] = 0;
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
    for (uint32_t w = threadIdx.x; w < begin / 32; w += kThreads) {
      marked += __popc(lower[w]);
      if (lower[w]) atomicMin(&least, w * 32 + __ffs(static_cast<int>(lower[w])) - 1);
    }
  }
  __syncthreads();

  const uint32_t first = threadIdx.x * kEach;
  uint32_t found = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) found += first < kRange && counts[first + k] != 0;
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
  // The blocks from the last range on know where the fills begin, and share these.
  if (block + 1 < kBlocks || before + total >= size || (block + 1 == kBlocks && blocks > kBlocks)) return;
  __syncthreads();
  const T fill =
      problem.has_fill ? static_cast<const T*>(buffers.fill)[problem.fill(row)] : element_of(static_cast<T>(least));
  const uint32_t filling = max(blocks - kBlocks, 1u), part = block + 1 == kBlocks ? 0 : block - kBlocks;
#pragma unroll 4
  for (uint32_t i = before + total + part * kThreads + threadIdx.x; i < size; i += filling * kThreads)
    out[i] = fill, out_counts[i] = 0;
}

template <class T>
cudaError_t run(cudaStream_t stream, const UniquePlan& plan, const Unique& problem, const UniqueBuffers& buffers,
                void* workspace) {
  auto* const counted = plan.chunk > 0 ? static_cast<Counted*>(workspace) : nullptr;
  Launch config;
  config.block = dim3(kThreads);
  if (counted) {
    const int64_t words = sizeof(Counted) / 4 - 1 + kKeys<T>;
    cudaError_t error = launch_set_words(stream, static_cast<uint32_t*>(workspace), words, 0, 0);
    if (error != cudaSuccess) return error;
    config.grid = dim3(static_cast<unsigned>((problem.rows.length + plan.chunk - 1) / plan.chunk));
    config.shared_bytes = plan.shared_bytes;
    config.overlap = plan.overlap;
    error = launch(stream, config, count_keys_kernel<T>, static_cast<const T*>(buffers.x), problem.rows.length,
                   plan.chunk, problem.order, counted);
    if (error != cudaSuccess) return error;
    config.shared_bytes = 0;
  }
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer * plan.blocks));
  return launch(stream, config, unique_counts_kernel<T>, problem, buffers, counted, static_cast<uint32_t>(plan.blocks));
}

}  // namespace

cudaError_t launch_unique_counts(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                 const UniqueBuffers& buffers, void* workspace) {
  return problem.bits == 8 ? run<uint8_t>(stream, plan, problem, buffers, workspace)
                           : run<uint16_t>(stream, plan, problem, buffers, workspace);
}

}  // namespace jaxgpuops::search
