// Copies parts of rows that do not begin at a multiple of 16 bytes, between global and shared memory. A lane takes the
// 16 bytes that it wants from the two aligned vectors that contain them. All lanes of a warp call these functions.
#pragma once

#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/between.cuh"

namespace jaxgpuops::scan {

// Where pack number `pack` of a warp's part, in the order of memory, stands in shared memory. Packs are permuted within
// a run of kPacks, so that lanes meet in no bank; after 8 / kPacks runs the permutation changes.
template <int kPacks>
__device__ __forceinline__ int permuted(int pack) {
  return pack ^ (pack / 8 & (kPacks - 1));
}

// How many elements an address is past a multiple of 16 bytes.
template <class Item>
__device__ __forceinline__ int elements_past(const Item* at) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(at) / sizeof(Item) % (16 / sizeof(Item)));
}

// Sets an element of a run whose number is not a constant.
template <class Item, int kPacks>
__device__ __forceinline__ void set_element(Pack (&run)[kPacks], int element, Item value) {
  constexpr int n = 16 / sizeof(Item);
#pragma unroll
  for (int i = 0; i < kPacks * n; ++i)
    if (i == element) set<Item>(run[i / n], i % n, value);
}

// Clears the elements of a pack that are not between `begin` and `end`; the pack begins at element `at`.
template <class Item>
__device__ __forceinline__ void clear_outside(Pack& pack, int at, int begin, int end) {
  constexpr int n = 16 / sizeof(Item);
  if (at >= begin && at + n <= end) return;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (at + i < begin || at + i >= end) set<Item>(pack, i, Item{});
}

// A warp's part of one row: 32 runs of kPacks packs, in the order of memory. Elements of the row are those from `begin`
// to `end` of the part. The vectors of memory that contain the part come to shared memory as they are, the first one to
// the place of the first pack; there may be one more than there are packs, which goes to `beyond`. Lanes shift them to
// packs, and packs of results back to vectors, on the way through their registers.
template <int kPacks, class Item>
struct OddPart {
  static constexpr int n = 16 / sizeof(Item), kBytes = sizeof(Item);
  Pack* packs;
  Pack* beyond;
  int begin, end;
  bool backward;  // whether the first lane has the last run

  // Starts to copy the vectors. Those without an element of the row become 0.
  __device__ void copy(const Item* part) const {
    const int lane = threadIdx.x % 32, past = elements_past(part);
    const auto one = [&](Pack* to, int i) {
      const int e = i * n - past;
      copy_async_or_clear(to, part + e, max(e, begin) < min(e + n, end));
    };
#pragma unroll
    for (int u = 0; u < kPacks; ++u) one(packs + u * 32 + permuted<kPacks>(lane), u * 32 + lane);
    if (lane == 0) one(beyond, 32 * kPacks);
  }

  // Replaces the vectors by packs. Elements outside the row become 0.
  __device__ void to_packs(const Item* part) const {
    const int run = run_of_lane(), past = elements_past(part);
    Pack vectors[kPacks + 1];
#pragma unroll
    for (int j = 0; j <= kPacks; ++j) vectors[j] = *vector(run * kPacks + j);
#pragma unroll
    for (int j = 0; j < kPacks; ++j) vectors[j] = between<kBytes, 15>(vectors[j], vectors[j + 1], past * kBytes);
    if (begin > 0 || end < 32 * kPacks * n)
#pragma unroll
      for (int j = 0; j < kPacks; ++j) clear_outside<Item>(vectors[j], (run * kPacks + j) * n, begin, end);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPacks; ++j) *vector(run * kPacks + j) = vectors[j];
  }

  // Returns an element, counted from the first one of the first vector.
  __device__ Item& element(int e) const {
    return reinterpret_cast<Item*>(packs)[e ^ (e / (8 * n) & (kPacks - 1)) * n];
  }

  // Takes the packs of a run that begins at an element, counted so; it may be negative. The first pack is the last one
  // in memory if the run is `reversed`. Elements outside the part may be anything.
  __device__ void take(int at, bool reversed, Pack (&run)[kPacks]) const {
    const int first = at >> (kBytes == 1 ? 4 : 3), shift = (at & (n - 1)) * kBytes;
    Pack vectors[kPacks + 1];
#pragma unroll
    for (int j = 0; j <= kPacks; ++j) vectors[j] = *vector(max(first + j, 0));
#pragma unroll
    for (int j = 0; j < kPacks; ++j) run[j] = between<kBytes, 15>(vectors[j], vectors[j + 1], shift);
    if (reversed) swap_ends(run);
  }

  // Writes the elements `begin` to `end` of such a run, in words, and in elements where it shares a word.
  __device__ void put(int at, bool reversed, const Pack (&of_run)[kPacks], int begin, int end) const {
    constexpr int kInWord = 4 / kBytes, kWords = 4 * kPacks;
    Pack run[kPacks];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) run[j] = of_run[j];
    if (reversed) swap_ends(run);
    const int past = at & (kInWord - 1), first = (at - past) / kInWord;
