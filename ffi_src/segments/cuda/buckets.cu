// Sums of floats in many segments, of rows of few bytes in no order. Reading such rows in the order of their ids would
// read a whole sector of memory for each, from anywhere. Here the rows themselves are moved once, to their bucket: a
// bucket is 2^shift neighbouring segments, and the high bits of an id name it. Then a block has the sums of a bucket's
// segments in shared memory, and reads the bucket's rows one after the other.
//
//   segment_bucket_count_kernel: counts the rows of each bucket in each tile.
//   segment_bucket_scan_kernel: adds the counts of a bucket up over the tiles, so that each tile knows where its rows
//     go.
//   segment_bucket_move_kernel: a block orders a tile by bucket in shared memory, so that neighbours are written
//     together: the rows, and the low bits of their ids. The order of a bucket's rows is that of the data.
//   segment_bucket_sum_kernel: a block has a bucket, or a piece of a long one, and takes its rows by steps. The
//   segments
//     are dealt out to its warps, and rows go to the warp of their segment through shared memory, so that each sum has
//     one writer. Lanes with the same segment fold their rows in a tree.
//   segment_bucket_join_kernel: adds up the sums of the pieces of long buckets.
//
// So the order of additions follows from the ids and the sizes, and not from tiles or from the GPU.
//
// Bytes moved: ids are read twice, rows twice and written once, with two bytes of id; each segment is written once.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr uint32_t kScanThreads = 1024, kScanBuckets = 8;  // of a block of segment_bucket_scan_kernel
constexpr uint32_t kNone = ~0u;

struct Args : SegmentArgs {
  BucketsPlan plan;
  uint32_t of_row;  // bytes of a row

  Args(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        plan(plan.buckets),
        of_row(static_cast<uint32_t>(problem.rows.inner * bytes_of(problem.dtype))) {}

  template <class T>
  __device__ T* part(int64_t at) const {
    return reinterpret_cast<T*>(workspace + blockIdx.y * workspace_bytes + at);
  }
  // [tile][bucket]: how many of the tile's rows are in the bucket; and how many of the bucket's rows are before the
  // tile.
  __device__ uint16_t* counts() const { return part<uint16_t>(0); }
  __device__ uint32_t* before() const { return part<uint32_t>(plan.before); }
  __device__ uint32_t* totals() const { return part<uint32_t>(plan.totals); }  // rows of a bucket
  __device__ uint16_t* low() const { return part<uint16_t>(plan.low); }        // the low bits of a moved row's id
  __device__ char* moved() const { return part<char>(plan.moved); }
  __device__ uint32_t bucket_of(uint32_t id) const {
    return id < static_cast<uint32_t>(segments) ? id >> plan.shift : plan.count;
  }
  __device__ uint32_t pieces_of(uint32_t total) const { return max(1u, (total + plan.piece - 1) / plan.piece); }
};

__global__ void __launch_bounds__(kBucketThreads) segment_bucket_count_kernel(const __grid_constant__ Args a) {
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  let_dependents_start();
  const int32_t* const ids = a.ids + a.ids_at(blockIdx.y);
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < a.plan.tiles; tile += gridDim.x) {
    for (uint32_t b = threadIdx.x; b < a.plan.count; b += kBucketThreads) counts[b] = 0;
    __syncthreads();
    const int64_t begin = int64_t{tile} * a.plan.tile, end = min(begin + a.plan.tile, a.length);
#pragma unroll 1
    for (int64_t at = begin + threadIdx.x; at < end; at += kBucketItems * kBucketThreads) {
      uint32_t id[kBucketItems];
#pragma unroll
      for (int i = 0; i < kBucketItems; ++i)
        id[i] = at + i * kBucketThreads < end ? static_cast<uint32_t>(ids[at + i * kBucketThreads]) : kNone;
#pragma unroll
      for (int i = 0; i < kBucketItems; ++i)
        if (const uint32_t bucket = a.bucket_of(id[i]); bucket < a.plan.count) atomicAdd(counts + bucket, 1u);
    }
    __syncthreads();
    uint16_t* const to = a.counts() + int64_t{tile} * a.plan.count;
    for (uint32_t b = threadIdx.x; b < a.plan.count; b += kBucketThreads) to[b] = static_cast<uint16_t>(counts[b]);
    __syncthreads();
  }
}

