// Top-k of long rows for k up to kMaxSieveK. A row is read once, by one block or by several that synchronise
// twice.
//
// A row is divided evenly into streams, and a warp reads several streams at the same time; so the first vectors of all
// streams are a sample of the whole row. Each thread has a part of the sample, and the largest key of that part is a
// delegate. (If the threshold would depend on few delegates, they are the largest keys of the streams' parts instead.)
// The threshold is reached by so many delegates that fewer than k elements of the row hardly ever reach it. If
// neighbours are alike, as in sorted rows, a stream tells little, and the threshold is low. Then all lanes of some warp
// have delegates that reach it, and a second sample, of scattered elements, raises it.
//
// Elements that reach the threshold are survivors and stay in shared memory. When the row has been read, its blocks
// take the highest of their thresholds and divide the range above it into bins. Counts of the survivors in each bin
// give each survivor a place in a list, and comparisons within its bin give its rank. The blocks share that work.
//
// A block with many more survivors than k keeps only its own k best, and tells the other blocks. If a block has done
// so, or if a bin is crowded, the blocks choose a threshold once more, and a sorted sample of the survivors divides the
// range into bins. If that fails, too (there are fewer than k survivors, or more than a block holds, or a bin is still
// crowded), the exact selection of sieve_row.cuh runs.
//
// For results in the order of indices, reorder.cu sorts them once more.
//
// Bytes moved: the input once, and k results (value and index). With several blocks a row, the survivors also go
// through the workspace, about three times. Sources: Dr. Top-k's delegates (arXiv 2109.08219), sample sort, AIR's
// histograms (SC'23).
#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/scatter.cuh"
#include "topk/cuda/sieve_division.cuh"
#include "topk/cuda/sieve_row.cuh"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

// The bits that any lane has.
__device__ __forceinline__ uint32_t bits_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(kEveryLane, value);
#else
  return fold_lanes(value, [](uint32_t a, uint32_t b) { return a | b; });
#endif
}

constexpr uint32_t kListRoom = kSieveRoom / 32;

__device__ __forceinline__ uint32_t longest_list(const uint32_t* counts) {
  return largest_of_warp(counts[threadIdx.x % 32]);
}

// Runs shrink(), which selects from a single buffer, on all 32 lists together. Before, it pads every list to the length
// of the longest one, with composites that are never selected.
template <class Shrink>
__device__ __forceinline__ void shrink_lists(Control& control, C* survivors, Shrink shrink) {
  const uint32_t longest = longest_list(control.counts), tid = threadIdx.x;
  for (uint32_t i = tid; i < longest * 32; i += kThreads)
    if (i / 32 >= control.counts[i % 32]) survivors[i] = 0;
  if (tid == 0) control.shared.count = longest * 32;
  __syncthreads();
  shrink();
  if (tid < 32) control.counts[tid] = (control.shared.count + 31 - tid) / 32;
  __syncthreads();
}

// Finds the index up to which the sample has about a.ties elements with this key or a larger one (not fewer, if the
// sample has that many). It is the last index of some stream's part of the sample, or of the row. `of_streams` has room
// for a word for each stream.
template <class Key>
__device__ __noinline__ uint32_t last_tie(const Sieve& a, Share<Key> share, uint32_t rank, const uint4* ring, Key key,
                                          uint32_t* of_streams) {
  constexpr uint32_t kVector = Share<Key>::kVector;
  static_assert(kSieveLoads * kWarps == 64);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int u = 0; u < kSieveLoads; ++u) {
    uint32_t counts = 0;  // low half: elements that equal the key; high half: elements above it
    if (share.vector(0, u) < share.vectors) {
      const uint4 words = ring[u * kThreads + threadIdx.x];
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) {
        const Key k = encode(reinterpret_cast<const Key*>(&words)[e], a.order);
        counts += k > key ? 1u << 16 : k == key;
      }
    }
    counts = sum_of_warp(counts);
    if (lane == 0) of_streams[u * kWarps + warp] = counts;
  }
  __syncthreads();
  const uint32_t even = of_streams[2 * lane], odd = of_streams[2 * lane + 1];
  const uint32_t upto = sum_up_to_lane(even + odd);
  const uint32_t above = __shfl_sync(kEveryLane, upto, 31) >> 16;
  // The number of streams that end before a.ties elements have been counted.
  const uint32_t streams = __popc(__ballot_sync(kEveryLane, above + ((upto - odd) & 0xffff) < a.ties)) +
                           __popc(__ballot_sync(kEveryLane, above + (upto & 0xffff) < a.ties));
  __syncthreads();
  if (streams == 64) return a.length - 1;
  const uint32_t vector = (streams * a.slices + rank) * (a.steps * 32) + 31;
  return min(share.index(vector) + kVector, a.length) - 1;
}

