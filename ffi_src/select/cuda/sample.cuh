// For long.cu: the first intervals of a row, from a sample of it.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "select/cuda/blocks.cuh"

namespace jaxgpuops::select {
namespace {

// A sample has 2^kSmallSampleBits elements. If each block takes that of its row, which has less than kLargeSampled
// elements, it has 2^kOwnSampleBits elements of 64 bits, or 2^kWarpSampleBits others, which a warp sorts. It has
// 2^kLargeSampleBits elements if a row has more, and a block has more than kLargePart of them. The larger sample gives
// narrower intervals; wider ones would have more keys than a block can keep.
constexpr int kWarpSampleBits = 9, kOwnSampleBits = 10, kSmallSampleBits = 11, kLargeSampleBits = 13;
constexpr int64_t kLargeSampled = 1 << 22, kLargePart = 1 << 16;
// The threads of a block of the sample's kernel, and how many elements of the sample are sorted.
constexpr int kSampleThreads = 1024, kPilot = 1 << 7;

// What a block needs in shared memory for a sample, besides tables.
template <class T>
struct Sample {
  using Word = typename Found<T>::Word;
  Word few[kPilot];
  Scale<T> scale;
  uint32_t ranks;   // a bit for each rank
  uint32_t coarse;  // a bit for each rank with an end of its interval in a part that has much of the sample
  // For each rank: the places in the sorted sample where its interval begins and ends, the parts that these fall in,
  // and the least or largest key of the sample in that part.
  uint32_t place[2 * kMostRanks], first[2 * kMostRanks], last[2 * kMostRanks];
  Word bound[2 * kMostRanks];
  Parts<uint32_t> parts[kMostRanks];
};

// Finds the first intervals of a row from a sample. Each rank needs only the elements at two places of the sorted
// sample, and to sort the whole sample would take as long as all other work. So only kPilot elements of the sample are
// sorted. They give an interval of the sample, whose keys are counted in equal parts, as those of the row are later.
// The interval of the row goes from the least sampled element in the part of the first place to the largest sampled
// element in the part of the second place. The whole block (of kOfBlock threads) calls this. `counts`: tables of zeros.
template <int kOfBlock, int kSampleBits, class T>
__device__ __forceinline__ void find_first_tables(const Select& problem, const T* x, const int32_t* ranks_of_row,
                                                  Sample<T>& shared, uint32_t* counts, Found<T>& found) {
  constexpr int kBins = 1 << kLongBinBits, kSamples = 1 << kSampleBits, kOwn = kSamples / kOfBlock;
  constexpr int kEach = kSamples / kPilot;
  using Word = typename Found<T>::Word;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  uint32_t rank = 0;
  const bool has = warp == 0 && own_rank(problem, length, ranks_of_row, rank);
  Word own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    own[i] = sampled_key(kSampleBits, problem.order, x, length, i * kOfBlock + threadIdx.x);
  if (threadIdx.x % kEach == 0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) shared.few[(i * kOfBlock + threadIdx.x) / kEach] = own[i];
  }
  __syncthreads();
  int from = 0, to = 0;
  if (warp == 0) {
    T key[kPilot / 32];
#pragma unroll
    for (int i = 0; i < kPilot / 32; ++i) key[i] = shared.few[i * 32 + lane];
    const auto of_few = Scale<T>::of_warp(key);
    if (lane == 0) shared.scale = of_few;
    uint32_t sorted[kPilot / 32];
#pragma unroll
    for (int i = 0; i < kPilot / 32; ++i) sorted[i] = of_few.word(key[i]);
    sort_in_warp(sorted);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPilot / 32; ++i) shared.few[lane * (kPilot / 32) + i] = sorted[i];
    __syncwarp();
    if (has) {
      from = place_in_sample(kSamples, rank, length, 4, -1), to = place_in_sample(kSamples, rank, length, 4, 1);
      uint32_t low, high;
      const auto sampled = [&](int i) { return static_cast<uint32_t>(shared.few[i]); };
      find_interval<uint32_t>(kPilot, max(from, 0), min(to, kSamples - 1), kSamples, 4, sampled, low, high);
      shared.parts[lane] = Parts<uint32_t>::template between<uint32_t>(kLongBinBits, low, high);
      shared.place[2 * lane] = max(from, 0), shared.place[2 * lane + 1] = min(to, kSamples - 1);
      shared.bound[2 * lane] = ~Word{0}, shared.bound[2 * lane + 1] = 0;
    }
    const uint32_t ranks = __ballot_sync(kEveryLane, has);
    if (lane == 0) shared.ranks = ranks, shared.coarse = 0;
  }
  __syncthreads();
  const uint32_t ranks = shared.ranks;
  const Scale<T> scale = shared.scale;
#pragma unroll 1
  for (bool again = false;; again = true) {
    for_bits(ranks, [&](int r) {
      const Parts<uint32_t> its = shared.parts[r];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        increment(counter_of(its, shared_address(counts + r * kBins) - 4 * its.base, scale.word(own[i])));
    });
    __syncthreads();
#pragma unroll 1
    for (int end = warp; end < 2 * kMostRanks; end += kOfBlock / 32) {
      const int r = end / 2;
      if (!(ranks >> r & 1)) continue;
      const PartOfRank at = find_rank(counts + r * kBins, sum_counts(counts + r * kBins), shared.place[end]);
      if (lane > 0) continue;
      shared.parts[r].template bounds<uint32_t>(at.part, shared.first[end], shared.last[end]);
      if (at.size > kSamples / 32 && shared.last[end] > 0) atomicOr(&shared.coarse, 1u << r);
    }
    __syncthreads();
    for_bits(ranks, [&](int r) {
      const uint32_t low = shared.first[2 * r], high = shared.first[2 * r + 1];
      const uint32_t low_span = shared.last[2 * r], high_span = shared.last[2 * r + 1];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t word = scale.word(own[i]);
        if (word - low <= low_span) atomicMin(shared.bound + 2 * r, own[i]);
        if (word - high <= high_span) atomicMax(shared.bound + 2 * r + 1, own[i]);
      }
    });
    __syncthreads();
    if (again || shared.coarse == 0) break;