// A block has kScanBuckets buckets, and each of its threads the tiles of a chunk.
__global__ void __launch_bounds__(kScanThreads) segment_bucket_scan_kernel(const __grid_constant__ Args a) {
  constexpr uint32_t kChunks = kScanThreads / kScanBuckets;
  __shared__ uint32_t sums[kChunks][kScanBuckets];
  const uint32_t own = threadIdx.x % kScanBuckets, chunk = threadIdx.x / kScanBuckets;
  const uint32_t bucket = blockIdx.x * kScanBuckets + own, share = (a.plan.tiles + kChunks - 1) / kChunks;
  const uint32_t begin = min(chunk * share, a.plan.tiles), end = min(begin + share, a.plan.tiles);
  const bool live = bucket < a.plan.count;
  wait_for_predecessor();
  let_dependents_start();
  const uint16_t* const counts = a.counts() + bucket;
  uint32_t sum = 0;
  if (live) {
#pragma unroll 8
    for (uint32_t tile = begin; tile < end; ++tile) sum += counts[int64_t{tile} * a.plan.count];
  }
  sums[chunk][own] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (uint32_t c = 0; c < chunk; ++c) before += sums[c][own];
  if (!live) return;
  if (chunk == kChunks - 1) a.totals()[bucket] = before + sum;
  uint32_t* const to = a.before() + bucket;
#pragma unroll 8
  for (uint32_t tile = begin; tile < end; ++tile) {
    const uint32_t count = counts[int64_t{tile} * a.plan.count];
    to[int64_t{tile} * a.plan.count] = before;
    before += count;
  }
}

// Returns the sum of this lane's number and those of the lanes below.
__device__ __forceinline__ uint32_t sum_to_lane(uint32_t number) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint32_t other = __shfl_up_sync(kEveryLane, number, lanes);
    if (threadIdx.x % 32 >= lanes) number += other;
  }
  return number;
}

// Returns the sum of the numbers of all threads before this one. `sums` has room for the sums of all warps.
__device__ uint32_t sum_before(uint32_t number, uint32_t* sums) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = sum_to_lane(number);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const uint32_t of_warp = lane < blockDim.x / 32 ? sums[lane] : 0;
  const uint32_t before = __shfl_sync(kEveryLane, sum_to_lane(of_warp) - of_warp, warp);
  __syncthreads();
  return before + sum - number;
}

// Returns the lanes whose key is the same in its kBits bits.
template <int kBits>
__device__ __forceinline__ unsigned lanes_with(uint32_t key) {
  unsigned peers = kEveryLane;
#pragma unroll
  for (int b = 0; b < kBits; ++b) {
    const unsigned vote = __ballot_sync(kEveryLane, key >> b & 1);
    peers &= key >> b & 1 ? vote : ~vote;
  }
  return peers;
}

// Starts to copy rows to shared memory.
__device__ __forceinline__ void copy_rows(unsigned char* to, const char* from, uint32_t bytes) {
  const auto copy = [&](auto unit) {
    constexpr int kUnit = sizeof(unit);
#pragma unroll 4
    for (uint32_t at = threadIdx.x * kUnit; at < bytes; at += blockDim.x * kUnit) {
      if constexpr (kUnit >= 4) {
        copy_async<kUnit>(to + at, from + at);
      } else {
        *reinterpret_cast<decltype(unit)*>(to + at) = *reinterpret_cast<const decltype(unit)*>(from + at);
      }
    }
  };
  const auto place = reinterpret_cast<uintptr_t>(from);
  if (place % 16 == 0 && bytes % 16 == 0) {
    copy(uint4{});
  } else if (place % 4 == 0 && bytes % 4 == 0) {
    copy(uint32_t{});
  } else {
    copy(uint16_t{});
  }
}

