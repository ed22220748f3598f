// unique: the different elements of one long row in ascending order, how often each is there, and where it is first.
//
// The blocks of a first kernel look for different elements, each in a part of the row: a hash table in shared memory
// has their keys, counts and first places. A block that has found too many gives up, and soon all others do. (A table
// that fills up takes long.) If none has, they add their tables to one in global memory. Then nothing is sorted: the
// last kernel (choose.cu) finds the place of each different element by comparing it with all others, and writes the
// results.
//
// If there are too many, the row is sorted, and the last kernel writes the elements that differ from the one before.
// All kernels are launched in any case, as the host does not know which case it is; those of a sort that is not needed
// end at once.
//
// Bytes moved: every element is read once if there are few different ones. Otherwise each block reads some
// thousand elements before the sort and the choice.
#include <algorithm>
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/set_words.h"
#include "search/cuda/launch.h"
#include "search/distinct.h"
#include "select/cuda/select.cuh"
#include "sort/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

constexpr int kMostProbes = 64;  // slots in which an element is looked for

constexpr int kBatch = 8;  // elements that a thread loads at once

struct CollectArgs {
  const void* x;
  Distinct* all;
  int64_t length, chunk;
  SortOrder order;
  // As in UniquePlan, if few results are wanted. Otherwise `samples` is 0.
  int samples, sampled_rank;
  uint32_t* sample;
  void* least;
  uint32_t* numbers;
};

// Loads elements that are a block apart, from `at` on. Those from `end` on are copies of the last one before it.
template <class Element>
__device__ __forceinline__ void load_batch(const Element* x, uint32_t at, uint32_t end, Element* batch) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) batch[i] = x[min(at + i * kCollectThreads, end - 1)];
}

template <class Key>
struct Table {
  Key keys[kSlots];
  uint32_t counts[kSlots + 1], firsts[kSlots + 1];  // as in Distinct
};

__device__ __forceinline__ uint32_t slot_of(uint32_t key) { return key * 0x9e3779b1u >> (32 - kSlotBits); }
__device__ __forceinline__ uint32_t slot_of(uint64_t key) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  return (low * 0x9e3779b1u + high * 0x85ebca6bu) >> (32 - kSlotBits);
}

__device__ __forceinline__ uint32_t exchange_if_free(uint32_t* slot, uint32_t key) { return atomicCAS(slot, 0u, key); }
__device__ __forceinline__ uint64_t exchange_if_free(uint64_t* slot, uint64_t key) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(slot), 0ull, static_cast<unsigned long long>(key));
}

// Returns the slot of a key, which takes a free one if it has none, or -1 if there is no slot for it nearby. Calls
// taken() if it takes a free one.
template <class Key, class F>
__device__ __forceinline__ int find_slot(Key* keys, Key key, F taken) {
  if (key == 0) return kSlots;
  uint32_t slot = slot_of(key);
#pragma unroll 1
  for (int probes = 0; probes < kMostProbes; ++probes, slot = (slot + 1) % kSlots) {
    Key found = *static_cast<const volatile Key*>(keys + slot);
    if (found == key) return static_cast<int>(slot);
    if (found != 0) continue;
    found = exchange_if_free(keys + slot, key);
    if (found == 0) taken();
    if (found == 0 || found == key) return static_cast<int>(slot);
  }
  return -1;
}

// ---- Few results ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(uint32_t key) { return key; }
__device__ __forceinline__ uint32_t word_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

// Leaves the least words of a sample of the block's part. The last block that does so finds the bound in all of them.
// All threads of the block call this. `has`: whether the part is to be sampled; a short one is not.
template <class Element>
__device__ __noinline__ void find_bound(const CollectArgs& a, bool has) {
  using Key = std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>;
  constexpr int kOwn = 8, kEach = kSampledWords;  // samples of a lane; words of a thread
  __shared__ uint32_t counts[16];
  __shared__ bool is_last;
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    const auto* const x = static_cast<const Element*>(a.x) + blockIdx.x * a.chunk;
    const uint32_t step = static_cast<uint32_t>(a.chunk) / a.samples;
    uint32_t word[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t s = i * 32 + lane;
      // From another place of each part, so that periods of the row do no harm.
      const uint32_t place = s * step + __umulhi(s * 0x9e3779b1u, step);
      word[i] = has && s < a.samples ? word_of(static_cast<Key>(sort_key(x[place], a.order))) : ~0u;
    }
    select::sort_in_warp(word);
    uint32_t* const to = a.sample + blockIdx.x * kLeastWords + lane * kOwn;
    if (lane < kLeastWords / kOwn) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) to[i] = word[i];
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) is_last = atomicAdd(&a.all->sampled, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const uint32_t words = gridDim.x * kLeastWords;
  uint32_t word[kEach], bound = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t at = i * kCollectThreads + threadIdx.x;
    word[i] = at < words ? __ldcg(a.sample + at) : ~0u;
  }
  // Digit by digit, from the highest: `left` words of those that share the digits so far come before the bound.
  auto left = static_cast<uint32_t>(a.sampled_rank - 1);
