// Top-k of long rows for k of hundreds to kMaxSieveK: each row is read once, by one block or by a few that meet twice.
//
// Streams of warps divide the row evenly, so that what they load first is a sample of all of it. Each thread's best key
// of the sample is a delegate; a threshold that some of the delegates reach is hardly ever reached by fewer than k
// elements of the row. Survivors stay in shared memory. When all is read, the blocks of a row agree on the highest
// threshold and deal their survivors out to bins over the range above it: a count in each bin gives each survivor a
// place in a list, and comparisons within its bin its rank. The blocks share the ranking, too.
//
// Where a bin is crowded, a sorted sample of the survivors divides their range instead. Where the bet fails (fewer than
// k survivors, more than a block holds, a crowded bin still), digits of the composite from the top, a histogram and a
// read of the row (or of the survivors) each, find a threshold that a few thousand elements reach; these are sorted.
//
// Bytes moved: the input once, k (value + index) out; with several blocks a row about three times the survivors through
// the workspace. After: Dr. Top-k's delegates (arXiv 2109.08219), sample sort, AIR's histograms (SC'23).
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/intrinsics.cuh"
#include "common/launch.cuh"
#include "common/residents.cuh"
#include "topk/candidates.cuh"
#include "topk/delegates.cuh"
#include "topk/kernels.h"
#include "topk/sieve_shape.h"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

struct Sieve {
  const void* x;
  void* values;
  int32_t* indices;
  unsigned char* boards;
  int64_t board_bytes;  // of a row
  int64_t first_row;
  KeyOrder order;
  uint32_t length, k, slices, steps;
  uint32_t reach;  // delegates that reach the threshold
  uint32_t ties;   // elements of a sample that reach it where most of these are equal
};

constexpr int kThreads = kSieveThreads;
constexpr uint32_t kWarps = kThreads / 32, kPerThread = kSieveBins / kThreads;

using C = uint64_t;

struct Control {
  Shared<kThreads, C> shared;
  uint32_t counts[32];  // survivors, each in one of 32 lists that are interleaved
  uint32_t tops[kWarps];
  uint32_t digit, found;
};
static_assert(kSieveKeep * sizeof(C) <= kSieveRing && kSieveSample == kThreads);
static_assert(sizeof(Control) <= kSieveControl && Shared<kThreads, C>::kBins == kSieveBins);

// What the blocks that share a row leave for each other.
struct Board {
  uint32_t* arrivals;
  uint32_t* failed;
  uint32_t* crowded;
  uint32_t* found;
  C* told;  // each block's threshold, then each block's best
  uint32_t* bins;
  C* list;

  __device__ Board(const Sieve& a, int64_t row) {
    unsigned char* bytes = a.boards + row * a.board_bytes;
    arrivals = reinterpret_cast<uint32_t*>(bytes);
    failed = arrivals + 1;
    crowded = arrivals + 2;
    found = arrivals + 3;
    bins = reinterpret_cast<uint32_t*>(bytes + 128);
    list = reinterpret_cast<C*>(bins + kSieveBins);
    told = list + kSieveKeep;
  }
};

// All blocks of a row, which run at the same time; `target` counts their arrivals since the start.
__device__ __forceinline__ void meet(uint32_t* arrivals, uint32_t slices, uint32_t& target) {
  __syncthreads();
  if (slices == 1) return;
  target += slices;
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    while (*static_cast<volatile uint32_t*>(arrivals) < target) {
    }
    __threadfence();
  }
  __syncthreads();
}

// The part of a row that a block reads. Streams of 32 neighbouring vectors a step are spread evenly over the row.
template <class Key>
struct Share {
  static constexpr uint32_t kVector = 16 / sizeof(Key);
  const Key* x;
  uint32_t length, head, vectors, first, spread, steps;

  __device__ Share(const Sieve& a, int64_t row, uint32_t rank) {
    x = static_cast<const Key*>(a.x) + row * a.length;
    length = a.length;
    steps = a.steps;
    const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
    head = misaligned ? kVector - misaligned : 0;
    vectors = (length - head) / kVector;
    first = (threadIdx.x / 32 * a.slices + rank) * (a.steps * 32) + threadIdx.x % 32;
    spread = kWarps * a.slices * (a.steps * 32);
  }
  __device__ __forceinline__ uint32_t vector(uint32_t step, int load) const {
    return first + load * spread + step * 32;
  }
  __device__ __forceinline__ const uint4* address(uint32_t vector) const {
    return reinterpret_cast<const uint4*>(x + head) + vector;
  }
  __device__ __forceinline__ uint32_t index(uint32_t vector) const { return head + vector * kVector; }
  __device__ uint32_t loose() const { return length - vectors * kVector; }
  __device__ uint32_t loose_index(uint32_t i) const { return i < head ? i : vectors * kVector + i; }
};

