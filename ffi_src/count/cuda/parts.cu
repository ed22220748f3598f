// bincount of long rows in more bins than tables in shared memory hold. A first kernel cuts the ids of each tile by
// their high bits into parts, each of as many bins as one table holds, and keeps only the low 16 bits; a second one
// counts a part of a row, or of a slice of it, in a table. Atomics on the result would take a sector of 32 bytes
// between L2 and its atomic units for each id.
//
// Where an id goes in its tile follows from counters that each thread has for itself, so equal ids take no longer than
// others. An id that many lanes of a warp have does not go there: the warp counts it. Otherwise one block would have to
// count most ids if most are equal. Parts of a tile begin at multiples of 16 bytes, after ids that no part has.
//
// Bytes moved: each id is read once, with 2 bytes written and read; counts are written once, or once a slice.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/rounding.h"
#include "count/cuda/counter.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kPartThreads, kIds = kPartTile / kThreads;
constexpr int kCountThreads = 1024;
constexpr int kPackIds = 8, kChunk = 64;  // ids in 16 bytes; packs that a warp counts at a time
constexpr int kMany = 4;                  // a warp counts an id that so many lanes have in one step
constexpr uint32_t kNone = ~0u;

struct Args {
  const void* x;
  uint32_t* counts;
  char* workspace;
  int64_t workspace_bytes;
  int64_t length, bins, tiles, slices, slice;  // `slice`: tiles of a slice
  uint64_t limit;
  int parts, bits;  // a part has 2^bits bins

  // In the workspace of an outer index stand the ids of each tile, then the ids that its warps counted and how often
  // they occur, and then where its parts begin, and the last one ends, in packs.
  __device__ Pack* ids_of(int64_t o, int64_t tile) const {
    return reinterpret_cast<Pack*>(workspace + o * workspace_bytes) + tile * (kPartPitch / kPackIds);
  }
  __device__ uint2* counted(int64_t o, int64_t tile) const {
    return reinterpret_cast<uint2*>(ids_of(o, tiles)) + tile * kPartWarps;
  }
  __device__ uint16_t* starts_of(int64_t o, int64_t tile) const {
    return reinterpret_cast<uint16_t*>(counted(o, tiles)) + tile * (parts + 1);
  }
};

// Each thread counts its ids of each part in a byte of shared memory; a word has the counters of four parts. The sums
// over lower threads need 16 bits, so they take two words: one for the even parts of the four, one for the odd parts.
template <class T>
__global__ void __launch_bounds__(kThreads, 3) bincount_split_kernel(const __grid_constant__ Args a) {
  __shared__ uint32_t totals[kMostParts], starts[kMostParts];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread / 32;
  const int words = (a.parts + 3) / 4;
  auto* const staged = reinterpret_cast<uint16_t*>(dynamic_shared_memory());  // after the counters are read
  auto* const counters = reinterpret_cast<uint32_t*>(staged) + thread;
  auto* const bases = reinterpret_cast<uint32_t*>(staged + kPartPitch) + thread;
  const int64_t o = blockIdx.x / a.tiles, tile = blockIdx.x - o * a.tiles, begin = tile * kPartTile;
  const auto count = static_cast<int>(min(int64_t{kPartTile}, a.length - begin));
  const T* const x = static_cast<const T*>(a.x) + o * a.length + begin;

  T id[kIds];
#pragma unroll
  for (int i = 0; i < kIds; ++i) {
    const int at = i * kThreads + thread;
    id[i] = at < count ? __ldcs(x + at) : static_cast<T>(~T{0});
  }
  uint32_t key[kIds], ranks[kIds / 8] = {};  // a rank among the thread's ids of the part has 4 bits
#pragma unroll
  for (int i = 0; i < kIds; ++i) key[i] = id[i] < a.limit ? static_cast<uint32_t>(id[i]) : kNone;
  uint2 hot = {kNone, 0};
  for (int from = 0; from < 32 && hot.x == kNone; from += 31) {
    const uint32_t candidate = __shfl_sync(kEveryLane, key[0], from);
    if (__popc(__ballot_sync(kEveryLane, key[0] == candidate)) >= kMany) hot.x = candidate;
  }
  if (hot.x != kNone) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      hot.y += __popc(__ballot_sync(kEveryLane, key[i] == hot.x));
      if (key[i] == hot.x) key[i] = kNone;
    }
  }
  if (lane == 0) a.counted(o, tile)[warp] = hot;

  for (int w = 0; w < words; ++w) counters[w * kThreads] = 0;