#pragma unroll 1
  for (int shift = 28; shift >= 0; shift -= 4) {
    if (threadIdx.x < 16) counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((word[i] ^ bound) >> shift < 16) atomicAdd(counts + (word[i] >> shift) % 16, 1u);
    }
    __syncthreads();
    const uint32_t own = lane < 16 ? counts[lane] : 0, up_to = sum_up_to_lane(own);
    const int digit = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > left))) - 1;
    left -= shuffle_from(up_to - own, digit);
    bound |= static_cast<uint32_t>(digit) << shift;
    __syncthreads();
  }
  if (threadIdx.x == 0) a.all->bound = bound, a.all->bounded = bound != ~0u;
}

// Collects the elements up to the bound.
template <class Element>
__global__ void __launch_bounds__(kCollectThreads, 3) least_kernel(const __grid_constant__ CollectArgs a) {
  using Key = std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>;
  if (!a.all->bounded) return;
  const uint32_t bound = a.all->bound;
  const auto* const x = static_cast<const Element*>(a.x);
  const auto length = static_cast<uint32_t>(a.length);
#pragma unroll 1
  for (int64_t at = int64_t{blockIdx.x} * kBatch * kCollectThreads + threadIdx.x; at < length;
       at += int64_t{gridDim.x} * kBatch * kCollectThreads) {
    const auto first = static_cast<uint32_t>(at);
    Element batch[kBatch];
    load_batch(x, first, length, batch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t place = first + i * kCollectThreads;
      if (place >= length || word_of(static_cast<Key>(sort_key(batch[i], a.order))) > bound) continue;
      const uint32_t to = atomicAdd(&a.all->candidates, 1u);
      if (to >= kMostLeast) return;
      static_cast<Element*>(a.least)[to] = batch[i];
      a.numbers[to] = place;
    }
  }
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

template <class Element>
__global__ void __launch_bounds__(kCollectThreads, kCollectBlocks)
    collect_kernel(const __grid_constant__ CollectArgs a) {
  using Key = std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>;
  constexpr uint32_t kMost = sizeof(Element) == 8 ? kMostDistinct : kMostShortDistinct;
  auto& table = *reinterpret_cast<Table<Key>*>(dynamic_shared_memory());
  __shared__ uint32_t found;
  __shared__ volatile bool gives_up;
  const auto* const x = static_cast<const Element*>(a.x);
  const auto begin = static_cast<uint32_t>(blockIdx.x * a.chunk);
  const auto end = static_cast<uint32_t>(min(a.length, int64_t{begin} + a.chunk));
  uint32_t at = begin + threadIdx.x;
  Element next[kBatch];
  load_batch(x, at, end, next);
  auto* const words = reinterpret_cast<uint32_t*>(&table);
  for (uint32_t w = threadIdx.x; w < sizeof(table) / 4; w += kCollectThreads) words[w] = 0;
  if (threadIdx.x == 0) found = 0, gives_up = false;
  wait_for_predecessor();  // it sets `all` to zero
  __syncthreads();

#pragma unroll 1
  for (; at < end && !gives_up; at += kBatch * kCollectThreads) {
    Element batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = next[i];
    load_batch(x, at + kBatch * kCollectThreads, end, next);
    if (threadIdx.x == 0 && load_relaxed(&a.all->many)) gives_up = true;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t place = at + i * kCollectThreads;
      if (place >= end || gives_up) break;
      const int slot = find_slot(table.keys, static_cast<Key>(sort_key(batch[i], a.order)), [&] {
        if (atomicAdd(&found, 1u) >= kMost) gives_up = true;
      });
      if (slot < 0) {
        gives_up = true;
        break;
      }
      atomicAdd(table.counts + slot, 1u);
      if (~place > *static_cast<const volatile uint32_t*>(table.firsts + slot)) atomicMax(table.firsts + slot, ~place);
    }
  }
  __syncthreads();
  // The last part may be short: its block may have read all of it, with few different elements, before others give up.
  const bool is_short = end - begin < a.chunk;
  if (gives_up) {
    if (threadIdx.x == 0) store_relaxed(&a.all->many, 1u), store_relaxed(&a.all->sorts, 1u);
    if (a.samples) find_bound<Element>(a, !is_short);
    return;
  }
  if (a.samples && is_short) find_bound<Element>(a, false);
#pragma unroll 1
  for (int own = threadIdx.x; own <= kSlots; own += kCollectThreads) {
    const uint32_t count = table.counts[own];
    if (count == 0) continue;
    const uint64_t key = own < kSlots ? table.keys[own] : 0;
    const int slot = find_slot(a.all->keys, key, [] {});
    uint32_t number = kMost;
    if (slot >= 0) {
      atomicMax(a.all->firsts + slot, table.firsts[own]);
      if (atomicAdd(a.all->counts + slot, count) > 0) continue;  // another block has listed it
      number = atomicAdd(&a.all->count, 1u);
    }
    if (number >= kMost) {
      store_relaxed(&a.all->many, 1u), store_relaxed(&a.all->sorts, 1u);
    } else {
      a.all->listed[number] = slot;
      a.all->listed_keys[number] = key;
    }
  }
}