// Unit: what rows are moved by; a row has `units`.
template <class Unit>
__global__ void __launch_bounds__(kBucketThreads, 2)
    segment_bucket_move_kernel(const __grid_constant__ Args a, uint32_t units) {
  __shared__ uint32_t sums[32];
  const uint32_t threads = blockDim.x, warps = threads / 32, tile = kBucketItems * threads, digits = a.plan.digits;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp * (32 * kBucketItems) + lane;
  auto* const rows = reinterpret_cast<Unit*>(dynamic_shared_memory());
  auto* const sorted = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + tile * a.of_row);
  uint32_t* const next_of = sorted + tile;      // of each bucket: where its rows begin
  uint32_t* const shift_of = next_of + digits;  // where the tile's rows go, less where they are in the tile
  auto* const source = reinterpret_cast<uint16_t*>(shift_of + digits);
  uint16_t* const tables = source + tile;  // a table of counts for each warp
  uint16_t* const table = tables + warp * digits;
  const uint32_t each = (digits + threads - 1) / threads;  // buckets of a thread
  const uint32_t first = min(threadIdx.x * each, digits), last = min(first + each, digits);
  const int32_t* const ids = a.ids + a.ids_at(blockIdx.y);
  const char* const data =
      static_cast<const char*>(a.data) + a.data_at(blockIdx.y) / a.inner * static_cast<int64_t>(a.of_row);
  uint32_t next[kBucketItems];
  const auto load_ids = [&](int64_t base) {
#pragma unroll
    for (int i = 0; i < kBucketItems; ++i)
      next[i] = base + own + 32 * i < a.length ? static_cast<uint32_t>(ids[base + own + 32 * i]) : kNone;
  };
  int64_t base = int64_t{blockIdx.x} * tile;
  load_ids(base);
  wait_for_predecessor();
  let_dependents_start();
  {
    const uint32_t* totals = a.totals();
    uint32_t sum = 0;
    for (uint32_t d = first; d < last; ++d) sum += d < a.plan.count ? totals[d] : 0;
    sum = sum_before(sum, sums);
    for (uint32_t d = first; d < last; ++d) {
      next_of[d] = sum;
      sum += d < a.plan.count ? totals[d] : 0;
    }
  }
  uint16_t* const low = a.low();
  auto* const moved = reinterpret_cast<Unit*>(a.moved());
  const uint32_t* before_tile = a.before() + int64_t{blockIdx.x} * a.plan.count;
  // Blocks that run at the same time have neighbouring tiles, whose rows meet in the same lines of the L2 cache.
