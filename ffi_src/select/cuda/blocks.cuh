// For long.cu: the workspace of a row, and how the blocks that share the row wait for each other.
#pragma once

#include "select/cuda/select.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kThreads = kLongThreads, kWarps = kThreads / 32;

// Keys of 8 bits need no sample: one step counts how many elements have each.
template <class T>
constexpr bool kIsByte = sizeof(T) == 1;

// What stands first in a row's workspace.
template <class T>
struct Head {
  Found<T> found;     // the first intervals and, later, the largest key
  uint32_t finished;  // how many blocks have finished a step, of all steps together
  uint32_t listed[kMostRanks];
  uint32_t last_of_largest;  // the last index of a largest key
  uint32_t chosen;           // of a partition: the index of the chosen element
};

template <class T>
struct Args {
  Select problem;
  const T* x;
  const int32_t* ranks;
  T* values;
  int32_t* indices;
  char* workspace;  // heads and tables of all rows, and then lists
  SelectPlan plan;
  int64_t first_row;
  const void* shares;  // of quantiles
  int64_t beside;      // how quantiles lie (quantile.h)

  __device__ char* own(int64_t row) const { return workspace + row * plan.list_at; }
  __device__ Head<T>& head(int64_t row) const { return *reinterpret_cast<Head<T>*>(own(row)); }
  // The counts of a step, from 1 on. When a block adds to those of a step, others may still read those of the step
  // before, and the tables of the next step are cleared; so there are three sets of them.
  __device__ uint32_t* tables(int64_t row, uint32_t step) const {
    const auto words = static_cast<uint32_t>(problem.count) << kLongBinBits;
    return reinterpret_cast<uint32_t*>(own(row) + plan.table_at) + step % kLongTables * words;
  }
  __device__ bool alone() const { return plan.slices == 1; }  // whether a row has one block
  // The list of a rank: the indices of the elements that are left, or, if these are equal, how many each slice has.
  __device__ uint32_t* list(int64_t row, int r) const {
    return reinterpret_cast<uint32_t*>(own(problem.rows.count()) + (row * problem.count + r) * plan.list_bytes);
  }
  // The keys of the elements of a list.
  __device__ T* list_keys(int64_t row, int r) const { return reinterpret_cast<T*>(list(row, r) + plan.list_size); }
  // Of a partition: what the tiles of a row publish.
  __device__ uint64_t* tiles(int64_t row) const {
    return reinterpret_cast<uint64_t*>(list(problem.rows.count(), 0)) + row * plan.tiles;
  }
};

// Clears what the blocks of a row add to. One block calls this.
template <class T>
__device__ __forceinline__ void clear_row(const Args<T>& a, uint32_t row) {
  Head<T>& head = a.head(row);
  uint32_t* const tables = a.tables(row, 1);
  const int words = a.alone() ? 0 : static_cast<int>(a.problem.count) << kLongBinBits;
  for (int b = threadIdx.x; b < words; b += blockDim.x) tables[b] = 0;
  for (int64_t t = threadIdx.x; t < a.plan.tiles; t += blockDim.x) a.tiles(row)[t] = 0;
  if (threadIdx.x < kMostRanks) head.listed[threadIdx.x] = 0;
  if (threadIdx.x == 0) head.finished = head.last_of_largest = head.found.largest = 0;
}

// Returns when all blocks of the row have finished a step, the first of which is 1, if the calling block `waits` for
// that; else at once. A block that waited sees what the others wrote before.
template <class T>
__device__ __forceinline__ void wait_for_all(const Args<T>& a, Head<T>& head, uint32_t step, bool waits = true) {
  __syncthreads();
  if (a.alone()) return;
  if (threadIdx.x == 0) {
    const auto all = step * static_cast<uint32_t>(a.plan.slices);
    __threadfence();
    atomicAdd(&head.finished, 1u);
    while (waits && load_relaxed(&head.finished) < all) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Copies the first intervals to shared memory. Loads bypass the L1 cache, which may have stale words.
template <class T>
__device__ __forceinline__ void load_found(const Head<T>& head, Found<T>& found) {
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&found)[w] = __ldcg(reinterpret_cast<const uint32_t*>(&head.found) + w);
  __syncthreads();
}

// Sets up one table for all ranks, whose parts are the highest 8 bits of keys: those of part p are p - 1. One warp
// calls this.
template <class T>
__device__ __forceinline__ void set_byte_table(const Select& problem, uint32_t length, const int32_t* ranks,
                                               Found<T>& found) {
  constexpr uint32_t kAll = static_cast<T>(~T{0});
  const uint32_t lane = threadIdx.x & 31;
  uint32_t rank;
  const bool has = own_rank(problem, length, ranks, rank);
  const uint32_t with_table = __ballot_sync(kEveryLane, has);
  if (has) found.rank[lane] = rank, found.table[lane] = 0;
  if (lane > 0) return;
  found.parts[0] = Parts<uint32_t>::between<T>(kLongBinBits, 0, kAll);
  found.low[0] = 0, found.span[0] = kAll;
  found.used = with_table ? 1 : 0, found.more = found.missed = 0, found.largest = 0;
  found.ends = ((1u << problem.count) - 1) & ~with_table;
}

}  // namespace
}  // namespace jaxgpuops::select