// ---- The inverse ----------------------------------------------------------------------------------------------------

struct InverseArgs {
  CollectArgs row;
  const int32_t* order;           // of the sorted row
  const uint32_t *bits, *before;  // of ChooseDistinct
  uint32_t units;
  int32_t* to;
};

template <class Element>
__global__ void __launch_bounds__(kCollectThreads, kCollectBlocks)
    inverse_kernel(const __grid_constant__ InverseArgs a) {
  using Key = std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>;
  constexpr int kWarps = kCollectThreads / 32;
  auto& table = *reinterpret_cast<Table<Key>*>(dynamic_shared_memory());
  const Distinct& all = *a.row.all;
  const uint32_t lane = threadIdx.x % 32;
  if (all.many) {
    // The words of a unit, one of each lane, say where elements differ from the one before.
#pragma unroll 1
    for (uint32_t unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < a.units; unit += gridDim.x * kWarps) {
      const uint32_t word = a.bits[unit * 32 + lane], up_to = sum_up_to_lane(static_cast<uint32_t>(__popc(word)));
      const uint32_t before = a.before[unit] + up_to - __popc(word), first = unit * 1024;
#pragma unroll 8
      for (int i = 0; i < 32; ++i) {
        const uint32_t own = shuffle_from(word, i) & (2u << lane) - 1, rank = shuffle_from(before, i) + __popc(own) - 1;
        const uint32_t place = first + i * 32 + lane;
        if (place < a.row.length) a.to[a.order[place]] = static_cast<int32_t>(rank);
      }
    }
    return;
  }
#pragma unroll 1
  for (int s = threadIdx.x; s < kSlots; s += kCollectThreads) {
    table.keys[s] = static_cast<Key>(all.keys[s]);
    table.counts[s] = all.ranks[s];
  }
  if (threadIdx.x == 0) table.counts[kSlots] = all.ranks[kSlots];
  __syncthreads();
  const auto* const x = static_cast<const Element*>(a.row.x);
  const auto begin = static_cast<uint32_t>(blockIdx.x * a.row.chunk);
  const auto end = static_cast<uint32_t>(min(a.row.length, int64_t{begin} + a.row.chunk));
#pragma unroll 1
  for (uint32_t at = begin + threadIdx.x; at < end; at += kBatch * kCollectThreads) {
    Element batch[kBatch];
    load_batch(x, at, end, batch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t place = at + i * kCollectThreads;
      if (place >= end) break;
      const int slot = find_slot(table.keys, static_cast<Key>(sort_key(batch[i], a.row.order)), [] {});
      a.to[place] = static_cast<int32_t>(table.counts[max(slot, 0)]);
    }
  }
}

