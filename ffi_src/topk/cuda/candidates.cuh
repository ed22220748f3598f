// How a block raises the threshold of a buffer of candidates in shared memory, and how it sorts the best candidates.
//
// These functions run a few times for each row, mostly with a cold instruction cache, where fetching instructions costs
// as much as executing them. So loops are unrolled only if that lets several candidates of a thread hide each other's
// latency.
//
// A threshold is found from one value of each thread (kth_of_block); if it is a guess, a count confirms it. If the
// count refutes it, and for sorting, a histogram over the range of the candidates decides. There are more bins than k,
// so a bin has one or two candidates, and sorting is a counting sort and a few comparisons. If one bin has too many
// candidates (because of ties beside an outlier, for example), selection divides that bin again, and sorting is
// bitonic, which is slower but has the same result.
#pragma once

#include "common/cuda/warp.cuh"
#include "topk/cuda/composite.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {

constexpr uint32_t kCrowded = 64;  // with more candidates in a bin, a sort is the better choice

template <class C>
__device__ __forceinline__ C larger(C a, C b) {
  return a > b ? a : b;
}
template <class C>
__device__ __forceinline__ C smaller(C a, C b) {
  return a < b ? a : b;
}

template <class C>
__device__ __forceinline__ int bit_length(C v) {
  if constexpr (sizeof(C) == 16) {
    const uint64_t high = static_cast<uint64_t>(v >> 64);
    return high ? 128 - __clzll(high) : 64 - __clzll(static_cast<uint64_t>(v));
  } else {
    return 64 - __clzll(v);
  }
}

template <int kThreads, class C>
struct Shared {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBinsPerThread = 8;
  static constexpr int kBins = kThreads * kBinsPerThread;
  alignas(16) uint32_t histogram[kBins];
  C low[kWarps], high[kWarps];
  uint32_t sums[kWarps];
  uint32_t count;     // candidates that were appended, or that found no place in the buffer
  uint32_t full;      // whether some candidates found no place
  uint32_t boundary;  // the bin that holds the k-th candidate
  uint32_t above;     // candidates in the bins above that one
  uint32_t kept;      // candidates in the bins up to and including it
};

// Returns a lower bound of the k-th largest of the threads' values, which at least k of them reach, and few more. The
// ceil(k / warps)-th largest values of the warps bracket it, and a few counts, each made by a barrier, narrow the
// bracket. Starts and ends with the block in step.
template <int kThreads, class Key>
__device__ __noinline__ Key kth_of_block(Key value, uint32_t k) {
  constexpr uint32_t kWarps = kThreads / 32;
  __shared__ Key warp_kth[kWarps];
  const uint32_t lane = threadIdx.x & 31;
  Key sorted = value;
#pragma unroll
  for (uint32_t size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (uint32_t stride = size / 2; stride; stride /= 2) {
      const Key other = shuffle_xor(sorted, stride);
      const bool first = !(lane & stride), downwards = !(lane & size);  // lane < 32, so the last merge is descending
      sorted = first == downwards ? larger(sorted, other) : smaller(sorted, other);
    }
  }
  if (lane == (k + kWarps - 1) / kWarps - 1) warp_kth[threadIdx.x / 32] = sorted;
  __syncthreads();
  Key low = warp_kth[0], high = low;
#pragma unroll
  for (uint32_t w = 1; w < kWarps; ++w) {
    low = smaller(low, warp_kth[w]);
    high = larger(high, warp_kth[w]);
  }
  if (k == 1) low = high;
  // Six steps suffice if the bracket is narrow. If it starts at the 0 of an empty warp, more steps are needed.
  constexpr int kCoarse = 8 * sizeof(Key) > 14 ? 8 * sizeof(Key) - 14 : 0;
#pragma unroll 1
  for (int step = 0; low < high && (step < 6 || (high - low) >> kCoarse); ++step) {
    const Key middle = static_cast<Key>(high - (high - low) / 2);
    const uint32_t reached = __syncthreads_count(value >= middle);
    if (reached >= k) {
      low = middle;
      if (reached == k) break;
    } else {
      high = static_cast<Key>(middle - 1);
    }
  }
  __syncthreads();
  return low;
}

