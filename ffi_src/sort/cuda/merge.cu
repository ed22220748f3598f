// Merge sort of rows of 64-bit keys with few elements in all, and of segments of long rows. It takes fewer steps that
// wait for each other than a radix sort, and their number does not depend on the width of keys; but an element takes
// more instructions.
//
// A first kernel sorts tiles of a row in shared memory: those of elements of 8 and 16 bits by digits
// (segment_digits.cuh), others by merges. Networks sort those of many short segments of which only values are wanted
// (segment_network.cuh); then runs have the elements themselves in place of indices. Then each kernel merges groups of
// neighbouring sorted runs: a thread has an element, and binary searches in the other runs of the group tell its place.
// Of equal elements, those of earlier runs come first. An element is written to the results as soon as its row, or its
// segment, lies in the group: keys are no elements, so these are read from the row by their indices. Tiles of segments
// begin where segments begin, so only segments of more than half a tile (or a third) are cut. The others are finished
// with their tile.
//
// Bytes moved: the keys are read once; each kernel writes a key and an index for each element, but for segments that
// are finished, and merges read them; every result is written once, and its element read once more. Searches read keys
// from the caches.
#include "sort/cuda/kernels.h"
#include "sort/cuda/merge_tiles.cuh"
#include "sort/cuda/raised.cuh"
#include "sort/cuda/segment_network.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kFanBits = kMergeFanBits;
constexpr uint32_t kFan = 1 << kFanBits;  // runs that are merged at once

// Returns the part of [begin, end) that lies in `of`. It is not before the first element even if it is empty, so that
// the element before its end can be read.
__device__ __forceinline__ Range part_in(Range of, uint32_t begin, uint32_t end) {
  const uint32_t first = max(of.begin, begin), last = min(of.end, end);
  return first < last ? Range{first, last} : Range{1, 1};
}

// Finds in each of several ranges of sorted keys how many elements come before an element whose key is `own`. Equal
// elements count if `ties`. Ranges have at most `longest` elements, a power of two. Returns the sum.
template <int kCount, class Key>
__device__ __forceinline__ uint32_t elements_before(const Key* keys, const Range (&ranges)[kCount],
                                                    const bool (&ties)[kCount], uint32_t longest, Key own) {
  uint32_t at[kCount], sum = 0;
  Key bound[kCount];
  const bool is_last = own == static_cast<Key>(~Key{0});
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    bound[u] = static_cast<Key>(own + (ties[u] && !is_last));
    at[u] = ties[u] && is_last ? ranges[u].end : ranges[u].begin;
  }
#pragma unroll 1
  for (uint32_t step = longest; step > 0; step /= 2) {
    // All searches load before one of them branches.
    uint32_t next[kCount];
    Key key[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      next[u] = min(at[u] + step, ranges[u].end);
      key[u] = keys[next[u] - 1];
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) at[u] = key[u] < bound[u] ? next[u] : at[u];
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) sum += at[u] - ranges[u].begin;
  return sum;
}

template <class Key, class Bits>
__device__ __forceinline__ Key key_at(const MergeArgs& a, uint32_t outer, uint32_t column, uint32_t place) {
  const int64_t at = (int64_t{outer} * a.length + place) * a.inner + column;
  return raised_key(Key{static_cast<const Bits*>(a.x)[at]} << 8 * (sizeof(Key) - sizeof(Bits)), a.order);
}

// Writes an element to its place in the results.
template <class Key>
__device__ __forceinline__ void finish(const MergeArgs& a, uint32_t row, uint32_t place, uint32_t index) {
  if (place >= a.k) return;
  const uint32_t outer = a.inner == 1 ? row : row / a.inner, column = row - outer * a.inner;
  const int64_t to = (int64_t{outer} * a.k + place) * a.inner + column;
  if (a.indices) a.indices[to] = static_cast<int32_t>(index);
  if (!a.values) return;
  const int64_t from = (int64_t{outer} * a.length + min(index, a.length - 1)) * a.inner + column;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    static_cast<Bits*>(a.values)[to] = a.carries_bits ? static_cast<Bits>(index) : static_cast<const Bits*>(a.x)[from];
  });
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

