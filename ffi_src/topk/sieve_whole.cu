// Top-k of rows of 16-bit keys that a block holds whole in shared memory, for k of hundreds to kMaxSieveK: as sieve.cu,
// with less to do, for the row can be looked at again.
//
// The first quarter of each of 64 streams is a sample. Of each thread's best key of it, some reach a threshold, and
// hardly ever do fewer than k elements of the row reach that. Filtering leaves numbers of elements, 16 bits each; an
// element and its index are one word of 32 bits, made when it is needed. Counts in bins over the range above the
// threshold give each survivor a place in a list, and comparisons within its bin its rank.
//
// Where the bet fails (fewer than k survivors, more than there is room for, a crowded bin), the k-th key is found by
// counts over the row, and the index up to which elements like it are taken; these are sorted.
//
// Bytes moved: the input once, k (value + index) out.
#include <cuda_pipeline.h>

#include <algorithm>
#include <cmath>

#include "common/intrinsics.cuh"
#include "common/launch.cuh"
#include "topk/candidates.cuh"
#include "topk/delegates.cuh"
#include "topk/kernels.h"
#include "topk/sieve_shape.h"

namespace jaxgpuops::topk {
namespace {

using Key = uint16_t;

struct Whole {
  const Key* x;
  Key* values;
  int32_t* indices;
  KeyOrder order;
  uint32_t length, k;
  uint32_t reach;  // delegates that reach the threshold
};

constexpr int kThreads = kSieveThreads, kLoads = kSieveLoads;
constexpr uint32_t kWarps = kThreads / 32, kVector = 8, kElements = kLoads * kVector;  // of a thread in a step
constexpr uint32_t kSpread = kMaxWholeLength / kVector / kLoads;  // vectors between a thread's loads
constexpr uint32_t kSteps = kSpread / kThreads;
constexpr uint32_t kPerThread = kSieveBins / kThreads;
static_assert(kElements == 32 && kSieveBins == 1 << 12);

// A number of an element, from the top: its warp, the step, its lane, the load of the thread, the element of the
// vector. In its index, the load is on top.
__device__ __forceinline__ uint32_t index_of(uint32_t number) {
  const uint32_t element = number & (kVector - 1), load = number / kVector & (kLoads - 1);
  return number / kElements * kVector | element | load * (kSpread * kVector);
}

struct Control {
  alignas(16) uint32_t bins[kSieveBins + 32];  // and what nobody reads: to count there costs less than a branch
  uint32_t sums[kWarps], tops[kWarps], lows[kWarps];
  uint32_t count, kept, found;
};
static_assert(sizeof(Control) <= kWholeControl);

__device__ __forceinline__ uint32_t most_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullWarp, value);
#else
#pragma unroll
  for (int d = 16; d; d /= 2) value = larger(value, shuffle_xor(value, d));
  return value;
#endif
}

// A row in shared memory, where its vectors are aligned, too.
struct Row {
  Key* keys;  // of element 0
  KeyOrder order;
  uint32_t length, head, vectors, loose;  // `loose` elements belong to no vector, `head` of them come first

  __device__ __forceinline__ uint4* ring() const { return reinterpret_cast<uint4*>(keys + head); }
  __device__ __forceinline__ uint32_t loose_index(uint32_t i) const { return i < head ? i : vectors * kVector + i; }
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return static_cast<Key>(encode(keys[i], order)); }
  // Key above, mirrored index below.
  __device__ __forceinline__ uint32_t operator[](uint32_t i) const { return key(i) << 16 | (length - 1 - i); }
};

// The exact way: finds the k-th largest key in [low, high] by counts, the first of them of those that reach `middle`,
// and the index up to which elements like it belong to the k best; then sorts these. `above` elements are above `high`.
__device__ __noinline__ void search(const Whole& a, Row row, Control& s, uint32_t* list, uint32_t low, uint32_t high,
                                    uint32_t middle, uint32_t above) {
  __builtin_assume(__isShared(row.keys) && __isShared(&s) && __isShared(list));
  const uint32_t tid = threadIdx.x, lane = tid % 32, k = a.k;
  for (; low < high; middle = high - (high - low) / 2) {
    const Filter<Key> filter(static_cast<Key>(middle), row.order);
    uint32_t mine = tid < row.loose && row.key(row.loose_index(tid)) >= middle;
#pragma unroll 4
    for (uint32_t v = tid; v < row.vectors; v += kThreads) {
      const uint4 words = row.ring()[v];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(&words)[w] ^ filter.flips;
        count_less(mine, filter.floor - 1, word << 16);
        count_less(mine, filter.floor - 1, word);
      }
    }
    const uint32_t before = scan_block<kThreads>(mine, s.sums);
    if (tid == kThreads - 1) s.found = before + mine;
    __syncthreads();
    const uint32_t reached = s.found;
    if (reached >= k) {
      low = middle;
    } else {
      high = middle - 1;
      above = reached;
    }
  }
  // Each thread counts what is like it in a part of the row, from places that are on other banks than its neighbours'.
  constexpr uint32_t kPart = kMaxWholeLength / kThreads;
  uint32_t ties = 0;