// Returns a lower bound of the k-th largest of the threads' composites, which have no ties. This is faster for small k.
// Values below `floor` count as `floor`.
template <int kThreads, class C>
__device__ __forceinline__ C kth_of_composites(C value, uint32_t k, C floor = 0) {
  constexpr uint32_t kWarps = kThreads / 32;
  __shared__ C warp_kth[kWarps], warp_least[kWarps];
  const uint32_t warp = threadIdx.x / 32;
  value = larger(value, floor);
  C rest = value, kth = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < k; i += kWarps) {
    kth = largest_of_warp(rest);
    if (rest == kth) rest = 0;
  }
  if (threadIdx.x % 32 == 0) warp_kth[warp] = kth;
  __syncthreads();
  const auto least_of_warp = [](C c) { return static_cast<C>(~largest_of_warp(static_cast<C>(~c))); };
  const C of_warp = warp_kth[threadIdx.x % kWarps];
  C low = larger(least_of_warp(of_warp), floor), high = largest_of_warp(of_warp);
  for (uint32_t step = 1; low < high; ++step) {
    const C middle = high - (high - low) / 2;
    const uint32_t reached = __syncthreads_count(value >= middle);
    if (reached >= k) {
      low = middle;
      if (reached <= k + (k <= 64 ? k / 2 : k / 8)) break;
    } else {
      high = middle - 1;
    }
    if (__builtin_expect(step == 8, false)) {  // equal keys far from all others: continue with values that occur
      const C least = least_of_warp(value >= low ? value : ~C{0}), most = largest_of_warp(value <= high ? value : C{0});
      if (threadIdx.x % 32 == 0) warp_least[warp] = least, warp_kth[warp] = most;
      __syncthreads();
      low = least_of_warp(warp_least[threadIdx.x % kWarps]);
      high = largest_of_warp(warp_kth[threadIdx.x % kWarps]);
    }
  }
  __syncthreads();
  return low;
}

template <int kThreads>
__device__ __forceinline__ uint32_t spread_index() {
  return (threadIdx.x & 31) * (kThreads / 32) + threadIdx.x / 32;
}

// Calls use(c) for each candidate of buffer[0, m). A thread reads a few at once.
template <class C>
constexpr int kBatch = sizeof(C) == 16 ? 4 : 8;

template <int kThreads, class C, class Use>
__device__ __forceinline__ void for_each_candidate(const C* buffer, uint32_t m, Use use) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < m; i += kBatch<C> * kThreads) {
    C c[kBatch<C>];
#pragma unroll
    for (int j = 0; j < kBatch<C>; ++j) c[j] = buffer[min(i + j * kThreads, m - 1)];
#pragma unroll
    for (int j = 0; j < kBatch<C>; ++j)
      if (i + j * kThreads < m) use(c[j]);
  }
}

template <class C>
struct Bins {
  C high;  // bin 0 starts here and bins descend
  int shift;
  uint32_t boundary, above, kept;
  bool crowded;  // one of the bins that matter holds too many to compare with each other

  __device__ uint32_t of(C c) const { return static_cast<uint32_t>((high - c) >> shift); }
  __device__ C floor() const {  // the lowest composite of the boundary bin
    const C span = (static_cast<C>(boundary + 1) << shift) - 1;
    return span >= high ? 0 : high - span;
  }
};

// Finds the digit of the k-th largest element, and sets s.boundary, s.above and s.kept (of that digit alone). There are
// count(d) elements of digit d. Ends with the block in step.
template <int kThreads, uint32_t kDigits, class C, class Count>
__device__ __forceinline__ void find_digit(Shared<kThreads, C>& s, uint32_t k, Count count) {
  constexpr uint32_t kEach = kDigits / kThreads;
  const uint32_t highest = kDigits - 1 - threadIdx.x * kEach;
  uint32_t counts[kEach], sum = 0;
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) sum += counts[j] = count(highest - j);
  uint32_t before = sum_before<kThreads>(sum, s.sums);
