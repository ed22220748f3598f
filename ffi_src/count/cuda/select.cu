// select: a block keeps the keys of a row in shared memory, and finds all ranks together, by digits from the highest
// down. The first digit of 11 bits is counted while the row is read. Of the keys that have the digits found so far for
// a rank, the next digit, of 7 bits, is counted in a table of that rank; a warp then finds the digit that the rank
// falls in. The index follows the key as its lowest digits, since equal elements are in order of appearance. The search
// ends as soon as each rank has one element left.
//
// Once the elements that are left for all ranks are few, the block lists them, and reads the others no more. Ranks that
// are neighbours mostly have them in common. Keys that share a digit make atomics wait for each other, so lanes that
// all have one digit add once.
//
// After: Alabi et al., "Fast k-selection algorithms for graphics processing units" (2012).
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kLaterBits = 7, kLaterBins = 1 << kLaterBits;  // of a digit after the first
constexpr int kBins = 1 << kSelectBits;
static_assert(kMostRanks * kLaterBins <= kBins, "the tables of later digits take the place of the first");

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

// What is known of the element of each rank: the digits found so far of its key and of its index, how many elements
// have them, and which of these it is, in the order of the ranks.
template <class T>
struct Found {
  T key[kMostRanks];
  uint32_t index[kMostRanks], size[kMostRanks], rank[kMostRanks];
};

// Finds the digit that rank `r` falls in; a warp does. `save(digit)` is called by one lane.
template <int kCount, class T, class Save>
__device__ __forceinline__ void find_digit(const uint32_t* counts, Found<T>& found, int r, Save save) {
  constexpr int kChunks = kCount / 128;  // a lane has four neighbouring bins of each
  const int lane = threadIdx.x & 31;
  const auto bins = reinterpret_cast<const uint4*>(counts) + lane;
  const uint32_t rank = found.rank[r];
  uint32_t before = 0;
  int chunk = 0;
  if constexpr (kChunks > 1) {
    uint32_t end = 0;
#pragma unroll
    for (int c = 0; c + 1 < kChunks; ++c) {
      const uint4 four = bins[32 * c];
      end += sum_of_warp(four.x + four.y + four.z + four.w);
      if (rank >= end) before = end, chunk = c + 1;
    }
  }
  const uint4 four = bins[32 * chunk];
  const uint32_t own = four.x + four.y + four.z + four.w;
  before += sum_up_to_lane(own) - own;
  __syncwarp();  // all lanes have read the rank before one of them changes it
  if (rank < before || rank - before >= own) return;
  const uint32_t count[4] = {four.x, four.y, four.z, four.w};
  uint32_t left = rank - before, size = count[0], digit = 128 * chunk + 4 * lane;
#pragma unroll
  for (int b = 0, past = 0; b < 3; ++b) {
    past |= left < count[b];
    if (past) continue;
    left -= count[b];
    size = count[b + 1];
    ++digit;
  }
  found.rank[r] = left;
  found.size[r] = size;
  save(digit);
}

