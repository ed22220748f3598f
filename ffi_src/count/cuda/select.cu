// select: a block keeps the keys of a row in shared memory, and finds each rank by digits of 11 bits, the highest
// first: of the keys that have the digits found so far it counts the next digit, and the counts say which one the rank
// falls in. At the end the key is known, and which of the elements that have it is wanted: these are counted in order
// of appearance.
//
// Reads a row once. The first digit is counted while the row is read, and once for all ranks. Keys that share a digit
// make atomics wait for each other, so lanes that all have one digit add once.
//
// After: Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012).
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kBins = 1 << kSelectBits, kMaxWarps = 32;

// All lanes of the warp take part; `has`: whether the lane has a digit.
__device__ __forceinline__ void count_digit(uint32_t* counts, uint32_t digit, bool has) {
  const unsigned mine = __ballot_sync(kEveryLane, has);
  if (mine == 0) return;
  const uint32_t first = __shfl_sync(kEveryLane, digit, __ffs(mine) - 1);
  const unsigned same = __ballot_sync(kEveryLane, has && digit == first);
  if (same == mine) {
    if ((threadIdx.x & 31) == 0) atomicAdd(counts + first, __popc(mine));
  } else if (has) {
    atomicAdd(counts + digit, 1u);
  }
}

template <class T>
__global__ void __launch_bounds__(1024)
    select_kernel(Select problem, const T* __restrict__ x, const int32_t* __restrict__ ranks, T* __restrict__ values,
                  int32_t* __restrict__ indices) {
  constexpr int kBits = 8 * sizeof(T), kFirst = kBits < kSelectBits ? 0 : kBits - kSelectBits;  // shift of a digit
  __shared__ uint32_t first_counts[kBins], later_counts[kBins], warps[kMaxWarps];
  __shared__ uint32_t found_digit, found_before;
  T* keys = reinterpret_cast<T*>(dynamic_shared_memory());
  const int threads = blockDim.x;
  const auto length = static_cast<int>(problem.rows.length);
  const int64_t row = blockIdx.x;
  x += row * length;

  for (int b = threadIdx.x; b < kBins; b += threads) first_counts[b] = 0;
  __syncthreads();
  constexpr int kPacks = 4;
  for (int start = 0; start < length; start += kPacks * threads) {
    T element[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = start + p * threads + threadIdx.x;
      element[p] = at < length ? x[at] : T{0};
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = start + p * threads + threadIdx.x;
      const T key = sort_key(element[p], problem.order);
      if (at < length) keys[at] = key;
      count_digit(first_counts, static_cast<uint32_t>(key >> kFirst), at < length);
    }
  }
  __syncthreads();

  const int bins = kBins / threads > 0 ? kBins / threads : 1;  // of a thread
  for (int64_t r = 0; r < problem.count; ++r) {
    auto rank = static_cast<uint32_t>(problem.rank_of(ranks[problem.ranks(row, r, 0)]));
    T prefix = 0, known = 0;  // the digits found so far, and where they are
    for (int shift = kFirst;;) {
      const bool is_first = shift == kFirst;
      uint32_t* counts = is_first ? first_counts : later_counts;
      if (!is_first) {
        for (int b = threadIdx.x; b < kBins; b += threads) counts[b] = 0;
        __syncthreads();
        for (int start = 0; start < length; start += threads) {
          const int at = start + threadIdx.x;
          const T key = at < length ? keys[at] : T{0};
          const bool has = at < length && static_cast<T>(key & known) == prefix;
          count_digit(counts, static_cast<uint32_t>(static_cast<T>(key & static_cast<T>(~known)) >> shift), has);
        }
        __syncthreads();
      }
      uint32_t sum = 0, total;
      for (int b = 0; b < bins; ++b) sum += counts[threadIdx.x * bins + b];
      uint32_t before = sum_before(sum, warps, threads / 32, total);
      if (rank >= before && rank < before + sum) {  // one thread
        int digit = threadIdx.x * bins;
        while (rank >= before + counts[digit]) before += counts[digit++];
        found_digit = static_cast<uint32_t>(digit);
        found_before = before;
      }
      __syncthreads();
      rank -= found_before;
      prefix = static_cast<T>(prefix | static_cast<T>(static_cast<T>(found_digit) << shift));
      known = static_cast<T>(~T{0} << shift);
      if (shift == 0) break;
      shift = shift > kSelectBits ? shift - kSelectBits : 0;
      __syncthreads();
    }

    // The one of that rank among those of the key.
    for (int start = 0; start < length; start += threads) {
      const int at = start + threadIdx.x;
      const bool has = at < length && keys[at] == prefix;
      const auto count = static_cast<uint32_t>(__syncthreads_count(has));
      if (rank >= count) {
        rank -= count;
        continue;
      }
      uint32_t total;
      const uint32_t before = sum_before(uint32_t{has}, warps, threads / 32, total);
      if (has && before == rank) {
        values[row * problem.count + r] = x[at];
        indices[row * problem.count + r] = at;
      }
      break;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_select(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const int32_t* ranks, void* values, int32_t* indices) {
  if (plan.algorithm == Selecting::kEmpty) return cudaSuccess;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, select_kernel<T>, problem, static_cast<const T*>(x), ranks, static_cast<T*>(values),
                  indices);
  });
}

}  // namespace jaxgpuops::count
