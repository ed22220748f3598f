// Joins segments that begin in one tile and end in a later one: folds the tail of the tile that a segment begins in
// with the heads of the tiles behind it (tiles.cuh). A block has as many tiles as teams of threads, and a chunk of the
// columns. Neighbouring tiles whose heads are of one segment are a run. A block folds all its runs at once, each as a
// tree, and the team of a tail adds the run behind it. If a segment goes on in the next block, but has no more than
// kFew tiles there, the team of the tail adds these, too. Otherwise the segment is long: each block leaves the fold of
// its tiles in the workspace and counts itself, and the one that counts last folds what all of them left, as a tree
// whose shape depends on their number alone. No block waits for another.
//
// Passes: one. Bytes moved: each head and tail is read once, and up to kFew heads of a block twice; a segment that
// crosses tiles is written once; for long ones, each block writes a partial result, which the last one reads.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/tiles_args.cuh"

namespace jaxgpuops::segments {
namespace {

// Returns how many of the `most` tiles next to `tile`, in one direction (1 or -1), begin with the same id as `tile`.
// Ids ascend, so these tiles are neighbours. Usually they are few: the lanes of a warp first look at distances of 1, 2,
// 4 and so on, and then cut the interval that is left into 32 parts, until it is one tile. A whole warp calls this.
__device__ __noinline__ int64_t run_beside(const Args& a, const int32_t* ids, int64_t tile, int direction, int64_t most,
                                           int32_t id) {
  const int lane = threadIdx.x & 31;
  const auto lanes_in_run = [&](int64_t distance) {
    const bool is_in = distance <= most && ids[(tile + direction * distance) * a.rows] == id;
    return __popc(__ballot_sync(kEveryLane, is_in));
  };
  const int doublings = lanes_in_run(int64_t{1} << lane);
  if (doublings == 0) return 0;
  int64_t low = int64_t{1} << (doublings - 1), high = min(most, 2 * low - 1);
#pragma unroll 1
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, distance = low + (lane + 1) * step;
    low += lanes_in_run(distance <= high ? distance : most + 1) * step;
    high = min(high, low + step - 1);
  }
  return low;
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kJoinThreads) segment_join_kernel(const __grid_constant__ Args a) {
  using Acc = typename Monoid::Acc;
  constexpr int kFew = 8;
  constexpr int32_t kNone = -1;
  __shared__ Partial<Monoid, kCount> partials[kJoinThreads];
  __shared__ int32_t head_of[kJoinThreads], tail_of[kJoinThreads];  // ids, or kNone
  __shared__ uint32_t starts[kJoinThreads / 32];                    // a bit for each tile that begins a run
  // The first and last tiles of the segment that comes from a block before, and of the one that begins in this block
  // and goes on in the next.
  __shared__ int64_t in_first, in_last, out_first, out_last;
  __shared__ bool is_last_block;
  const int lane = threadIdx.x & ((1 << a.team_bits) - 1), team = threadIdx.x >> a.team_bits;
  const int teams = kJoinThreads >> a.team_bits;
  const int64_t block = blockIdx.x / a.chunks, chunk = blockIdx.x - block * a.chunks;
  const int64_t blocks = (a.tiles + teams - 1) / teams, o = block / blocks, first = (block - o * blocks) * teams;
  const int32_t* ids = a.ids + offset_of(a.ids_at, o);

  // The kernel of tiles lets this one start only after the ids are in order, but may still write heads and tails. So
  // all that follows from the ids comes before the wait for it.
  const int64_t behind = first + teams;  // the first tile behind the block's
  // The id of the segment that has rows on both sides of the tile's front, or kNone.
  const auto id_across = [&](int64_t tile) {
    if (tile == 0 || tile >= a.tiles) return kNone;
    const int32_t id = ids[tile * a.rows];
    return a.is_segment(id) && ids[tile * a.rows - 1] == id ? id : kNone;
  };
  const int32_t in_id = id_across(first), out_id = id_across(behind);
  int32_t head = kNone;
  if (threadIdx.x < teams) {
    const int64_t tile = first + threadIdx.x;
    head = id_across(tile);
    const int32_t tail = id_across(tile + 1);
    head_of[threadIdx.x] = head;
    // If head and tail are of one segment, the tile has only a head.
    tail_of[threadIdx.x] = tail != head ? tail : kNone;
  }
  if (threadIdx.x / 32 == 0) {
    int64_t begin = -1, end = -1;
    if (in_id != kNone) {
      end = first + run_beside(a, ids, first, 1, a.tiles - 1 - first, in_id);
      begin = first - run_beside(a, ids, first, -1, first, in_id);
      if (id_across(begin) != kNone) --begin;
    }
    if (threadIdx.x == 0) in_first = begin, in_last = end;
  } else if (threadIdx.x / 32 == 1) {
    const int64_t end = out_id != kNone ? behind + run_beside(a, ids, behind, 1, a.tiles - 1 - behind, out_id) : -1;
    // If the caller wrongly says that ids ascend, it may be that no tile has the tail. Results are undefined then, but
    // the kernel must not leave its buffers.
    if (threadIdx.x == 32) out_first = behind - 1, out_last = end;
  }
  __syncthreads();
  // A tile without a head is a run of its own, whose fold is not used.
  const bool starts_run = head == kNone || threadIdx.x == 0 || head_of[threadIdx.x - 1] != head;
  if (threadIdx.x < teams) {
    const uint32_t bits = __ballot_sync(kEveryLane, starts_run);
    if (threadIdx.x % 32 == 0) starts[threadIdx.x / 32] = bits;
    if (out_id != kNone && tail_of[threadIdx.x] == out_id) out_first = first + threadIdx.x;
  }
  wait_for_predecessor();
  __syncthreads();

  const int64_t column = ((chunk << a.team_bits) + lane) * kCount;
  const bool live = column < a.inner;
  char* workspace = a.workspace + o * a.workspace_bytes;
  Acc* const heads = reinterpret_cast<Acc*>(workspace) + column;
  Acc* const tails = reinterpret_cast<Acc*>(workspace + a.tails_at) + column;
  const auto store = [&](const Partial<Monoid, kCount>& sum, int32_t id) {
    sum.store_result(a.out, (o * a.segments + id) * a.inner + column, a.keys);
  };

  Partial<Monoid, kCount> own, tail;
  own.clear();
  if (live && head_of[team] != kNone) own.load(heads + (first + team) * a.inner);
  if (live && tail_of[team] != kNone) tail.load(tails + (first + team) * a.inner);
  partials[threadIdx.x] = own;
  // The run that the team's tile is in: its place, and how many tiles of it follow.
  int word = team / 32;
  uint32_t bits = starts[word] & (2u << team % 32) - 1;
  while (bits == 0) bits = starts[--word];
  const int place = team - (32 * word + 31 - __clz(bits));
  word = team / 32;
  bits = starts[word] & ~((2u << team % 32) - 1);
  while (bits == 0 && 32 * (word + 1) < teams) bits = starts[++word];
  const int follow = (bits ? 32 * word + __ffs(bits) - 1 : teams) - 1 - team;
  // In the end, the first tile of each run has the fold of the whole run.
#pragma unroll 1
  for (int half = 1; __syncthreads_or(half <= follow); half *= 2)
    if (half <= follow && place % (2 * half) == 0)
      partials[threadIdx.x].fold(partials[threadIdx.x + (half << a.team_bits)]);

  const bool is_few = out_last - behind < kFew;
  if (live && tail_of[team] != kNone) {
    const int32_t id = tail_of[team];
    if (team + 1 < teams) tail.fold(partials[threadIdx.x + (1 << a.team_bits)]);
    if (id != out_id) {
      store(tail, id);
    } else if (is_few) {
      for (int64_t tile = behind; tile <= out_last; ++tile) {
        own.load(heads + tile * a.inner);
        tail.fold(own);
      }
      store(tail, id);
    } else {
      tail.store(tails + (first + team) * a.inner);
    }
  }
  // Whether the segment that comes from a block before is long. The block in which the segment begins decides the same,
  // by !is_few.
  const bool comes = in_id != kNone && (in_first < first - teams || in_last - first >= kFew);
  if (comes && live && team == 0) partials[threadIdx.x].store(heads + first * a.inner);
  const bool goes = out_id != kNone && out_id != in_id && !is_few;
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    if (!(side == 0 ? comes : goes)) continue;
    const int64_t begin = side == 0 ? in_first : out_first, end = side == 0 ? in_last : out_last;
    const int64_t begin_block = begin / teams, parts = end / teams - begin_block + 1;
    // The barrier and the fence publish what the block's threads have stored; the second fence and barrier let them
    // read what other blocks published before they counted.
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      is_last_block = atomicAdd(a.counter(workspace, begin, column), 1u) == parts - 1;
      __threadfence();
    }
    __syncthreads();
    if (!is_last_block) continue;
    const int64_t share = (parts + teams - 1) / teams;  // neighbouring parts that a team folds
    Partial<Monoid, kCount> sum;
    sum.clear();
#pragma unroll 4
    for (int64_t part = team * share; part < min(parts, (team + 1) * share); ++part) {
      if (!live) break;
      own.load(part == 0 ? tails + begin * a.inner : heads + (begin_block + part) * teams * a.inner);
      sum.fold(own);
    }
    partials[threadIdx.x] = sum;
    for (int half = teams / 2; half > 0; half /= 2) {
      __syncthreads();
      if (team < half) partials[threadIdx.x].fold(partials[threadIdx.x + (half << a.team_bits)]);
    }
    if (live && team == 0) store(partials[threadIdx.x], side == 0 ? in_id : out_id);
  }
}

template <class Monoid, int kCount>
cudaError_t run_join(cudaStream_t stream, Args a) {
  const int64_t lanes = (a.inner + kCount - 1) / kCount, teams = kJoinThreads >> a.team_bits;
  a.chunks = ((lanes - 1) >> a.team_bits) + 1;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(a.outer * ((a.tiles + teams - 1) / teams) * a.chunks));
  config.block = dim3(kJoinThreads);
  config.overlap = a.overlap;
  return launch(stream, config, segment_join_kernel<Monoid, kCount>, a);
}

}  // namespace
}  // namespace jaxgpuops::segments