// Returns the key that enough threads' samples of scattered elements reach. Sets `tops` to the largest of each warp.
template <class Key>
__device__ __noinline__ Key kth_of_scattered(const Sieve& a, const Key* x, uint32_t* tops) {
  Key bits[kSieveScattered], most = 0;
#pragma unroll
  for (int i = 0; i < kSieveScattered; ++i) bits[i] = __ldg(x + scatter(i * kThreads + threadIdx.x, a.length));
#pragma unroll
  for (int i = 0; i < kSieveScattered; ++i) most = larger(most, encode(bits[i], a.order));
  const uint32_t top = largest_of_warp(uint32_t{most});
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  return kth_of_block<kThreads>(most, a.reach_scattered);
}

// The state of a block in sieve_kernel. The functions are the phases of the kernel, in the order in which they run.
// kAlone: the block has a whole row.
template <class Key, bool kAlone>
struct Block {
  static constexpr uint32_t kVector = Share<Key>::kVector;
  static constexpr uint32_t kElements = kSieveLoads * kVector;  // elements that a thread reads in a step
  static_assert(kElements <= 32);

  const Sieve& a;
  Control& control;
  Shared<kThreads, C>& s;
  uint4* const ring;  // the vectors that are being loaded or were loaded last
  C* const survivors;
  C* const window;  // this array and the next two take the place of the ring when the row has been read
  C* const splitters;
  uint32_t* const places;  // the bin of each survivor, and its place in the bin
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const uint32_t slices = kAlone ? 1 : a.slices;
  const int64_t row = a.first_row + (kAlone ? blockIdx.x : blockIdx.x / slices);
  const uint32_t rank = kAlone ? 0 : blockIdx.x % slices;
  const Share<Key> share{a, row, rank};
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange exchange{a, row};
  uint32_t* const bins = kAlone ? s.histogram : exchange.bins;

  C threshold = 0, high = 0;       // the k best elements reach `threshold`; no element exceeds `high`
  uint32_t bits = 0;               // those that some thread's largest key of the sample has
  C raised = 0;                    // the threshold of this block if it has kept only its k best elements, else 0
  uint32_t token = 0, target = 0;  // arrivals at the barriers of the blocks of a row, see meet()
  uint32_t in_list = 0;            // survivors in the list of this lane
  uint32_t held = 0;               // 32 times the length of the longest list
  bool failed = false;             // some list had no room for a survivor
  bool crowd = false;              // bins of equal width would be crowded
  Division division = {};

  __device__ __forceinline__ Block(const Sieve& a, unsigned char* shared_bytes)
      : a(a),
        control(*reinterpret_cast<Control*>(shared_bytes)),
        s(control.shared),
        ring(reinterpret_cast<uint4*>(shared_bytes + kSieveControl)),
        survivors(reinterpret_cast<C*>(shared_bytes + kSieveControl + kSieveRing)),
        window(reinterpret_cast<C*>(ring)),
        splitters(window + kMaxSieveK + 2 * kSieveCrowd),
        places(reinterpret_cast<uint32_t*>(splitters + 2 * kSieveSample)) {}