template <class Element>
cudaError_t invert(cudaStream_t stream, const UniquePlan& plan, const InverseArgs& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kCollectThreads);
  config.shared_bytes = sizeof(Table<std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>>);
  return launch(stream, config, inverse_kernel<Element>, a);
}

template <class Element>
cudaError_t collect(cudaStream_t stream, const UniquePlan& plan, bool overlap, const CollectArgs& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kCollectThreads);
  config.shared_bytes = sizeof(Table<std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>>);
  config.overlap = overlap;
  return launch(stream, config, collect_kernel<Element>, a);
}

template <class Element>
cudaError_t find_least(cudaStream_t stream, const CollectArgs& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.length + kBatch * kCollectThreads - 1) / (kBatch * kCollectThreads)));
  config.block = dim3(kCollectThreads);
  return launch(stream, config, least_kernel<Element>, a);
}

}  // namespace

cudaError_t launch_unique(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                          const UniqueBuffers& buffers, void* workspace) {
  if (plan.algorithm == Finding::kEmpty) return cudaSuccess;
  if (plan.algorithm == Finding::kCompare) return launch_unique_compare(stream, plan, problem, buffers);
  if (plan.algorithm == Finding::kCounts) return launch_unique_counts(stream, plan, problem, buffers, workspace);
  auto* const bytes = static_cast<unsigned char*>(workspace);
  auto* const distinct = reinterpret_cast<Distinct*>(bytes);
  cudaError_t error = launch_set_words(stream, reinterpret_cast<uint32_t*>(bytes), sizeof(Distinct) / 4, 0, 0);
  if (error != cudaSuccess) return error;
  const CollectArgs a{buffers.x,           distinct,
                      problem.rows.length, plan.chunk,
                      problem.order,       plan.samples,
                      plan.sampled_rank,   reinterpret_cast<uint32_t*>(bytes + plan.sample),
                      bytes + plan.least,  reinterpret_cast<uint32_t*>(bytes + plan.least_at)};
  error = dispatch_key(problem.bits,
                       [&](auto element) { return collect<decltype(element)>(stream, plan, plan.choose.overlap, a); });
  if (error != cudaSuccess) return error;
  if (plan.samples) {
    error = dispatch_key(problem.bits, [&](auto element) { return find_least<decltype(element)>(stream, a); });
    if (error != cudaSuccess) return error;
    Unique least = problem;
    least.rows.length = kMostLeast;
    UniqueBuffers of_least = buffers;
    of_least.x = a.least;
    error = launch_unique_compare(stream, plan, least, of_least, distinct, a.numbers);
    if (error != cudaSuccess) return error;
  }
  void* const sorted = bytes + plan.sorted;
  auto* const order = plan.sorting.indices ? reinterpret_cast<int32_t*>(bytes + plan.order) : nullptr;
  error = sort::launch_sort(stream, plan.sort, plan.sorting, buffers.x, sorted, order, bytes + plan.sort_workspace,
                            nullptr, nullptr, &distinct->sorts);
  if (error != cudaSuccess) return error;
  ChooseBuffers chosen = {};
  chosen.x = chosen.array[0] = sorted;
  chosen.fill[0] = problem.has_fill ? buffers.fill : sorted;
  chosen.array[1] = chosen.fill[1] = order;
  chosen.out[0] = buffers.out;
  chosen.out[1] = buffers.index;
  chosen.counts = buffers.counts;
  ChooseDistinct also{distinct, buffers.x};
  if (problem.inverse) {
    also.bits = reinterpret_cast<uint32_t*>(bytes + plan.bits);
    also.before = reinterpret_cast<uint32_t*>(bytes + plan.before);
  }
  error = launch_choose(stream, plan.choose, plan.choosing, chosen, bytes + plan.choose_workspace, also);
  if (error != cudaSuccess || !problem.inverse) return error;
  const InverseArgs inverse{a, order, also.bits, also.before, static_cast<uint32_t>(plan.units), buffers.inverse};
  return dispatch_key(problem.bits, [&](auto element) { return invert<decltype(element)>(stream, plan, inverse); });
}

}  // namespace jaxgpuops::search
