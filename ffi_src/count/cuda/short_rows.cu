// bincount of many short rows.
//
// Few ids: each lane has a row of its own, and counts it in a table of bytes in shared memory,
// which no other lane touches. Tables are an odd number of words apart, so that equal ids of all lanes are in different
// banks. In the end the warp writes the counts of its rows, which are neighbours in memory.
//
// Moves each id and each count once. The lanes of a warp load from addresses that are a row apart; the lines that one
// load brings serve the next ones from L1.
//
// More ids: each warp has a row, and counts it in a table in shared memory. If there are few bins, each lane has its
// own counters for all bins, in its own bank, so that lanes never conflict; otherwise, the lanes share one table.
// Neighbouring lanes load neighbouring ids, and one batch of loads covers most rows.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/counter.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kIds = 8;  // ids that a lane loads at a time

struct Args {
  const void* x;
  int32_t* counts;
  int64_t rows;
  int length, bins, words;  // `words`: the size of a lane's table in words, or of a warp's tables
  uint32_t limit;
  uint32_t reciprocal;  // n / bins is n * reciprocal >> 32
};

template <class T>
__global__ void __launch_bounds__(32 * kMostRowWarps) bincount_rows_kernel(Args a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp) * 32;
  if (first >= a.rows) return;
  auto* const tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory()) + warp * 32 * a.words;
  for (int w = lane; w < 32 * a.words; w += 32) tables[w] = 0;
  __syncwarp();

  const auto rows = static_cast<int>(min(int64_t{32}, a.rows - first));
  const T* const x = static_cast<const T*>(a.x) + (first + lane) * a.length;
  auto* const table = reinterpret_cast<uint8_t*>(tables + lane * a.words);
  const auto count = [&](T id) {
    if (id < a.limit) ++table[static_cast<uint32_t>(id)];
  };
  constexpr int kPerPack = 16 / sizeof(T);
  if (lane < rows && reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && a.length % kPerPack == 0) {
    const auto* const packs = reinterpret_cast<const Pack*>(x);
#pragma unroll 4
    for (int i = 0; i < a.length / kPerPack; ++i) {
      const Pack pack = packs[i];
#pragma unroll
      for (int e = 0; e < kPerPack; ++e) count(get<T>(pack, e));
    }
  } else if (lane < rows) {
    for (int at = 0; at < a.length; at += kIds) {
      T id[kIds];
#pragma unroll
      for (int i = 0; i < kIds; ++i) id[i] = at + i < a.length ? x[at + i] : static_cast<T>(~T{0});
#pragma unroll
      for (int i = 0; i < kIds; ++i)
        if (at + i < a.length) count(id[i]);
    }
  }
  __syncwarp();

  int32_t* const counts = a.counts + first * a.bins;
  for (uint32_t i = lane; i < static_cast<uint32_t>(rows * a.bins); i += 32) {
    const uint32_t row = a.bins == 1 ? i : __umulhi(i, a.reciprocal), bin = i - row * a.bins;
    counts[i] = reinterpret_cast<const uint8_t*>(tables + row * a.words)[bin];
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kMostRowWarps) bincount_warps_kernel(Args a, bool apart) {
  constexpr int kBatch = sizeof(T) == 8 ? 8 : 16;  // ids that a lane loads at a time
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp;
  if (row >= a.rows) return;
  auto* const table = reinterpret_cast<uint32_t*>(dynamic_shared_memory()) + warp * a.words;
  const T* const x = static_cast<const T*>(a.x) + row * a.length + lane;
  const int own = a.length - lane;  // ids from the lane's first one to the end of the row
  T id[kBatch];
  const auto load = [&](int start) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) id[i] = start + 32 * i < own ? x[start + 32 * i] : static_cast<T>(~T{0});
  };
  load(0);
  for (int w = lane; w < a.words; w += 32) table[w] = 0;
  __syncwarp();

  Counter<uint32_t> counter;
  counter.table = table;
  counter.size = a.limit;
  for (int start = 0; start < a.length; start += 32 * kBatch) {
    if (start > 0) load(start);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (start + 32 * i >= a.length) break;
      const bool counts = start + 32 * i < own && id[i] < a.limit;
      const uint32_t bin = counts ? static_cast<uint32_t>(id[i]) : counter.kNone;
      if (!apart) {
        counter.add(bin, i % 4 == 0);
      } else if (counts) {
        atomicAdd(table + bin * 32 + lane, 1u);
      }
    }
  }
  counter.flush();
  __syncwarp();

  int32_t* const to = a.counts + row * a.bins;
  for (int bin = lane; bin < a.bins; bin += 32) {
    uint32_t count = apart ? 0 : table[bin];
    if (apart) {
#pragma unroll 8
      for (int i = 0; i < 32; ++i) count += table[bin * 32 + (lane + i) % 32];
    }
    to[bin] = static_cast<int32_t>(count);
  }
}

}  // namespace

cudaError_t launch_bincount_rows(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                 int32_t* counts) {
  Args a = {};
  a.x = x;
  a.counts = counts;
  a.rows = problem.rows.outer;
  a.length = static_cast<int>(problem.rows.length);
  a.bins = static_cast<int>(problem.bins);
  a.words = static_cast<int>(plan.range);
  a.limit = static_cast<uint32_t>(problem.limit());
  a.reciprocal = static_cast<uint32_t>(((uint64_t{1} << 32) + a.bins - 1) / a.bins);
  const bool by_warp = plan.algorithm == Counting::kWarps;
  const int64_t block_rows = by_warp ? plan.threads / 32 : plan.threads;
  Launch config;
  config.block = dim3(plan.threads);
  config.grid = dim3(static_cast<unsigned>((a.rows + block_rows - 1) / block_rows));
  config.shared_bytes = plan.shared_bytes;
  if (by_warp) {
    return dispatch_key(8 * problem.bytes, [&](auto width) {
      return launch(stream, config, bincount_warps_kernel<decltype(width)>, a, plan.tables > 1);
    });
  }
  return dispatch_key(8 * problem.bytes,
                      [&](auto width) { return launch(stream, config, bincount_rows_kernel<decltype(width)>, a); });
}

}  // namespace jaxgpuops::count