#pragma unroll
  for (uint32_t j = 0; j < kEach; ++j) {
    if (before < k && before + counts[j] >= k) s.boundary = highest - j, s.above = before, s.kept = counts[j];
    before += counts[j];
  }
  __syncthreads();
}

// Divides the range [from, to] into bins and counts the candidates of buffer[0, m) in them. Leaves in s.histogram, for
// each bin, the number of candidates above it. k must be at least 1, and the range must contain k candidates. Starts
// and ends with the block in step.
template <int kThreads, class C>
__device__ Bins<C> bin_candidates(Shared<kThreads, C>& s, const C* buffer, uint32_t m, uint32_t k, C from, C to) {
  using S = Shared<kThreads, C>;
  const uint32_t tid = threadIdx.x, lane = tid & 31, warp = tid / 32;
  C low = ~C{0}, high = 0;
  for_each_candidate<kThreads>(buffer, m, [&](C c) {
    if (c < from || c > to) return;
    low = smaller(low, c);
    high = larger(high, c);
  });
  low = fold_lanes(low, smaller<C>);
  high = fold_lanes(high, larger<C>);
  if (lane == 0) s.low[warp] = low, s.high[warp] = high;
  for (int i = tid; i < S::kBins; i += kThreads) s.histogram[i] = 0;
  __syncthreads();
#pragma unroll 4
  for (int w = 0; w < S::kWarps; ++w) {
    low = smaller(low, s.low[w]);
    high = larger(high, s.high[w]);
  }
  constexpr int kLogBins = kThreads == 512 ? 12 : 11;
  static_assert(S::kBins == 1 << kLogBins);
  Bins<C> bins;
  bins.high = high;
  bins.shift = max(0, bit_length(static_cast<C>(high - low)) - kLogBins);
  for_each_candidate<kThreads>(buffer, m, [&](C c) {
    if (c >= from && c <= to) atomicAdd(&s.histogram[bins.of(c)], 1u);
  });
  __syncthreads();

  uint4* const mine = reinterpret_cast<uint4*>(s.histogram) + tid * (S::kBinsPerThread / 4);
  alignas(16) uint32_t counts[S::kBinsPerThread];
  uint32_t sum = 0;
#pragma unroll
  for (int v = 0; v < S::kBinsPerThread / 4; ++v) reinterpret_cast<uint4*>(counts)[v] = mine[v];
#pragma unroll
  for (int j = 0; j < S::kBinsPerThread; ++j) sum += counts[j];
  const uint32_t inclusive = sum_up_to_lane(sum);
  if (lane == 31) s.sums[warp] = inclusive;
  __syncthreads();
  uint32_t above = inclusive - sum;
#pragma unroll 4
  for (uint32_t w = 0; w < S::kWarps; ++w) above += w < warp ? s.sums[w] : 0;
  bool crowded = false;
#pragma unroll
  for (int j = 0; j < S::kBinsPerThread; ++j) {
    const uint32_t count = counts[j];
    if (above < k) {
      crowded |= count > kCrowded;
      if (above + count >= k) s.boundary = tid * S::kBinsPerThread + j, s.above = above, s.kept = above + count;
    }
    counts[j] = above;
    above += count;
  }
#pragma unroll
  for (int v = 0; v < S::kBinsPerThread / 4; ++v) mine[v] = reinterpret_cast<const uint4*>(counts)[v];
  bins.crowded = __syncthreads_or(crowded);
  bins.boundary = s.boundary;
  bins.above = s.above;
  bins.kept = s.kept;
  return bins;
}

// Bitonic sort in which all comparators point the same way, so that a length that is no power of two needs no padding.
template <int kThreads, class C>
__device__ void sort_descending(C* buffer, uint32_t m) {
  uint32_t padded = 2;
  while (padded < m) padded *= 2;
  const auto exchange = [&](uint32_t a, uint32_t b) {
    if (b < m && buffer[a] < buffer[b]) {
      const C t = buffer[a];
      buffer[a] = buffer[b];
      buffer[b] = t;
    }
  };
  for (uint32_t size = 2; size <= padded; size *= 2) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < padded / 2; i += kThreads) {
      const uint32_t a = 2 * i - (i & (size / 2 - 1));
      exchange(a, a ^ (size - 1));
    }
    for (uint32_t stride = size / 4; stride; stride /= 2) {
      __syncthreads();
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < padded / 2; i += kThreads) {
        const uint32_t a = 2 * i - (i & (stride - 1));
        exchange(a, a + stride);
      }
    }
  }
  __syncthreads();
}

