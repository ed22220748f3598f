// What select's kernels share that hold the keys of a row in shared memory: of a block, or of the blocks of a cluster,
// each of which has a part of the row.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "common/cuda/bulk_copy.cuh"
#include "select/cuda/select.cuh"

namespace jaxgpuops::select {
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
        make_keys(pack[i].element, order);
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

// Returns the number in the row of the last one of a thread's elements that are in a set, as keys_between() returns it,
// or 0. `at`: returns the number of the element at a place, or one past the row.
template <class At>
__device__ __forceinline__ uint32_t last_in_row(uint32_t set, uint32_t length, At at) {
  while (set) {
    const int place = 31 - __clz(static_cast<int>(set));
    if (const uint32_t index = at(place); index < length) return index;
    set ^= 1u << place;
  }
  return 0;
}

// Whether an element sorts before the one at `middle`, whose key is given.
template <class T>
struct IsBefore {
  T key;
  uint32_t middle;

  __device__ __forceinline__ bool operator()(T own, uint32_t at) const {
    return own < key || (own == key && at < middle);
  }
};

// Writes a warp's share of a partition of a row: the elements that sort before the one that has rank kth, then that
// one, then the others. The warp has the elements from `begin` to `end` of those at `keys`, whose first one is element
// `first` of the row; each lane takes kAhead of them at a time. `before`: how many earlier elements go to the first
// part. `values` or `indices` may be null.
template <uint32_t kAhead, class T>
__device__ __forceinline__ void write_around(const T* keys, const IsBefore<T>& is_before, uint32_t kth,
                                             const T* __restrict__ x, uint32_t first, uint32_t begin, uint32_t end,
                                             uint32_t before, T* __restrict__ values, int32_t* __restrict__ indices) {
  const uint32_t lane = threadIdx.x & 31, lower = (1u << lane) - 1;
  uint32_t writes = (values != nullptr) + 2 * (indices != nullptr);
  const auto write = [&](uint32_t i, bool has, T element) {
    const uint32_t at = first + i;
    const bool is_first = has && is_before(keys[i], at);
    const unsigned lanes = __ballot_sync(kEveryLane, is_first);
    const uint32_t up_to = before + __popc(lanes & lower);
    before += __popc(lanes);
    const uint32_t others = at == is_before.middle ? kth : kth + (at < is_before.middle) + at - up_to;
    const uint32_t place = is_first ? up_to : others;
    if (has && (writes & 1)) values[place] = element;
    if (has && (writes & 2)) indices[place] = static_cast<int32_t>(at);
  };
  x += first;
  uint32_t i = begin + lane;
#pragma unroll 1
  for (; i - lane + 32 * kAhead <= end; i += 32 * kAhead) {
    asm volatile("" : "+r"(writes));  // else the compiler would make a loop for each value
    T element[kAhead];
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j) element[j] = x[i + j * 32];
#pragma unroll
    for (uint32_t j = 0; j < kAhead; ++j) write(i + j * 32, true, element[j]);
  }
#pragma unroll 1
  for (; i - lane < end; i += 32) {
    asm volatile("" : "+r"(writes));
    const uint32_t at = min(i, end - 1);
    write(at, i < end, x[at]);
  }
}

}  // namespace
}  // namespace jaxgpuops::select