#pragma unroll 8
  for (uint32_t j = 0; j < kPart; ++j) {
    const uint32_t i = tid * kPart + (j + 2 * lane) % kPart;
    ties += i < row.length && row.key(i) == low;
  }
  const uint32_t before = scan_block<kThreads>(ties, s.sums), need = k - above;
  if (before < need && need <= before + ties) {
    uint32_t i = tid * kPart;
    for (uint32_t left = need - before; left; ++i) left -= row.key(i) == low;
    s.found = i - 1;
  }
  if (tid == 0) s.count = 0;
  __syncthreads();
  const uint32_t threshold = low << 16 | (row.length - 1 - s.found);
#pragma unroll 8
  for (uint32_t i = tid; i < row.length; i += kThreads) {
    const uint32_t c = row[i];
    if (c >= threshold) list[atomicAdd(&s.count, 1u)] = c;
  }
  sort_descending<kThreads>(list, k);
}

__global__ void __launch_bounds__(kThreads, 1) whole_kernel(const __grid_constant__ Whole a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Control*>(shared_bytes);
  Key* const keys = reinterpret_cast<Key*>(shared_bytes + kWholeControl);
  auto* const survivors = reinterpret_cast<uint16_t*>(shared_bytes + kWholeControl + kWholeRow);
  auto* const list = reinterpret_cast<uint32_t*>(survivors + kWholeRoom);

  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const Key* const x = a.x + static_cast<int64_t>(blockIdx.x) * a.length;
  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
  const uint32_t head = misaligned ? kVector - misaligned : 0, vectors = (a.length - head) / kVector;
  const uint32_t loose = a.length - vectors * kVector;
  const Row row{keys + misaligned, a.order, a.length, head, vectors, loose};
  const uint4* const from = reinterpret_cast<const uint4*>(x + head);
  uint4* const ring = row.ring();
  const uint32_t first = warp * (kSteps * 32) + lane;

  // Every thread reads what it copied itself: no barrier stands between the copies and their use.
  const auto copy = [&](uint32_t step) {
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint32_t vector = first + u * kSpread + step * 32;
      if (vector < vectors) __pipeline_memcpy_async(ring + vector, from + vector, 16);
    }
    __pipeline_commit();
  };
  copy(0);
  if (tid == 0) s.count = 0;
#pragma unroll
  for (uint32_t i = 0; i < kPerThread / 4; ++i)
    reinterpret_cast<uint4*>(s.bins)[i * kThreads + tid] = make_uint4(0, 0, 0, 0);
  if (tid < loose) row.keys[row.loose_index(tid)] = x[row.loose_index(tid)];
  __pipeline_wait_prior(0);  // it would wait for all that is asked for with it
#pragma unroll 1
  for (uint32_t step = 1; step < kSteps; ++step) copy(step);

  const Lanes<Key> lanes(a.order);
  uint32_t most = 0;
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    if (first + u * kSpread >= vectors) continue;
    const uint4 words = ring[first + u * kSpread];
#pragma unroll
    for (int w = 0; w < 4; ++w) most = lanes.max(most, lanes.encode(reinterpret_cast<const uint32_t*>(&words)[w]));
  }
  const uint32_t best = lanes.largest(most), warp_top = most_of_warp(best), warp_low = ~most_of_warp(~best);
  if (lane == 0) s.tops[warp] = warp_top, s.lows[warp] = warp_low;
  __syncthreads();
  const uint32_t top = most_of_warp(s.tops[lane % kWarps]);
  uint32_t least = ~most_of_warp(~s.lows[lane % kWarps]);
  for (uint32_t upper = top; least < upper;) {
    const uint32_t middle = upper - (upper - least) / 2, reached = __syncthreads_count(best >= middle);
    if (reached >= a.reach) {
      least = middle;
      if (reached <= a.reach + a.reach / 16) break;
    } else {
      upper = middle - 1;
    }
  }
  const uint32_t threshold = larger(least << 16, 1u);
  uint32_t high = top << 16 | (a.length - 1);
  high += smaller((high - threshold) / 8, ~high);  // there may be better ones
  int shift = max(0, 32 - __clz(high - threshold) - 12);
  const auto bin_of = [&](uint32_t c) { return c >= high ? 0 : (high - c) >> shift; };

  const Filter<Key> filter(static_cast<Key>(least), a.order);
  const uint32_t below = filter.floor - 1;
