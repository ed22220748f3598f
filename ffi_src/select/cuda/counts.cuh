// For long.cu: few rows of 16 bits, if each block has fewer than 2^16 elements of one. They need no sample and no
// lists: each block counts all keys of its slice in shared memory, two counts of 16 bits in a word. Then the blocks of
// a row add up how many keys have each of the 256 highest bytes, which tells the byte of each rank; and how many have
// each key of these bytes, which tells the key. For an index, the block that has the wanted one of the equal elements
// looks for it in its slice.
//
// Bytes moved: the row is read once, and the slice of an index once more, from the L2 cache.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda/counting.cuh"
#include "select/cuda/blocks.cuh"
#include "select/cuda/list.cuh"
#include "select/cuda/quantile.cuh"
#include "select/cuda/slice.cuh"

namespace jaxgpuops::select {
namespace {

// Counts of 65536 keys, and room for the table of 2^kLongBinBits counts of each rank beside them.
struct KeyCounts {
  uint32_t* words;

  __device__ __forceinline__ void add(uint32_t key, uint32_t count) const {
    atomicAdd(words + key / 2, count << 16 * (key % 2));
  }
  __device__ __forceinline__ uint32_t operator[](uint32_t key) const {
    return words[key / 2] >> 16 * (key % 2) & 0xffff;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) select_counts_kernel(const __grid_constant__ Args<T> a) {
  namespace cg = cooperative_groups;
  using Own = Slice<T>;
  constexpr uint32_t kHigh = 256, kTable = 1 << kLongBinBits;
  __shared__ __align__(16) uint32_t counts[kMostRanks][kTable];  // of the whole row
  __shared__ uint32_t sums[kWarps + 1], found_slice[2];
  // For each rank: the key; its number among the elements of the key; the rank whose table it has.
  __shared__ uint32_t key_of[kMostRanks], left_of[kMostRanks], table_of[kMostRanks];
  __shared__ Quantiles<uint32_t> quantiles;
  __shared__ typename Own::Pack edges[2];
  const KeyCounts own_counts{reinterpret_cast<uint32_t*>(dynamic_shared_memory())};
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, wanted = static_cast<int>(a.problem.count);
  const auto slices = static_cast<uint32_t>(a.plan.slices), in_launch = blockIdx.x / slices;
  const int64_t row = a.first_row + in_launch, slice = blockIdx.x - in_launch * slices;
  const auto inner = static_cast<uint32_t>(a.problem.rows.inner), outer = static_cast<uint32_t>(row) / inner;
  const uint32_t column = static_cast<uint32_t>(row) - outer * inner;
  const Own own(a.x + row * a.problem.rows.length, a.problem.rows.length, slice, a.plan.slice_packs, edges);
  const SortOrder order = one_flip<T>(a.problem.order);
  Head<T>& head = a.head(row);
  if (slice == 0) {
    clear_row(a, static_cast<uint32_t>(row));
    for (int b = threadIdx.x; b < wanted << kLongBinBits; b += kThreads) a.tables(row, 2)[b] = 0;
  }
  cg::grid_group::arrival_token cleared = cg::this_grid().barrier_arrive();
  for (uint32_t w = threadIdx.x; w < 1 << 13; w += kThreads)
    reinterpret_cast<uint4*>(own_counts.words)[w] = uint4{0, 0, 0, 0};
  for (int b = threadIdx.x; b < static_cast<int>(kMostRanks * kTable); b += kThreads) (&counts[0][0])[b] = 0;
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, column);
  if (slice == 0 && threadIdx.x < a.problem.quantiles)
    quantiles.own[threadIdx.x].load(a.problem, a.shares, ranks, outer, column, threadIdx.x);
  if (warp == 0) {
    uint32_t rank;
    own_rank(a.problem, own.length, ranks, rank);
    if (lane < wanted) left_of[lane] = min(rank, own.length - 1);
  }
  __syncthreads();

  // The next elements are loaded while these are counted.
  typename Own::Packs pack, next;
  int count = own.load(0, pack);
#pragma unroll 1
  for (int at = 0; at < own.steps(); ++at) {
    const int next_count = at + 1 < own.steps() ? own.load(at + 1, next) : 0;
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) {
      if (i >= count) continue;
      // Lanes that count the same key wait for each other. So the elements of a vector are counted together where all
      // are equal, as in ordered rows.
      if (all_equal<T>(pack[i])) {
        own_counts.add(sort_key(pack[i].element[0], order), Own::kPack);
        continue;
      }
#pragma unroll
      for (int e = 0; e < Own::kPack; ++e) own_counts.add(sort_key(pack[i].element[e], order), 1);
    }
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) pack[i] = next[i];
    count = next_count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // copies of the first and the last element
    own_counts.add(sort_key(own.x[0], order), 0u - own.before);
    own_counts.add(sort_key(own.x[own.length - 1], order), 0u - own.after);
  }
  __syncthreads();
  cg::this_grid().barrier_wait(std::move(cleared));