#pragma unroll 1
  for (; base < a.length; base += int64_t{gridDim.x} * tile, before_tile += gridDim.x * a.plan.count) {
    for (uint32_t d = first; d < min(last, a.plan.count); ++d) copy_async<4>(shift_of + d, before_tile + d);
    commit_async_copies();
    copy_rows(reinterpret_cast<unsigned char*>(rows), data + base * a.of_row,
              a.of_row * static_cast<uint32_t>(min(int64_t{tile}, a.length - base)));
    commit_async_copies();
    for (uint32_t d = lane; d < digits / 2; d += 32) reinterpret_cast<uint32_t*>(table)[d] = 0;
    __syncwarp();
    uint32_t id[kBucketItems], rank[kBucketItems];  // the rank of a row among the warp's rows of its bucket
#pragma unroll
    for (int i = 0; i < kBucketItems; ++i) {
      id[i] = next[i];
      const uint32_t bucket = a.bucket_of(id[i]);
      // Where all lanes have one bucket, as with ids that ascend, no votes are needed.
      unsigned peers = kEveryLane;
      if (!__all_sync(kEveryLane, bucket == __shfl_sync(kEveryLane, bucket, 0)))
        peers = lanes_with<kMostBucketBits>(bucket);
      const uint32_t before = __popc(peers & ((1u << lane) - 1)), count = table[bucket];
      __syncwarp();
      if (before == 0) table[bucket] = static_cast<uint16_t>(count + __popc(peers));
      __syncwarp();
      rank[i] = count + before;
    }
    load_ids(base + int64_t{gridDim.x} * tile);
    __syncthreads();
    uint32_t sum = 0;
    for (uint32_t d = first; d < last; ++d)
#pragma unroll 8
      for (uint32_t w = 0; w < warps; ++w) sum += tables[w * digits + d];
    sum = sum_before(sum, sums);
    wait_for_async_copies<1>();
    for (uint32_t d = first; d < last; ++d) {
      shift_of[d] += next_of[d] - sum;
#pragma unroll 8
      for (uint32_t w = 0; w < warps; ++w) {
        const uint32_t count = tables[w * digits + d];
        tables[w * digits + d] = static_cast<uint16_t>(sum);
        sum += count;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBucketItems; ++i) {
      const uint32_t place = table[a.bucket_of(id[i])] + rank[i];
      sorted[place] = id[i];
      source[place] = static_cast<uint16_t>(own + 32 * i);
    }
    wait_for_async_copies<0>();
    __syncthreads();
    // Rows without a segment are behind all others.
#pragma unroll
    for (int i = 0; i < kBucketItems; ++i) {
      const uint32_t place = i * threads + threadIdx.x, key = sorted[place];
      if (key >= static_cast<uint32_t>(a.segments)) break;
      const uint32_t to = place + shift_of[key >> a.plan.shift];
      low[to] = static_cast<uint16_t>(key & ((1u << a.plan.shift) - 1));
      if (units == 1) moved[to] = rows[source[place]];
    }
    if (units > 1) {
#pragma unroll 1
      for (uint32_t at = threadIdx.x; at < tile * units; at += threads) {
        const uint32_t place = at / units, key = sorted[place];
        if (key >= static_cast<uint32_t>(a.segments)) break;
        const uint32_t unit = at - place * units;
        moved[int64_t{place + shift_of[key >> a.plan.shift]} * units + unit] = rows[source[place] * units + unit];
      }
    }
    __syncthreads();
  }
}

// kCount neighbouring numbers of a row, aligned for the widest loads that whole rows of them allow.
template <class T, int kCount>
struct alignas(std::min<size_t>(16, (kCount & -kCount) * sizeof(T))) Columns {
  T value[kCount];
};

// Finds what a block has: the bucket of a piece, its rows, and how many pieces the bucket has.
struct Piece {
  uint32_t bucket, begin, end, pieces;
};
__device__ __forceinline__ void find_piece(const Args& a, uint32_t number, uint32_t* sums, Piece& piece) {
  const uint32_t* const totals = a.totals();
  const uint32_t each = (a.plan.count + kBucketThreads - 1) / kBucketThreads;
  const uint32_t first = min(threadIdx.x * each, a.plan.count), last = min(first + each, a.plan.count);
  if (threadIdx.x == 0) piece.bucket = kNone;
  uint32_t rows = 0, pieces = 0;
  for (uint32_t b = first; b < last; ++b) rows += totals[b], pieces += a.pieces_of(totals[b]);
  rows = sum_before(rows, sums);
  pieces = sum_before(pieces, sums);
  for (uint32_t b = first; b < last; ++b) {
    const uint32_t total = totals[b], count = a.pieces_of(total), own = number - pieces;
    if (own < count) piece = {b, rows + own * a.plan.piece, rows + min(total, (own + 1) * a.plan.piece), count};
    rows += total;
    pieces += count;
  }
  __syncthreads();
}