template <class Key, int kPlaces, TileBy kBy>
__global__ void __launch_bounds__(merge_tile_threads(kPlaces), merge_tile_blocks(kPlaces))
    merge_tiles_kernel(const __grid_constant__ MergeArgs a) {
  constexpr int kItems = merge_tile_items(kPlaces);
  constexpr uint32_t kTile = kPlaces, kThreads = merge_tile_threads(kPlaces);
  constexpr bool kByDigits = kBy == TileBy::kDigits;
  using Shared = TileShared<Key, kPlaces, kBy>;
  __shared__ Shared shared;
  let_dependents_start();
  const uint32_t row = blockIdx.x / a.blocks, tile = blockIdx.x - row * a.blocks;
  const uint32_t outer = a.inner == 1 ? row : row / a.inner, column = row - outer * a.inner;
  const int32_t* const offsets = a.offsets ? a.offsets + a.offsets_at(outer) : nullptr;
  const Range places = tile_of<kPlaces>(a, offsets, row, tile, shared);
  const uint32_t begin = places.begin, there = places.end - begin;
  if (there == 0) return;
  const auto at = [](uint32_t slot) { return kByDigits ? slot : padded<kItems>(slot); };
  Key any = 0, all = static_cast<Key>(~Key{0});
  if constexpr (kByDigits)
    if (threadIdx.x == 0) shared.any = any, shared.all = all;
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t slot = threadIdx.x + i * kThreads;
      Key key = static_cast<Key>(~Key{0});  // slots past the end come after all elements
      if (slot < there) {
        key = key_at<Key, decltype(type)>(a, outer, column, begin + slot);
        any |= key;
        all &= key;
      }
      shared.keys[at(slot)] = key;
    }
  });
  if (offsets) mark_segments<kThreads>(a, offsets, begin, begin + there, shared);
  __syncthreads();
  bool sorted = true;  // whether shared memory has the indices
  if constexpr (kByDigits) {
    count_begins<kThreads, Shared::kWords>(shared.begins, shared.before, shared.warps);
    const Key differ = differing_bits(shared, any, all);
    sorted = sort_by_digits(shared, there, a.bytes, differ, {shared.begins, shared.before});
  } else {
    merge_in_tile(a, shared, there);
  }

  // Elements of segments that lie in the tile are in their places.
  Range finished = {a.blocks == 1 ? 0 : kTile, kTile};
  if (a.offsets) finished = finished_slots(shared, there);
  auto* const to_keys = static_cast<Key*>(a.to_keys) + int64_t{row} * a.length + begin;
  int32_t* const to_indices = a.to_indices + int64_t{row} * a.length + begin;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t slot = threadIdx.x + i * kThreads;
    if (slot >= there) break;
    const uint32_t from = begin + (sorted ? uint32_t{shared.indices[at(slot)]} : slot);
    if (slot >= finished.begin && slot < finished.end) {
      finish<Key>(a, row, begin + slot, from);
    } else {
      // Where digits have been sorted, there are numbers of segments in shared memory.
      to_keys[slot] = shared.keys[at(slot)];
      if constexpr (kByDigits)
        dispatch_bytes<Key>(a.bytes,
                            [&](auto type) { to_keys[slot] = key_at<Key, decltype(type)>(a, outer, column, from); });
      to_indices[slot] = static_cast<int32_t>(from);
    }
  }
}