  // A thread sums up half of the keys of a byte. Lanes read from different banks.
  static_assert(kThreads == 2 * kHigh);
  uint32_t both = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t word = own_counts.words[threadIdx.x * 64 + (i + lane) % 64];
    both += (word & 0xffff) + (word >> 16);
  }
  both += __shfl_xor_sync(kEveryLane, both, 1);
  if (lane % 2 == 0 && both) atomicAdd(a.tables(row, 1) + threadIdx.x / 2, both);
  wait_for_all(a, head, 1);
  if (threadIdx.x < kHigh) counts[0][threadIdx.x] = __ldcg(a.tables(row, 1) + threadIdx.x);
  __syncthreads();
  const uint32_t up_to_high = warp < wanted ? sum_counts(counts[0]) : 0;
#pragma unroll 1
  for (int r = warp; r < wanted; r += kWarps) {
    const PartOfRank at = find_rank(counts[0], up_to_high, left_of[r]);
    __syncwarp();
    if (lane == 0) key_of[r] = at.part * kHigh, left_of[r] = at.left;
  }
  __syncthreads();
  // Ranks with the same byte share the table of the least of them.
  if (threadIdx.x < wanted) {
    int table = static_cast<int>(threadIdx.x);
    for (int q = table - 1; q >= 0; --q)
      if (key_of[q] == key_of[threadIdx.x]) table = q;
    table_of[threadIdx.x] = table;
  }
  __syncthreads();
  uint32_t* const tables = a.tables(row, 2);
#pragma unroll 1
  for (int b = threadIdx.x; b < wanted * static_cast<int>(kHigh); b += kThreads) {
    const int r = b / kHigh, low = b % kHigh;
    if (table_of[r] != r) continue;
    const uint32_t its = own_counts[key_of[r] + low];
    if (its) atomicAdd(tables + (r << kLongBinBits) + low, its);
  }
  wait_for_all(a, head, 2);
#pragma unroll 1
  for (int b = threadIdx.x; b < wanted * static_cast<int>(kHigh); b += kThreads)
    counts[b / kHigh][b % kHigh] = __ldcg(tables + (b / kHigh << kLongBinBits) + b % kHigh);
  __syncthreads();
#pragma unroll 1
  for (int r = warp; r < wanted; r += kWarps) {
    const uint32_t* const table = counts[table_of[r]];
    const PartOfRank at = find_rank(table, sum_counts(table), left_of[r]);
    __syncwarp();
    if (lane == 0) key_of[r] += at.part, left_of[r] = at.left;
  }
  __syncthreads();

  const bool is_told = lane < wanted && is_told_by_key(a.problem, static_cast<T>(key_of[lane]));
  const uint32_t told = __ballot_sync(kEveryLane, is_told), all = (1u << wanted) - 1;
  if (slice == 0 && warp == 0 && is_told)
    quantiles.taken[lane] = element_of_key(a.problem, static_cast<T>(key_of[lane]));
  if (told != all) {
    // A list has only the number of equal elements in each slice.
    if (threadIdx.x < wanted) a.list(row, threadIdx.x)[slice] = own_counts[key_of[threadIdx.x]];
    const bool has_quantiles = a.problem.quantiles > 0, chooses = slice < (has_quantiles ? 1 : wanted);
    wait_for_all(a, head, 3, chooses);
    if (!chooses) return;
#pragma unroll 1
    for (int r = 0; r < wanted; ++r) {
      if ((told >> r & 1) || (!has_quantiles && r % slices != slice)) continue;
      uint32_t left = left_of[r];
      const int64_t of = find_slice(a.list(row, r), slices, left, found_slice, sums);
      const int64_t first = of * a.plan.slice_packs * Own::kPack - own.past;
      const int64_t begin = max(first, int64_t{0});
      const int64_t end = min(first + a.plan.slice_packs * Own::kPack, int64_t{own.length});
      const auto key = static_cast<T>(key_of[r]);
      const uint32_t at = find_equal(own.x, order, key, begin, end, left, sums);
      if (threadIdx.x > 0) continue;
      if (a.problem.kth >= 0) {
        head.chosen = at;
      } else if (has_quantiles) {
        quantiles.taken[r] = own.x[at];
      } else {
        const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
        a.values[to] = own.x[at];
        a.indices[to] = static_cast<int32_t>(at);
      }
    }
  }
  __syncthreads();
  if (slice == 0 && threadIdx.x < a.problem.quantiles)
    a.values[quantile_at(static_cast<uint32_t>(row), threadIdx.x, a.problem.quantiles, a.beside)] =
        static_cast<T>(quantiles(a.problem, threadIdx.x));
}

}  // namespace
}  // namespace jaxgpuops::select