    // One part may have much of the sample, for example if the interval contains zero, near which floating-point
    // numbers are dense. Then the interval between the two ends found is cut into equal parts once more.
    if (warp == 0 && (ranks & shared.coarse) >> lane & 1) {
      shared.parts[lane] = Parts<uint32_t>::template between<uint32_t>(kLongBinBits, scale.word(shared.bound[2 * lane]),
                                                                       scale.word(shared.bound[2 * lane + 1]));
      shared.bound[2 * lane] = ~Word{0}, shared.bound[2 * lane + 1] = 0;
    }
#pragma unroll 1
    for (int b = threadIdx.x; b < static_cast<int>(problem.count) * kBins; b += kOfBlock) counts[b] = 0;
    __syncthreads();
  }
  if (warp > 0) return;
  Word low = 0, high = 0;
  if (has) {
    low = shared.bound[2 * lane], high = shared.bound[2 * lane + 1];
    widen_interval<T>(kSamples, from, to, low, high);
  }
  set_tables<true>(kSamples, kLongBinBits, static_cast<int>(problem.count), length, has, rank, low, high, found);
}

// The same from 2^kWarpSampleBits elements of up to 32 bits. A warp calls this. `sample`: room for these.
template <class T>
__device__ __forceinline__ void find_tables_in_warp(const Select& problem, const T* x, const int32_t* ranks_of_row,
                                                    uint32_t* sample, Found<T>& found) {
  constexpr int kSamples = 1 << kWarpSampleBits;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  uint32_t rank;
  const bool has = own_rank(problem, length, ranks_of_row, rank);
  const auto scale = sample_in_warp<kWarpSampleBits - 5>(problem.order, x, length, sample);
  typename Found<T>::Word low = 0, high = 0;
  const auto sampled = [&](int i) { return sample[i]; };
  if (has) find_interval<T>(kSamples, rank, rank, length, 4, sampled, low, high, scale);
  set_tables<true>(kSamples, kLongBinBits, static_cast<int>(problem.count), length, has, rank, low, high, found);
}

// Clears what the blocks of a row add to, and finds the first intervals of the row. A block for each row.
template <class T, int kSampleBits>
__global__ void __launch_bounds__(kSampleThreads) select_sample_kernel(const __grid_constant__ Args<T> a) {
  let_dependents_start();
  __shared__ Sample<T> shared;
  __shared__ __align__(16) uint32_t counts[kMostRanks << kLongBinBits];
  const uint32_t row = blockIdx.x, inner = static_cast<uint32_t>(a.problem.rows.inner), outer = row / inner;
  clear_row(a, row);
  for (int b = threadIdx.x; b < static_cast<int>(a.problem.count) << kLongBinBits; b += kSampleThreads) counts[b] = 0;
  const T* const x = a.x + row * a.problem.rows.length;
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, row - outer * inner);
  find_first_tables<kSampleThreads, kSampleBits>(a.problem, x, ranks, shared, counts, a.head(row).found);
}

}  // namespace
}  // namespace jaxgpuops::select
