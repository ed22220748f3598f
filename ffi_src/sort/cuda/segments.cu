// Radix sort of the segments of rows that fit into the registers of a block: segment_digits.cuh says how.
//
// What is sorted are keys and indices; in the end, results are read from the row by the sorted indices. So elements of
// up to 32 bits have one kernel.
//
// Bytes moved: every element is read twice, the second time from the caches; offsets are read once a row, and every
// result is written once.
#include "sort/cuda/kernels.h"
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/raised.cuh"
#include "sort/cuda/segment_digits.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr uint32_t kWords = 512;  // words that have a bit for each place of the longest row

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
  const bool moved = sort_by_digits(shared.sort, a.length, a.bytes, any, all, {shared.begins, shared.before});

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
  if (plan.threads == 512 && a.bytes < 8) return run<uint32_t, 512, 8>(stream, problem, a);
  return a.bytes == 8 ? run<uint64_t, 1024, 8>(stream, problem, a) : run<uint32_t, 1024, 16>(stream, problem, a);
}

}  // namespace jaxgpuops::sort