#pragma unroll 1
  for (uint32_t step = 0; step < kSteps; ++step) {
    __pipeline_wait_prior(kSteps - 1);
    const uint32_t vector = first + step * 32;
    uint32_t hits = 0;  // the first element on top
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint4 words = ring[vector + u * kSpread];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(&words)[w] ^ filter.flips;
        push_reaches(hits, word << 16, below);
        push_reaches(hits, word, below);
      }
    }
    if (vectors < kLoads * kSpread) {  // some are not there
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
        if (vector + u * kSpread >= vectors) hits &= u ? ~0u << (kElements - u * kVector) : 0;
    }
    const uint32_t mine = __popc(hits), upto = inclusive_scan_warp(mine);
    uint32_t at = 0;
    if (lane == 31)  // atomicAdd would look for more lanes
      asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                   : "=r"(at)
                   : "r"(shared_address(&s.count)), "r"(upto)
                   : "memory");
    at = __shfl_sync(kFullWarp, at, 31) + upto - mine;
    if (at + mine > kWholeRoom) hits = 0;  // too many: the count tells
    const uint32_t last = ((warp * kSteps + step) * 32 + lane + 1) * kElements - 1;
    for (uint16_t* to = survivors + at; hits; ++to) {
      const uint32_t bit = 31 - __clz(hits);
      hits ^= 1u << bit;
      *to = static_cast<uint16_t>(last - bit);
    }
    __pipeline_commit();
  }
  __syncthreads();

  const bool many = s.count > kWholeRoom;
  const uint32_t m = many ? 0 : s.count, nobody = kSieveBins + lane;
  const auto survivor = [&](uint32_t i) { return row[head + index_of(survivors[i])]; };
  constexpr uint32_t kAtOnce = 3072 / kThreads;
  const uint32_t single = tid < loose ? row[row.loose_index(tid)] : 0;  // belongs to no vector
  uint32_t c[kAtOnce], bin[kAtOnce], kept;
#pragma unroll
  for (uint32_t j = 0; j < kAtOnce; ++j) c[j] = survivor(tid + j * kThreads);  // whatever it is beyond the last
  const auto write = [&](uint32_t rank, uint32_t c) {
    const int64_t to = static_cast<int64_t>(blockIdx.x) * a.k + rank;
    a.values[to] = decode(static_cast<Key>(c >> 16), a.order);
    a.indices[to] = static_cast<int32_t>(a.length - 1 - (c & 0xffff));
  };
#pragma unroll 1
  for (bool again = false;; again = true) {
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      bin[j] = tid + j * kThreads < m ? bin_of(c[j]) : nobody;
      atomicAdd(&s.bins[bin[j]], 1u);
    }
#pragma unroll 1
    for (uint32_t i = tid + kAtOnce * kThreads; i < m; i += kThreads) atomicAdd(&s.bins[bin_of(survivor(i))], 1u);
    if (single >= threshold) atomicAdd(&s.bins[bin_of(single)], 1u);
    __syncthreads();
    alignas(16) uint32_t starts[kPerThread];
    uint4* const mine = reinterpret_cast<uint4*>(s.bins) + tid * (kPerThread / 4);
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) reinterpret_cast<uint4*>(starts)[v] = mine[v];
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) sum += starts[j];
    uint32_t before = scan_block<kThreads>(sum, s.sums);
    bool failed = many;
    const bool has_last = before < a.k && before + sum >= a.k;
