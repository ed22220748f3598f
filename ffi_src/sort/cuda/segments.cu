// Sorts the segments of rows that fit into the registers of a block, by digits: segment_digits.cuh says how. Short
// segments are compared instead: the place of an element is the number of elements of its segment that come before it.
// A block counts the pairs that it would have to compare, and takes what is faster for its row.
//
// What is sorted are keys and indices; in the end, results are read from the row by the sorted indices. So elements of
// up to 32 bits have one kernel.
//
// Bytes moved: every element is read twice, the second time from the caches; offsets are read once a row, and every
// result is written once.
#include "sort/cuda/kernels.h"
#include "sort/cuda/rank_in.cuh"
#include "sort/cuda/raised.cuh"
#include "sort/cuda/segment_digits.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr uint32_t kWords = 512;  // words that have a bit for each place of the longest row
// An element is compared with so many others in less time than sorting it by one digit takes.
constexpr uint32_t kComparedOfDigit = 8;

struct SegmentsArgs {
  const void* x;
  void* values;      // null: not wanted
  int32_t* indices;  // null: not wanted
  const int32_t* offsets;
  IndexMap offsets_at;
  int64_t count;  // of offsets
  uint32_t length;
  int bytes;  // of an element
  SortOrder order;
};

template <class Key, int kThreads, int kItems>
struct SegmentsShared {
  DigitsShared<Key, kThreads, kItems> sort;
  uint32_t begins[kWords], before[kWords];  // see Numbers
  uint32_t of_warps[kThreads / 32];
};

// Finds the segments of a row, and returns the places between which they are. All threads of the block call it.
template <int kThreads, class Shared>
__device__ __forceinline__ Range find_segments(const SegmentsArgs& a, Shared& shared) {
  for (uint32_t w = threadIdx.x; w < kWords; w += kThreads) shared.begins[w] = 0;
  const auto mark = [&](uint32_t place) {
    if (place < a.length) atomicOr(shared.begins + place / 32, 1u << place % 32);
  };
  const int32_t* const offsets = a.offsets + a.offsets_at(blockIdx.x);
  const Range range = mark_offsets<kThreads>(offsets, a.count, a.length, shared.of_warps, mark);
  __syncthreads();
  count_begins<kThreads, kWords>(shared.begins, shared.before, shared.sort.warps);
  return range;
}

// The segments by their numbers, while nothing is sorted by digits.
template <class Key, int kThreads, int kItems>
struct Segments {
  static_assert(2 * kThreads * kItems <= kThreads / 32 * kDigits * 4);
  uint16_t* begins;  // of segment 1 and so on; number 0 are places before all segments
  Numbers numbers;
  uint32_t last, length;  // the largest number
  Range all;              // the places between which all segments are

  __device__ __forceinline__ Segments(SegmentsShared<Key, kThreads, kItems>& shared, uint32_t length, Range all)
      : begins(reinterpret_cast<uint16_t*>(shared.sort.counts)),
        numbers{shared.begins, shared.before},
        last(numbers.of(length - 1)),
        length(length),
        all(all) {}

  __device__ __forceinline__ bool has(uint32_t place) const { return place - all.begin < all.end - all.begin; }
  __device__ __forceinline__ Range of_number(uint32_t number) const {
    return {number > 0 ? uint32_t{begins[number - 1]} : 0, number < last ? uint32_t{begins[number]} : length};
  }

  // Finds where segments begin, and returns how many pairs of elements they have, which `sum` adds up.
  __device__ __forceinline__ uint32_t count_pairs(uint32_t& sum) {
    if (threadIdx.x == 0) sum = 0;
#pragma unroll 1
    for (uint32_t place = threadIdx.x; place < length; place += kThreads)
      if (numbers.begins[place / 32] >> place % 32 & 1) begins[numbers.of(place) - 1] = static_cast<uint16_t>(place);
    __syncthreads();
    uint32_t pairs = 0;
#pragma unroll 1
    for (uint32_t number = threadIdx.x; number <= last; number += kThreads) {
      const Range range = of_number(number);
      if (range.begin < range.end && has(range.begin)) pairs += (range.end - range.begin) * (range.end - range.begin);
    }
    pairs = sum_of_warp(pairs);
    if (threadIdx.x % 32 == 0) atomicAdd(&sum, pairs);
    __syncthreads();
    return sum;
  }

