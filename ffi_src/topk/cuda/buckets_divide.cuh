// How the blocks of the first kernel of kBuckets move their candidates to buckets.
#pragma once

#include "topk/cuda/buckets_block.cuh"
#include "topk/cuda/meet.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key, bool kColumns>
__device__ __forceinline__ bool Block<Key, kColumns>::divide_staged() {
  const uint32_t staged = min(s.count, s.full);
  uint32_t *const places = reinterpret_cast<uint32_t*>(samples() + 2 * kBucketsThreads), *const starts =
                                                                                             places + kBucketsThreads;
  const auto bucket_of = [&](C c) {
    uint32_t above = 0;
#pragma unroll 1
    for (uint32_t half = kBucketsThreads / 2; half; half /= 2)
      if (samples()[above + half - 1] > c) above += half;
    return above;  // at most kBucketsThreads - 1, since the last sample is below the threshold
  };
  places[tid] = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = tid; i < staged; i += kBucketsThreads) atomicAdd(&places[bucket_of(buffer[i])], 1u);
  __syncthreads();
  // The atomic returns the bucket's count without this block. That is where this block's candidates begin in it.
  if (places[tid]) places[tid] = atomicAdd(&exchange.counts[tid], places[tid]);
  meet(exchange.arrivals, a.slices, target);
  const uint32_t size = __ldcg(&exchange.counts[tid]), before = sum_before<kBucketsThreads>(size, s.sums);
  starts[tid] = before;
  places[tid] += before;
  if (tid == kBucketsThreads - 1) s.kept = before + size;
  __syncthreads();
  const uint32_t total = s.kept;
  if (__ldcg(exchange.found) || total < a.k || total > a.room) {
    meet(exchange.arrivals, a.slices, target);  // now all blocks have read the counts
    if (rank == 0) exchange.counts[tid] = 0;
    return false;
  }
  let_dependents_start();
  if (rank == 0) {
    exchange.starts[tid] = before;
    for (uint32_t b = kBucketsThreads + tid; b <= a.splitters + 1; b += kBucketsThreads) exchange.starts[b] = total;
  }
#pragma unroll 1
  for (uint32_t i = tid; i < staged; i += kBucketsThreads) {
    const C c = buffer[i];
    const uint32_t bucket = bucket_of(c), place = atomicAdd(&places[bucket], 1u);
    if (starts[bucket] < a.k) exchange.sorted[place] = c;
  }
  return true;
}

template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::divide() {
  const uint32_t found = __ldcg(exchange.found), buckets = a.splitters + 1;
  uint32_t* const counts = reinterpret_cast<uint32_t*>(buffer + 2 * kMostSplitters);
  uint32_t* const starts = counts + kMostSplitters + 4;
#pragma unroll 1
  for (uint32_t b = tid; b < buckets; b += kBucketsThreads) counts[b] = 0;
  const C* const splitters = sorted(buffer, a.splitters, [&](uint32_t i) {
    return load_published(exchange.list + static_cast<uint64_t>(i) * found / a.splitters);
  });
  // Calls use(c, bucket) for each candidate of this block's share. A bucket's number is that of the splitters above
  // it.
  const auto each = [&](auto use) {
    constexpr int kAtOnce = 4;
    const uint32_t step = a.slices * kBucketsThreads;
#pragma unroll 1
    for (uint32_t i = rank * kBucketsThreads + tid; i - lane < found; i += kAtOnce * step) {
      C c[kAtOnce];
      uint32_t above[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) c[j] = load_published(exchange.list + min(i + j * step, found - 1));
#pragma unroll 1
      for (uint32_t half = a.splitters / 2; half; half /= 2)
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (splitters[above[j] + half - 1] > c[j]) above[j] += half;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) use(i + j * step < found, c[j], above[j] + (splitters[above[j]] > c[j]));
    }
  };
  // Adds to the count of the bucket, and returns what it was. Where equal elements stand on the list in their order,
  // all lanes have the same bucket.
  const auto add = [&](bool there, uint32_t bucket) {
    int same;
    __match_all_sync(kEveryLane, there ? bucket : ~0u, &same);
    if (!same) return there ? atomicAdd(&counts[bucket], 1u) : 0;
    uint32_t at = 0;
    if (there && lane == 0) at = atomicAdd(&counts[bucket], 32u);
    return __shfl_sync(kEveryLane, at, 0) + lane;
  };
  each([&](bool there, C, uint32_t bucket) { add(there, bucket); });
  __syncthreads();
  // The atomic returns the bucket's count without this block. That is where this block's candidates begin in it.
  for (uint32_t b = tid; b < buckets; b += kBucketsThreads)
    if (counts[b]) counts[b] = atomicAdd(&exchange.counts[b], counts[b]);
  meet(exchange.arrivals, a.slices, target);
  constexpr uint32_t kEach = kMostSplitters / kBucketsThreads + 1;
  uint32_t sizes[kEach], sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    const uint32_t b = tid * kEach + j;
    sum += sizes[j] = b < buckets ? __ldcg(&exchange.counts[b]) : 0;
  }
  uint32_t before = sum_before<kBucketsThreads>(sum, s.sums);
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    const uint32_t b = tid * kEach + j;
    if (b <= buckets) {
      if (rank == 0) exchange.starts[b] = before;
      starts[b] = before;
    }
    before += sizes[j];
  }
  __syncthreads();
  let_dependents_start();
  each([&](bool there, C c, uint32_t bucket) {
    const uint32_t place = starts[bucket] + add(there, bucket);
    if (there && starts[bucket] < a.k) exchange.sorted[place] = c;
  });
}

}  // namespace

}  // namespace jaxgpuops::topk
