// What select's kernels share that hold the keys of a row in shared memory: of a block, or of the blocks of a cluster,
// each of which has a part of the row.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "common/cuda/bulk_copy.cuh"
#include "count/cuda/select.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kBinBits = kSelectBinBits, kBins = 1 << kBinBits;

// 16 bytes of a row in shared memory.
template <class T>
struct alignas(16) Pack {
  static constexpr int kElements = 16 / sizeof(T);
  T element[kElements];
};

// Packs that a thread has at a time: 16 keys, or 8 of 64 bits.
template <class T>
constexpr int kPacks = sizeof(T) < 4 ? sizeof(T) : 4;

// Starts to copy packs of a row to shared memory. `start`: the number of the first pack's first element in the row,
// which is negative if the row begins behind it. Places before and after the row get copies of its first element. The
// last warp copies the packs that lie only partly in the row. The others are copied by the copy engine, if the GPU has
// one.
template <class T>
__device__ __forceinline__ void start_row_copy(Pack<T>* held, const T* __restrict__ x, int start, uint32_t length,
                                               int packs, uint64_t* copied) {
  constexpr int kPack = Pack<T>::kElements;
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int first_whole = start < 0, end_whole = packs - (start + packs * kPack > static_cast<int>(length));
  if (warp == warps - 1) {
    const int p = lane < kPack ? 0 : packs - 1, e = lane % kPack;
    if (lane < 2 * kPack && (p < first_whole || p >= end_whole)) {
      const auto at = static_cast<uint32_t>(start + p * kPack + e);
      held[p].element[e] = x[at < length ? at : 0];
    }
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      const uint32_t bytes = (end_whole - first_whole) * 16;
      make_copy_barrier(copied);
      make_barriers_visible();
      expect_copies(copied, bytes);
      copy_bulk(held + first_whole, x + start + first_whole * kPack, bytes, copied);
    }
#endif
  }
#if __CUDA_ARCH__ < 900
  for (int p = first_whole + threadIdx.x; p < end_whole; p += threads) copy_async(held + p, x + start + p * kPack);
  commit_async_copies();
#endif
}

// Calls `visit(key, has, start)` for all keys, kPacks packs of a thread at a time: key[i] are those of pack i, which
// counts if has[i]. `raw`: the packs still hold elements, which become keys now.
template <class T, class Visit>
__device__ __forceinline__ void for_keys(Pack<T>* held, int packs, SortOrder order, bool raw, Visit visit) {
  constexpr int kPack = Pack<T>::kElements;
  const int threads = blockDim.x, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  for (int start = warp * 32; start < packs; start += kPacks<T> * threads) {
    typename Found<T>::Word key[kPacks<T>][kPack];
    Pack<T> pack[kPacks<T>] = {};
    bool has[kPacks<T>];
#pragma unroll
    for (int i = 0; i < kPacks<T>; ++i) {
      has[i] = start + i * threads + lane < packs;
      if (has[i]) pack[i] = held[start + i * threads + lane];
    }
#pragma unroll
    for (int i = 0; i < kPacks<T>; ++i) {
      if (raw) {
#pragma unroll
        for (int e = 0; e < kPack; ++e) pack[i].element[e] = sort_key(pack[i].element[e], order);
        if (has[i]) held[start + i * threads + lane] = pack[i];
      }
#pragma unroll
      for (int e = 0; e < kPack; ++e) key[i][e] = pack[i].element[e];
    }
    visit(key, has, start);
  }
}

// Counts the keys in the parts of all tables in use. Returns the largest key, if `ends`.
template <class T, class ForKeys>
__device__ __forceinline__ typename Found<T>::Word count_all(uint32_t* tables, Found<T>& found, uint32_t used, bool raw,
                                                             bool ends, ForKeys for_keys) {
  typename Found<T>::Word highest = 0;
  for_keys(raw, [&](auto& key, auto& has, int) {
    if (raw && ends) {
#pragma unroll
      for (int i = 0; i < kPacks<T>; ++i) {
        if (!has[i]) continue;
#pragma unroll
        for (int e = 0; e < Pack<T>::kElements; ++e) highest = max(highest, key[i][e]);
      }
    }
    for_bits(used, [&](int t) { count_keys(kBinBits, tables, found, t, key, has); });
  });
  return highest;
}

// Writes a block's share of a partition of a row: the elements that sort before the element at `middle`, which has rank
// kth, then that element, then the others. Element i of the block is element first + i of the row, which `is_before`
// says to sort before the middle one, or not. A warp has the elements from `begin` to `end`, and each lane takes kAhead
// of them at a time. `before`: how many elements before the warp's go to the first part.
template <uint32_t kAhead, class T, class Chosen, class IsBefore>
__device__ __forceinline__ void write_around(uint32_t first, uint32_t middle, uint32_t kth, const T* __restrict__ x,
                                             uint32_t length, uint32_t begin, uint32_t end, uint32_t before,
                                             T* __restrict__ values, int32_t* __restrict__ indices, int64_t to,
                                             Chosen chosen_at, IsBefore is_before) {
  const int lane = threadIdx.x & 31;
  T* const to_values = values + to;
  int32_t* const to_indices = indices + to;
  for (uint32_t start = begin + lane; start - lane < end; start += 32 * kAhead) {
    T element[kAhead];
    if (values) {
#pragma unroll
      for (uint32_t j = 0; j < kAhead; ++j) element[j] = x[min(first + start + j * 32, length - 1)];
    }
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t at = first + start + j * 32;
      const unsigned lanes = chosen_at(start + j * 32, is_before);
      const uint32_t up_to = before + __popc(lanes & ((1u << lane) - 1));
      const uint32_t place = lanes >> lane & 1 ? up_to : at == middle ? kth : kth + (at < middle) + at - up_to;
      before += __popc(lanes);
      if (start + j * 32 >= end) continue;
      if (values) to_values[place] = element[j];
      if (indices) to_indices[place] = static_cast<int32_t>(at);
    }
  }
}

}  // namespace
}  // namespace jaxgpuops::count
