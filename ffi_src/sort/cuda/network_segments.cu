// Sorts the segments of rows of up to 8192 elements of up to 32 bits, if only values are wanted: segment_network.cuh
// says how. A block has a row, or a warp several short ones. Offsets need not ascend.
//
// Bytes moved: every element is read once, and every result is written once; offsets are read once a row, or once for
// all rows of a block if they share them. Rows with -0 or NaNs are read once more, from the caches.
#include "sort/cuda/kernels.h"
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/segment_network.cuh"

namespace jaxgpuops::sort {
namespace {

struct NetworkSegmentsArgs {
  const void* x;
  void* values;
  const int32_t* offsets;  // null: a row is one segment
  IndexMap offsets_at;
  int64_t count;  // of offsets
  int64_t rows;
  uint32_t length, together;  // together: rows of a block
  bool shared;                // all rows have the same offsets
  int bytes;                  // of an element
  SortOrder order;            // of elements that are the upper part of a word
};

template <class Key, int kThreads>
__global__ void __launch_bounds__(kThreads, 768 / kThreads)
    network_segments_kernel(const __grid_constant__ NetworkSegmentsArgs a) {
  __shared__ SegmentBits<kThreads> bits;
  __shared__ Range ranges[kMostTogether];  // the places of each row between which its segments are
  auto* const buffer = reinterpret_cast<Key*>(dynamic_shared_memory());
  const int64_t first_row = int64_t{blockIdx.x} * a.together, base = first_row * a.length;
  const auto rows = static_cast<uint32_t>(min(int64_t{a.together}, a.rows - first_row));
  const uint32_t there = rows * a.length, threads = blockDim.x;
  bits.begins[threadIdx.x] = 0;
  const TileElements<Key> elements{a.x, a.values, base, there, a.bytes};
  elements.load(buffer, threads);
  __syncthreads();
  const auto mark = [&](uint32_t place) { atomicOr(bits.begins + place / 32, 1u << place % 32); };
  const auto find = [&](uint32_t row, auto mark_place) {
    return mark_offsets<0>(a.offsets + a.offsets_at(first_row + row), a.count, a.length, bits.sums, mark_place);
  };
  if (!a.offsets) {
    if (threadIdx.x < rows) ranges[threadIdx.x] = {0, a.length};
  } else if (a.shared) {
    const Range range = find(0, [&](uint32_t place) {
      if (place >= a.length) return;
      for (uint32_t row = 0; row < rows; ++row) mark(row * a.length + place);
    });
    if (threadIdx.x < rows) ranges[threadIdx.x] = range;
  } else {
#pragma unroll 1
    for (uint32_t row = 0; row < rows; ++row) {
      const Range range = find(row, [&](uint32_t place) {
        if (place < a.length) mark(row * a.length + place);
      });
      if (threadIdx.x == 0) ranges[row] = range;
    }
  }
  __syncthreads();
  // Places outside all segments, and behind the rows, are segments of their own.
  constexpr uint32_t kEach = kSegmentEach<Key>;
  const uint32_t first = threadIdx.x * kEach;
  uint32_t begins = bits.begins[first / 32] >> first % 32 | place_bits(first, there, ~0u);
  if (first < there) {
#pragma unroll 1
    for (uint32_t row = first / a.length; row < rows && row * a.length < first + kEach; ++row) {
      const uint32_t begin = row * a.length;
      const Range range = ranges[row];
      begins |= place_bits(first, begin, begin + a.length) & ~place_bits(first, begin + range.begin, begin + range.end);
      begins |= place_bits(first, begin, begin + 1);
    }
  }
  begins &= ~0u >> (32 - kEach);
  __syncthreads();
  sort_segments(bits, buffer, threads, begins, there, a.order, elements);
  elements.store(buffer, threads, {0, there}, [](uint32_t, Key, auto) {});
}

}  // namespace

cudaError_t launch_network_segments(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                    const Buffers& buffers) {
  NetworkSegmentsArgs a = {buffers.x, buffers.values, buffers.offsets};
  a.offsets_at = problem.offsets_at.outer;
  a.count = problem.offsets;
  a.rows = problem.rows.count();
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.together = static_cast<uint32_t>(plan.together);
  a.shared = problem.shares_offsets();
  a.bytes = problem.key_bits / 8;
  a.order = raised(problem.order, a.bytes == 8 ? 0 : 32 - problem.key_bits);
  const Launch config{dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                      static_cast<size_t>(plan.shared_bytes)};
  if (a.bytes == 8)
    return plan.threads == 32 ? launch(stream, config, network_segments_kernel<uint64_t, 32>, a)
                              : launch(stream, config, network_segments_kernel<uint64_t, 256>, a);
  return plan.threads == 32 ? launch(stream, config, network_segments_kernel<uint32_t, 32>, a)
                            : launch(stream, config, network_segments_kernel<uint32_t, 256>, a);
}

}  // namespace jaxgpuops::sort
