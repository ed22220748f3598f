// Sorts rows of up to 8 elements, each in the registers of a thread. Neighbours change places only if they are out of
// order, so the sort is stable. Of columns, the first k may be all that is wanted.
//
// Bytes moved: every element is read once, and every result is written once. Rows that lie close together in memory are
// copied through shared memory, so that global loads and stores are whole vectors. Where inner is large, neighbouring
// threads have neighbouring columns instead.
#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

struct ShortArgs {
  const void* x;
  void* values;      // null if only indices are wanted
  int32_t* indices;  // null if only values are wanted
  int64_t outer, inner;
  uint32_t length, k, tile_outers;
  uint32_t per_inner;  // r / inner is the high word of r * per_inner
  SortOrder order;
};

// A row, with room for kRoom elements.
template <class T, int kRoom>
struct alignas(kRoom * sizeof(T) < 16 ? kRoom * sizeof(T) : 16) Elements {
  T at[kRoom];

  __device__ __forceinline__ void read(const T* row, int64_t step, uint32_t length) {
#pragma unroll
    for (int i = 0; i < kRoom; ++i) at[i] = i < length ? row[i * step] : T{};
  }
  __device__ __forceinline__ void write(T* row, int64_t step, uint32_t length) const {
#pragma unroll
    for (int i = 0; i < kRoom; ++i)
      if (i < length) row[i * step] = at[i];
  }
};

template <class Key, int kRoom>
__device__ __forceinline__ void sort_in_thread(Elements<Key, kRoom>& bits, Elements<int32_t, kRoom>& index,
                                               uint32_t length, const SortOrder& order) {
  using Word = std::conditional_t<sizeof(Key) < 4, uint32_t, Key>;
  // `moved` changes places with the keys: the element, and above it, if it has at most 16 bits, its index.
  Word key[kRoom], moved[kRoom];
#pragma unroll
  for (int i = 0; i < kRoom; ++i) {
    // Missing elements get the last key, so they stay behind the others.
    key[i] = i < length ? sort_key(bits.at[i], order) : static_cast<Key>(~Key{0});
    moved[i] = sizeof(Key) < 4 ? bits.at[i] | i << 16 : bits.at[i];
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
      exchange(moved[i], moved[i + 1]);
      if constexpr (sizeof(Key) >= 4) exchange(index.at[i], index.at[i + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRoom; ++i) {
    bits.at[i] = static_cast<Key>(moved[i]);
    if constexpr (sizeof(Key) < 4) index.at[i] = static_cast<int32_t>(moved[i] >> 16);
  }
}

// Returns how many of the `count` elements at `pointer` lie in whole vectors; none if it is not aligned.
template <class T>
__device__ __forceinline__ uint32_t in_vectors(const T* pointer, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 ? count / kVector * kVector : 0;
}

template <class T>
__device__ __forceinline__ void load_tile(T* tile, const T* from, uint32_t count) {
  constexpr uint32_t kVector = 16 / sizeof(T);
  const uint32_t whole = in_vectors(from, count);
  for (uint32_t e = threadIdx.x * kVector; e < whole; e += kShortThreads * kVector) copy_async(tile + e, from + e);
  for (uint32_t e = whole + threadIdx.x; e < count; e += kShortThreads) tile[e] = from[e];
  commit_async_copies();
  wait_for_async_copies<0>();
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
__global__ void __launch_bounds__(kShortThreads) short_tiles_kernel(const __grid_constant__ ShortArgs a) {
  __shared__ __align__(16) Key tile[kShortTile];
  __shared__ __align__(16) int32_t places[kShortTile];
  const int64_t outer = int64_t{blockIdx.x} * a.tile_outers, first = outer * a.length * a.inner;
  const auto inner = static_cast<uint32_t>(a.inner);
  const uint32_t rows = static_cast<uint32_t>(min(int64_t{a.tile_outers}, a.outer - outer)) * inner;
  load_tile(tile, static_cast<const Key*>(a.x) + first, rows * a.length);
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < rows; r += kShortThreads) {
    Elements<Key, kRoom> bits;
    Elements<int32_t, kRoom> index;
    if (inner == 1 && a.length == kRoom) {  // the row is read from shared memory in whole vectors
      bits = *reinterpret_cast<Elements<Key, kRoom>*>(tile + r * kRoom);
      sort_in_thread(bits, index, kRoom, a.order);
      *reinterpret_cast<Elements<Key, kRoom>*>(tile + r * kRoom) = bits;
      if (a.indices) *reinterpret_cast<Elements<int32_t, kRoom>*>(places + r * kRoom) = index;
    } else {
      const uint32_t at = r + (inner == 1 ? r : __umulhi(r, a.per_inner)) * (a.length - 1) * inner;
      bits.read(tile + at, inner, a.length);
      sort_in_thread(bits, index, a.length, a.order);
      bits.write(tile + at, inner, a.length);
      if (a.indices) index.write(places + at, inner, a.length);
    }
  }
  __syncthreads();
  if (a.values) store_tile(static_cast<Key*>(a.values) + first, tile, rows * a.length);
  if (a.indices) store_tile(a.indices + first, places, rows * a.length);
}

template <class Key, int kRoom>
__global__ void __launch_bounds__(kShortThreads) short_columns_kernel(const __grid_constant__ ShortArgs a) {
  const int64_t rows = a.outer * a.inner, row = int64_t{blockIdx.x} * kShortThreads + threadIdx.x;
  if (row >= rows) return;
  const int64_t outer = rows >> 32 ? row / a.inner : static_cast<uint32_t>(row) / static_cast<uint32_t>(a.inner);
  const int64_t first = row + outer * (a.length - 1) * a.inner;
  Elements<Key, kRoom> bits;
  Elements<int32_t, kRoom> index;
  bits.read(static_cast<const Key*>(a.x) + first, a.inner, a.length);
  sort_in_thread(bits, index, a.length, a.order);
  const int64_t to = row + outer * (a.k - 1) * a.inner;
  if (a.values) bits.write(static_cast<Key*>(a.values) + to, a.inner, a.k);
  if (a.indices) index.write(a.indices + to, a.inner, a.k);
}

template <class Key, int kRoom>
cudaError_t run(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  const auto [outer, length, inner] = problem.rows;
  const ShortArgs a{buffers.x,
                    buffers.values,
                    buffers.indices,
                    outer,
                    inner,
                    static_cast<uint32_t>(length),
                    static_cast<uint32_t>(problem.k),
                    static_cast<uint32_t>(short_tile_outers(problem.rows, problem.k)),
                    static_cast<uint32_t>(((uint64_t{1} << 32) + inner - 1) / inner),
                    problem.order};
  const Launch config{dim3(static_cast<unsigned>(short_blocks(problem.rows, problem.k))), dim3(kShortThreads)};
  return a.tile_outers ? launch(stream, config, short_tiles_kernel<Key, kRoom>, a)
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
