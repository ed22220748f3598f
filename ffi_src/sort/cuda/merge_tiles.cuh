// The tiles of merge.cu: where they begin, what they have in shared memory, and how their segments are found and
// merged.
#pragma once

#include "sort/cuda/kernels.h"
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/segment_digits.cuh"

namespace jaxgpuops::sort {
namespace {

// Where a tile begins and the one before it ends.
struct Border {
  uint32_t place;
  int64_t offset;  // the number of an offset; those before it are not after the border
  bool cuts;       // whether a segment has elements on both sides
  Range across;    // see MergeArgs
};

struct MergeArgs {
  const void* x;
  void* values;      // null: not wanted
  int32_t* indices;  // null: not wanted
  uint32_t length, k, inner;
  uint32_t blocks;  // of a row
  int bytes;        // of an element
  SortOrder order;
  const void* from_keys;  // runs: keys and the indices of their elements in the row
  const int32_t* from_indices;
  void* to_keys;
  int32_t* to_indices;
  int run_bits;            // logarithm of the length of a run
  const int32_t* offsets;  // ascending; null if rows have no segments
  IndexMap offsets_at;
  int64_t count;  // of offsets, which count as the nearest places of the row
  // [row][tile]: the segment that has elements before and after the end of the tile's step; empty if there is none, or
  // if it lies in a tile.
  Range* across;
  int step_bits;         // logarithm of the distance of tiles, which is that of the first runs
  bool carries_bits;     // `indices` are the elements' own bits
  uint32_t each, parts;  // places of a part of merge_runs_kernel's work, and parts of a block
};

// Where a slot is in shared memory: of neighbouring threads, each of which reads its own slots, no two meet in a bank.
template <int kItems>
__device__ __forceinline__ uint32_t padded(uint32_t slot) {
  return slot + slot / kItems;
}

enum class TileBy { kMerges, kDigits, kNetwork };  // what sorts a tile

// Keys and indices of a tile, or keys alone for a network.
template <class Key, int kPlaces, TileBy kBy>
struct TileSort {
  static constexpr uint32_t kSlots = kPlaces + kPlaces / merge_tile_items(kPlaces) + 1;
  Key keys[kSlots];
  uint16_t indices[kSlots];
};
template <int kPlaces>
struct TileSort<uint32_t, kPlaces, TileBy::kDigits>
    : DigitsShared<uint32_t, merge_tile_threads(kPlaces), merge_tile_items(kPlaces)> {
  uint32_t before[kPlaces / 32];  // for each word of `begins`, how many bits those before it have
};
template <int kPlaces>
struct TileSort<uint32_t, kPlaces, TileBy::kNetwork> {  // with `begins` below, what segment_network.cuh needs
  alignas(16) uint32_t buffer[kPlaces / kNetworkEach * (kNetworkEach + 1)];
  uint32_t with_begins[kPlaces / kMostWarpLength], sums[kPlaces / kMostWarpLength];
};

template <class Key, int kPlaces, TileBy kBy>
struct TileShared : TileSort<Key, kPlaces, kBy> {
  static constexpr uint32_t kTile = kPlaces, kWords = kTile / 32;
  uint32_t begins[kWords + 1];   // a bit for each place of the tile where a segment begins, and for the place after
  uint32_t filled[kWords / 32];  // a bit for each of these words, but for the last, that has bits
  uint32_t largest[merge_tile_threads(kTile) / 32];  // offset of each warp's
  Border borders[2];                                 // where the tile begins, and where it ends