#pragma unroll
  for (int i = 0; i < kIds; ++i) {
    if (key[i] == kNone) continue;
    const uint32_t part = key[i] >> a.bits;
    uint32_t* const counter = counters + part / 4 * kThreads;
    const uint32_t word = *counter, shift = part % 4 * 8;
    *counter = word + (1u << shift);
    ranks[i / 8] |= (word >> shift & 15) << i % 8 * 4;
  }
  __syncthreads();

  if (warp < words) {
    const int at = warp * kThreads - thread + lane;
    uint32_t even = 0, odd = 0;
#pragma unroll 4
    for (int t = 0; t < kThreads; t += 32) {
      const uint32_t word = counters[at + t];
      even += word & 0xff00ff;
      odd += word >> 8 & 0xff00ff;
    }
    const uint32_t evens = sum_up_to_lane(even), odds = sum_up_to_lane(odd);
    even = evens - even;
    odd = odds - odd;
#pragma unroll 4
    for (int t = 0; t < kThreads; t += 32) {
      bases[at + warp * kThreads + t] = even;
      bases[at + (warp + 1) * kThreads + t] = odd;
      const uint32_t word = counters[at + t];
      even += word & 0xff00ff;
      odd += word >> 8 & 0xff00ff;
    }
    if (lane == 31) {
      totals[4 * warp] = evens & 0xffff, totals[4 * warp + 2] = evens >> 16;
      totals[4 * warp + 1] = odds & 0xffff, totals[4 * warp + 3] = odds >> 16;
    }
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t total = lane < 4 * words ? totals[lane] : 0, packs = (total + kPackIds - 1) / kPackIds;
    const uint32_t end = sum_up_to_lane(packs);
    starts[lane] = (end - packs) * kPackIds;
    for (uint32_t i = (end - packs) * kPackIds + total; i < end * kPackIds; ++i) staged[i] = 0xffff;
    uint16_t* const to = a.starts_of(o, tile);
    if (lane == 0) to[0] = 0;
    if (lane < a.parts) to[lane + 1] = static_cast<uint16_t>(end);
    __syncwarp();  // lane 0 has read totals[0]
    if (lane == 31) totals[0] = end;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kIds; ++i) {
    if (key[i] == kNone) continue;
    const uint32_t part = key[i] >> a.bits;
    const uint32_t base = bases[(part / 4 * 2 + part % 2) * kThreads] >> (part / 2 % 2 * 16) & 0xffff;
    const uint32_t slot = starts[part] + base + (ranks[i / 8] >> i % 8 * 4 & 15);
    staged[slot] = static_cast<uint16_t>(key[i] & ((1u << a.bits) - 1));
  }
  __syncthreads();
  Pack* const to = a.ids_of(o, tile);
  for (uint32_t i = thread; i < totals[0]; i += kThreads) to[i] = reinterpret_cast<const Pack*>(staged)[i];
}

