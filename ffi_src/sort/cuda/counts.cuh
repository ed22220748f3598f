// How the blocks that count the digits of a row put their counts together (sweep.cuh, keys.cu, splitters.cu).
#pragma once

#include <cstdint>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "sort/cuda/digits.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kCountThreads = 512;  // of a block that counts

// Adds a block's counts, of kPasses digits, to those of its row. Returns whether this is the last of the row's blocks
// to do so; `counts` are then those of the row. `last` is in shared memory.
template <int kPasses>
__device__ __forceinline__ bool add_to_row(uint32_t* counts, uint32_t* all, uint32_t* counted, int64_t blocks,
                                           bool& last) {
  if (blocks == 1) return true;
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads)
    if (counts[c]) atomicAdd(all + c, counts[c]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counted, 1u) == blocks - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = __ldcg(all + c);
  return true;
}

// Writes to `all` how many elements of the row have a lower digit than each. Sets the bits in `active`, in shared
// memory, of the passes whose digits differ. The digits of pass p are in the order of d ^ turn_of(p).
template <int kPasses, class TurnOf>
__device__ __forceinline__ void sum_counts(const uint32_t* counts, uint32_t* all, int64_t length, uint32_t& active,
                                           const TurnOf& turn_of) {
  if (threadIdx.x == 0) active = 0;
  __syncthreads();
  // Each warp adds up the counts of a pass: each lane those of neighbouring digits.
  constexpr int kOfLane = kDigits / 32;
  static_assert(kPasses <= kCountThreads / 32);
  if (const uint32_t p = threadIdx.x / 32; p < kPasses) {
    const uint32_t turn = turn_of(p), first = threadIdx.x % 32 * kOfLane;
    uint32_t own[kOfLane], total = 0;
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      own[i] = counts[p * kDigits + ((first + i) ^ turn)];
      differ |= own[i] != 0 && own[i] != length;
      total += own[i];
    }
    uint32_t less = sum_up_to_lane(total) - total;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      all[p * kDigits + ((first + i) ^ turn)] = less;
      less += own[i];
    }
    if (differ) atomicOr(&active, 1u << p);
  }
  __syncthreads();
}

// ---- Tiles that look back -------------------------------------------------------------------------------------------

// A status word says what a tile has published about a digit: 0 means nothing yet; with the bit kSum it is the count of
// this tile and all before it; else it is the tile's own count plus 1.
constexpr uint32_t kSum = 1u << 31;

// Returns the sum of the counts of all tiles before this one, which has published its own count, `own`, and now
// publishes its sum. `status` has a digit's word of the first tile; kAhead words are loaded at once.
template <int kAhead>
__device__ __forceinline__ uint32_t sum_of_tiles_before(uint32_t* status, uint32_t tile, uint32_t own) {
  uint32_t before = 0;
  for (auto t = static_cast<int32_t>(tile) - 1; t >= 0;) {
    uint32_t published[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) published[j] = load_relaxed(status + int64_t{max(t - j, 0)} * kDigits);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (t < 0 || published[j] == 0) break;
      const bool is_sum = published[j] & kSum;
      before += is_sum ? published[j] & ~kSum : published[j] - 1;
      t = is_sum ? -1 : t - 1;
    }
  }
  store_relaxed(status + int64_t{tile} * kDigits, kSum | (before + own));
  return before;
}

// ---- Tiles that tell each other their counts ------------------------------------------------------------------------

// The sum of a group of tiles says in its upper bits how many of them have added their counts to it.
constexpr int kArrivedBits = 24;

// Publishes a tile's count of a digit: for its group, and for the tiles of its group. `words` and `sums` have the
// digit's words of the first tile and group.
__device__ __forceinline__ void tell(uint32_t* words, uint32_t* sums, uint32_t tile, uint32_t group, uint32_t own) {
  store_relaxed(words + int64_t{tile} * kDigits, own + 1);
  atomicAdd(sums + tile / group * kDigits, (1u << kArrivedBits) + own);
}

// Calls f(i, word) for words first to last - 1 of a digit as soon as is_there(i, word).
template <class There, class F>
__device__ __forceinline__ void await_words(const uint32_t* words, uint32_t first, uint32_t last, There is_there, F f) {
  constexpr int kLook = 8;  // words that a thread loads at once
#pragma unroll 1
  for (uint32_t t = first; t < last; t += kLook) {
    uint32_t word[kLook];
    const auto ask = [&](int j) { word[j] = load_relaxed(words + min(t + j, last - 1) * kDigits); };
#pragma unroll
    for (int j = 0; j < kLook; ++j) ask(j);
#pragma unroll
    for (int j = 0; j < kLook; ++j) {
      while (!is_there(min(t + j, last - 1), word[j])) ask(j);
      if (t + j < last) f(t + j, word[j]);
    }
  }
}

// Waits for the counts of all groups of a row. Adds them to `all`, and those of the groups before this one to `before`.
__device__ __forceinline__ void add_groups(const uint32_t* sums, uint32_t tiles, uint32_t group, uint32_t own_group,
                                           uint32_t& all, uint32_t& before) {
  await_words(
      sums, 0, (tiles - 1) / group + 1,
      [&](uint32_t g, uint32_t word) { return word >> kArrivedBits == min(group, tiles - g * group); },
      [&](uint32_t g, uint32_t word) {
        const uint32_t sum = word & ((1u << kArrivedBits) - 1);
        all += sum;
        if (g < own_group) before += sum;
      });
}

// Adds up the counts of the tiles of a group before this tile.
__device__ __forceinline__ uint32_t sum_in_group(const uint32_t* words, uint32_t tile, uint32_t group) {
  uint32_t before = 0;
  await_words(
      words, tile / group * group, tile, [](uint32_t, uint32_t word) { return word != 0; },
      [&](uint32_t, uint32_t word) { before += word - 1; });
  return before;
}

}  // namespace
}  // namespace jaxgpuops::sort
