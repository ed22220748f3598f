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

// Loads a part of 16-bit elements, which begins at element `first` of a row. The first vector may begin before the row,
// but it contains the row's first element.
template <int kPacks>
__device__ __noinline__ void fetch_odd_part(Pack* part, const uint16_t* row, int64_t first, int64_t length) {
  constexpr int kPart = 32 * kPacks * 8;
  const int lane = threadIdx.x % 32, past = elements_past(row + first);
  if (first < 0 || first - past + kPart + 8 > length) {  // one by one, where the row ends
#pragma unroll 8
    for (int e = lane; e < kPart; e += 32) {
      const int64_t i = first + e;
      reinterpret_cast<uint16_t*>(part + permuted<kPacks>(e / 8))[e % 8] = i >= 0 && i < length ? row[i] : uint16_t{0};
    }
    return;
  }
  const Pack* const from = reinterpret_cast<const Pack*>(row + first - past);
  Pack packs[kPacks + 1];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) packs[u] = from[u * 32 + lane];
  if (lane == 0) packs[kPacks] = from[kPacks * 32];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const Pack next = shuffle_from(lane == 0 ? packs[u + 1] : packs[u], (lane + 1) % 32);
    part[permuted<kPacks>(u * 32 + lane)] = between<2, 15>(packs[u], next, 2 * past);
  }
}

// Stores a part, all of which is inside a row.
template <int kPacks>
__device__ __noinline__ void store_odd_part(const Pack* part, uint16_t* to) {
  constexpr int kPart = 32 * kPacks * 8;
  const int lane = threadIdx.x % 32, past = elements_past(to), head = (8 - past) % 8;
  const auto element = [&](int e) { return reinterpret_cast<const uint16_t*>(part + permuted<kPacks>(e / 8))[e % 8]; };
  Pack last = {};
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const Pack own = part[permuted<kPacks>(u * 32 + lane)];
    const Pack before = shuffle_from(lane == 31 ? last : own, (lane + 31) % 32);
    last = own;
    if (u > 0 || lane > 0 || past == 0)
      reinterpret_cast<Pack*>(to - past)[u * 32 + lane] = between<2, 16>(before, own, 16 - 2 * past);
  }
  if (lane < head) to[lane] = element(lane);
  if (lane < past) to[kPart - past + lane] = element(kPart - past + lane);
}

// What a warp has of some rows: of each row the elements from `begin` to `end`. Its packs begin at element `origin`,
// which is before the row if the scan runs backward. A row has 2^run_bits runs of kPacks packs.
struct Parts {
  int rows, run_bits, length, origin, begin, end;
  // From the first part to the last one; if there are several, they are whole rows.
  __device__ int elements() const { return rows > 0 ? (rows - 1) * length + end - begin : 0; }
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
    const int head = min(parts.begin + to_aligned(to + parts.begin), parts.end),
              tail = parts.end - (parts.end - head) % n;
    const int at = i % (2 * n) < n ? parts.begin + e : tail + e;
    if (at >= (i % (2 * n) < n ? head : parts.end)) continue;
    const int in_part = at - parts.origin, pack = (row << (parts.run_bits + kBits)) + in_part / n;
    to[at] = reinterpret_cast<const Item*>(packs + permuted<kPacks>(pack))[in_part % n];
  }
}

// Starts to copy the aligned vectors that contain the parts; rows follow each other in memory. There may be one vector
// more than the parts have packs, which goes to `beyond`.
template <int kPacks, class Item>
__device__ __noinline__ void copy_parts(Pack* packs, Pack* beyond, const Item* rows, const Parts parts) {
  constexpr int n = 16 / sizeof(Item);
  const Item* const first = rows + parts.begin;
  const int lane = threadIdx.x % 32, past = elements_past(first), count = parts.elements();
  const int vectors = count > 0 ? (past + count + n - 1) / n : 0;
  const auto copy = [&](Pack* to, int i) { copy_async_or_clear(to, first - past + i * n, i < vectors); };
#pragma unroll
  for (int u = 0; u < kPacks; ++u) copy(packs + permuted<kPacks>(u * 32 + lane), u * 32 + lane);
  if (lane == 0) copy(beyond, kPacks * 32);
}

// When the vectors are there, replaces them by the packs of the parts. Elements that are in no part become 0.
template <int kPacks, class Item>
__device__ __noinline__ void align_parts(Pack* packs, const Pack* beyond, const Item* rows, const Parts parts) {
  constexpr int n = 16 / sizeof(Item), kBits = kPacks / 2;
  const int lane = threadIdx.x % 32, past = elements_past(rows + parts.begin);
  const auto vector = [&](int i) {
    i = max(i, 0);
    return *(i < 32 * kPacks ? packs + permuted<kPacks>(i) : beyond);
  };
  Pack aligned[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int pack = u * 32 + lane, row = pack >> (parts.run_bits + kBits);
    const int at = parts.origin + (pack - (row << (parts.run_bits + kBits))) * n;
    aligned[u] = {};
    if (row >= parts.rows || at >= parts.end || at + n <= parts.begin) continue;
    const int from = past + row * parts.length + at - parts.begin, first = from < 0 ? -1 : from / n;
    aligned[u] = between<sizeof(Item), 15>(vector(first), vector(first + 1),
                                           (from - first * n) * static_cast<int>(sizeof(Item)));
    clear_outside<Item>(aligned[u], at, parts);
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kPacks; ++u) packs[permuted<kPacks>(u * 32 + lane)] = aligned[u];
  __syncwarp();
}

}  // namespace jaxgpuops::scan
