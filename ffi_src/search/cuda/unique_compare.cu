// unique of few elements, in one launch: every block of a row collects its different elements in a hash table in shared
// memory, and finds the places of those that are first in its own part of the row by comparing them with all others.
//
// So blocks do not wait for each other, and all read the whole row. A slot of the table has the number of the first
// element of a key, from which the key is read again; elements that are equal take the same slot. Results do not depend
// on the order in which slots are taken: places are numbers of smaller keys.
//
// Bytes moved: every element is read once by each block, from the L2 cache but for the first time, and every result is
// written once. The blocks of a row share its fills.
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "search/cuda/launch.h"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = kUniqueThreads, kWarps = kThreads / 32, kEach = kUniquePart / kWarps;
constexpr uint32_t kFree = ~0u;

__device__ __forceinline__ uint32_t hash_of(uint32_t key) { return key * 0x9e3779b1u; }
__device__ __forceinline__ uint32_t hash_of(uint64_t key) {
  return (static_cast<uint32_t>(key) * 0x9e3779b1u) ^ (static_cast<uint32_t>(key >> 32) * 0x85ebca6bu);
}

// The different keys of a row. `slots` has the number of the first element of each, or kFree, and `counts` how many
// elements have the key of a slot.
template <class Key>
struct Slots {
  const Key* keys;  // of all elements
  uint32_t* slots;
  uint32_t* counts;
  int bits;                 // there are 2^bits slots, at least twice as many as elements
  const uint32_t* numbers;  // of elements that are in no order, or null

  __device__ __forceinline__ bool is_before(uint32_t i, uint32_t j) const {
    return numbers ? numbers[i] < numbers[j] : i < j;
  }

  __device__ __forceinline__ uint32_t first_slot(Key key) const {
    const uint32_t hash = hash_of(key);
    return (hash ^ hash >> 15) * 0x2c1b3c6du >> (32 - bits);
  }
  __device__ __forceinline__ uint32_t next(uint32_t slot) const { return (slot + 1) & ((1u << bits) - 1); }

  __device__ __forceinline__ void add(uint32_t i) const {
    const Key key = keys[i];
    uint32_t slot = first_slot(key);
#pragma unroll 1
    for (;; slot = next(slot)) {
      uint32_t its = *static_cast<const volatile uint32_t*>(slots + slot);
      if (its == kFree) its = atomicCAS(slots + slot, kFree, i);
      if (its == kFree) break;
      if (keys[its] != key) continue;
      while (is_before(i, its)) {
        const uint32_t before = atomicCAS(slots + slot, its, i);
        if (before == its) break;
        its = before;
      }
      break;
    }
    atomicAdd(counts + slot, 1u);
  }
  // Returns the slot of a key that has one.
  __device__ __forceinline__ uint32_t find(Key key) const {
    uint32_t slot = first_slot(key);
    while (keys[slots[slot]] != key) slot = next(slot);
    return slot;
  }
};

// Adds the number of those of four keys that are less than `key` to `count`.
__device__ __forceinline__ void count_less(const uint32_t* keys, uint32_t key, uint32_t& count) {
  const uint4 four = *reinterpret_cast<const uint4*>(keys);
  count += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
}
__device__ __forceinline__ void count_less(const uint64_t* keys, uint64_t key, uint32_t& count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ulonglong2 two = reinterpret_cast<const ulonglong2*>(keys)[half];
    count += (two.x < key) + (two.y < key);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    unique_compare_kernel(const __grid_constant__ Unique problem, const __grid_constant__ UniqueBuffers buffers,
                          uint32_t blocks, int slot_bits, Distinct* least_found, const uint32_t* numbers) {
  using Key = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const auto size = static_cast<uint32_t>(problem.size);
  auto length = static_cast<uint32_t>(problem.rows.length);
  if (least_found != nullptr) {
    if (!least_found->bounded || least_found->candidates > length) return;
    length = least_found->candidates;
    if (length <= size || blockIdx.x * kUniquePart >= length) return;
  }
  const uint32_t padded = (length + 3) / 4 * 4, row = blockIdx.x / blocks, block = blockIdx.x % blocks;
  Key* const keys = reinterpret_cast<Key*>(dynamic_shared_memory());
  Key* const list = keys + padded;  // the different keys, in no order
  const Slots<Key> found{keys, reinterpret_cast<uint32_t*>(list + padded),
                         reinterpret_cast<uint32_t*>(list + padded) + (1 << slot_bits), slot_bits, numbers};
  __shared__ uint32_t listed;
  __shared__ Key least_of[kWarps];
  const T* const x = static_cast<const T*>(buffers.x) + int64_t{row} * length;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) keys[i] = sort_key(x[i], problem.order);
  for (uint32_t s = threadIdx.x; s < 1u << slot_bits; s += kThreads) found.slots[s] = kFree, found.counts[s] = 0;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) found.add(i);
  __syncthreads();

  Key least = ~Key{0};
