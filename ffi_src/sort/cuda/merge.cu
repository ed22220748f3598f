// Merge sort of rows of any length, and of segments of rows. It takes fewer steps that wait for each other than a radix
// sort, and their number does not depend on the width of keys; but an element takes more instructions. So it serves
// arrays of few elements, keys of 64 bits, and segments that are mostly shorter than a tile.
//
// A first kernel sorts tiles of a row. Then each kernel merges groups of neighbouring sorted runs: a thread has an
// element, and its place is the sum of the places that binary searches find for it in all runs of the group. Of equal
// elements, those of earlier runs come first. An element is written to the results as soon as its row, or its segment,
// lies in the group: the keys that are sorted are not the elements, so these are read from the row by their indices.
// The searches of an element stay in its segment, so a segment that lies in a tile takes no part in merges.
//
// Bytes moved: each kernel reads and writes a key and an index for each element; searches read keys from the caches.
#include "sort/cuda/kernels.h"
#include "sort/cuda/raised.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kTileThreads = 512, kTileItems = kMergeTile / kTileThreads;
constexpr uint32_t kTile = kMergeTile;
constexpr uint32_t kFirstRun = 16, kFan = 4;  // of the merges in a tile

struct Range {
  uint32_t begin, end;
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
  int run_bits, fan_bits;  // logarithms of the length of a run and of the runs of a group
  const int32_t* offsets;  // ascending; null if rows have no segments
  IndexMap offsets_at;
  int64_t count;  // of offsets, which count as the nearest places of the row
  Range* across;  // [row][tile]: the segment that has elements in this tile and in the next one; empty if there is none
  uint32_t each;  // places of a block of merge_runs_kernel
};

// Returns how many of the ascending offsets are less than `place`. All lanes of a warp call it.
__device__ __forceinline__ int64_t offsets_below(const int32_t* offsets, int64_t count, int64_t place) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t step = (count + 31) / 32, at = int64_t{threadIdx.x} % 32 * step;
    const int below = __popc(__ballot_sync(kEveryLane, at < count && offsets[low + at] < place));
    if (below == 0) break;
    const int64_t skipped = (below - 1) * step + 1;
    low += skipped;
    count = min(step - 1, count - skipped);
  }
  return low;
}

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

template <class Key>
struct TileShared {
  Key keys[2][kTile];
  uint16_t indices[2][kTile];
  uint32_t begins[kTile / 32 + 1];  // a bit for each place of the tile where a segment begins, and for the place after
  int64_t offsets_before[2];        // how many offsets are before the first place, and before the place after the tile
  uint32_t longest;                 // the length of the longest segment in the tile
};

// Finds where segments begin in a tile. Places outside all segments are segments of their own.
template <class Shared>
__device__ __forceinline__ void mark_segments(const MergeArgs& a, const int32_t* offsets, uint32_t begin, uint32_t end,
                                              Shared& shared, Range& to_next) {
  if (threadIdx.x <= kTile / 32) shared.begins[threadIdx.x] = 0;
  if (const uint32_t warp = threadIdx.x / 32; warp < 2)
    shared.offsets_before[warp] = offsets_below(offsets, a.count, warp ? end : begin);
  __syncthreads();
  const auto mark = [&](uint32_t place) { atomicOr(shared.begins + (place - begin) / 32, 1u << (place - begin) % 32); };
  const int64_t before = shared.offsets_before[1];
  for (int64_t i = shared.offsets_before[0] + threadIdx.x; i < before; i += kTileThreads) {
    const auto offset = static_cast<uint32_t>(offsets[i]);
    if (offset - begin < end - begin) mark(offset);
  }
  if (threadIdx.x == 0) {
    Range across = {0, 0};
    if (before > 0 && before < a.count && offsets[before] != end) {
      across.begin = static_cast<uint32_t>(max(offsets[before - 1], 0));
      across.end = min(static_cast<uint32_t>(offsets[before]), a.length);
    }
    if (across.end == 0 || end == a.length) mark(end);
    to_next = end == a.length ? Range{0, 0} : across;
  }
  const int64_t first = offsets[0], last = offsets[a.count - 1];
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const uint32_t place = begin + threadIdx.x + i * kTileThreads;
    if (place < end && (place < first || place >= last || place == 0)) mark(place);
  }
  __syncthreads();
}