#pragma unroll
    for (uint32_t j = 0; j < kPerThread; ++j) {
      const uint32_t in_bin = starts[j];
      starts[j] = before;
      failed |= before < a.k && in_bin > kSieveCrowd;
      before += in_bin;
    }
    if (tid == kThreads - 1) {
      s.found = before;
      failed |= before < a.k;
    }
    if (has_last) {
      uint32_t end = before;
#pragma unroll
      for (uint32_t j = kPerThread - 1; j; --j)
        if (starts[j] >= a.k) end = starts[j];
      s.kept = end;
    }
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) mine[v] = reinterpret_cast<const uint4*>(starts)[v];
    if (!__syncthreads_or(failed)) break;
    const uint32_t found = s.found;
    if (again || many || found < a.k) {
      __syncthreads();
      // Too many are most often equal. Of too few, the k-th is below, of crowds above.
      const bool few = !many && found < a.k && least != 0;
      search(a, row, s, list, few ? 0 : least, few ? least - 1 : 0xffff,
             few ? least / 2 : min(least + (many ? 1 : 64), 0xffffu), few ? found : 0);
      for (uint32_t i = tid; i < a.k; i += kThreads) write(i, list[i]);
      return;
    }
    // Crowds: the range of what has been found says more than the sample's.
    high = single;
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j)
      if (bin[j] != nobody) high = larger(high, c[j]);
#pragma unroll 1
    for (uint32_t i = tid + kAtOnce * kThreads; i < m; i += kThreads) high = larger(high, survivor(i));
    high = most_of_warp(high);
    if (lane == 0) s.tops[warp] = high;
#pragma unroll
    for (uint32_t v = 0; v < kPerThread / 4; ++v) mine[v] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    high = most_of_warp(s.tops[lane % kWarps]);
    shift = max(0, 32 - __clz(high - threshold) - 12);
  }

  kept = s.kept;
  const auto put = [&](uint32_t c, uint32_t bin) {
    const uint32_t place = atomicAdd(&s.bins[bin], 1u);
    if (place < kept) list[place] = c;
  };
  uint32_t place[kAtOnce];
#pragma unroll
  for (uint32_t j = 0; j < kAtOnce; ++j) place[j] = atomicAdd(&s.bins[bin[j]], 1u);
#pragma unroll
  for (uint32_t j = 0; j < kAtOnce; ++j)
    if (place[j] < kept && bin[j] < kSieveBins) list[place[j]] = c[j];
#pragma unroll 1
  for (uint32_t i = tid + kAtOnce * kThreads; i < m; i += kThreads) put(survivor(i), bin_of(survivor(i)));
  if (single >= threshold) put(single, bin_of(single));
  __syncthreads();  // a bin's number is now where it ends, and where the next one starts
  constexpr int kRanked = 2048 / kThreads;
#pragma unroll 1
  for (uint32_t i = tid; i < kept; i += kRanked * kThreads) {
    uint32_t mine[kRanked], at[kRanked], end[kRanked], place[kRanked], longest = 0;
#pragma unroll
    for (int j = 0; j < kRanked; ++j) mine[j] = list[min(i + j * kThreads, kept - 1)];
#pragma unroll
    for (int j = 0; j < kRanked; ++j) {
      const uint32_t bin = bin_of(mine[j]);
      place[j] = at[j] = bin ? s.bins[bin - 1] : 0;
      end[j] = s.bins[bin];
      longest = max(longest, end[j] - at[j]);
    }
#pragma unroll 1
    for (; longest; --longest) {
#pragma unroll
      for (int j = 0; j < kRanked; ++j) {
        if (at[j] < end[j]) place[j] += list[at[j]] > mine[j];
        ++at[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kRanked; ++j)
      if (i + j * kThreads < kept && place[j] < a.k) write(place[j], mine[j]);
  }
}

}  // namespace

cudaError_t launch_sieve_whole(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  Whole a = {};
  a.x = static_cast<const Key*>(buffers.x);
  a.values = static_cast<Key*>(buffers.values);
  a.indices = buffers.indices;
  a.order = problem.order;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.k = static_cast<uint32_t>(problem.k);
  // The threads that have one of the k best in their sample, with five deviations to spare.
  const double of_thread = a.length / static_cast<double>(kThreads * kSteps);  // elements of its sample
  const double share = static_cast<double>(a.k) / a.length, seen = 1 - std::exp(-share * of_thread);
  const double reach = kThreads * seen + 5 * std::sqrt(kThreads * seen * (1 - seen)) + 5;
  a.reach = static_cast<uint32_t>(std::min(reach, kThreads * 63.0 / 64));
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kWholeShared;
  return launch(stream, shape, whole_kernel, a);
}

}  // namespace jaxgpuops::topk
