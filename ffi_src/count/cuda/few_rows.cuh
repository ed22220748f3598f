// What the kernels of few rows share: a block has a range of segments and a chunk of columns. Shared memory has a cell
// for each segment and column of the block: its accumulators. The block goes through all rows once or more.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/args.cuh"

namespace jaxgpuops::count {

constexpr int kLoads = 8;  // rows that a lane loads at a time
// If so many rows that a warp has just loaded are of one segment, they are folded by shuffles: atomics on a cell wait
// for each other.
constexpr int kMany = 4;

struct FewArgs : SegmentArgs {
  int64_t ranges, chunks;
  int length, range, team_bits;
  int row_bits;  // there are at most 2^row_bits rows

  FewArgs(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        ranges(plan.tiles),
        chunks((inner + (int64_t{1} << plan.team_bits) - 1) >> plan.team_bits),
        length(static_cast<int>(problem.rows.length)),
        range(static_cast<int>(plan.rows)),
        team_bits(plan.team_bits),
        row_bits(kFewRowBits) {
    while (length > 1 << row_bits) ++row_bits;
  }
};

// The segments and columns that a block has, and how its threads share them.
template <class Bits>
struct FewBlock {
  const FewArgs& a;
  int64_t o, first, column;
  uint32_t range;  // how many segments the block has
  int lane;        // the thread's lane in its team
  bool live;
  const int32_t* ids;
  const Bits* data;  // the data of the thread's column
  // Rows that the thread has loaded: their segments, counted from the block's first, and their elements. They begin
  // with the row `held` of the first thread.
  int held = -1;
  uint32_t local[kLoads];
  Bits bits[kLoads];

  __device__ explicit FewBlock(const FewArgs& args) : a(args) {
    const int64_t chunk = blockIdx.x % a.chunks, part = blockIdx.x / a.chunks % a.ranges;
    o = blockIdx.x / a.chunks / a.ranges;
    first = part * a.range;
    range = static_cast<uint32_t>(min(static_cast<int64_t>(a.range), a.segments - first));
    lane = static_cast<int>(threadIdx.x) & ((1 << a.team_bits) - 1);
    column = (chunk << a.team_bits) + lane;
    live = column < a.inner;
    ids = a.ids + a.ids_at(o);
    data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  }
  __device__ int cells() const { return static_cast<int>(range << a.team_bits); }
  __device__ int cell(int segment) const { return (segment << a.team_bits) + lane; }

  // Loads the thread's rows from `start` on. If that is all of them, elements are loaded together with the ids, whether
  // the block needs them or not: the time of such a call is that of one load after the other.
  __device__ __forceinline__ void load(int start, int slots) {
    const int first_row = start + (static_cast<int>(threadIdx.x) >> a.team_bits);
    const auto has = [&](int i) { return live && first_row + i * slots < a.length; };
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      local[i] = has(i) ? static_cast<uint32_t>(ids[first_row + i * slots]) - static_cast<uint32_t>(first) : ~0u;
    if (a.length <= kLoads * slots) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (has(i)) bits[i] = data[(first_row + i * slots) * a.inner];
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (local[i] < range) bits[i] = data[(first_row + i * slots) * a.inner];
    }
  }
  // Calls `take(row, cell, bits)` for the rows of the thread; the cell is -1 if the row's segment belongs to another
  // block, or if it has none. All lanes of a warp call it alike, with row -1 where there are no more, but unless
  // `kEvery`, not for rows none of which has a cell. Then all threads wait for each other.
  template <bool kEvery = false, class Take>
  __device__ __forceinline__ void each_row(Take take) {
    const int slots = static_cast<int>(blockDim.x) >> a.team_bits;
    for (int start = 0; start < a.length; start += kLoads * slots) {
      if (start != held) load(start, slots);
      held = start;
      int row = start + (static_cast<int>(threadIdx.x) >> a.team_bits);
#pragma unroll
      for (int i = 0; i < kLoads; ++i, row += slots) {
        if (!kEvery && !__any_sync(kEveryLane, local[i] < range)) continue;
        take(live && row < a.length ? row : -1, local[i] < range ? cell(static_cast<int>(local[i])) : -1, bits[i]);
      }
    }
    __syncthreads();
  }
  // Calls `write(segment, cell)` for the segments of the thread.
  template <class Write>
  __device__ __forceinline__ void each_segment(Write write) const {
    const int slots = static_cast<int>(blockDim.x) >> a.team_bits, slot = static_cast<int>(threadIdx.x) >> a.team_bits;
    for (int s = slot; live && s < static_cast<int>(range); s += slots) write(s, cell(s));
  }
};

// Calls `put(cell, value)` for each lane that has a cell, or once for many lanes of a segment, with their fold. 0 must
// be the identity of `fold`. All lanes of a warp must call it.
template <class Value, class Fold, class Put>
__device__ __forceinline__ void put_together(int team_bits, int cell, Value value, Fold fold, Put put) {
  const unsigned some = __ballot_sync(kEveryLane, cell >= 0);
  if (some == 0) return;
  const int segment = cell >> team_bits, own = __shfl_sync(kEveryLane, segment, __ffs(some) - 1);
  const unsigned same = __ballot_sync(kEveryLane, segment == own);
  if (__popc(same) >> team_bits >= kMany) {
    Value sum = segment == own ? value : Value{0};
    for (int lanes = 1 << team_bits; lanes < 32; lanes *= 2) sum = fold(sum, shuffle_xor(sum, lanes));
    const int lane = static_cast<int>(threadIdx.x & 31);
    if (lane < 1 << team_bits) put((own << team_bits) + lane, sum);
    if (segment == own) return;
  }
  if (cell >= 0) put(cell, value);
}

// Adds `value` to an integer in memory that has `kWords` words of 32 bits, the lowest first; from one to the next it is
// `apart` words.
template <int kWords, class Wide>
__device__ __forceinline__ void add_wide(uint32_t* words, int apart, Wide value) {
  uint32_t carry = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const auto word = static_cast<uint32_t>(value >> (32 * w));
    const uint32_t more = word + carry;
    carry = more < carry;  // only if the word was all ones
    if (more == 0) continue;
    const uint32_t before = atomicAdd(words + w * apart, more);
    carry |= before + more < before;
  }
}

inline cudaError_t launch_few(cudaStream_t stream, const SegmentsPlan& plan, const FewArgs& a, int cell_bytes,
                              void (*kernel)(FewArgs)) {
  Launch config;
  config.block = dim3(plan.threads);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.ranges * a.chunks));
  config.shared_bytes = static_cast<size_t>(cell_bytes * a.range) << a.team_bits;
  return launch(stream, config, kernel, a);
}

}  // namespace jaxgpuops::count