// The same for segments of elements of up to 32 bits of which only values are wanted. Runs have these in place of their
// indices.
template <int kPlaces>
__global__ void __launch_bounds__(kPlaces / kNetworkEach, 768 * kNetworkEach / kPlaces)
    network_tiles_kernel(const __grid_constant__ MergeArgs a) {
  constexpr uint32_t kThreads = kPlaces / kNetworkEach;
  __shared__ TileShared<uint32_t, kPlaces, TileBy::kNetwork> shared;
  let_dependents_start();
  const uint32_t row = blockIdx.x / a.blocks, tile = blockIdx.x - row * a.blocks;
  const int32_t* const offsets = a.offsets + a.offsets_at(row);
  const Range places = tile_of<kPlaces>(a, offsets, row, tile, shared);
  const uint32_t begin = places.begin, there = places.end - begin;
  if (there == 0) return;
  const int64_t base = int64_t{row} * a.length + begin;
  const TileElements<uint32_t> elements{a.x, a.values, base, there, a.bytes};
  elements.load(shared.buffer, kThreads);
  mark_segments<kThreads>(a, offsets, begin, begin + there, shared);
  __syncthreads();
  const Range finished = finished_slots(shared, there);
  const uint32_t begins =
      shared.begins[threadIdx.x] | place_bits(threadIdx.x * kNetworkEach, there, ~0u) | (threadIdx.x == 0);
  __syncthreads();
  sort_segments(shared, shared.buffer, kThreads, begins, there, a.order, elements);
  elements.store(shared.buffer, kThreads, finished, [&](uint32_t slot, uint32_t word, auto element) {
    (static_cast<uint32_t*>(a.to_keys) + base)[slot] = raised_key(word, a.order);
    (a.to_indices + base)[slot] = static_cast<int32_t>(element);
  });
}

// ---- Merges ---------------------------------------------------------------------------------------------------------

template <class Key>
__global__ void __launch_bounds__(kMergeThreads) merge_runs_kernel(const __grid_constant__ MergeArgs a) {
  const uint32_t row = blockIdx.x / a.blocks, block = blockIdx.x - row * a.blocks, run = 1u << a.run_bits;
  wait_for_predecessor();
  let_dependents_start();
  const Range* const across = a.across + (int64_t{row} * (((a.length - 1) >> a.step_bits) + 1) - 1);
  // The segments that have elements in other runs, too: at the begin and at the end of the run of a place.
  struct Ends {
    Range left, right;
  };
  const auto ends_of = [&](uint32_t place) {
    const uint32_t own_run = place & ~(run - 1), run_end = min(own_run + run, a.length);
    Ends ends = {{0, a.length}, {a.length, a.length}};
    if (!a.offsets) return ends;
    ends.left = own_run == 0 ? Range{0, 0} : across[own_run >> a.step_bits];
    if (run_end < a.length) ends.right = across[run_end >> a.step_bits];
    if (ends.right.end == 0) ends.right = {a.length, a.length};
    return ends;
  };
  // In most parts of many segments nothing is left to do. Each lane finds that out for one.
  __shared__ uint32_t busy;
  if (threadIdx.x < 32) {
    const int64_t first = (int64_t{block} * a.parts + threadIdx.x) * a.each;
    bool is_busy = threadIdx.x < a.parts && first < a.length;
    if (is_busy && a.offsets) {
      const Ends ends = ends_of(static_cast<uint32_t>(first));
      is_busy = first < ends.left.end || first + a.each > ends.right.begin;
    }
    const uint32_t all = __ballot_sync(kEveryLane, is_busy);
    if (threadIdx.x == 0) busy = all;
  }
  __syncthreads();
  const int64_t base = int64_t{row} * a.length;
  const Key* const keys = static_cast<const Key*>(a.from_keys) + base;
#pragma unroll 1
  for (uint32_t parts = busy; parts; parts &= parts - 1) {
    const uint32_t first_place = (block * a.parts + __ffs(static_cast<int>(parts)) - 1) * a.each;
    const Ends ends = ends_of(first_place);
    const uint32_t own_run = first_place & ~(run - 1), run_end = min(own_run + run, a.length);
    const uint32_t group = first_place & ~(run * kFan - 1), group_end = min(group + run * kFan, a.length);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < a.each; i += kMergeThreads) {
      const uint32_t place = first_place + i;
      const Range segment = place >= ends.right.begin ? ends.right : ends.left;
      if (place >= run_end || place >= segment.end) continue;
      const Key own = keys[place];
      const auto index = static_cast<uint32_t>((a.from_indices + base)[place]);
      uint32_t to = max(segment.begin, group) + place - max(segment.begin, own_run);
      Range ranges[kFan - 1];
      bool ties[kFan - 1];
#pragma unroll
      for (uint32_t u = 0; u < kFan - 1; ++u) {
        const uint32_t other = group + ((own_run - group + (u + 1) * run) & (run * kFan - 1));
        ranges[u] = part_in(segment, other, min(other + run, a.length));
        ties[u] = other < own_run;
      }
      to += elements_before(keys, ranges, ties, run, own);
      if (segment.begin >= group && segment.end <= group_end) {
        finish<Key>(a, row, to, index);
      } else {
        (static_cast<Key*>(a.to_keys) + base)[to] = own;
        (a.to_indices + base)[to] = static_cast<int32_t>(index);
      }
    }
  }
}