// The ids of the block's part are cut into chunks, which warps take in turn, since there may be many in some tiles and
// none in others. Those of the next chunk are loaded before those of this one are counted.
__global__ void __launch_bounds__(kCountThreads, 1) bincount_parts_kernel(const __grid_constant__ Args a) {
  constexpr int kPacks = kChunk / 32;
  // For the tile of each thread that has one: its first chunk, and where its ids begin and end, in packs.
  __shared__ uint32_t chunks[kCountThreads + 1], bounds[kCountThreads], sums[kCountThreads / 32];
  auto* const table = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread / 32;
  const int64_t unit = blockIdx.x / a.parts, part = blockIdx.x - unit * a.parts, o = unit / a.slices;
  const int64_t first = (unit - o * a.slices) * a.slice, end = min(a.tiles, first + a.slice);
  const auto size = static_cast<uint32_t>(min(int64_t{1} << a.bits, a.bins - (part << a.bits)));
  for (uint32_t b = thread; b < size; b += kCountThreads) table[b] = 0;
  wait_for_predecessor();
  __syncthreads();
  for (int64_t i = first * kPartWarps + thread; i < end * kPartWarps; i += kCountThreads) {
    const uint2 hot = a.counted(o, 0)[i];
    if (hot.y && hot.x >> a.bits == part) atomicAdd(table + (hot.x & ((1u << a.bits) - 1)), hot.y);
  }

  Counter<uint32_t> counter;
  counter.table = table;
  counter.size = size;
  for (int64_t group = first; group < end; group += kCountThreads) {
    uint32_t begins = 0, ends = 0;
    if (group + thread < end) {
      const uint16_t* const starts = a.starts_of(o, group + thread) + part;
      begins = starts[0], ends = starts[1];
    }
    const uint32_t own = (ends - begins + kChunk - 1) / kChunk, before = sum_before<kCountThreads>(own, sums);
    bounds[thread] = begins | ends << 16;
    chunks[thread] = before;
    if (thread == kCountThreads - 1) chunks[kCountThreads] = before + own;
    __syncthreads();
    const uint32_t count = chunks[kCountThreads];
    int tile = 0;
    Pack pack[kPacks];
    bool has[kPacks];
    const auto load = [&](uint32_t chunk) {
      if (chunk >= count) return;
      for (int step = 32; step == 32; tile += step)  // to the tile that has the chunk
        step = __popc(__ballot_sync(kEveryLane, tile + lane < kCountThreads && chunks[tile + lane + 1] <= chunk));
      const uint32_t begin = (bounds[tile] & 0xffff) + (chunk - chunks[tile]) * kChunk, stop = bounds[tile] >> 16;
      const Pack* const from = a.ids_of(o, group + tile);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        has[p] = begin + 32 * p + lane < stop;
        if (has[p]) pack[p] = load_once(from + begin + 32 * p + lane);
      }
    };
    load(warp);
    for (uint32_t chunk = warp; chunk < count; chunk += kCountThreads / 32) {
      uint32_t id[kPacks * kPackIds];
#pragma unroll
      for (int i = 0; i < kPacks * kPackIds; ++i)
        id[i] = has[i / kPackIds] ? get<uint16_t>(pack[i / kPackIds], i % kPackIds) : kNone;
      load(chunk + kCountThreads / 32);
#pragma unroll
      for (int i = 0; i < kPacks * kPackIds; ++i) counter.add(id[i], i % kPackIds == 0);
    }
    __syncthreads();
  }
  counter.flush();
  __syncthreads();
  uint32_t* const to = a.counts + o * a.bins + (part << a.bits);
  for (uint32_t b = threadIdx.x; b < size; b += kCountThreads) {
    const uint32_t total = table[b];
    if (a.slices == 1) {
      to[b] = total;
    } else if (total) {
      atomicAdd(to + b, total);
    }
  }
}

}  // namespace

cudaError_t launch_bincount_parts(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                                  int32_t* counts, char* workspace, int64_t workspace_bytes) {
  Args a = {};
  a.x = x;
  a.counts = reinterpret_cast<uint32_t*>(counts);
  a.workspace = workspace;
  a.workspace_bytes = workspace_bytes;
  a.length = problem.rows.length;
  a.bins = problem.bins;
  a.limit = problem.limit();
  a.tiles = plan.tiles;
  a.slices = plan.slices;
  a.slice = (a.tiles + a.slices - 1) / a.slices;
  a.parts = static_cast<int>(plan.ranges);
  a.bits = bits_for(plan.range);
  Launch split;
  split.block = dim3(kThreads);
  split.grid = dim3(static_cast<unsigned>(problem.rows.outer * a.tiles));
  split.shared_bytes = 2 * kPartPitch + 8 * ((a.parts + 3) / 4) * kThreads;
  cudaError_t status = problem.bytes == 8 ? launch(stream, split, bincount_split_kernel<uint64_t>, a)
                                          : launch(stream, split, bincount_split_kernel<uint32_t>, a);
  if (status != cudaSuccess) return status;
  Launch count;
  count.block = dim3(kCountThreads);
  count.grid = dim3(static_cast<unsigned>(problem.rows.outer * a.slices * a.parts));
  count.shared_bytes = plan.shared_bytes;
  count.overlap = plan.overlap;
  return launch(stream, count, bincount_parts_kernel, a);
}

}  // namespace jaxgpuops::count