// Drops the candidates of buffer[0, s.count) that do not reach the threshold. Starts and ends with the block in step.
template <int kThreads, class C>
__device__ __noinline__ void compact(Shared<kThreads, C>& s, C* buffer, C threshold) {
  __builtin_assume(__isShared(&s) && __isShared(buffer));
  const uint32_t m = s.count, tid = threadIdx.x;
  __syncthreads();
  if (tid == 0) s.count = 0;
  constexpr int kPer = sizeof(C) == 16 ? 4 : 8;
#pragma unroll 1
  for (uint32_t start = 0; start < m; start += kThreads * kPer) {
    C v[kPer];
    uint32_t keeps = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const uint32_t i = start + j * kThreads + tid;
      v[j] = i < m ? buffer[i] : C{0};
      keeps |= static_cast<uint32_t>(i < m && v[j] >= threshold) << j;
    }
    __syncthreads();  // the chunk is in registers, so its places may be overwritten
    const uint32_t mine = __popc(keeps), inclusive = sum_up_to_lane(mine);
    uint32_t at = 0;
    if ((tid & 31) == 31 && inclusive) at = atomicAdd(&s.count, inclusive);
    at = __shfl_sync(kEveryLane, at, 31) + inclusive - mine;
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (keeps >> j & 1) buffer[at++] = v[j];
  }
  __syncthreads();
}

// Shortens buffer[0, s.count) to at most `keep` candidates, among them the k largest, and returns a threshold as
// reselect() does. It counts candidates in bins over their range. As long as the bin of the k-th candidate has too
// many, it divides that bin again. Starts and ends with the block in step.
template <int kThreads, class C>
__device__ __noinline__ C divide(Shared<kThreads, C>& s, C* buffer, uint32_t k, uint32_t keep, Bins<C> bins) {
  __builtin_assume(__isShared(&s) && __isShared(buffer));
  C to = ~C{0};
  uint32_t above = 0;
  while (above + bins.kept > keep) {
    to = smaller(to, bins.high - (static_cast<C>(bins.boundary) << bins.shift));
    above += bins.above;
    bins = bin_candidates<kThreads>(s, buffer, s.count, k - above, bins.floor(), to);
  }
  const C threshold = bins.floor();
  compact<kThreads>(s, buffer, threshold);
  return threshold;
}

// Shortens buffer[0, s.count) to at most `keep` candidates, among them the k largest. Returns the new threshold: all
// dropped candidates are below it, and k of the kept ones reach it. A sample, one candidate of each thread, gives a
// threshold, and a count checks it. If the check fails, bins over all candidates decide. Starts and ends with the block
// in step.
template <int kThreads, class Key>
__device__ __noinline__ Composite<Key> reselect(Shared<kThreads, Composite<Key>>& s, Composite<Key>* buffer,
                                                Packing<Key> packing, uint32_t k, uint32_t keep) {
  __builtin_assume(__isShared(&s) && __isShared(buffer));
  using C = Composite<Key>;
  const uint32_t m = s.count, tid = threadIdx.x;
  const float share = static_cast<float>(k) / m;
  const float rank = kThreads * share + 4 * sqrtf(kThreads * share * (1 - share)) + 1;
  if (rank < kThreads) {
    const Key sample = packing.key(buffer[static_cast<uint32_t>(static_cast<uint64_t>(m) * tid / kThreads)]);
    const C threshold = packing.lowest(kth_of_block<kThreads>(sample, static_cast<uint32_t>(rank)));
    uint32_t reached = 0;
#pragma unroll 4
    for (uint32_t i = tid; i < m; i += kThreads) reached += buffer[i] >= threshold;
    reached = sum_up_to_lane(reached);
    if (tid % 32 == 31) s.sums[tid / 32] = reached;
    __syncthreads();
    reached = 0;
#pragma unroll 4
    for (int w = 0; w < kThreads / 32; ++w) reached += s.sums[w];
    if (reached >= k && reached <= keep) {
      compact<kThreads>(s, buffer, threshold);
      return threshold;
    }
  }
  return divide<kThreads>(s, buffer, k, keep, bin_candidates<kThreads>(s, buffer, m, k, C{0}, ~C{0}));
}

