// Copies parts of rows that do not begin at a multiple of 16 bytes, between global and shared memory. A lane takes the
// 16 bytes that it wants from the two aligned vectors that contain them. All lanes of a warp call these functions. The
// functions are not inlined, so that kernels share their code, and so that aligned rows, for which the kernels are
// tuned, need no more registers.
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

// What a warp has of some rows: of each row the elements from `begin` to `end`. Its packs begin at element `origin`,
// which is before the row if the scan runs backward. A row has 2^run_bits runs of kPacks packs.
struct Parts {
  int rows, run_bits, length, origin, begin, end;
};

// Clears the elements of a pack that are not in a part; the pack begins at element `at` of the row.
template <class Item>
__device__ __forceinline__ void clear_outside(Pack& pack, int at, const Parts& parts) {
  constexpr int n = 16 / sizeof(Item);
  if (at >= parts.begin && at + n <= parts.end) return;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (at + i < parts.begin || at + i >= parts.end) set<Item>(pack, i, Item{});
}

// Loads the parts; other elements of their packs become 0. Each lane passes the row to which its run belongs. A pack
// is taken from the two aligned vectors that contain it; a vector is read only if it has an element of the part.
template <int kPacks, class Item>
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
    clear_outside<Item>(pack, at[u], parts);
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
    const int head = min(parts.begin + to_aligned(to + parts.begin), parts.end), tail = parts.end - (parts.end - head) % n;
    const int at = i % (2 * n) < n ? parts.begin + e : tail + e;
    if (at >= (i % (2 * n) < n ? head : parts.end)) continue;
    const int in_part = at - parts.origin, pack = (row << (parts.run_bits + kBits)) + in_part / n;
    to[at] = reinterpret_cast<const Item*>(packs + permuted<kPacks>(pack))[in_part % n];
  }
}

// Starts to copy the aligned vectors that contain a part of one row, whose first pack would begin at `first`. There is
// one vector more than the part has packs.
template <int kPacks, class Item>
__device__ __noinline__ void copy_odd_part(Pack* packs, Pack* beyond, const Item* first, const Parts parts) {
  constexpr int n = 16 / sizeof(Item);
  const int lane = threadIdx.x % 32, past = static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(Item) % n);
  const auto copy = [&](Pack* to, int pack) {
    const int e = pack * n - past;
    copy_async_or_clear(to, first + e, e + n > parts.begin && e < parts.end);
  };
#pragma unroll
  for (int u = 0; u < kPacks; ++u) copy(packs + permuted<kPacks>(u * 32 + lane), u * 32 + lane);
  if (lane == 0) copy(beyond, kPacks * 32);
}

// Replaces the vectors by the packs of the part. Elements that are not in it become 0.
template <int kPacks, class Item>
__device__ __noinline__ void align_odd_part(Pack* packs, const Pack* beyond, const Item* first, const Parts parts) {
  constexpr int n = 16 / sizeof(Item);
  const int lane = threadIdx.x % 32, past = static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(Item) % n);
  Pack aligned[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = u * 32 + lane;
    const Pack* const next = pack + 1 < 32 * kPacks ? packs + permuted<kPacks>(pack + 1) : beyond;
    aligned[u] = between<sizeof(Item), 15>(packs[permuted<kPacks>(pack)], *next, past * static_cast<int>(sizeof(Item)));
    clear_outside<Item>(aligned[u], pack * n, parts);
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kPacks; ++u) packs[permuted<kPacks>(u * 32 + lane)] = aligned[u];
  __syncwarp();
}

}  // namespace jaxgpuops::scan
