// For select_long: the workspace of a row, and how the blocks that share the row wait for each other and learn what the
// last of them has found.
#pragma once

#include "count/cuda/select.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kLongThreads, kWarps = kThreads / 32;

// Keys of 8 bits need no sample: one step counts how many elements have each.
template <class T>
constexpr bool kIsByte = sizeof(T) == 1;

// What stands first in a row's workspace.
template <class T>
struct Head {
  Found<T> found;
  uint32_t finished;  // how many blocks have finished the step
  uint32_t step;      // the last step whose results are in `found`
  uint32_t listed[kMostRanks];
  uint32_t last_of_largest;  // the last index of a largest key
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

  __device__ char* own(int64_t row) const { return workspace + row * plan.list_at; }
  __device__ Head<T>& head(int64_t row) const { return *reinterpret_cast<Head<T>*>(own(row)); }
  __device__ uint32_t* tables(int64_t row) const { return reinterpret_cast<uint32_t*>(own(row) + plan.table_at); }
  __device__ bool alone() const { return plan.slices == 1; }  // whether a row has one block
  // The list of a rank: the indices of the elements that are left, or, if these are equal, how many each slice has.
  __device__ uint32_t* list(int64_t row, int r) const {
    return reinterpret_cast<uint32_t*>(own(problem.rows.count())) + (row * problem.count + r) * plan.list_size;
  }
};

// Counts the calling block as finished, and returns how many blocks of the row have finished. One thread of the block
// calls this after a barrier. Another block that reads the count and then executes a fence sees what all threads of
// this block wrote before.
template <class T>
__device__ __forceinline__ uint32_t count_finished(Head<T>& head) {
  __threadfence();
  return atomicAdd(&head.finished, 1u) + 1;
}

// Whether the calling block is the last of its row to finish. The last one sees what the others have written.
template <class T>
__device__ __forceinline__ bool is_last(const Args<T>& a, Head<T>& head) {
  __shared__ bool last;
  __syncthreads();
  if (a.alone()) return true;
  if (threadIdx.x == 0) {
    last = count_finished(head) == a.plan.slices;
    if (last) head.finished = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Returns when all blocks of the row have finished, if the calling block `waits` for that; else at once.
template <class T>
__device__ __forceinline__ void wait_for_all(const Args<T>& a, Head<T>& head, bool waits) {
  __syncthreads();
  if (a.alone()) return;
  if (threadIdx.x == 0) {
    count_finished(head);
    while (waits && load_relaxed(&head.finished) < a.plan.slices) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Copies what was found last to shared memory. Loads bypass the L1 cache, which may have stale words.
template <class T>
__device__ __forceinline__ void load_found(const Head<T>& head, Found<T>& found) {
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&found)[w] = __ldcg(reinterpret_cast<const uint32_t*>(&head.found) + w);
  __syncthreads();
}

// Tells the other blocks of the row what the calling block, the last to finish, has found in a step.
template <class T>
__device__ __forceinline__ void tell_found(const Args<T>& a, Head<T>& head, const Found<T>& found, uint32_t step) {
  __syncthreads();
  if (a.alone()) return;
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&head.found)[w] = reinterpret_cast<const uint32_t*>(&found)[w];
  __syncthreads();
  if (threadIdx.x > 0) return;
  __threadfence();
  store_relaxed(&head.step, step);
}

// Waits for what the last block to finish has found in a step, and copies it to shared memory.
template <class T>
__device__ __forceinline__ void wait_for_found(Head<T>& head, Found<T>& found, uint32_t step) {
  if (threadIdx.x == 0) {
    while (load_relaxed(&head.step) < step) {
    }
    __threadfence();
  }
  __syncthreads();
  load_found(head, found);
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
}  // namespace jaxgpuops::count
