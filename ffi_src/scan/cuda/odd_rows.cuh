// Copies parts of rows of 16-bit elements that do not begin at a multiple of 16 bytes, between global and shared
// memory. A lane takes the 16 bytes that it wants from two aligned vectors, its own and that of a neighbouring lane.
// All lanes of a warp call these functions. The functions are not inlined, so that kernels share their code, and so
// that aligned rows, for which the kernels are tuned, need no more registers.
#pragma once

#include <cstdint>

#include "common/cuda/between.cuh"

namespace jaxgpuops::scan {

// Where pack number `pack` of a warp's part, in the order of memory, stands in shared memory. Packs are permuted within
// a run of kPacks, so that lanes meet in no bank; after 8 / kPacks runs the permutation changes.
template <int kPacks>
__device__ __forceinline__ int permuted(int pack) {
  return pack ^ (pack / 8 & (kPacks - 1));
}

// How many elements an address is past a multiple of 16 bytes.
__device__ __forceinline__ int elements_past(const uint16_t* at) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(at) / 2 % 8);
}

// Loads a part, which begins at element `first` of a row. The first vector may begin before the row, but it contains
// the row's first element.
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

}  // namespace jaxgpuops::scan