#pragma unroll 1
  for (uint32_t s = threadIdx.x; s - lane < 1u << slot_bits; s += kThreads) {
    const uint32_t first = found.slots[s];
    const unsigned lanes = __ballot_sync(kEveryLane, first != kFree);
    uint32_t at = 0;
    if (lane == 0 && lanes) at = atomicAdd(&listed, static_cast<uint32_t>(__popc(lanes)));
    at = shuffle_from(at, 0) + __popc(lanes & ((1u << lane) - 1));
    if (first != kFree) list[at] = keys[first], least = min(least, keys[first]);
  }
  least = fold_lanes(least, [](Key a, Key b) { return min(a, b); });
  if (lane == 0) least_of[warp] = least;
  __syncthreads();
  const uint32_t different = listed;
  if (least_found != nullptr) {
    if (different <= size) return;  // further copies of the last of them may lie outside of this list
    if (blockIdx.x == 0 && threadIdx.x == 0) least_found->sorts = 0;
  }
  if (threadIdx.x < (0u - different) % 4) list[different + threadIdx.x] = ~Key{0};
  __syncthreads();

  // A warp finds the places of some elements at a time.
  T* const out = static_cast<T*>(buffers.out) + int64_t{row} * size;
  int32_t* const counts = buffers.counts + int64_t{row} * size;
  int32_t* const index = problem.index ? buffers.index + int64_t{row} * size : nullptr;
  Key key[kEach];
  uint32_t slot[kEach] = {}, place[kEach] = {};
  bool is_first[kEach], any = false;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const uint32_t i = block * kUniquePart + e * kWarps + warp;
    is_first[e] = i < length;
    key[e] = keys[min(i, length - 1)];
    if (is_first[e]) slot[e] = found.find(key[e]), is_first[e] = found.slots[slot[e]] == i;
    any |= is_first[e] || (problem.inverse && i < length);
  }
  if (any) {
#pragma unroll 2
    for (uint32_t j = 4 * lane; j < different; j += 128)
#pragma unroll
      for (int e = 0; e < kEach; ++e) count_less(list + j, key[e], place[e]);
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const uint32_t i = block * kUniquePart + e * kWarps + warp;
    const uint32_t at = sum_of_warp(place[e]);
    if (lane > 0) continue;
    if (is_first[e] && at < size) {
      out[at] = x[i], counts[at] = static_cast<int32_t>(found.counts[slot[e]]);
      if (index) index[at] = static_cast<int32_t>(i);
    }
    if (problem.inverse && i < length) buffers.inverse[int64_t{row} * length + i] = static_cast<int32_t>(at);
  }

  if (different >= size) return;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) least = min(least, least_of[w]);
  const uint32_t first = found.slots[found.find(least)];
  const T fill = problem.has_fill ? static_cast<const T*>(buffers.fill)[problem.fill(row)] : x[first];
  const uint32_t share = (size - different + blocks - 1) / blocks, begin = different + block * share;
#pragma unroll 4
  for (uint32_t i = begin + threadIdx.x; i < min(begin + share, size); i += kThreads) {
    out[i] = fill, counts[i] = 0;
    if (index) index[i] = static_cast<int32_t>(first);
  }
}

}  // namespace

cudaError_t launch_unique_compare(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                  const UniqueBuffers& buffers, Distinct* found, const uint32_t* numbers) {
  const int64_t blocks = found ? problem.rows.length / kUniquePart : plan.blocks;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer * blocks));
  config.block = dim3(kThreads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.bits, [&](auto width) {
    return launch(stream, config, unique_compare_kernel<decltype(width)>, problem, buffers,
                  static_cast<uint32_t>(blocks), plan.slot_bits, found, numbers);
  });
}

}  // namespace jaxgpuops::search