// Adds to each lane's sum those of the lanes behind it that have the same key, in a tree. Returns whether the lane is
// the first of its key.
template <class Monoid, class Sum>
__device__ __forceinline__ bool fold_peers(unsigned peers, Sum& sum) {
  const uint32_t lane = threadIdx.x % 32;
  const unsigned before = peers & ((1u << lane) - 1);
  unsigned after = peers & ~(before | 1u << lane);
  int rank = __popc(before);
  while (__any_sync(kEveryLane, after != 0)) {
    const int other = __ffs(after);
#pragma unroll
    for (auto& value : sum.value) {
      const auto more = shuffle_from(value, other ? other - 1 : static_cast<int>(lane));
      if (other) value = Monoid::fold(value, more);
    }
    after &= __ballot_sync(kEveryLane, (rank & 1) == 0);
    rank /= 2;
  }
  return before == 0;
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kBucketThreads, 2) segment_bucket_sum_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Row = Columns<Bits, kCount>;
  using Sum = Columns<Acc, kCount>;
  constexpr int kRows = kBucketRows, kWarps = kBucketThreads / 32, kWarpBits = 4;
  static_assert(kWarps == 1 << kWarpBits);
  constexpr uint32_t kNoSegment = 1 << 16, kMany = 6;
  __shared__ uint32_t sums[32];
  __shared__ Piece piece;
  __shared__ uint16_t counts[kWarps][kWarps];  // [a][b]: how many rows of warp a belong to segments of warp b
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 1u << a.plan.shift;
  auto* const totals = reinterpret_cast<Sum*>(dynamic_shared_memory());
  auto* const rows = reinterpret_cast<Sum*>(totals + width);
  auto* const segments = reinterpret_cast<uint16_t*>(rows + kRows * kBucketThreads);
  for (uint32_t s = threadIdx.x; s < width; s += kBucketThreads)
#pragma unroll
    for (Acc& value : totals[s].value) value = Monoid::identity();
  wait_for_predecessor();
  let_dependents_start();
  find_piece(a, blockIdx.x, sums, piece);
  const uint32_t bucket = piece.bucket, begin = piece.begin, end = piece.end, pieces = piece.pieces;
  if (bucket == kNone) return;
  const auto column = blockIdx.z * kCount, inner = static_cast<uint32_t>(a.inner);
  const uint16_t* const low = a.low();
  const auto* const data = reinterpret_cast<const Bits*>(a.moved()) + column;
  uint32_t next_segment[kRows];
  Row next[kRows];
  const auto load = [&](uint32_t base) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t at = base + warp * (32 * kRows) + 32 * r + lane;
      next_segment[r] = at < end ? low[at] : kNoSegment;
      if (at < end) next[r] = *reinterpret_cast<const Row*>(data + int64_t{at} * inner);
    }
  };
  load(begin);
#pragma unroll 1
  for (uint32_t base = begin; base < end; base += kRows * kBucketThreads) {
    // Ranks the warp's rows among those whose segments belong to the same warp: lane w counts those of warp w.
    uint32_t segment[kRows], place[kRows], count = 0;
    Sum sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      segment[r] = next_segment[r];
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[r].value[k] = Monoid::load(next[r].value[k], a.keys);
    }
    load(base + kRows * kBucketThreads);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // A segment that many lanes have is folded at once, so that its warp has not all the work.
      const unsigned same = __ballot_sync(kEveryLane, segment[r] == __shfl_sync(kEveryLane, segment[r], 0));
      if (__popc(same) >= kMany && fold_peers<Monoid>(same >> lane & 1 ? same : 1u << lane, sum[r]) == false)
        segment[r] = kNoSegment;
      unsigned mine = __ballot_sync(kEveryLane, segment[r] < kNoSegment), of_lane = mine;
#pragma unroll
      for (int b = 0; b < kWarpBits; ++b) {
        const unsigned vote = __ballot_sync(kEveryLane, segment[r] >> b & 1);
        mine &= segment[r] >> b & 1 ? vote : ~vote;
        of_lane &= lane >> b & 1 ? vote : ~vote;
      }
      place[r] = __shfl_sync(kEveryLane, count, segment[r] % kWarps) + __popc(mine & ((1u << lane) - 1));
      count += __popc(of_lane);
    }
    if (lane < kWarps) counts[warp][lane] = static_cast<uint16_t>(count);
    __syncthreads();
    // Lane w finds how many rows of warp w come before this warp's, and where the rows of warp w begin.
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t more = counts[w][lane % kWarps];
      if (w < warp) before += more;
      all += more;
    }
    const uint32_t to_own = sum_to_lane(lane < kWarps ? all : 0), from_own = to_own - all;
    before += from_own;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t to = place[r] + __shfl_sync(kEveryLane, before, segment[r] % kWarps);
      if (segment[r] == kNoSegment) continue;
      rows[to] = sum[r];
      segments[to] = static_cast<uint16_t>(segment[r]);
    }
    const uint32_t own = __shfl_sync(kEveryLane, from_own, warp), own_end = __shfl_sync(kEveryLane, to_own, warp);
    __syncthreads();
