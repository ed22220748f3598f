// Merge sort of rows of 64-bit keys with few elements in all, and of segments of long rows. It takes fewer steps that
// wait for each other than a radix sort, and their number does not depend on the width of keys; but an element takes
// more instructions.
//
// A first kernel sorts tiles of a row in shared memory. Then each kernel merges groups of neighbouring sorted runs: a
// thread has an element, and binary searches in the other runs of the group tell its place. Of equal elements, those of
// earlier runs come first. An element is written to the results as soon as its row, or its segment, lies in the group:
// keys are no elements, so these are read from the row by their indices. Tiles of segments begin where segments begin,
// so only segments of more than half a tile (or a third) are cut. The others are finished with their tile.
//
// Bytes moved: the keys are read once; each kernel writes a key and an index for each element, but for segments that
// are finished, and merges read them; every result is written once, and its element read once more. Searches read keys
// from the caches.
#include "sort/cuda/kernels.h"
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/raised.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kFanBits = kMergeFanBits;
constexpr uint32_t kFan = 1 << kFanBits;  // runs that are merged at once

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
  uint32_t each, parts;  // places of a part of merge_runs_kernel's work, and parts of a block
};

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
    static_cast<Bits*>(a.values)[to] = static_cast<const Bits*>(a.x)[from];
  });
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Where a slot is in shared memory: of neighbouring threads, each of which reads its own slots, no two meet in a bank.
template <int kItems>
__device__ __forceinline__ uint32_t padded(uint32_t slot) {
  return slot + slot / kItems;
}

template <class Key, int kPlaces>
struct TileShared {
  static constexpr uint32_t kTile = kPlaces, kWords = kTile / 32;
  static constexpr uint32_t kSlots = kTile + kTile / merge_tile_items(kTile) + 1;
  Key keys[kSlots];
  uint16_t indices[kSlots];
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

// Finds where the tile of this number begins: where the segment begins that has the place number << step_bits, if that
// is at most so many places `back`, by which tiles are longer than a step. So tiles cut only segments of more places.
// All lanes of a warp call it.
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

// A thread sorts a few neighbouring elements in registers. Then runs are merged two by two: a thread finds where its
// part of the result begins in both by a binary search, and goes on from there element by element.
template <class Key, int kPlaces>
__global__ void __launch_bounds__(merge_tile_threads(kPlaces), merge_tile_blocks(kPlaces))
    merge_tiles_kernel(const __grid_constant__ MergeArgs a) {
  constexpr int kItems = merge_tile_items(kPlaces);
  constexpr uint32_t kTile = kPlaces, kThreads = merge_tile_threads(kPlaces);
  __shared__ TileShared<Key, kPlaces> shared;
  let_dependents_start();
  const uint32_t row = blockIdx.x / a.blocks, tile = blockIdx.x - row * a.blocks;
  const uint32_t outer = a.inner == 1 ? row : row / a.inner, column = row - outer * a.inner;
  const int32_t* const offsets = a.offsets ? a.offsets + a.offsets_at(outer) : nullptr;
  uint32_t begin = tile * kTile, there = min(kTile, a.length - begin);
  if (offsets && a.blocks > 1) {
    if (const uint32_t end = threadIdx.x / 32; end < 2) {
      const Border border = border_of(a, offsets, tile + end, kTile - (1u << a.step_bits));
      shared.borders[end] = border;
      if (end == 1 && threadIdx.x % 32 == 0) a.across[int64_t{row} * a.blocks + tile] = border.across;
    }
    __syncthreads();
    begin = shared.borders[0].place;
    there = shared.borders[1].place - begin;
    if (there == 0) return;
  }
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + (int64_t{outer} * a.length + begin) * a.inner + column;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t slot = threadIdx.x + i * kThreads;
      Key key = static_cast<Key>(~Key{0});  // slots past the end come after all elements
      if (slot < there)
        key = raised_key(Key{from[int64_t{slot} * a.inner]} << 8 * (sizeof(Key) - sizeof(Bits)), a.order);
      shared.keys[padded<kItems>(slot)] = key;
    }
  });
  if (offsets) mark_segments<kThreads>(a, offsets, begin, begin + there, shared);
  __syncthreads();

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

  // Elements of segments that lie in the tile are in their places.
  uint32_t finished = a.blocks == 1 ? 0 : kTile, unfinished = kTile;  // the first of them, and the one after the last
  if (a.offsets) {
    finished = shared.begins[0] & 1 ? 0 : shared.segment_of(0).end;
    if (!(shared.begins[there / 32] >> there % 32 & 1)) unfinished = shared.segment_of(there - 1).begin;
  }
  auto* const to_keys = static_cast<Key*>(a.to_keys) + int64_t{row} * a.length + begin;
  int32_t* const to_indices = a.to_indices + int64_t{row} * a.length + begin;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t slot = threadIdx.x + i * kThreads;
    if (slot >= there) break;
    const uint32_t from = begin + shared.indices[padded<kItems>(slot)];
    if (slot >= finished && slot < unfinished) {
      finish<Key>(a, row, begin + slot, from);
    } else {
      to_keys[slot] = shared.keys[padded<kItems>(slot)];
      to_indices[slot] = static_cast<int32_t>(from);
    }
  }
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

// Small tiles are for a few rows of 64-bit keys only.
template <class Key>
auto tiles_kernel(int places) {
  if constexpr (sizeof(Key) == 8)
    if (places == 1 << kSmallMergeTileBits) return merge_tiles_kernel<Key, 1 << kSmallMergeTileBits>;
  return places == kShortMergeTile ? merge_tiles_kernel<Key, kShortMergeTile>
                                   : merge_tiles_kernel<Key, 1 << kMergeTileBits>;
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
  const int places = merge_tile(problem.rows, problem.offsets, plan.tile_bits);
  config.block = dim3(merge_tile_threads(places));
  writes_to(0);
  cudaError_t error = launch(stream, config, tiles_kernel<Key>(places), a);
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