template <class Key>
__global__ void __launch_bounds__(kTileThreads, sizeof(Key) == 8 ? 2 : 3)
    merge_tiles_kernel(const __grid_constant__ MergeArgs a) {
  __shared__ TileShared<Key> shared;
  let_dependents_start();
  const uint32_t row = blockIdx.x / a.blocks, tile = blockIdx.x - row * a.blocks, begin = tile * kTile;
  const uint32_t there = min(kTile, a.length - begin);
  const uint32_t outer = a.inner == 1 ? row : row / a.inner, column = row - outer * a.inner;
  const auto slot_of = [&](int i) { return threadIdx.x + i * kTileThreads; };

  Key own[kTileItems];
  uint32_t index[kTileItems];
  Range segment[kTileItems];
  dispatch_bytes<Key>(a.bytes, [&](auto type) {
    using Bits = decltype(type);
    const Bits* const from = static_cast<const Bits*>(a.x) + (int64_t{outer} * a.length + begin) * a.inner + column;
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      own[i] = static_cast<Key>(~Key{0});  // slots past the end come after all elements
      if (slot_of(i) < there)
        own[i] = raised_key(Key{from[int64_t{slot_of(i)} * a.inner]} << 8 * (sizeof(Key) - sizeof(Bits)), a.order);
    }
  });
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    index[i] = slot_of(i);
    segment[i] = {0, kTile};
    shared.keys[0][slot_of(i)] = own[i];
  }
  uint32_t longest = 1;
  if (threadIdx.x == 0) shared.longest = a.offsets ? 1 : kTile;
  bool opens = true, closes = true;  // whether a segment begins at the first place of the tile, and at that after it
  if (a.offsets) {
    mark_segments(a, a.offsets + a.offsets_at(outer), begin, begin + there, shared,
                  a.across[int64_t{row} * a.blocks + tile]);
    opens = shared.begins[0] & 1;
    closes = shared.begins[there / 32] >> there % 32 & 1;
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      const uint32_t slot = slot_of(i), word = slot / 32, up_to_this = 2u << slot % 32;
      int w = static_cast<int>(word);
      for (uint32_t bits = shared.begins[w] & (up_to_this - 1);; bits = shared.begins[w]) {
        segment[i].begin = bits ? w * 32 + 31 - __clz(bits) : 0;
        if (bits || --w < 0) break;
      }
      w = static_cast<int>(word);
      for (uint32_t bits = shared.begins[w] & ~(up_to_this - 1);; bits = shared.begins[w]) {
        segment[i].end = bits ? min(there, w * 32 + __ffs(bits) - 1) : there;
        if (bits || ++w > static_cast<int>(kTile / 32)) break;
      }
      if (slot >= there) segment[i] = {slot, slot + 1};
      longest = max(longest, segment[i].end - segment[i].begin);
    }
    longest = fold_lanes(longest, [](uint32_t x, uint32_t y) { return max(x, y); });
    if (threadIdx.x % 32 == 0) atomicMax(&shared.longest, longest);
  }
  __syncthreads();

  int side = 0;  // which of the two buffers has the elements
  const auto put = [&](int i, uint32_t place) {
    shared.keys[1 - side][place] = own[i];
    shared.indices[1 - side][place] = static_cast<uint16_t>(index[i]);
  };
  // Runs of a few elements are sorted by comparing all with all.
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const uint32_t slot = slot_of(i), run = slot / kFirstRun * kFirstRun;
    const Range within = part_in(segment[i], run, run + kFirstRun);
    uint32_t before = 0;
    constexpr int kOfVector = 16 / sizeof(Key);
#pragma unroll
    for (int v = 0; v < static_cast<int>(kFirstRun) / kOfVector; ++v) {
      const uint4 vector = reinterpret_cast<const uint4*>(shared.keys[0] + run)[v];
      Key keys[kOfVector];
      memcpy(keys, &vector, 16);
#pragma unroll
      for (int j = 0; j < kOfVector; ++j) {
        const uint32_t other = run + v * kOfVector + j;
        const bool comes = other < slot ? keys[j] <= own[i] : keys[j] < own[i];
        before += comes && other - within.begin < within.end - within.begin;
      }
    }
    put(i, within.begin + before);
  }
  side = 1;
  // Powers of two that are not less than the longest segment.
  longest = shared.longest;
  longest = longest == 1 ? 1 : 1u << (32 - __clz(longest - 1));
#pragma unroll 1
  for (uint32_t run = kFirstRun; run < kTile; run *= kFan) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      own[i] = shared.keys[side][slot_of(i)];
      index[i] = shared.indices[side][slot_of(i)];
    }
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      const uint32_t slot = slot_of(i), group = slot & ~(run * kFan - 1), own_run = slot & ~(run - 1);
      Range ranges[kFan - 1];
      bool ties[kFan - 1];
#pragma unroll
      for (uint32_t u = 0; u < kFan - 1; ++u) {
        const uint32_t other = group + ((own_run - group + (u + 1) * run) & (run * kFan - 1));
        ranges[u] = part_in(segment[i], other, other + run);
        ties[u] = other < own_run;
      }
      const uint32_t before = elements_before(shared.keys[side], ranges, ties, min(run, longest), own[i]);
      put(i, max(segment[i].begin, group) + slot - max(segment[i].begin, own_run) + before);
    }
    side = 1 - side;
  }
  __syncthreads();

  const bool may_finish = a.offsets || a.blocks == 1;
  auto* const to_keys = static_cast<Key*>(a.to_keys) + int64_t{row} * a.length + begin;
  int32_t* const to_indices = a.to_indices + int64_t{row} * a.length + begin;
