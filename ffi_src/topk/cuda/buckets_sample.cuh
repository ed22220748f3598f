// How a block of the first kernel of kBuckets finds a threshold, by a sample, or by digits where that fails.
#pragma once

#include "topk/cuda/buckets_block.cuh"
#include "topk/cuda/meet.cuh"
#include "topk/cuda/scatter.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::sample() {
  Key keys[kBucketsSample];
  uint32_t places[kBucketsSample];
  // (For columns, some elements are loaded again: with fewer loads, two long ones took 5 to 10 % longer.)
#pragma unroll
  for (uint32_t j = 0; j < kBucketsSample; ++j) {
    places[j] = scatter((kColumns ? min(j, a.sample - 1) : j) * kBucketsThreads + tid, a.length);
    keys[j] = kColumns || j < a.sample ? element(places[j]) : Key{0};
  }
  C best = 0;
#pragma unroll
  for (uint32_t j = 0; j < kBucketsSample; ++j)
    if (kColumns || j < a.sample) best = larger(best, packing.pack(encode(keys[j], a.order), places[j]));
  if (a.direct) {
    threshold = sorted(samples(), kBucketsThreads, [&](uint32_t) { return best; })[a.reach - 1];
  } else {
    threshold = kth_of_composites<kBucketsThreads>(best, a.reach);
  }
}

template <class Key, bool kColumns>
template <class Load>
__device__ __forceinline__ auto Block<Key, kColumns>::sorted(C* to, uint32_t count, Load load) const -> C* {
  C* merged = to + count;
#pragma unroll 1
  for (uint32_t i = tid; i < count; i += kBucketsThreads) {
    C mine = load(i);
#pragma unroll 1
    for (uint32_t size = 2; size <= 32; size *= 2) {
#pragma unroll 1
      for (uint32_t stride = size / 2; stride; stride /= 2) {
        const C other = shuffle_xor(mine, stride);
        const bool first = !(lane & stride), downwards = !(lane & size);
        mine = first == downwards ? larger(mine, other) : smaller(mine, other);
      }
    }
    to[i] = mine;
  }
  __syncthreads();
  // The rank of c in a run, whose size is a power of two.
  const auto above = [](const C* run, uint32_t size, C c, bool later) {
    uint32_t rank = 0;
    const auto before = [&](C other) { return other > c || (later && other == c); };
#pragma unroll 1
    for (uint32_t half = size / 2; half; half /= 2)
      if (before(run[rank + half - 1])) rank += half;
    return rank + before(run[rank]);
  };
#pragma unroll 1
  for (uint32_t size = 32; size < count; size *= 2) {
#pragma unroll 1
    for (uint32_t i = tid; i < count; i += kBucketsThreads) {
      const C mine = to[i];
      const uint32_t run = i & ~(size - 1);
      merged[(run & ~size) + (i - run) + above(to + (run ^ size), size, mine, i & size)] = mine;
    }
    __syncthreads();
    C* const from = to;
    to = merged;
    merged = from;
  }
  return to;
}

// Finds a threshold that at least k elements reach, and no more than there is room for, by digits of the composites.
// Elements of the row are `step` apart from x on. `target` as for meet().
template <class Key>
__device__ __noinline__ Composite<Key> search(const Buckets& a, Shared<kBucketsThreads, Composite<Key>>& s, int64_t row,
                                              const Key* x, uint32_t step, uint32_t rank, uint32_t& target) {
  using C = Composite<Key>;
  const Exchange<C> exchange(a, row);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const uint32_t tid = threadIdx.x;
  int bits = packing.shift() + 8 * static_cast<int>(sizeof(Key));
  const int top = bits;
  C prefix = 0;
  uint32_t need = a.k, reached;
  meet(exchange.arrivals, a.slices, target);  // now all blocks have read the number of candidates
  do {
    const int above = bits, digit = min(bits, 11);
    bits -= digit;
#pragma unroll 1
    for (uint32_t i = tid; i < kBucketsDigits; i += kBucketsThreads) {
      s.histogram[i] = 0;
      if (rank == 0) exchange.counts[i] = 0;
    }
    meet(exchange.arrivals, a.slices, target);
#pragma unroll 1
    for (uint64_t i = rank * kBucketsThreads + tid; i < a.length; i += a.slices * kBucketsThreads) {
      const C c = packing.pack(encode(x[i * step], a.order), static_cast<uint32_t>(i));
      const uint32_t value = static_cast<uint32_t>(c >> bits) & ((1u << digit) - 1);
      if (above == top || c >> above == prefix) atomicAdd(&s.histogram[value], 1u);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = tid; i < kBucketsDigits; i += kBucketsThreads)
      if (s.histogram[i]) atomicAdd(&exchange.counts[i], s.histogram[i]);
    meet(exchange.arrivals, a.slices, target);
    find_digit<kBucketsThreads, kBucketsDigits>(s, need, [&](uint32_t d) { return __ldcg(&exchange.counts[d]); });
    need -= s.above;
    prefix = prefix << digit | s.boundary;
    reached = a.k - need + s.kept;
    meet(exchange.arrivals, a.slices, target);  // now all blocks have read the counts
  } while (reached > a.room && bits > 0);
  if (rank == 0) {
    if (tid == 0) *exchange.found = 0;
#pragma unroll 1
    for (uint32_t b = tid; b < kBucketsDigits || b <= a.splitters; b += kBucketsThreads) exchange.counts[b] = 0;
  }
  meet(exchange.arrivals, a.slices, target);
  return prefix << bits;
}

template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::repair() {
  uint32_t arrivals = target;
  threshold = search<Key>(a, s, row, all.x + column, beside, rank, arrivals);
  target = arrivals;
#pragma unroll 1
  for (uint64_t i = rank * kBucketsThreads + tid; i - lane < a.length; i += a.slices * kBucketsThreads) {
    const C c = at(static_cast<uint32_t>(min(i, uint64_t{a.length - 1})));
    const bool hit = i < a.length && c >= threshold;
    const uint32_t hits = __ballot_sync(kEveryLane, hit);
    if (!hits) continue;
    const uint32_t place = reserve(__popc(hits)) + __popc(hits & ((1u << lane) - 1));
    if (hit && place < a.room) exchange.list[place] = c;
  }
  meet(exchange.arrivals, a.slices, target);
}

}  // namespace

}  // namespace jaxgpuops::topk