  // Each thread copies the vectors that it will read itself, so no barrier is needed between the copies and the reads.
  __device__ __forceinline__ void copy(uint32_t step, uint32_t stage) {
    if (step < share.steps) {
#pragma unroll
      for (int u = 0; u < kSieveLoads; ++u) {
        const uint32_t vector = share.vector(step, u);
        if (vector < share.vectors)
          copy_async(ring + (stage * kSieveLoads + u) * kThreads + tid, share.body() + vector);
      }
    }
    commit_async_copies();
  }

  __device__ __forceinline__ void clear_bins() {  // clears this block's share of the bins
    if (kAlone) {
#pragma unroll
      for (uint32_t i = 0; i < kPerThread / 4; ++i)
        reinterpret_cast<uint4*>(s.histogram)[i * kThreads + tid] = make_uint4(0, 0, 0, 0);
    } else {
      for (uint32_t i = rank * kThreads + tid; i < kSieveBins; i += slices * kThreads) exchange.bins[i] = 0;
    }
  }

  // Waits for the sample, and starts the next loads.
  __device__ __forceinline__ void start() {
    copy(0, 0);
    if (tid == 0) control.found = control.most = 0;
    if (tid < 32) control.counts[tid] = 0;
    clear_bins();
    if (!kAlone && rank == 0 && tid == 0) {
      *exchange.arrivals = *exchange.failed = *exchange.crowded = *exchange.total = *exchange.found = 0;
      *exchange.most = 0;
    }
    wait_for_async_copies<0>();  // this waits for all loads, so it comes before the next loads are issued
#pragma unroll 1
    for (uint32_t stage = 1; stage < kSieveStages; ++stage) copy(stage, stage);
  }

  // Finds the threshold that enough delegates of the sample reach, and publishes it to the other blocks.
  __device__ __forceinline__ void sample() {
    const Lanes<Key> lanes(a.order);
    uint32_t most = 0, delegate = 0;
#pragma unroll
    for (int u = 0; u < kSieveLoads; ++u) {
      uint32_t of_stream = 0;
      if (share.vector(0, u) < share.vectors) {
        const uint4 words = ring[u * kThreads + tid];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          of_stream = lanes.max(of_stream, lanes.encode(reinterpret_cast<const uint32_t*>(&words)[w]));
        most = lanes.max(most, of_stream);
      }
      if (a.by_streams) {
        of_stream = largest_of_warp(lanes.largest(of_stream));
        if (lane == static_cast<uint32_t>(u)) delegate = of_stream;
      }
    }
    const Key best = static_cast<Key>(lanes.largest(most));
    if (!a.by_streams) delegate = best;
    uint32_t top = largest_of_warp(uint32_t{best});
    if (lane == 0) control.tops[warp] = top;
    const Key least = kth_of_block<kThreads>(static_cast<Key>(delegate), a.reach);
    top = largest_of_warp(control.tops[lane % kWarps]);
    bits = bits_of_warp(best >= least ? uint32_t{best} : 0);
    if (lane == 0) control.bits[warp] = bits;
    // Elements that tie with the threshold survive, too, unless there are many. The composite 0, which is the last of
    // all, never survives.
    threshold = larger(packing.lowest(least), C{1});
    if (__syncthreads_count(best == least) > kThreads / 8) {
      threshold = larger(
          packing.pack(least, last_tie<Key>(a, share, rank, ring, least, reinterpret_cast<uint32_t*>(survivors))),
          C{1});
    } else if (2 * a.reach <= (a.by_streams ? kSieveLoads * kWarps : kThreads) &&
               __syncthreads_or(__all_sync(kEveryLane, best >= least))) {
      threshold = larger(threshold, packing.lowest(kth_of_scattered<Key>(a, share.x, control.tops)));
      // Where neighbours are alike, the largest keys may lie between the parts of the first sample.
      top = larger(top, largest_of_warp(control.tops[lane % kWarps]));
    }
    bits = bits_of_warp(control.bits[lane % kWarps]);
    high = larger(packing.pack(static_cast<Key>(top), 0), threshold);
    // The row may have larger keys than its sample. The smaller the sample, the further they may lie above it.
    high += smaller((high - threshold) / (kAlone && share.steps <= 16 ? 8 : 2), ~high);
    if (!kAlone) {
      if (tid == 0) {
        exchange.told[rank] = threshold;
        exchange.told[slices + rank] = high;
        exchange.told[2 * slices + rank] = 0;
        exchange.told[3 * slices + rank] = bits;
      }
      token = cg::this_grid().barrier_arrive();
    }
  }