#pragma unroll
  for (int i = 0; i < kTileItems; ++i) {
    const uint32_t slot = slot_of(i), from = begin + shared.indices[side][slot];
    if (slot >= there) continue;
    if (may_finish && (segment[i].begin > 0 || opens) && (segment[i].end < there || closes)) {
      finish<Key>(a, row, begin + slot, from);
    } else {
      to_keys[slot] = shared.keys[side][slot];
      to_indices[slot] = static_cast<int32_t>(from);
    }
  }
}

// ---- Merges ---------------------------------------------------------------------------------------------------------

// A thread searches kTogether runs at the same time.
template <class Key, int kTogether>
__global__ void __launch_bounds__(kMergeThreads) merge_runs_kernel(const __grid_constant__ MergeArgs a) {
  const uint32_t row = blockIdx.x / a.blocks, block = blockIdx.x - row * a.blocks;
  const uint32_t first_place = block * a.each, run = 1u << a.run_bits, fan = 1u << a.fan_bits;
  const uint32_t own_run = first_place & ~(run - 1), run_end = min(own_run + run, a.length);
  const uint32_t group = first_place & ~(run * fan - 1), group_end = min(group + run * fan, a.length);
  wait_for_predecessor();
  let_dependents_start();
  // The segments that have elements in other runs, too: at the begin and at the end of the run.
  Range left = {0, a.length}, right = {a.length, a.length};
  if (a.offsets) {
    const Range* const across = a.across + (int64_t{row} * ceil_div(a.length, kTile) - 1);
    left = own_run == 0 ? Range{0, 0} : across[own_run / kTile];
    if (run_end < a.length) right = across[run_end / kTile];
    if (right.end == 0) right = {a.length, a.length};
    if (first_place >= left.end && first_place + a.each <= right.begin) return;
  }
  const int64_t base = int64_t{row} * a.length;
  const Key* const keys = static_cast<const Key*>(a.from_keys) + base;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < a.each; i += kMergeThreads) {
    const uint32_t place = first_place + i;
    const Range segment = place >= right.begin ? right : left;
    if (place >= run_end || place >= segment.end) continue;
    const Key own = keys[place];
    const auto index = static_cast<uint32_t>((a.from_indices + base)[place]);
    uint32_t to = max(segment.begin, group) + place - max(segment.begin, own_run);
#pragma unroll 1
    for (uint32_t first = 1; first < fan; first += kTogether) {
      Range ranges[kTogether];
      bool ties[kTogether];
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const uint32_t other = group + ((own_run - group + (first + u) * run) & (run * fan - 1));
        ranges[u] = part_in(segment, other, first + u < fan ? min(other + run, a.length) : 0);
        ties[u] = other < own_run;
      }
      to += elements_before(keys, ranges, ties, run, own);
    }
    if (segment.begin >= group && segment.end <= group_end) {
      finish<Key>(a, row, to, index);
    } else {
      (static_cast<Key*>(a.to_keys) + base)[to] = own;
      (a.to_indices + base)[to] = static_cast<int32_t>(index);
    }
  }
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const MergeShape shape(rows, length, problem.key_bits / 8, plan.fan_bits, problem.offsets > 0);
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
  a.fan_bits = shape.fan_bits;
  a.across = reinterpret_cast<Range*>(workspace + shape.across);
  const auto writes_to = [&](int half) {
    a.to_keys = workspace + half * shape.half;
    a.to_indices = reinterpret_cast<int32_t*>(workspace + half * shape.half + shape.indices);
  };
  Launch config;
  a.blocks = static_cast<uint32_t>(shape.tiles);
  config.grid = dim3(static_cast<unsigned>(rows * a.blocks));
  config.block = dim3(kTileThreads);
  writes_to(0);
  cudaError_t error = launch(stream, config, merge_tiles_kernel<Key>, a);
  a.each = static_cast<uint32_t>(merge_each(problem.rows, problem.offsets > 0));
  a.blocks = static_cast<uint32_t>(ceil_div(length, a.each));
  config.grid = dim3(static_cast<unsigned>(rows * a.blocks));
  config.block = dim3(kMergeThreads);
  config.overlap = plan.overlap;
  a.run_bits = kMergeTileBits;
  for (int level = 0; level < shape.levels && error == cudaSuccess; ++level, a.run_bits += a.fan_bits) {
    a.from_keys = a.to_keys;
    a.from_indices = a.to_indices;
    writes_to(1 - level % 2);
    error = launch(stream, config, a.fan_bits <= 2 ? merge_runs_kernel<Key, 3> : merge_runs_kernel<Key, 7>, a);
  }
  return error;
}

}  // namespace

cudaError_t launch_merge(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return problem.key_bits == 64 ? run<uint64_t>(stream, plan, problem, buffers)
                                : run<uint32_t>(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::sort