template <class Key>
__device__ __forceinline__ void write(const Sieve& a, Packing<Key> packing, int64_t row, uint32_t rank, C c) {
  static_cast<Key*>(a.values)[row * a.k + rank] = decode(packing.key(c), a.order);
  a.indices[row * a.k + rank] = static_cast<int32_t>(packing.index(c));
}

// The exact way, for all blocks of a row together: of the survivors from `floor` on, or, where these are not all that
// matter, of the row. `few` has room for kSieveKeep composites in shared memory.
template <class Key>
__device__ __noinline__ void search(const Sieve& a, int64_t row, uint32_t rank, Control& control, const C* survivors,
                                    uint32_t held, C floor, bool of_row, C* few, bool alone, uint32_t target) {
  auto& s = control.shared;
  constexpr int kDigit = 11;
  constexpr uint32_t kDigits = 1 << kDigit;
  const uint32_t tid = threadIdx.x;
  const Share<Key> share(a, row, rank);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Board board(a, row);
  C* const list = alone ? few : board.list;
  uint32_t* const found = alone ? &control.found : board.found;
  const auto each = [&](auto use) {
    if (!of_row) {
      for (uint32_t i = tid; i < held; i += kThreads)
        if (i / 32 < control.counts[i % 32] && survivors[i] >= floor) use(survivors[i]);
      return;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < share.steps; ++step) {
      uint4 tile[kSieveLoads];
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u)
        if (share.vector(step, u) < share.vectors) tile[u] = __ldcs(share.address(share.vector(step, u)));
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u) {
        if (share.vector(step, u) >= share.vectors) continue;
        const uint32_t index = share.index(share.vector(step, u));
#pragma unroll
        for (int e = 0; e < static_cast<int>(Share<Key>::kVector); ++e)
          use(packing.pack(encode(reinterpret_cast<const Key*>(&tile[u])[e], a.order), index + e));
      }
    }
    if (rank == 0 && tid < share.loose()) {
      const uint32_t index = share.loose_index(tid);
      use(packing.pack(encode(share.x[index], a.order), index));
    }
  };
  const int top = packing.shift() + 8 * static_cast<int>(sizeof(Key));
  int bits = top;
  C prefix = 0;
  uint32_t need = a.k;
  meet(board.arrivals, a.slices, target);  // all have read the bins
  while (true) {
    const int digit = min(kDigit, bits);
    for (uint32_t i = tid; i < kDigits; i += kThreads) s.histogram[i] = 0;
    if (!alone)
      for (uint32_t i = rank * kThreads + tid; i < kDigits; i += a.slices * kThreads) board.bins[i] = 0;
    meet(board.arrivals, a.slices, target);
    const int above = bits;
    bits -= digit;
    each([&](C c) {
      if (above == top || c >> above == prefix) atomicAdd(&s.histogram[(c >> bits) & ((1u << digit) - 1)], 1u);
    });
    __syncthreads();
    if (!alone) {
      for (uint32_t i = tid; i < kDigits; i += kThreads)
        if (s.histogram[i]) atomicAdd(&board.bins[i], s.histogram[i]);
      meet(board.arrivals, a.slices, target);
      for (uint32_t i = tid; i < kDigits; i += kThreads) s.histogram[i] = __ldcg(&board.bins[i]);
      __syncthreads();
    }
    uint32_t counts[kDigits / kThreads], sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < kDigits / kThreads; ++j)
      sum += counts[j] = s.histogram[kDigits - 1 - (tid * (kDigits / kThreads) + j)];
    uint32_t before = scan_block<kThreads>(sum, s.sums);