#pragma unroll 1
    for (uint32_t first = own; first < own_end; first += 32) {
      const bool there = first + lane < own_end;
      const uint32_t s = there ? segments[first + lane] : kNoSegment + lane;
      Sum more;
      if (there) more = rows[first + lane];
      const unsigned all = __ballot_sync(kEveryLane, there);
      const unsigned peers = lanes_with<kMostShift - kWarpBits>(s >> kWarpBits) & (there ? all : 0);
      if (fold_peers<Monoid>(peers, more) && there) {
        Sum total = totals[s];
#pragma unroll
        for (int k = 0; k < kCount; ++k) total.value[k] = Monoid::fold(total.value[k], more.value[k]);
        totals[s] = total;
      }
      __syncwarp();
    }
  }
  __syncthreads();
  const uint32_t first = bucket << a.plan.shift, count = min(width, static_cast<uint32_t>(a.segments) - first);
  if (pieces == 1) {
    Bits* const out = static_cast<Bits*>(a.out) + (blockIdx.y * a.segments + first) * a.inner + column;
    for (uint32_t s = threadIdx.x; s < count; s += kBucketThreads) {
      Row row;
#pragma unroll
      for (int k = 0; k < kCount; ++k) row.value[k] = Monoid::store(totals[s].value[k], a.keys);
      *reinterpret_cast<Row*>(out + int64_t{s} * inner) = row;
    }
  } else {
    Acc* const parts = a.part<Acc>(a.plan.parts) + (int64_t{blockIdx.x} << a.plan.shift) * inner + column;
    for (uint32_t s = threadIdx.x; s < count; s += kBucketThreads)
      *reinterpret_cast<Sum*>(parts + int64_t{s} * inner) = totals[s];
  }
}

// Blocks of blockIdx.z share the segments of a bucket.
template <class Monoid>
__global__ void __launch_bounds__(kBucketThreads) segment_bucket_join_kernel(const __grid_constant__ Args a) {
  using Acc = typename Monoid::Acc;
  __shared__ uint32_t sums[32];
  __shared__ uint32_t first_piece;
  wait_for_predecessor();
  const uint32_t* const totals = a.totals();
  const uint32_t bucket = blockIdx.x, pieces = a.pieces_of(totals[bucket]);
  if (pieces == 1) return;
  uint32_t before = 0;
  for (uint32_t b = threadIdx.x; b < bucket; b += kBucketThreads) before += a.pieces_of(totals[b]);
  before = sum_before(before, sums);
  if (threadIdx.x == kBucketThreads - 1) {
    for (uint32_t b = threadIdx.x; b < bucket; b += kBucketThreads) before += a.pieces_of(totals[b]);
    first_piece = before;
  }
  __syncthreads();
  const int64_t first = int64_t{bucket} << a.plan.shift, width = (int64_t{1} << a.plan.shift) * a.inner;
  const int64_t cells = min(width, (a.segments - first) * a.inner);
  const Acc* const parts = a.part<const Acc>(a.plan.parts) + first_piece * width;
  auto* const out = static_cast<typename Monoid::Bits*>(a.out) + (blockIdx.y * a.segments + first) * a.inner;
  for (int64_t cell = blockIdx.z * kBucketThreads + threadIdx.x; cell < cells; cell += gridDim.z * kBucketThreads) {
    Acc sum = parts[cell];
#pragma unroll 4
    for (uint32_t p = 1; p < pieces; ++p) sum = Monoid::fold(sum, parts[p * width + cell]);
    out[cell] = Monoid::store(sum, a.keys);
  }
}