// Sorts the k largest candidates of buffer[0, s.count), in descending order, to the front of the buffer. `scratch` has
// room for `room` composites; with too little room, the sort is bitonic. Starts and ends with the block in step.
template <int kThreads, class C>
__device__ __noinline__ void sort_candidates(Shared<kThreads, C>& s, C* buffer, uint32_t k, C* scratch, uint32_t room) {
  __builtin_assume(__isShared(&s) && __isShared(buffer) && __isShared(scratch));
  const uint32_t tid = threadIdx.x;
  uint32_t m;
  Bins<C> bins;
  for (bool again = false;; again = true) {
    m = s.count;
    if (m <= kThreads / 2) {  // if candidates are few, several threads compare each with all others
      const uint32_t team = kThreads / m, chunk = (m + team - 1) / team, begin = tid / m * chunk;
      if (tid < m) s.histogram[tid] = 0;
      const C mine = buffer[tid % m];
      __syncthreads();
      uint32_t above = 0;
#pragma unroll 4
      for (uint32_t j = begin; j < min(m, begin + chunk); ++j) above += buffer[j] > mine;
      if (above) atomicAdd(&s.histogram[tid % m], above);
      __syncthreads();
      if (tid < m && s.histogram[tid] < k) buffer[s.histogram[tid]] = mine;
      __syncthreads();
      return;
    }
    bins = bin_candidates<kThreads>(s, buffer, m, k, C{0}, ~C{0});
    if (!bins.crowded && bins.kept <= room) break;
    // If candidates are many, most of those that are not among the k largest are dropped first.
    const uint32_t keep = max(k + k / 8, kThreads / 2);
    if (again || m <= keep) {
      sort_descending<kThreads>(buffer, m);
      return;
    }
    divide<kThreads>(s, buffer, k, keep, bins);
  }
#pragma unroll 1
  for (uint32_t i = tid; i < m; i += kBatch<C> * kThreads) {
    C mine[kBatch<C>];
    uint32_t at[kBatch<C>];
#pragma unroll
    for (int j = 0; j < kBatch<C>; ++j) mine[j] = buffer[min(i + j * kThreads, m - 1)];
#pragma unroll
    for (int j = 0; j < kBatch<C>; ++j) {
      const uint32_t bin = bins.of(mine[j]);
      at[j] = i + j * kThreads < m && bin <= bins.boundary ? atomicAdd(&s.histogram[bin], 1u) : ~0u;
    }
#pragma unroll
    for (int j = 0; j < kBatch<C>; ++j)
      if (at[j] != ~0u) scratch[at[j]] = mine[j];
  }
  __syncthreads();  // now s.histogram[bin] is the end of the bin, where the next one starts
  // A thread ranks several candidates at the same time. The candidates of a warp are neighbours, whose bins have
  // similar sizes.
  constexpr int kRanked = 4;
#pragma unroll 1
  for (uint32_t i = tid / 32 * (32 * kRanked) + tid % 32; i < bins.kept; i += kRanked * kThreads) {
    C mine[kRanked];
    uint32_t at[kRanked], end[kRanked], rank[kRanked], steps = 0;
#pragma unroll
    for (int j = 0; j < kRanked; ++j) mine[j] = scratch[min(i + j * 32, bins.kept - 1)];
#pragma unroll
    for (int j = 0; j < kRanked; ++j) {
      const uint32_t bin = bins.of(mine[j]);
      rank[j] = at[j] = bin ? s.histogram[bin - 1] : 0;
      end[j] = s.histogram[bin];
      steps = max(steps, end[j] - at[j]);
    }
#pragma unroll 1
    for (; steps; --steps) {
#pragma unroll
      for (int j = 0; j < kRanked; ++j) {
        if (at[j] < end[j]) rank[j] += scratch[at[j]] > mine[j];
        ++at[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kRanked; ++j)
      if (i + j * 32 < bins.kept && rank[j] < k) buffer[rank[j]] = mine[j];
  }
  __syncthreads();
}

// Appends the hits of each lane: candidate at(bit) for each bit that is set. The warp reserves room once for all its
// lanes. Returns the hits that found no room.
template <int kThreads, class C, class At>
__device__ __forceinline__ uint32_t append_hits(Shared<kThreads, C>& s, C* buffer, uint32_t room, uint32_t hits,
                                                At at) {
  if (!__any_sync(kEveryLane, hits)) return 0;
  const uint32_t mine = __popc(hits), inclusive = sum_up_to_lane(mine);
  uint32_t base = 0;
  if ((threadIdx.x & 31) == 31) base = atomicAdd(&s.count, inclusive);
  uint32_t place = __shfl_sync(kEveryLane, base, 31) + inclusive - mine;
  while (hits && place < room) {
    buffer[place++] = at(__ffs(hits) - 1);
    hits &= hits - 1;
  }
  return hits;
}

// Makes room and returns the new threshold. It is called after a barrier, if some hits have found no room.
template <int kThreads, class Key>
__device__ Composite<Key> make_room(Shared<kThreads, Composite<Key>>& s, Composite<Key>* buffer, Packing<Key> packing,
                                    uint32_t k, uint32_t keep, uint32_t room) {
  if (threadIdx.x == 0) s.count = min(s.count, room), s.full = 0;
  __syncthreads();
  return reselect<kThreads, Key>(s, buffer, packing, k, keep);
}

// Drops most candidates by one more threshold before they are ranked, which saves most comparisons. For k up to half
// the number of threads.
template <int kThreads, class Key>
__device__ void prune(Shared<kThreads, Composite<Key>>& s, Composite<Key>* buffer, Packing<Key> packing, uint32_t k) {
  const uint32_t m = s.count, i = spread_index<kThreads>();
  if (m <= kThreads / 2 || m > kThreads) return;
  const Key key = i < m ? packing.key(buffer[i]) : Key{0};
  compact<kThreads>(s, buffer, packing.lowest(kth_of_block<kThreads>(key, k)));
}

// Writes buffer[0, k), which are in the order of keys, to the output, in the order asked for.
template <int kThreads, class Key>
__device__ void write_selected(Shared<kThreads, Composite<Key>>& s, const Call& a, Packing<Key> packing,
                               Composite<Key>* buffer, Composite<Key>* scratch, uint32_t room, int64_t row) {
  if (!a.sorted) {
    for (uint32_t i = threadIdx.x; i < a.k; i += kThreads) buffer[i] = packing.by_index(buffer[i]);
    if (threadIdx.x == 0) s.count = a.k;
    __syncthreads();
    sort_candidates<kThreads>(s, buffer, a.k, scratch, room);
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < a.k; i += kThreads) {
    const Composite<Key> c = a.sorted ? buffer[i] : packing.from_by_index(buffer[i]);
    const int64_t to = a.place(row, i);
    static_cast<Key*>(a.values)[to] = decode(packing.key(c), a.order);
    a.indices[to] = static_cast<int32_t>(packing.index(c));
  }
}

// Writes the k largest of buffer[0, s.count) to the output, in the order asked for.
template <int kThreads, class Key>
__device__ void write_result(Shared<kThreads, Composite<Key>>& s, const Call& a, Packing<Key> packing,
                             Composite<Key>* buffer, Composite<Key>* scratch, uint32_t room, int64_t row) {
  if (a.k <= kThreads / 2) prune<kThreads, Key>(s, buffer, packing, a.k);
  sort_candidates<kThreads>(s, buffer, a.k, scratch, room);
  write_selected<kThreads, Key>(s, a, packing, buffer, scratch, room, row);
}

}  // namespace jaxgpuops::topk