  // Keeps at most `keep` survivors, among them the k best of this block, and raises the threshold.
  __device__ __forceinline__ void raise(uint32_t keep) {
    shrink_lists(control, survivors,
                 [&] { threshold = larger(threshold, reselect<kThreads, Key>(s, survivors, packing, a.k, keep)); });
    raised = threshold;
    if (!kAlone && tid == 0) *static_cast<volatile C*>(&exchange.told[2 * slices + rank]) = raised;
  }

  // Appends those elements that reach the threshold to the lists, of the vectors that the warp loaded in one step.
  __device__ __forceinline__ void filter_step(uint32_t step, uint32_t stage, const Filter<Key>& filter) {
    // Returns a bit for each element, the first element in the highest bit: whether its order exceeds `below`.
    const auto reaches = [&](uint32_t below) {
      uint32_t hits = 0;
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
      return hits;
    };
    uint32_t hits = reaches(filter.floor - 1);
    // The test by carries is wrong for a threshold of 0, which every element reaches.
    if (filter.floor == 0) hits = ~0u >> (32 - kElements);
    if (!__any_sync(kEveryLane, hits)) return;
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
    // Of the elements that tie with the threshold's key, only the first ones pass.
    if (packing.index(threshold) != packing.last) {
      const uint32_t like = filter.floor | (~0u >> (8 * sizeof(Key) - 1) >> 1);
      uint32_t above = reaches(like);
#pragma unroll
      for (uint32_t u = 0; u < kSieveLoads; ++u) {
        const uint32_t last = packing.index(threshold), first = share.index(share.vector(step, static_cast<int>(u)));
        const uint32_t others = last < first ? kVector : kVector - min(last - first + 1, kVector);
        const uint32_t ties = ((1u << kVector) - 1) >> others << others;
        above |= ties << ((kSieveLoads - 1 - u) * kVector);
      }
      hits &= above;
    }
    // Each lane appends to another list, so no lane waits. A lane changes its list from step to step, because the
    // elements that a lane reads may be alike.
    const uint32_t list = (lane + 2 * warp + 3 * step) % 32, mine = __popc(hits);
    uint32_t at = mine ? atomicAdd(&control.counts[list], mine) : 0;
    if (at + mine > kListRoom) hits = 0;  // the list is full; its count, which exceeds the room, shows that later
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

  // Compares the block's share of the row with the threshold, which rises if there are many survivors.
  __device__ __forceinline__ void filter() {
    if (rank == 0 && tid < share.loose()) {
      const uint32_t index = share.loose_index(tid);
      const C c = packing.pack(encode(share.x[index], a.order), index);
      if (c >= threshold) survivors[atomicAdd(&control.counts[lane], 1u) * 32 + lane] = c;
    }
    Filter<Key> filter(packing.key(threshold), a.order);
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < share.steps; ++step) {
      wait_for_async_copies<kSieveStages - 1>();
      filter_step(step, stage, filter);
      copy(step + kSieveStages, stage);
      stage = stage + 1 == kSieveStages ? 0 : stage + 1;
      if (step % 2 == 1 && step + 1 < share.steps) {
        uint32_t total = control.counts[lane];
        bool many = __any_sync(kEveryLane, total > kListRoom * 3 / 8);
        if (many) {
          total = sum_of_warp(total);
          many = total >= a.k;
        }
        if (__syncthreads_or(many)) {
          if (longest_list(control.counts) > kListRoom) break;
          raise(kSieveKeep);
          filter = Filter<Key>(packing.key(threshold), a.order);
          if (kAlone) clear_bins();  // no thread counts before the next barrier
        }
      }
    }
    wait_for_async_copies<0>();
    __syncthreads();
    failed = longest_list(control.counts) > kListRoom;
    if (!kAlone && !failed && sum_of_warp(control.counts[lane]) >= max(2 * a.k, kSieveMany)) raise(a.k + a.k / 2);
    measure_lists();
  }