#pragma unroll
    for (int k = 0; k <= kWords; ++k) {
      const uint32_t before = k > 0 ? run[(k - 1) / 4].word[(k - 1) % 4] : 0;
      const uint32_t own = k < kWords ? run[k / 4 % kPacks].word[k % 4] : 0;
      const uint32_t word = __funnelshift_l(before, own, 8 * kBytes * past);
      const int e = k * kInWord - past, place = first + k;
      uint32_t* const to = reinterpret_cast<uint32_t*>(packs) + (place ^ (place / 32 & (kPacks - 1)) * 4);
      if (e >= begin && e + kInWord <= end) {
        *to = word;
      } else {
#pragma unroll
        for (int i = 0; i < kInWord; ++i)
          if (e + i >= begin && e + i < end)
            reinterpret_cast<Item*>(to)[i] = static_cast<Item>(word >> (8 * kBytes * i));
      }
    }
  }

  // Writes the packs of a lane's run, which are in the direction of the scan, as vectors. Each has the end of a pack
  // and the begin of the next.
  __device__ void to_vectors(const Item* part, const Pack (&of_run)[kPacks]) const {
    const int lane = threadIdx.x % 32, run = run_of_lane(), past = elements_past(part);
    const int at = 16 - past * kBytes;
    const auto pack = [&](int j) { return backward ? of_run[kPacks - 1 - j] : of_run[j]; };
    Pack before = shuffle_from(pack(kPacks - 1), (backward ? lane + 1 : lane + 31) % 32);
    __syncwarp();  // all lanes have taken what was in the place of `beyond`
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const Pack own = pack(j);
      *vector(run * kPacks + j) = between<kBytes, 16>(before, own, at);
      before = own;
    }
    if (run == 31) *beyond = between<kBytes, 16>(before, before, at);
  }

  // Stores the vectors, and the elements of those that are not wholly in the row, or in the part.
  __device__ void store(Item* part) const {
    const int lane = threadIdx.x % 32, past = elements_past(part);
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const int e = (u * 32 + lane) * n - past;
      if (e >= begin && e + n <= end) *reinterpret_cast<Pack*>(part + e) = packs[u * 32 + permuted<kPacks>(lane)];
    }
    if (lane >= n) return;
    for (const int at : {begin, end}) {
      const int i = (at + past) / n, e = i * n - past + lane;
      if (e >= begin && e < end) part[e] = reinterpret_cast<const Item*>(vector(i))[lane];
    }
  }

 private:
  // Reverses the order of the packs.
  __device__ static void swap_ends(Pack (&run)[kPacks]) {
#pragma unroll
    for (int j = 0; j < kPacks / 2; ++j) {
      const Pack first = run[j];
      run[j] = run[kPacks - 1 - j];
      run[kPacks - 1 - j] = first;
    }
  }

  __device__ int run_of_lane() const {
    const int lane = threadIdx.x % 32;
    return backward ? 31 - lane : lane;
  }
  __device__ Pack* vector(int i) const { return i < 32 * kPacks ? packs + permuted<kPacks>(i) : beyond; }
};

}  // namespace jaxgpuops::scan