template <class T>
__global__ void __launch_bounds__(1024)
    select_kernel(Select problem, const T* __restrict__ x, const int32_t* __restrict__ ranks, T* __restrict__ values,
                  int32_t* __restrict__ indices) {
  constexpr int kBits = 8 * sizeof(T), kPack = 16 / sizeof(T), kPacks = 2;
  constexpr int kFirstBits = kBits < kSelectBits ? kBits : kSelectBits, kFirst = kBits - kFirstBits;
  alignas(16) __shared__ uint32_t counts[kBins];
  __shared__ int32_t list[kSelectListed];
  __shared__ int listed;
  __shared__ Found<T> found;
  const int threads = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto length = static_cast<int>(problem.rows.length);
  const auto wanted = static_cast<int>(problem.count);
  const int64_t row = blockIdx.x;
  x += row * length;

  // Keys lie in shared memory as elements do in global memory, relative to 16 bytes.
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  T* keys = reinterpret_cast<T*>(dynamic_shared_memory()) + past;
  const int head = (kPack - past) % kPack, packs = (length - head) / kPack;

  for (int b = threadIdx.x; b < kBins / 4; b += threads) reinterpret_cast<uint4*>(counts)[b] = uint4{0, 0, 0, 0};
  if (threadIdx.x == 0) listed = 0;
  if (threadIdx.x < wanted) {
    const int r = threadIdx.x;
    found.rank[r] = static_cast<uint32_t>(problem.rank_of(ranks[problem.ranks(row, r, 0)]));
    found.index[r] = 0;
  }
  __syncthreads();

  struct alignas(16) Pack {
    T element[kPack];
  };
  for (int start = warp * 32; start < packs; start += kPacks * threads) {
    Pack pack[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = start + p * threads + lane;
      if (at < packs) pack[p] = reinterpret_cast<const Pack*>(x + head)[at];
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = start + p * threads + lane;
      const bool has = at < packs;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const T key = has ? sort_key(pack[p].element[e], problem.order) : T{0};
        pack[p].element[e] = key;
        count_digit(counts, static_cast<uint32_t>(key >> kFirst), has);
      }
      if (has) reinterpret_cast<Pack*>(keys + head)[at] = pack[p];
    }
  }
  if (warp == 0) {  // the elements before and after the packs are less than 32
    const int at = lane < head ? lane : lane + packs * kPack;
    const bool has = at < length;
    const T key = has ? sort_key(x[at], problem.order) : T{0};
    if (has) keys[at] = key;
    count_digit(counts, static_cast<uint32_t>(key >> kFirst), has);
  }
  __syncthreads();
  for (int r = warp; r < wanted; r += threads / 32) {
    find_digit<1 << kFirstBits>(
        counts, found, r, [&](uint32_t digit) { found.key[r] = static_cast<T>(static_cast<T>(digit) << kFirst); });
  }
  __syncthreads();

  // The bits of keys and indices that are known are those from these on.
  int key_bit = kFirst, index_bit = 32 - __clz(length - 1);
  constexpr T kAll = static_cast<T>(~T{0});
  T key_known = static_cast<T>(kAll << kFirst);
  uint32_t index_known = 0;
  const auto has_digits = [&](T key, int at, int r) {
    return static_cast<T>(key & key_known) == found.key[r] &&
           (index_known == 0 || (static_cast<uint32_t>(at) & index_known) == found.index[r]);
  };
  for (bool has_list = false;;) {
    uint32_t left = 0;  // elements, of all ranks; the next digit matters only if a rank has several
    bool is_found = true;
    for (int r = 0; r < wanted; ++r) {
      bool again = false;
      for (int q = 0; q < r; ++q) again |= found.key[q] == found.key[r] && found.index[q] == found.index[r];
      left += again ? 0 : found.size[r];
      is_found &= found.size[r] == 1;
    }
    if (!has_list && left <= kSelectListed) {
      constexpr int kKeys = 4;
      for (int start = threadIdx.x; start < length; start += kKeys * threads) {
        T key[kKeys];
        unsigned is_left = 0;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) key[i] = start + i * threads < length ? keys[start + i * threads] : T{0};
        for (int r = 0; r < wanted; ++r)
#pragma unroll
          for (int i = 0; i < kKeys; ++i) is_left |= has_digits(key[i], start + i * threads, r) ? 1u << i : 0;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const int at = start + i * threads;
          if ((is_left >> i & 1) && at < length) list[atomicAdd(&listed, 1)] = at;
        }
      }
      has_list = true;
      __syncthreads();
    }
    if (is_found) break;

    for (int b = threadIdx.x; b < wanted * kLaterBins; b += threads) counts[b] = 0;
    __syncthreads();
    const bool of_key = key_bit > 0;
    int& bit = of_key ? key_bit : index_bit;
    bit = bit > kLaterBits ? bit - kLaterBits : 0;
    const int among = has_list ? listed : length;
    for (int start = 0; start < among; start += threads) {
      const int i = start + threadIdx.x;
      const bool has = i < among;
      const int at = has ? (has_list ? list[i] : i) : 0;
      const T key = keys[at];
      const auto digit = of_key ? static_cast<uint32_t>(static_cast<T>(key & static_cast<T>(~key_known)) >> bit)
                                : (static_cast<uint32_t>(at) & ~index_known) >> bit;
      for (int r = 0; r < wanted; ++r) count_digit(counts + r * kLaterBins, digit, has && has_digits(key, at, r));
    }
    __syncthreads();
    for (int r = warp; r < wanted; r += threads / 32) {
      find_digit<kLaterBins>(counts + r * kLaterBins, found, r, [&](uint32_t digit) {
        if (of_key) {
          found.key[r] = static_cast<T>(found.key[r] | static_cast<T>(static_cast<T>(digit) << bit));
        } else {
          found.index[r] |= digit << bit;
        }
      });
    }
    if (of_key) {
      key_known = static_cast<T>(kAll << bit);
    } else {
      index_known = ~uint32_t{0} << bit;
    }
    __syncthreads();
  }

  for (int i = threadIdx.x; i < listed; i += threads) {
    const int at = list[i];
    for (int r = 0; r < wanted; ++r) {
      if (!has_digits(keys[at], at, r)) continue;
      values[row * wanted + r] = x[at];
      indices[row * wanted + r] = at;
    }
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
