// Sorts rows of up to 8 elements, each in the registers of a thread. Neighbours change places only where they are out
// of order, which makes the sort stable.
//
// Bytes moved: every element is read once, and every result is written once. Rows that follow one another in memory
// pass through shared memory, so that the global memory sees whole vectors; where the axis is not the last,
// neighbouring threads take neighbouring columns.
#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

struct ShortArgs {
  const void* x;
  void* values;      // null if only indices are wanted
  int32_t* indices;  // null if only values are wanted
  int64_t rows, inner;
  uint32_t length, tile_rows;  // rows of a block
  SortOrder order;
};

// A row, with room for kRoom elements.
template <class T, int kRoom>
struct alignas(kRoom * sizeof(T) < 16 ? kRoom * sizeof(T) : 16) Elements {
  T at[kRoom];
};

template <class Key, int kRoom>
__device__ __forceinline__ void sort_in_thread(Elements<Key, kRoom>& bits, Elements<int32_t, kRoom>& index,
                                               uint32_t length, const SortOrder& order) {
  Key key[kRoom];
#pragma unroll
  for (int i = 0; i < kRoom; ++i) {
    key[i] = i < length ? sort_key(bits.at[i], order) : static_cast<Key>(~Key{0});  // stays behind the others
    index.at[i] = i;
  }
#pragma unroll
  for (int round = 0; round < kRoom; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < kRoom; i += 2) {
      const bool swap = key[i + 1] < key[i];
      const auto exchange = [swap](auto& a, auto& b) {
        const auto first = swap ? b : a;
        b = swap ? a : b;
        a = first;
      };
      exchange(key[i], key[i + 1]);
      exchange(bits.at[i], bits.at[i + 1]);
      exchange(index.at[i], index.at[i + 1]);
    }
  }
}

// Reads or writes the row at `row`; slots past its length keep what they have.
template <class T, int kRoom>
__device__ __forceinline__ void read_row(Elements<T, kRoom>& to, const T* row, int64_t step, uint32_t length) {
#pragma unroll
  for (int i = 0; i < kRoom; ++i) to.at[i] = i < length ? row[i * step] : T{};
}
template <class T, int kRoom>
__device__ __forceinline__ void write_row(T* row, const Elements<T, kRoom>& from, int64_t step, uint32_t length) {
#pragma unroll
  for (int i = 0; i < kRoom; ++i)
    if (i < length) row[i * step] = from.at[i];
}

// Returns how many of `count` elements stand in whole vectors that `pointer` aligns.
template <class T>
__device__ __forceinline__ uint32_t in_vectors(const T* pointer, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 ? count / kVector * kVector : 0;
}

template <class T>
__device__ __forceinline__ void store_tile(T* to, const T* tile, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  const uint32_t whole = in_vectors(to, count);
  for (uint32_t e = threadIdx.x * kVector; e < whole; e += kShortThreads * kVector)
    *reinterpret_cast<uint4*>(to + e) = *reinterpret_cast<const uint4*>(tile + e);
  for (uint32_t e = whole + threadIdx.x; e < count; e += kShortThreads) to[e] = tile[e];
}

template <class Key, int kRoom>
__global__ void __launch_bounds__(kShortThreads) short_rows_kernel(const __grid_constant__ ShortArgs a) {
  __shared__ __align__(16) Key tile[kShortTile];
  __shared__ __align__(16) int32_t places[kShortTile];
  const int64_t first = int64_t{blockIdx.x} * a.tile_rows * a.length;
  const auto rows = static_cast<uint32_t>(min(int64_t{a.tile_rows}, a.rows - int64_t{blockIdx.x} * a.tile_rows));
  const uint32_t count = rows * a.length;
  const Key* const x = static_cast<const Key*>(a.x) + first;
  constexpr uint32_t kVector = 16 / sizeof(Key);
  const uint32_t whole = in_vectors(x, count);
  for (uint32_t e = threadIdx.x * kVector; e < whole; e += kShortThreads * kVector) copy_async(tile + e, x + e);
  for (uint32_t e = whole + threadIdx.x; e < count; e += kShortThreads) tile[e] = x[e];
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < rows; r += kShortThreads) {
    Elements<Key, kRoom> bits;
    Elements<int32_t, kRoom> index;
    auto* const row = tile + r * a.length;
    auto* const places_of_row = places + r * a.length;
    if (a.length == kRoom) {  // the row is one or two vectors of shared memory
      bits = *reinterpret_cast<Elements<Key, kRoom>*>(row);
      sort_in_thread(bits, index, kRoom, a.order);
      *reinterpret_cast<Elements<Key, kRoom>*>(row) = bits;
      if (a.indices) *reinterpret_cast<Elements<int32_t, kRoom>*>(places_of_row) = index;
    } else {
      read_row(bits, row, 1, a.length);
      sort_in_thread(bits, index, a.length, a.order);
      write_row(row, bits, 1, a.length);
      if (a.indices) write_row(places_of_row, index, 1, a.length);
    }
  }
  __syncthreads();
  if (a.values) store_tile(static_cast<Key*>(a.values) + first, tile, count);
  if (a.indices) store_tile(a.indices + first, places, count);
}

template <class Key, int kRoom>
__global__ void __launch_bounds__(kShortThreads) short_columns_kernel(const __grid_constant__ ShortArgs a) {
  const int64_t row = int64_t{blockIdx.x} * kShortThreads + threadIdx.x;
  if (row >= a.rows) return;
  const int64_t outer = a.rows >> 32 ? row / a.inner : static_cast<uint32_t>(row) / static_cast<uint32_t>(a.inner);
  const int64_t first = row + outer * (a.length - 1) * a.inner;
  Elements<Key, kRoom> bits;
  Elements<int32_t, kRoom> index;
  read_row(bits, static_cast<const Key*>(a.x) + first, a.inner, a.length);
  sort_in_thread(bits, index, a.length, a.order);
  if (a.values) write_row(static_cast<Key*>(a.values) + first, bits, a.inner, a.length);
  if (a.indices) write_row(a.indices + first, index, a.inner, a.length);
}

template <class Key, int kRoom>
cudaError_t run(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const ShortArgs a{buffers.x,          buffers.values, buffers.indices,         problem.rows.count(),
                    problem.rows.inner, length,         short_tile_rows(length), problem.order};
  const Launch config{dim3(static_cast<unsigned>(short_blocks(problem.rows))), dim3(kShortThreads)};
  return problem.rows.inner == 1 ? launch(stream, config, short_rows_kernel<Key, kRoom>, a)
                                 : launch(stream, config, short_columns_kernel<Key, kRoom>, a);
}

}  // namespace

cudaError_t launch_short(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if (problem.rows.length <= 2) return run<Key, 2>(stream, problem, buffers);
    return problem.rows.length <= 4 ? run<Key, 4>(stream, problem, buffers) : run<Key, 8>(stream, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