  __device__ __forceinline__ void measure_lists() {
    in_list = min(control.counts[lane], kListRoom);
    held = min(longest_list(control.counts), kListRoom) * 32;
  }
  // Returns survivor i of all lists, which belongs to the list of this lane. If it does not exist, returns 0, which is
  // never selected.
  __device__ __forceinline__ C held_at(uint32_t i) const { return i / 32 < in_list ? survivors[i] : C{0}; }

  // Sets the highest threshold of the blocks of a row as the threshold of all, and divides the range above it into bins
  // of equal width.
  __device__ __forceinline__ void agree() {
    if (!kAlone) {
      cg::this_grid().barrier_wait(std::move(token));
      if (tid == 0 && failed) *static_cast<volatile uint32_t*>(exchange.failed) = 1;
      for (uint32_t i = lane; i < slices; i += 32) {
        threshold = larger(threshold, __ldcg(&exchange.told[i]));
        high = larger(high, __ldcg(&exchange.told[slices + i]));
        bits |= static_cast<uint32_t>(__ldcg(&exchange.told[3 * slices + i]));
      }
      threshold = largest_of_warp(threshold);
      high = largest_of_warp(high);
      bits = bits_of_warp(bits);
      crowd = raised > 0;
    }
    // Indices need not divide keys that take as many values as there are bins, and already do where all keys are equal
    // and where keys are narrow, as no bits lie between these and their indices.
    const Key range = packing.key(high) - packing.key(threshold);
    // Larger floats than those of the sample, and its other elements, may have a few more bits.
    constexpr int kMoreBits = 3;
    const int zeros = max(__ffs(static_cast<int>(bits)) - 1 - kMoreBits, 0);
    const bool squeezes = sizeof(Key) == 4 && range > 0 && range >> zeros < kSieveBins;
    division = {high, 0, nullptr, squeezes, packing.shift(), zeros, packing.index_bits};
    C low = threshold;
    if (squeezes) {
      division.high = division.squeezed(high) | ((C{1} << packing.index_bits) - 1);
      low = division.squeezed(threshold);
    }
    static_assert(kSieveBins == 1 << 12);
    division.shift = max(0, bit_length(division.high - low) - 12);
    // If many survivors that are some way apart in the lists share a bin, bins will be crowded. Counting would show
    // that only later. (Close neighbours do so in each row that is in order.)
    const C some[1] = {held_at(tid)};
    uint32_t bin[1];
    division.bins(some, bin);
    if (some[0] < threshold) bin[0] = kSieveBins + lane;
    crowd |= __popc(__ballot_sync(kEveryLane, bin[0] == __shfl_xor_sync(kEveryLane, bin[0], 16))) > 12;
    if (!kAlone && crowd && lane == 0) *static_cast<volatile uint32_t*>(exchange.crowded) = 1;
  }