#pragma unroll
    for (uint32_t j = 0; j < kDigits / kThreads; ++j) {
      if (before < need && before + counts[j] >= need) {
        control.digit = kDigits - 1 - (tid * (kDigits / kThreads) + j);
        s.above = before;
        s.kept = counts[j];
      }
      before += counts[j];
    }
    __syncthreads();
    need -= s.above;
    prefix = prefix << digit | control.digit;
    const uint32_t reached = a.k - need + s.kept;
    meet(board.arrivals, a.slices, target);  // all have read the bins
    if (reached <= kSieveKeep || bits == 0) break;
  }
  const C threshold = prefix << bits;
  each([&](C c) {
    if (c >= threshold) list[atomicAdd(found, 1u)] = c;
  });
  meet(board.arrivals, a.slices, target);
  if (rank) return;
  const uint32_t m = *static_cast<volatile uint32_t*>(found);
  if (!alone)
    for (uint32_t i = tid; i < m; i += kThreads) few[i] = __ldcg(&list[i]);
  __syncthreads();
  sort_descending<kThreads>(few, m);
  for (uint32_t i = tid; i < a.k; i += kThreads) write(a, packing, row, i, few[i]);
}

// The bin of a survivor: there are a few between two splitters, which are a sorted sample of the survivors.
__device__ __noinline__ uint32_t bin_between(const C* splitters, C c) {
  constexpr uint32_t kEach = kSieveBins / kSieveSample;
  uint32_t above = 0;
#pragma unroll 1
  for (uint32_t step = kSieveSample / 2; step; step /= 2)
    if (splitters[above + step - 1] > c) above += step;
  if (above == 0) return 0;
  const C high = splitters[above - 1];
  const int shift = max(0, bit_length(high - splitters[above]) - bit_length<C>(kEach - 1));
  return above * kEach + static_cast<uint32_t>(smaller((high - c) >> shift, C{kEach - 1}));
}

constexpr uint32_t kListRoom = kSieveRoom / 32;

__device__ __forceinline__ uint32_t longest_list(const uint32_t* counts) {
  uint32_t longest = counts[threadIdx.x % 32];
#pragma unroll
  for (int d = 16; d; d /= 2) longest = larger(longest, shuffle_xor(longest, d));
  return longest;
}

// Makes all lists as long as the longest, with composites that nobody selects.
__device__ __forceinline__ void fill_lists(C* survivors, const uint32_t* counts, uint32_t longest) {
  for (uint32_t i = threadIdx.x; i < longest * 32; i += kThreads)
    if (i / 32 >= counts[i % 32]) survivors[i] = 0;
}

// An index up to which a.ties elements of the sample, or not many more, have the key or a larger one.
template <class Key>
__device__ __noinline__ uint32_t last_tie(const Sieve& a, const Share<Key>& share, Shared<kThreads, C>& s,
                                          const uint4* ring, Key key) {
  constexpr uint32_t kVector = Share<Key>::kVector;
  uint32_t above = 0, ties[kSieveLoads] = {};
#pragma unroll
  for (int u = 0; u < kSieveLoads; ++u) {
    if (share.vector(0, u) >= share.vectors) continue;
    const uint4 words = ring[u * kThreads + threadIdx.x];
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      const Key k = encode(reinterpret_cast<const Key*>(&words)[e], a.order);
      above += k > key;
      ties[u] |= static_cast<uint32_t>(k == key) << e;
    }
  }
  uint32_t low = 0, high = a.length - 1;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    uint32_t mine = above;
#pragma unroll
    for (int u = 0; u < kSieveLoads; ++u) {
      const uint32_t first = share.index(share.vector(0, u));
      if (middle >= first) mine += __popc(ties[u] & ((1u << min(middle - first + 1, kVector)) - 1));
    }
    mine = inclusive_scan_warp(mine);
    if (threadIdx.x % 32 == 31) s.sums[threadIdx.x / 32] = mine;
    __syncthreads();
    uint32_t reached = 0;
