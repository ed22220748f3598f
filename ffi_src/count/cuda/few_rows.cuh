// What the kernels of few rows share: a block has a range of segments and a chunk of columns. Shared memory has a cell
// for each segment and column of the block: its accumulators. The block goes through all rows once or more.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/args.cuh"

namespace jaxgpuops::count {

constexpr int kLoads = 8;  // rows that a lane loads at a time
constexpr int kRowBits = 11;
static_assert(kFewRows == 1 << kRowBits);

struct FewArgs : SegmentArgs {
  int64_t ranges, chunks;
  int length, range, team_bits;

  FewArgs(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        ranges(plan.tiles),
        chunks((inner + (int64_t{1} << plan.team_bits) - 1) >> plan.team_bits),
        length(static_cast<int>(problem.rows.length)),
        range(static_cast<int>(plan.rows)),
        team_bits(plan.team_bits) {}
};

// The segments and columns that a block has, and how its threads share them.
template <class Bits>
struct FewBlock {
  const FewArgs& a;
  int64_t o, first, column;
  int range, lane;  // how many segments the block has; the thread's lane in its team
  bool live;
  const int32_t* ids;
  const Bits* data;  // the data of the thread's column

  __device__ explicit FewBlock(const FewArgs& args) : a(args) {
    const int64_t chunk = blockIdx.x % a.chunks, part = blockIdx.x / a.chunks % a.ranges;
    o = blockIdx.x / a.chunks / a.ranges;
    first = part * a.range;
    range = static_cast<int>(min(static_cast<int64_t>(a.range), a.segments - first));
    lane = static_cast<int>(threadIdx.x) & ((1 << a.team_bits) - 1);
    column = (chunk << a.team_bits) + lane;
    live = column < a.inner;
    ids = a.ids + a.ids_at(o);
    data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  }
  __device__ int cells() const { return range << a.team_bits; }
  __device__ int cell(int segment) const { return (segment << a.team_bits) + lane; }

  // Calls `take(row, cell, bits)` for the rows of the thread; the cell is -1 if the row's segment belongs to another
  // block, or if it has none. Then all threads wait for each other.
  template <class Take>
  __device__ __forceinline__ void each_row(Take take) const {
    const int slots = static_cast<int>(blockDim.x) >> a.team_bits, slot = static_cast<int>(threadIdx.x) >> a.team_bits;
    for (int start = slot; live && start < a.length; start += kLoads * slots) {
      int64_t id[kLoads];
      Bits bits[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = start + i * slots;
        id[i] = row < a.length ? ids[row] - first : -1;
        if (id[i] >= range) id[i] = -1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (id[i] >= 0) bits[i] = data[(start + i * slots) * a.inner];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (start + i * slots < a.length)
          take(start + i * slots, id[i] < 0 ? -1 : cell(static_cast<int>(id[i])), bits[i]);
    }
    __syncthreads();
  }
  // Calls `write(segment, cell)` for the segments of the thread.
  template <class Write>
  __device__ __forceinline__ void each_segment(Write write) const {
    const int slots = static_cast<int>(blockDim.x) >> a.team_bits, slot = static_cast<int>(threadIdx.x) >> a.team_bits;
    for (int s = slot; live && s < range; s += slots) write(s, cell(s));
  }
};

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