template <class Monoid, int kCount>
cudaError_t run_sums(cudaStream_t stream, const SegmentsPlan& plan, const Args& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.buckets.pieces), static_cast<unsigned>(a.outer),
                     static_cast<unsigned>(a.inner / kCount));
  config.block = dim3(kBucketThreads);
  config.shared_bytes = bucket_sum_bytes(plan.buckets.shift, kCount * sizeof(typename Monoid::Acc));
  config.overlap = plan.overlap;
  const cudaError_t status = launch(stream, config, segment_bucket_sum_kernel<Monoid, kCount>, a);
  if (status != cudaSuccess || plan.buckets.pieces == plan.buckets.count) return status;
  config.grid = dim3(plan.buckets.count, static_cast<unsigned>(a.outer), 8);
  config.shared_bytes = 0;
  return launch(stream, config, segment_bucket_join_kernel<Monoid>, a);
}

// Sums of as many columns at a time as the plan says, unless the results are not aligned for that.
template <class Monoid>
cudaError_t run_columns(cudaStream_t stream, const SegmentsPlan& plan, const Args& a) {
  const auto out = reinterpret_cast<uintptr_t>(a.out);
  const auto suits = [&](int count) {
    return plan.columns == count && out % ((count & -count) * sizeof(typename Monoid::Bits)) == 0;
  };
  constexpr int kMost = 16 / sizeof(typename Monoid::Acc);
  if constexpr (kMost == 4)
    if (suits(4)) return run_sums<Monoid, 4>(stream, plan, a);
  if constexpr (sizeof(typename Monoid::Bits) == 4)
    if (suits(3)) return run_sums<Monoid, 3>(stream, plan, a);
  if (suits(2)) return run_sums<Monoid, 2>(stream, plan, a);
  return run_sums<Monoid, 1>(stream, plan, a);
}

cudaError_t run_move(cudaStream_t stream, const SegmentsPlan& plan, const Args& a) {
  Launch config;
  config.grid = dim3(plan.buckets.blocks, static_cast<unsigned>(a.outer));
  config.block = dim3(32 * plan.warps);
  config.shared_bytes = plan.shared_bytes;
  config.overlap = plan.overlap;
  if (a.of_row % 16 == 0) return launch(stream, config, segment_bucket_move_kernel<uint4>, a, a.of_row / 16);
  if (a.of_row % 8 == 0) return launch(stream, config, segment_bucket_move_kernel<uint2>, a, a.of_row / 8);
  if (a.of_row % 4 == 0) return launch(stream, config, segment_bucket_move_kernel<uint32_t>, a, a.of_row / 4);
  return launch(stream, config, segment_bucket_move_kernel<uint16_t>, a, a.of_row / 2);
}

}  // namespace

cudaError_t launch_segment_buckets(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  const auto outer = static_cast<unsigned>(a.outer);
  Launch config;
  config.grid = dim3(std::min(plan.buckets.tiles, 4 * plan.buckets.blocks), outer);
  config.block = dim3(kBucketThreads);
  config.shared_bytes = 4 * plan.buckets.count;
  cudaError_t status = launch(stream, config, segment_bucket_count_kernel, a);
  if (status != cudaSuccess) return status;
  config.grid = dim3((plan.buckets.count + kScanBuckets - 1) / kScanBuckets, outer);
  config.block = dim3(kScanThreads);
  config.shared_bytes = 0;
  config.overlap = plan.overlap;
  status = launch(stream, config, segment_bucket_scan_kernel, a);
  if (status == cudaSuccess) status = run_move(stream, plan, a);
  if (status != cudaSuccess) return status;
  switch (problem.dtype) {
    case DType::kFloat16: return run_columns<Sum<Float16>>(stream, plan, a);
    case DType::kBFloat16: return run_columns<Sum<BFloat16>>(stream, plan, a);
    case DType::kFloat32: return run_columns<Sum<Float32>>(stream, plan, a);
    case DType::kFloat64: return run_columns<Sum<Float64>>(stream, plan, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::segments