#pragma unroll 4
    for (uint32_t w = 0; w < kWarps; ++w) reached += s.sums[w];
    __syncthreads();
    if (reached >= a.ties) {
      high = middle;
      if (reached <= a.ties + a.ties / 4) break;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

template <class Key, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) sieve_kernel(const __grid_constant__ Sieve a) {
  constexpr uint32_t kVector = Share<Key>::kVector;
  constexpr uint32_t kElements = kSieveLoads * kVector;  // of a thread in a step
  static_assert(kElements <= 32);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& control = *reinterpret_cast<Control*>(shared_bytes);
  auto& s = control.shared;
  uint4* const ring = reinterpret_cast<uint4*>(shared_bytes + kSieveControl);
  C* const survivors = reinterpret_cast<C*>(shared_bytes + kSieveControl + kSieveRing);
  C* const window = reinterpret_cast<C*>(ring);  // when the row has been read
  C* const splitters = window + kMaxSieveK + 2 * kSieveCrowd;
  auto* const places = reinterpret_cast<uint16_t*>(splitters + kSieveSample);

  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const uint32_t slices = kAlone ? 1 : a.slices;
  const int64_t row = a.first_row + (kAlone ? blockIdx.x : blockIdx.x / slices);
  const uint32_t rank = kAlone ? 0 : blockIdx.x % slices;
  const Share<Key> share(a, row, rank);
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Board board(a, row);

  // Every thread reads what it copied itself: no barrier stands between the copies and their use.
  const auto copy = [&](uint32_t step, uint32_t stage) {
    if (step < share.steps) {
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u) {
        const uint32_t vector = share.vector(step, u);
        if (vector < share.vectors)
          __pipeline_memcpy_async(ring + (stage * kSieveLoads + u) * kThreads + tid, share.address(vector), 16);
      }
    }
    __pipeline_commit();
  };
  copy(0, 0);
  if (tid == 0) control.found = 0;
  if (tid < 32) control.counts[tid] = 0;
  const auto clear = [&] {  // the bins, or this block's share of them
    if (kAlone) {
#pragma unroll
      for (uint32_t i = 0; i < kPerThread / 4; ++i)
        reinterpret_cast<uint4*>(s.histogram)[i * kThreads + tid] = make_uint4(0, 0, 0, 0);
    } else {
      for (uint32_t i = rank * kThreads + tid; i < kSieveBins; i += slices * kThreads) board.bins[i] = 0;
    }
  };
  clear();
  if (!kAlone && rank == 0 && tid == 0) *board.arrivals = *board.failed = *board.crowded = *board.found = 0;

  __pipeline_wait_prior(0);  // it would wait for all that is asked for with it
#pragma unroll 1
  for (uint32_t stage = 1; stage < kSieveStages; ++stage) copy(stage, stage);
  const Lanes<Key> lanes(a.order);
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kSieveLoads; ++u) {
    if (share.vector(0, u) >= share.vectors) continue;
    const uint4 words = ring[u * kThreads + tid];
#pragma unroll
    for (int w = 0; w < 4; ++w) most = lanes.max(most, lanes.encode(reinterpret_cast<const uint32_t*>(&words)[w]));
  }
  const Key best = static_cast<Key>(lanes.largest(most));
  Key top = best;
#pragma unroll
  for (int d = 16; d; d /= 2) top = larger(top, shuffle_xor(top, d));
  if (lane == 0) control.tops[warp] = top;
  const Key least = kth_of_block<kThreads>(best, a.reach);
  top = static_cast<Key>(control.tops[lane % kWarps]);