// Small tiles are for a few rows of 64-bit keys only. Elements of 8 and 16 bits have so few digits that passes take
// less time than merges.
template <class Key>
auto tiles_kernel(int places, int bytes, TileBy by) {
  const bool is_short = places == kShortMergeTile;
  constexpr int kTile = 1 << kMergeTileBits;
  if (by == TileBy::kNetwork) return network_tiles_kernel<kNetworkTile>;
  if constexpr (sizeof(Key) == 8) {
    if (places == 1 << kSmallMergeTileBits) return merge_tiles_kernel<Key, 1 << kSmallMergeTileBits, TileBy::kMerges>;
  } else if (bytes < 4) {
    return is_short ? merge_tiles_kernel<Key, kShortMergeTile, TileBy::kDigits>
                    : merge_tiles_kernel<Key, kTile, TileBy::kDigits>;
  }
  return is_short ? merge_tiles_kernel<Key, kShortMergeTile, TileBy::kMerges>
                  : merge_tiles_kernel<Key, kTile, TileBy::kMerges>;
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const MergeShape shape(rows, length, problem.key_bits / 8, plan.tile_bits, problem.offsets > 0);
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  MergeArgs a = {};
  a.x = buffers.x;
  a.values = buffers.values;
  a.indices = buffers.indices;
  a.length = static_cast<uint32_t>(length);
  a.k = static_cast<uint32_t>(problem.k);
  a.inner = static_cast<uint32_t>(problem.rows.inner);
  a.bytes = problem.key_bits / 8;
  a.order = raised(problem.order, 8 * sizeof(Key) - problem.key_bits);
  a.offsets = buffers.offsets;
  a.offsets_at = problem.offsets_at.outer;
  a.count = problem.offsets;
  a.step_bits = shape.step_bits;
  a.across = reinterpret_cast<Range*>(workspace + shape.across);
  const auto writes_to = [&](int half) {
    a.to_keys = workspace + half * shape.half;
    a.to_indices = reinterpret_cast<int32_t*>(workspace + half * shape.half + shape.indices);
  };
  Launch config;
  a.blocks = static_cast<uint32_t>(shape.tiles);
  config.grid = dim3(static_cast<unsigned>(rows * a.blocks));
  const bool network = plan.tile_bits == kNetworkTileBits;
  a.carries_bits = network;
  const int places = merge_tile(problem.rows, problem.offsets, plan.tile_bits, network);
  config.block = dim3(network ? places / kNetworkEach : merge_tile_threads(places));
  writes_to(0);
  cudaError_t error =
      launch(stream, config, tiles_kernel<Key>(places, a.bytes, network ? TileBy::kNetwork : TileBy::kMerges), a);
  a.each = static_cast<uint32_t>(merge_each(problem.rows, problem.offsets > 0));
  a.parts = static_cast<uint32_t>(merge_parts(problem.rows, problem.offsets > 0));
  a.blocks = static_cast<uint32_t>(ceil_div(length, a.each * a.parts));
  config.grid = dim3(static_cast<unsigned>(rows * a.blocks));
  config.block = dim3(kMergeThreads);
  config.overlap = plan.overlap;
  a.run_bits = shape.step_bits;
  for (int level = 0; level < shape.levels && error == cudaSuccess; ++level, a.run_bits += kFanBits) {
    a.from_keys = a.to_keys;
    a.from_indices = a.to_indices;
    writes_to(1 - level % 2);
    error = launch(stream, config, merge_runs_kernel<Key>, a);
  }
  return error;
}

}  // namespace

cudaError_t launch_merge(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return problem.key_bits == 64 ? run<uint64_t>(stream, plan, problem, buffers)
                                : run<uint32_t>(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::sort