  // Returns the segment that has a slot, as far as it is in the tile.
  __device__ __forceinline__ Range segment_of(uint32_t slot) const {
    const uint32_t word = slot / 32, up_to_this = (2u << slot % 32) - 1, up_to_word = (2u << word % 32) - 1;
    uint32_t at = word, bits = begins[word] & up_to_this;
    if (bits == 0) {
      uint32_t part = word / 32, words = filled[part] & (up_to_word >> 1);
      while (words == 0 && part > 0) words = filled[--part];
      if (words) at = part * 32 + 31 - __clz(words), bits = begins[at];
    }
    Range segment = {bits ? at * 32 + 31 - __clz(bits) : 0, kTile};
    at = word, bits = begins[word] & ~up_to_this;
    if (bits == 0) {
      uint32_t part = word / 32, words = filled[part] & ~up_to_word;
      while (words == 0 && part + 1 < kWords / 32) words = filled[++part];
      if (words) at = part * 32 + __ffs(words) - 1, bits = begins[at];
    }
    if (bits) segment.end = at * 32 + __ffs(bits) - 1;
    return segment;
  }
};

// Finds where tile `number` begins. Steps are 1 << step_bits places, and a tile is `back` places longer than a step. So
// a tile may begin up to `back` places before its step, where the segment begins that the step would cut. Only segments
// that begin earlier are cut. All lanes of a warp call it.
__device__ __forceinline__ Border border_of(const MergeArgs& a, const int32_t* offsets, uint32_t number,
                                            uint32_t back) {
  if (number == 0) return {0, 0, false, {0, 0}};
  if (number == a.blocks) return {a.length, a.count, false, {0, 0}};
  const uint32_t place = number << a.step_bits;
  const int64_t after = offsets_below(offsets, a.count, int64_t{place} + 1);
  if (after == 0 || after == a.count) return {place, after, false, {0, 0}};
  const auto begin = static_cast<uint32_t>(max(offsets[after - 1], 0));
  const uint32_t end = min(static_cast<uint32_t>(offsets[after]), a.length);
  const bool cut = place - begin > back;  // here; `parted`: at any place
  const bool parted = begin < place && ((end - 1) >> a.step_bits << a.step_bits) > begin + back;
  return {cut ? place : begin, after - 1, cut, parted ? Range{begin, end} : Range{0, 0}};
}

// Finds the places of a tile. All threads of the block call it; the first two warps search.
template <int kPlaces, class Shared>
__device__ __forceinline__ Range tile_of(const MergeArgs& a, const int32_t* offsets, uint32_t row, uint32_t tile,
                                         Shared& shared) {
  if (!offsets || a.blocks == 1) return {tile * kPlaces, min((tile + 1) * kPlaces, a.length)};
  if (const uint32_t end = threadIdx.x / 32; end < 2) {
    const Border border = border_of(a, offsets, tile + end, kPlaces - (1u << a.step_bits));
    shared.borders[end] = border;
    if (end == 1 && threadIdx.x % 32 == 0) a.across[int64_t{row} * a.blocks + tile] = border.across;
  }
  __syncthreads();
  return {shared.borders[0].place, shared.borders[1].place};
}

// Calls mark(place) where segments begin in a tile, and returns the places between which all segments are. Offsets must
// ascend.
template <int kThreads, class Shared, class Mark>
__device__ __forceinline__ Range mark_ascending(const MergeArgs& a, const int32_t* offsets, const Shared& shared,
                                                Mark mark) {
  const Border from = shared.borders[0], to = shared.borders[1];
  const int64_t last = min(to.offset + 1, a.count);
  for (int64_t i = from.offset + threadIdx.x; i < last; i += kThreads) {
    const auto offset = static_cast<uint32_t>(offsets[i]);
    if (offset - from.place < to.place - from.place) mark(offset);
  }
  if (threadIdx.x == 0 && !to.cuts) mark(to.place);
  return {static_cast<uint32_t>(max(offsets[0], 0)), static_cast<uint32_t>(max(offsets[a.count - 1], 0))};
}

// Finds where segments begin in a tile. Places outside all segments are segments of their own.
template <int kThreads, class Shared>
__device__ __forceinline__ void mark_segments(const MergeArgs& a, const int32_t* offsets, uint32_t begin, uint32_t end,
                                              Shared& shared) {
  for (uint32_t w = threadIdx.x; w <= Shared::kWords; w += kThreads) shared.begins[w] = 0;
  __syncthreads();
  const auto mark = [&](uint32_t place) { atomicOr(shared.begins + (place - begin) / 32, 1u << (place - begin) % 32); };
  const bool whole = a.blocks == 1;  // the tile has the whole row
  const Range all = whole ? mark_offsets<kThreads>(offsets, a.count, a.length, shared.largest, mark)
                          : mark_ascending<kThreads>(a, offsets, shared, mark);
  if (whole && threadIdx.x == 0) mark(a.length);
#pragma unroll 2
  for (uint32_t place = begin + threadIdx.x; place < end; place += kThreads)
    if (place < all.begin || place >= all.end || place == 0) mark(place);
  __syncthreads();
  if (threadIdx.x < Shared::kWords) {
    const uint32_t filled = __ballot_sync(kEveryLane, shared.begins[threadIdx.x] != 0);
    if (threadIdx.x % 32 == 0) shared.filled[threadIdx.x / 32] = filled;
  }
}

// Returns the slots of a tile whose elements are in their places when it is sorted: those of segments that lie in it.
template <class Shared>
__device__ __forceinline__ Range finished_slots(const Shared& shared, uint32_t there) {
  Range slots = {0, Shared::kTile};
  if (!(shared.begins[0] & 1)) slots.begin = shared.segment_of(0).end;
  if (!(shared.begins[there / 32] >> there % 32 & 1)) slots.end = shared.segment_of(there - 1).begin;
  return slots;
}

// A thread sorts a few neighbouring elements in registers. Then runs are merged two by two: a thread finds where its
// part of the result begins in both by a binary search, and goes on from there element by element.
template <class Key, int kPlaces>
__device__ __forceinline__ void merge_in_tile(const MergeArgs& a, TileShared<Key, kPlaces, TileBy::kMerges>& shared,
                                              uint32_t there) {
  constexpr int kItems = merge_tile_items(kPlaces);
  constexpr uint32_t kTile = kPlaces;
  const uint32_t first = threadIdx.x * kItems, own = padded<kItems>(first);
  Key keys[kItems];
  uint32_t indices[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    keys[i] = shared.keys[own + i];
    indices[i] = first + i;
  }
  const uint32_t begins = a.offsets ? shared.begins[first / 32] >> first % 32 : 0;
#pragma unroll
  for (int round = 0; round < kItems; ++round) {
#pragma unroll
    for (int i = round % 2; i + 1 < kItems; i += 2) {
      if (keys[i] <= keys[i + 1] || begins >> (i + 1) & 1) continue;
      const Key key = keys[i];
      keys[i] = keys[i + 1], keys[i + 1] = key;
      const uint32_t index = indices[i];
      indices[i] = indices[i + 1], indices[i + 1] = index;
    }
  }
  const bool live = first < there;
  bool moved = true;  // whether shared memory lacks the order of the thread's elements
#pragma unroll 1
  for (uint32_t run = kItems; run < there; run *= 2) {
    __syncthreads();
    if (live && moved) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        shared.keys[own + i] = keys[i];
        shared.indices[own + i] = static_cast<uint16_t>(indices[i]);
      }
    }
    __syncthreads();
    if (!live) continue;
    // Only the segment that has the first element of the second run, and elements of the first, is merged.
    const uint32_t group = first & ~(2 * run - 1), middle = group + run;
    moved = middle < kTile;
    if (!moved) continue;
    Range both = {group, group + 2 * run};
    if (a.offsets) {
      both = shared.segment_of(middle);
      if (both.begin == middle) both.end = middle;
      both = {max(both.begin, group), min(both.end, group + 2 * run)};
    }
    moved = first < both.end && first + kItems > both.begin;
    if (!moved) continue;
    const auto key_at = [&](uint32_t slot) { return shared.keys[padded<kItems>(slot)]; };
    const uint32_t from = min(max(first, both.begin), both.end) - both.begin;
    uint32_t low = from - min(from, both.end - middle), high = min(from, middle - both.begin);
    while (low < high) {
      const uint32_t half = (low + high) / 2;
      if (key_at(both.begin + half) <= key_at(middle + from - 1 - half)) {
        low = half + 1;
      } else {
        high = half;
      }
    }
    uint32_t left = both.begin + low, right = middle + from - low;
    Key left_key = key_at(left), right_key = key_at(right);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t slot = first + i;
      uint32_t taken = slot;
      if (slot >= both.begin && slot < both.end) {
        const bool takes_left = left < middle && (right >= both.end || left_key <= right_key);
        taken = takes_left ? left++ : right++;
        keys[i] = takes_left ? left_key : right_key;
        const Key next = key_at(taken + 1);
        left_key = takes_left ? next : left_key;
        right_key = takes_left ? right_key : next;
      }
      indices[i] = shared.indices[padded<kItems>(taken)];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    shared.keys[own + i] = keys[i];
    shared.indices[own + i] = static_cast<uint16_t>(indices[i]);
  }
  __syncthreads();
}

}  // namespace
}  // namespace jaxgpuops::sort