  // Writes the indices of the sorted elements.
  __device__ __forceinline__ void compare(const Key* keys, uint16_t* indices) const {
#pragma unroll 1
    for (uint32_t place = threadIdx.x; place < length; place += kThreads) {
      if (!has(place)) continue;
      const Range range = of_number(numbers.of(place));
      indices[range.begin + rank_in(keys, range, place, 0, 1)] = static_cast<uint16_t>(place);
    }
    __syncthreads();
  }
};

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) segments_kernel(const __grid_constant__ SegmentsArgs a) {
  static_assert(kThreads * kItems <= 32 * kWords);
  auto& shared = *reinterpret_cast<SegmentsShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  const int64_t row = int64_t{blockIdx.x} * a.length;
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  // Loops over places that are not unrolled keep the kernel small.
  Key any = 0, all = static_cast<Key>(~Key{0});
  if (threadIdx.x == 0) shared.sort.any = any, shared.sort.all = all;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + row;
#pragma unroll 2
    for (uint32_t place = threadIdx.x; place < a.length; place += kThreads) {
      const Key key = raised_key(Key{from[place]} << 8 * (sizeof(Key) - sizeof(Bits)), a.order);
      shared.sort.keys[place] = key;
      any |= key;
      all &= key;
    }
  });
  const Range range = find_segments<kThreads>(a, shared);
  const Key differ = differing_bits(shared.sort, any, all);
  uint32_t digits = 0;  // by which keys have to be sorted
#pragma unroll
  for (uint32_t byte = 0; byte < sizeof(Key); ++byte) digits += (differ >> 8 * byte & 0xff) != 0;
  const uint32_t most = (digits + 1) * kComparedOfDigit;  // pairs for each element
  Segments<Key, kThreads, kItems> segments(shared, a.length, range);
  bool moved = digits > 0;
  if (moved && a.length <= most * (segments.last + 1) &&
      segments.count_pairs(shared.sort.warps[0]) <= most * a.length) {
    segments.compare(shared.sort.keys, shared.sort.indices);
  } else {
    moved = sort_by_digits(shared.sort, a.length, a.bytes, differ, segments.numbers);
  }

  const auto index_at = [&](uint32_t place) {
    const bool inside = place - range.begin < range.end - range.begin;
    return moved && inside ? uint32_t{shared.sort.indices[place]} : place;
  };
  const uint32_t end = min(first + 32 * kItems, a.length);
  if (a.indices) {
#pragma unroll 2
    for (uint32_t place = first; place < end; place += 32)
      a.indices[row + place] = static_cast<int32_t>(index_at(place));
  }
  if (!a.values) return;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + row;
    Bits* const to = static_cast<Bits*>(a.values) + row;
#pragma unroll 2
    for (uint32_t place = first; place < end; place += 32) to[place] = from[index_at(place)];
  });
}

template <class Key, int kThreads, int kItems>
cudaError_t run(cudaStream_t stream, const Problem& problem, const SegmentsArgs& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(kThreads);
  static_assert(sizeof(SegmentsShared<Key, kThreads, kItems>) <= segments_shared_bytes(sizeof(Key), kThreads, kItems));
  config.shared_bytes = segments_shared_bytes(sizeof(Key), kThreads, kItems);
  return launch(stream, config, segments_kernel<Key, kThreads, kItems>, a);
}

}  // namespace

cudaError_t launch_segments(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  SegmentsArgs a = {buffers.x, buffers.values, buffers.indices, buffers.offsets};
  a.offsets_at = problem.offsets_at.outer;
  a.count = problem.offsets;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.bytes = problem.key_bits / 8;
  a.order = raised(problem.order, a.bytes == 8 ? 0 : 32 - problem.key_bits);
  if (plan.threads == 256)
    return a.bytes == 8 ? run<uint64_t, 256, 4>(stream, problem, a) : run<uint32_t, 256, 4>(stream, problem, a);
  if (a.bytes == 8) return run<uint64_t, 1024, 8>(stream, problem, a);
  if (plan.threads == 512)
    return plan.items == 8 ? run<uint32_t, 512, 8>(stream, problem, a) : run<uint32_t, 512, 16>(stream, problem, a);
  return plan.items == 8 ? run<uint32_t, 1024, 8>(stream, problem, a) : run<uint32_t, 1024, 16>(stream, problem, a);
}

}  // namespace jaxgpuops::sort