  // Counts the survivors in bins. The value of the counter before a survivor was added is the number of that survivor
  // in its bin.
  __device__ __forceinline__ void count() {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (uint32_t i = tid; i < held; i += kAtOnce * kThreads) {
      C c[kAtOnce];
      uint32_t bin[kAtOnce], place[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) c[j] = held_at(i + j * kThreads);
      division.bins(c, bin);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        place[j] = c[j] >= threshold ? atomicAdd(&bins[bin[j]], 1u) : 0;
        crowd |= !division.splitters && c[j] >= threshold && division.loses(c[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * kThreads < held) places[i + j * kThreads] = bin[j] << 16 | (place[j] & 0xffff);
    }
    if (!kAlone && crowd && !division.splitters) *static_cast<volatile uint32_t*>(exchange.crowded) = 1;
  }

  // Turns the counts of the bins into the places where the bins begin, in s.histogram. Sets s.kept to the number of
  // survivors in the bins that have one of the k best, and `crowded` if one of these bins has too many. The last thread
  // returns the number of all survivors.
  __device__ __forceinline__ uint32_t add_up_bins(bool& crowded) {
    alignas(16) uint32_t starts[kPerThread];
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) {
      const uint4* from = reinterpret_cast<const uint4*>(bins) + tid * (kPerThread / 4) + v;
      reinterpret_cast<uint4*>(starts)[v] = kAlone ? *from : __ldcg(from);
    }
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) sum += starts[j];
    uint32_t before = sum_before<kThreads>(sum, s.sums);
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
    return before;
  }

  // Takes survivors at regular intervals as a sample, and sorts them to be the splitters. Bins between splitters have
  // more even counts than bins of equal width.
  __device__ __forceinline__ void take_splitters() {
    if (!kAlone) {
      for (uint32_t i = lane; i < slices; i += 32) raised = larger(raised, __ldcg(&exchange.told[2 * slices + i]));
      threshold = larger(threshold, largest_of_warp(raised));
    }
    shrink_lists(control, survivors, [&] { compact<kThreads>(s, survivors, threshold); });
    measure_lists();
    C most = 0;
#pragma unroll 4
    for (uint32_t i = tid; i < held; i += kThreads) most = larger(most, held_at(i));
    most = largest_of_warp(most);
    if (lane == 0) atomicMax(reinterpret_cast<unsigned long long*>(kAlone ? &control.most : exchange.most), most);
    if (!kAlone && tid == 0) control.before = atomicAdd(exchange.total, s.count);
    meet(exchange.arrivals, slices, target);  // now all blocks have read the bins
    C* const sample = splitters + kSieveSample;
    const uint32_t total = kAlone ? s.count : __ldcg(exchange.total);
    if (tid < kSieveSample) {
      const uint32_t at = static_cast<uint32_t>(uint64_t{tid} * total / kSieveSample) - (kAlone ? 0 : control.before);
      if (at < s.count) (kAlone ? sample : exchange.list)[tid] = survivors[at];
    }
    clear_bins();
    meet(exchange.arrivals, slices, target);
    if (!kAlone) {
      if (tid < kSieveSample) sample[tid] = __ldcg(&exchange.list[tid]);
      __syncthreads();
    }
    sort_sample(splitters, sample);
    __syncthreads();
    division.splitters = splitters;
    division.high = kAlone ? control.most : __ldcg(exchange.most);
  }

  // Gives each survivor a bin and a place in it. Returns false if the threshold was wrong; then the exact selection has
  // written the results already.
  __device__ __forceinline__ bool deal_out() {
#pragma unroll 1
    while (true) {
      if (!crowd || division.splitters) count();
      meet(exchange.arrivals, slices, target);
      const bool any_failed = kAlone ? failed : __ldcg(exchange.failed) != 0;
      const bool uncounted = !division.splitters && (kAlone ? crowd : __ldcg(exchange.crowded) != 0);
      bool crowded = uncounted;
      const bool lost = add_up_bins(crowded) < a.k && tid == kThreads - 1;
      if (!__syncthreads_or(crowded || lost || any_failed)) return true;
      // There are fewer than k survivors, or only some of them are on the lists.
      const bool few = any_failed || (!__syncthreads_or(uncounted) && __syncthreads_or(lost));
      if (few || division.splitters) {
        search<Key>(a, row, rank, control, survivors, held, threshold, few, window, kAlone, target);
        return false;
      }
      take_splitters();
    }
  }

  // Lists the survivors in the order of their bins, ranks each one within its bin, and writes the k best. The blocks of
  // a row share the ranking.
  __device__ __forceinline__ void rank_and_write() {
    C* const list = kAlone ? window : exchange.list;
#pragma unroll 2
    for (uint32_t i = tid; i < held; i += kThreads) {
      const C c = held_at(i);
      const uint32_t place = places[i], start = c >= threshold ? s.histogram[place >> 16] : a.k;
      if (start < a.k) list[start + (place & 0xffff)] = c;
    }
    meet(exchange.arrivals, slices, target);
    const uint32_t kept = s.kept, share_of_list = (kept + slices - 1) / slices;
    const uint32_t from = rank * share_of_list, to = min(kept, from + share_of_list);
    uint32_t offset = 0;
    if (!kAlone) {
      offset = max(from, kSieveCrowd) - kSieveCrowd;
      const uint32_t end = min(kept, to + kSieveCrowd);
      for (uint32_t i = offset + tid; i < end; i += kThreads) window[i - offset] = __ldcg(&list[i]);
      __syncthreads();
    }
    constexpr int kRanked = kAlone ? 4 : 1;  // survivors that a thread ranks at the same time
#pragma unroll 1
    for (uint32_t i = from + tid; i < to; i += kRanked * kThreads) {
      C mine[kRanked];
      uint32_t bin[kRanked], at[kRanked], end[kRanked], place[kRanked], longest = 0;
#pragma unroll
      for (int j = 0; j < kRanked; ++j) mine[j] = window[min(i + j * kThreads, to - 1) - offset];
      division.bins(mine, bin);
#pragma unroll
      for (int j = 0; j < kRanked; ++j) {
        place[j] = at[j] = s.histogram[bin[j]];
        end[j] = bin[j] + 1 < kSieveBins ? min(s.histogram[bin[j] + 1], kept) : kept;
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
  }
};

template <class Key, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1) sieve_kernel(const __grid_constant__ Sieve a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key, kAlone> block(a, shared_bytes);
  block.start();
  block.sample();
  block.filter();
  block.agree();
  if (block.deal_out()) block.rank_and_write();
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Problem& problem, Sieve a) {
  const int64_t rows = problem.rows.count();
  const int64_t chunks = (static_cast<int64_t>(a.length) * sizeof(Key) + 511) / 512;
  const double share = static_cast<double>(a.k) / a.length;
  // reach(parts, sample) is the number of `parts` equal parts of a sample that have one of the k best elements: the
  // expected number and five standard deviations more.
  constexpr double kSample = static_cast<double>(kSieveStep) / sizeof(Key), kStreams = kSieveLoads * kWarps;
  const auto reach = [&](double parts, double sample) {
    const double seen = 1 - std::exp(-share * sample / parts);
    return std::min(parts * seen + 5 * std::sqrt(parts * seen * (1 - seen)) + 5, parts * 63 / 64);
  };
  // If the threshold depended on the delegates of few threads, all of these might belong to one stream, whose elements
  // may be alike. So the streams' delegates replace them.
  a.by_streams = reach(kStreams, kSample) <= kStreams / 2;
  a.reach = static_cast<uint32_t>(reach(a.by_streams ? kStreams : kThreads, kSample));
  a.reach_scattered = static_cast<uint32_t>(reach(kThreads, kThreads * kSieveScattered));
  // The number of elements of a sample that are among the k best: the expected number, six standard deviations, and one
  // stream more.
  const double of_sample = share * kSample;
  a.ties = static_cast<uint32_t>(of_sample + 6 * std::sqrt(of_sample) + 5 + kSample / kStreams);
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
  // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
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
  Sieve a = {call_of(problem, buffers)};
  a.row_bytes = sieve_exchange_bytes(plan.slices);
  a.slices = static_cast<uint32_t>(plan.slices);
  switch (problem.key_bits) {
    case 16: return run<uint16_t>(stream, problem, a);
    case 32: return run<uint32_t>(stream, problem, a);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::topk