#pragma unroll
  for (int d = kWarps / 2; d; d /= 2) top = larger(top, shuffle_xor(top, d));
  // Ties with the threshold survive, too, unless there are many. The last composite of all, 0, never does.
  C threshold = larger(packing.lowest(least), C{1});
  if (__syncthreads_count(best == least) > kThreads / 8)
    threshold = larger(packing.pack(least, last_tie<Key>(a, share, s, ring, least)), C{1});
  C high = packing.pack(top, 0);
  // There may be better ones, the more the smaller the sample.
  high += smaller((high - threshold) / (kAlone && share.steps <= 16 ? 8 : 2), ~high);
  uint32_t token = 0, target = 0;
  if (!kAlone) {
    if (tid == 0) {
      board.told[rank] = threshold;
      board.told[slices + rank] = high;
    }
    token = cg::this_grid().barrier_arrive();
  }

  if (rank == 0 && tid < share.loose()) {
    const uint32_t index = share.loose_index(tid);
    const C c = packing.pack(encode(share.x[index], a.order), index);
    if (c >= threshold) survivors[atomicAdd(&control.counts[lane], 1u) * 32 + lane] = c;
  }
  Filter<Key> filter(packing.key(threshold), a.order);
  uint32_t below = filter.floor - 1;
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t step = 0; step < share.steps; ++step) {
    __pipeline_wait_prior(kSieveStages - 1);
    uint32_t hits = 0;  // the first element on top
#pragma unroll
    for (int u = 0; u < kSieveLoads; ++u) {
      const uint4 words = ring[(stage * kSieveLoads + u) * kThreads + tid];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(&words)[w] ^ filter.flips;
        if constexpr (sizeof(Key) == 2) push_reaches(hits, word << 16, below);
        push_reaches(hits, word, below);
      }
    }
    if (filter.floor == 0) hits = ~0u >> (32 - kElements);  // nothing is below: there is no carry
    if (__any_sync(kFullWarp, hits)) {
      const auto candidate = [&](uint32_t j) {
        const auto* from = reinterpret_cast<const Key*>(ring + (stage * kSieveLoads + j / kVector) * kThreads + tid);
        const uint32_t index = share.index(share.vector(step, static_cast<int>(j / kVector))) + j % kVector;
        return packing.pack(encode(from[j % kVector], a.order), index);
      };
      const auto first_of = [](uint32_t hits) { return static_cast<uint32_t>(__clz(hits)) - (32 - kElements); };
      const auto without = [](uint32_t hits, uint32_t j) { return hits & ~(1u << (kElements - 1 - j)); };
      if (share.vector(step, kSieveLoads - 1) >= share.vectors) {
#pragma unroll
        for (uint32_t u = 0; u < kSieveLoads; ++u)
          if (share.vector(step, u) >= share.vectors) hits = u ? hits & ~0u << (kElements - u * kVector) : 0;
      }
      if (packing.lowest(packing.key(threshold)) != threshold) {
        for (uint32_t rest = hits; rest;) {
          const uint32_t j = first_of(rest);
          rest = without(rest, j);
          if (candidate(j) < threshold) hits = without(hits, j);
        }
      }
      // Lanes add to different lists: nobody waits. The lists of a lane change, as elements of a lane may be alike.
      const uint32_t list = (lane + 2 * warp + 3 * step) % 32, mine = __popc(hits);
      uint32_t at = mine ? atomicAdd(&control.counts[list], mine) : 0;
      if (at + mine > kListRoom) hits = 0;  // too many: the count tells
      at = at * 32 + list;
      while (hits) {
        const uint32_t one = first_of(hits);
        hits = without(hits, one);
        const uint32_t two = hits ? first_of(hits) : one;
        const C first = candidate(one), second = candidate(two);
        survivors[at] = first;
        if (two != one) {
          survivors[at + 32] = second;
          hits = without(hits, two);
        }
        at += 64;
      }
    }
    copy(step + kSieveStages, stage);
    stage = stage + 1 == kSieveStages ? 0 : stage + 1;
    if (step % 2 == 1 && step + 1 < share.steps) {
      uint32_t total = control.counts[lane];
      bool many = __any_sync(kFullWarp, total > kListRoom * 3 / 8);
      if (many) {
#pragma unroll
        for (int d = 16; d; d /= 2) total += shuffle_xor(total, d);
        many = total >= a.k;
      }
      if (__syncthreads_or(many)) {  // the k best of this block are enough
        const uint32_t longest = longest_list(control.counts);
        if (longest > kListRoom) break;
        fill_lists(survivors, control.counts, longest);
        if (tid == 0) s.count = longest * 32;
        __syncthreads();
        threshold = larger(threshold, reselect<kThreads, Key>(s, survivors, packing, a.k, kSieveKeep));
        filter = Filter<Key>(packing.key(threshold), a.order);
        below = filter.floor - 1;
        if (tid < 32) control.counts[tid] = (s.count + 31 - tid) / 32;
        if (kAlone) clear();
        __syncthreads();
      }
    }
  }
  __pipeline_wait_prior(0);
  __syncthreads();

  const uint32_t longest = longest_list(control.counts), in_list = min(control.counts[lane], kListRoom);
  const uint32_t held = min(longest, kListRoom) * 32;
  const auto held_at = [&](uint32_t i) { return i / 32 < in_list ? survivors[i] : C{0}; };
  static_assert(kSieveBins == 1 << 12);
  uint32_t* const bins = kAlone ? s.histogram : board.bins;
  if (!kAlone) {
    cg::this_grid().barrier_wait(std::move(token));
    if (tid == 0 && longest > kListRoom) *static_cast<volatile uint32_t*>(board.failed) = 1;
    threshold = 0;
    for (uint32_t i = lane; i < slices; i += 32) {  // the blocks agree
      threshold = larger(threshold, __ldcg(&board.told[i]));
      high = larger(high, __ldcg(&board.told[slices + i]));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
      threshold = larger(threshold, shuffle_xor(threshold, d));
      high = larger(high, shuffle_xor(high, d));
    }
  }
  const int shift = max(0, bit_length(high - threshold) - 12);
  const auto bin_in_range = [&](C c) { return c >= high ? 0 : static_cast<uint32_t>((high - c) >> shift); };
  const auto bin_by_sample = [&](C c) { return bin_between(splitters, c); };
  // Where neighbours on the lists share bins, most survivors do: to count these would take long, for nothing.
  const C some = held_at(tid);
  const uint32_t bin = some >= threshold ? bin_in_range(some) : kSieveBins + lane;
  const bool crowd = __popc(__ballot_sync(kFullWarp, bin == __shfl_up_sync(kFullWarp, bin, 1))) > 4;
  if (!kAlone && crowd && lane == 0) *static_cast<volatile uint32_t*>(board.crowded) = 1;
  const auto count = [&](auto bin_of) {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (uint32_t i = tid; i < held; i += kAtOnce * kThreads) {
      C c[kAtOnce];
      uint32_t place[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) c[j] = held_at(i + j * kThreads);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) place[j] = c[j] >= threshold ? atomicAdd(&bins[bin_of(c[j])], 1u) : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * kThreads < held) places[i + j * kThreads] = static_cast<uint16_t>(place[j]);
    }
  };
  if (!crowd) count(bin_in_range);
  bool divided = false;  // by a sample
