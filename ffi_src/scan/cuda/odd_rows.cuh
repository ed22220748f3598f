// Copies parts of rows that do not begin at a multiple of 16 bytes, between global and shared memory. A lane takes the
// 16 bytes that it wants from the two aligned vectors that contain them. All lanes of a warp call these functions. The
// functions are not inlined, so that aligned rows, for which the kernels are tuned, need no more registers.
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

// What a warp has of some rows: of each row the elements from `begin` to `end`. Its packs begin at element `origin`,
// which is before the row if the scan runs backward. A row has 2^run_bits runs of kPacks packs.
struct Parts {
  int rows, run_bits, length, origin, begin, end;
};

// Clears the elements of a pack that are not between `begin` and `end`; the pack begins at element `at`.
template <class Item>
__device__ __forceinline__ void clear_outside(Pack& pack, int at, int begin, int end) {
  constexpr int n = 16 / sizeof(Item);
  if (at >= begin && at + n <= end) return;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (at + i < begin || at + i >= end) set<Item>(pack, i, Item{});
}

// Loads the parts; if kClear, other elements of their packs become 0. Each lane passes the row to which its run
// belongs. A pack is taken from the two aligned vectors that contain it; a vector is read only if it has an element of
// the part.
template <int kPacks, bool kClear, class Item>
__device__ __noinline__ void fetch_parts(Pack* packs, const Item* row_of_run, const Parts parts) {
  constexpr int n = 16 / sizeof(Item), kBits = kPacks / 2;  // log2 of kPacks, which is 2 or 4
  const int lane = threadIdx.x % 32;
  Pack low[kPacks], high[kPacks];
  int past[kPacks], at[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = u * 32 + lane, row = pack >> (parts.run_bits + kBits);
    const auto* const data = shuffle_from(row_of_run, row << parts.run_bits);
    at[u] = parts.origin + (pack - (row << (parts.run_bits + kBits))) * n;
    if (row >= parts.rows) at[u] = parts.end;
    past[u] = static_cast<int>(reinterpret_cast<uintptr_t>(data + at[u]) / sizeof(Item) % n);
    const int first = at[u] - past[u];  // of the first vector
    const auto* const from = reinterpret_cast<const Pack*>(data + first);
    low[u] = high[u] = {};
    if (at[u] < parts.end && first + n > parts.begin) low[u] = from[0];
    if (past[u] > 0 && first + n < parts.end && first + 2 * n > parts.begin) high[u] = from[1];
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    Pack pack = between<sizeof(Item), 15>(low[u], high[u], past[u] * static_cast<int>(sizeof(Item)));
    if (kClear) clear_outside<Item>(pack, at[u], parts.begin, parts.end);
    packs[permuted<kPacks>(u * 32 + lane)] = pack;
  }
}

// Stores the parts of rows that follow each other in memory: aligned vectors, and the elements that are in none.
template <int kPacks, class Item>
__device__ __noinline__ void store_parts(const Pack* packs, Item* rows, const Parts parts) {
  constexpr int n = 16 / sizeof(Item), kBits = kPacks / 2;
  const int lane = threadIdx.x % 32;
  const auto to_aligned = [](const Item* at) {
    return static_cast<int>((0 - reinterpret_cast<uintptr_t>(at) / sizeof(Item)) % n);
  };
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = u * 32 + lane, row = pack >> (parts.run_bits + kBits);
    const int at = parts.origin + (pack - (row << (parts.run_bits + kBits))) * n;
    Item* const to = rows + row * parts.length + at;
    const int head = to_aligned(to);
    if (row >= parts.rows || at + head < parts.begin || at + head + n > parts.end) continue;
    const Pack own = packs[permuted<kPacks>(pack)], next = packs[permuted<kPacks>(head > 0 ? pack + 1 : pack)];
    *reinterpret_cast<Pack*>(to + head) = between<sizeof(Item), 15>(own, next, head * static_cast<int>(sizeof(Item)));
  }
#pragma unroll 1
  for (int i = lane; i < parts.rows * 2 * n; i += 32) {
    const int row = i / (2 * n), e = i % n;
    Item* const to = rows + row * parts.length;
    const int head = min(parts.begin + to_aligned(to + parts.begin), parts.end),
              tail = parts.end - (parts.end - head) % n;
    const int at = i % (2 * n) < n ? parts.begin + e : tail + e;
    if (at >= (i % (2 * n) < n ? head : parts.end)) continue;
    const int in_part = at - parts.origin, pack = (row << (parts.run_bits + kBits)) + in_part / n;
    to[at] = reinterpret_cast<const Item*>(packs + permuted<kPacks>(pack))[in_part % n];
  }
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
    const int lane = threadIdx.x % 32, run = run_of_lane(), past = elements_past(part);
    if (begin > 0 || end < 32 * kPacks * n) {  // only the vectors in which the row begins and ends have others
      if (lane < n)
        for (const int at : {begin, end}) {
          const int i = (at + past) / n, e = i * n - past + lane;
          if (e < begin || e >= end) reinterpret_cast<Item*>(vector(i))[lane] = Item{};
        }
      __syncwarp();
    }
    Pack vectors[kPacks + 1];
#pragma unroll
    for (int j = 0; j <= kPacks; ++j) vectors[j] = *vector(run * kPacks + j);
#pragma unroll
    for (int j = 0; j < kPacks; ++j) vectors[j] = between<kBytes, 15>(vectors[j], vectors[j + 1], past * kBytes);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPacks; ++j) *vector(run * kPacks + j) = vectors[j];
  }

  // Takes the packs of the lane's run, in the direction of the scan, but each in the order of memory. Elements outside
  // the row may be anything.
  __device__ void take(const Item* part, Pack (&of_run)[kPacks]) const {
    const int run = run_of_lane(), past = elements_past(part);
    Pack vectors[kPacks + 1];
#pragma unroll
    for (int j = 0; j <= kPacks; ++j) vectors[j] = *vector(run * kPacks + j);
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const Pack pack = between<kBytes, 15>(vectors[j], vectors[j + 1], past * kBytes);
      if (backward) {
        of_run[kPacks - 1 - j] = pack;
      } else {
        of_run[j] = pack;
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
  __device__ int run_of_lane() const {
    const int lane = threadIdx.x % 32;
    return backward ? 31 - lane : lane;
  }
  __device__ Pack* vector(int i) const { return i < 32 * kPacks ? packs + permuted<kPacks>(i) : beyond; }
};

}  // namespace jaxgpuops::scan