#pragma unroll 1
  while (true) {
    meet(board.arrivals, slices, target);

    const bool failed = kAlone ? longest > kListRoom : __ldcg(board.failed) != 0;
    const bool uncounted = !divided && (kAlone ? crowd : __ldcg(board.crowded) != 0);
    alignas(16) uint32_t starts[kPerThread];
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) {
      const uint4* from = reinterpret_cast<const uint4*>(bins) + tid * (kPerThread / 4) + v;
      reinterpret_cast<uint4*>(starts)[v] = kAlone ? *from : __ldcg(from);
    }
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) sum += starts[j];
    uint32_t before = scan_block<kThreads>(sum, s.sums);
    bool crowded = uncounted;
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) {
      const uint32_t in_bin = starts[j];
      starts[j] = before;
      if (before < a.k) {
        crowded |= in_bin > kSieveCrowd;
        if (before + in_bin >= a.k) s.kept = before + in_bin;
      }
      before += in_bin;
    }
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v)
      reinterpret_cast<uint4*>(s.histogram)[tid * (kPerThread / 4) + v] = reinterpret_cast<const uint4*>(starts)[v];
    const bool lost = tid == kThreads - 1 && before < a.k;
    if (!__syncthreads_or(crowded || lost || failed)) break;
    const bool few = failed || (!__syncthreads_or(uncounted) && __syncthreads_or(lost));  // or not all of them
    if (few || divided) {
      search<Key>(a, row, rank, control, survivors, held, threshold, few, window, kAlone, target);
      return;
    }
    // A sample of the survivors divides them better than their range.
    const uint32_t each = kSieveSample / slices, depth = tid * (held / 32) / each * 32;
    C* const sample = kAlone ? splitters : board.list;
    if (tid < each) sample[rank * each + tid] = larger(held_at(depth + lane), threshold);
    meet(board.arrivals, slices, target);  // all have read the bins, too
    if (!kAlone) splitters[tid] = tid < each * slices ? __ldcg(&sample[tid]) : threshold;
    sort_descending<kThreads>(splitters, kSieveSample);
    clear();
    meet(board.arrivals, slices, target);
    count(bin_by_sample);
    divided = true;
  }

  const auto rank_all = [&](auto bin_of) {
    C* const list = kAlone ? window : board.list;
#pragma unroll 2
    for (uint32_t i = tid; i < held; i += kThreads) {
      const C c = held_at(i);
      const uint32_t start = c >= threshold ? s.histogram[bin_of(c)] : a.k;
      if (start < a.k) list[start + places[i]] = c;
    }
    meet(board.arrivals, slices, target);
    const uint32_t kept = s.kept, share_of_list = (kept + slices - 1) / slices;
    const uint32_t from = rank * share_of_list, to = min(kept, from + share_of_list);
    uint32_t offset = 0;
    if (!kAlone) {
      offset = max(from, kSieveCrowd) - kSieveCrowd;
      const uint32_t end = min(kept, to + kSieveCrowd);
      for (uint32_t i = offset + tid; i < end; i += kThreads) window[i - offset] = __ldcg(&list[i]);
      __syncthreads();
    }
    constexpr int kRanked = kAlone ? 4 : 1;  // candidates of a thread at once
#pragma unroll 1
    for (uint32_t i = from + tid; i < to; i += kRanked * kThreads) {
      C mine[kRanked];
      uint32_t at[kRanked], end[kRanked], place[kRanked], longest = 0;
#pragma unroll
      for (int j = 0; j < kRanked; ++j) mine[j] = window[min(i + j * kThreads, to - 1) - offset];
#pragma unroll
      for (int j = 0; j < kRanked; ++j) {
        const uint32_t bin = bin_of(mine[j]);
        place[j] = at[j] = s.histogram[bin];
        end[j] = bin + 1 < kSieveBins ? min(s.histogram[bin + 1], kept) : kept;
        longest = max(longest, end[j] - at[j]);
      }
#pragma unroll 1
      for (; longest; --longest) {
#pragma unroll
        for (int j = 0; j < kRanked; ++j) {
          if (at[j] < end[j]) place[j] += window[at[j] - offset] > mine[j];
          ++at[j];
        }
      }
#pragma unroll
      for (int j = 0; j < kRanked; ++j)
        if (i + j * kThreads < to && place[j] < a.k) write(a, packing, row, place[j], mine[j]);
    }
  };
  divided ? rank_all(bin_by_sample) : rank_all(bin_in_range);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Problem& problem, Sieve a) {
  const int64_t rows = problem.rows.count();
  const int64_t chunks = (static_cast<int64_t>(a.length) * sizeof(Key) + 511) / 512;
  const double share = static_cast<double>(a.k) / a.length;
  // The threads that have one of the k best in their sample, and such elements of a sample, of equal ones in streams of
  // neighbours; with five and six deviations to spare.
  constexpr double kElements = kSieveLoads * 16.0 / sizeof(Key);
  const double seen = 1 - std::exp(-share * kElements), of_sample = share * kElements * kThreads;
  const double reach = kThreads * seen + 5 * std::sqrt(kThreads * seen * (1 - seen)) + 5;
  a.reach = static_cast<uint32_t>(std::min(reach, kThreads * 63.0 / 64));
  a.ties = static_cast<uint32_t>(of_sample + 6 * std::sqrt(of_sample) + 5 + 32 * kElements / kSieveLoads);
  Launch shape;
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSieveShared;
  if (a.slices == 1) {
    a.steps = static_cast<uint32_t>((chunks + kSieveLoads * kWarps - 1) / (kSieveLoads * kWarps));
    shape.grid = dim3(static_cast<unsigned>(rows));
    return launch(stream, shape, sieve_kernel<Key, true>, a);
  }
  const auto kernel = sieve_kernel<Key, false>;
  static Residents of_kernel;
  int fitting = 0;
  cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(kernel), shape, &fitting);
  if (status != cudaSuccess) return status;
  // A smaller device has fewer blocks a row, or takes the rows in turn.
  a.slices = std::min(a.slices, static_cast<uint32_t>(fitting));
  const int64_t streams = static_cast<int64_t>(a.slices) * kSieveLoads * kWarps, together = fitting / a.slices;
  a.steps = static_cast<uint32_t>((chunks + streams - 1) / streams);
  shape.together = true;
  for (; a.first_row < rows && status == cudaSuccess; a.first_row += together) {
    shape.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.slices));
    status = launch(stream, shape, kernel, a);
  }
  return status;
}

}  // namespace

cudaError_t launch_sieve(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (sieve_holds_whole(problem.rows.length, problem.key_bits / 8)) return launch_sieve_whole(stream, problem, buffers);
  Sieve a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.boards = static_cast<unsigned char*>(buffers.workspace);
  a.board_bytes = sieve_workspace_bytes(plan.slices);
  a.order = problem.order;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.k = static_cast<uint32_t>(problem.k);
  a.slices = static_cast<uint32_t>(plan.slices);
  switch (problem.key_bits) {
    case 16: return run<uint16_t>(stream, problem, a);
    case 32: return run<uint32_t>(stream, problem, a);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::topk
