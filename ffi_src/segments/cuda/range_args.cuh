// What the kernels of few_rows.cu, picks.cu and ranges.cu share: a block has a range of segments and a chunk of columns
// of one outer index, and reads all of its ids.
#pragma once

#include <algorithm>

#include "common/cuda/launch.cuh"
#include "segments/cuda/args.cuh"

namespace jaxgpuops::segments {

struct RangeArgs : SegmentArgs {
  int64_t first = 0;  // the first outer index of the launch
  uint32_t ranges, chunks;
  int rows, range, team_bits;

  RangeArgs(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : SegmentArgs(problem, buffers),
        ranges(static_cast<uint32_t>(plan.tiles)),
        chunks(static_cast<uint32_t>((inner + (int64_t{1} << plan.team_bits) - 1) >> plan.team_bits)),
        rows(static_cast<int>(problem.rows.length)),
        range(static_cast<int>(plan.rows)),
        team_bits(plan.team_bits) {}

  __device__ const int32_t* ids_of(int64_t o) const { return ids + (o > 0 ? ids_at(o) : 0); }
  template <class Bits>
  __device__ const Bits* data_of(int64_t o) const {
    return static_cast<const Bits*>(data) + (o > 0 ? data_at(o) : 0);
  }
};

// What a block has.
struct RangeBlock {
  int64_t o;            // the outer index
  int64_t left;         // the first column
  uint32_t first, own;  // the first segment, and how many there are

  __device__ explicit RangeBlock(const RangeArgs& a) {
    const uint32_t part = gridDim.x > 1 ? blockIdx.x / a.chunks : 0, place = part > 0 ? part / a.ranges : 0;
    o = a.first + place;
    left = static_cast<int64_t>(blockIdx.x - part * a.chunks) << a.team_bits;
    first = (part - place * a.ranges) * a.range;
    own = min(static_cast<uint32_t>(a.range), static_cast<uint32_t>(a.segments) - first);
  }
};

// Launches the kernel for all outer indices: several times, if one grid cannot have so many blocks.
template <class Args>
cudaError_t launch_range_blocks(cudaStream_t stream, const SegmentsPlan& plan, Args a, void (*kernel)(Args)) {
  Launch config;
  config.block = dim3(32 * plan.warps);
  config.shared_bytes = plan.shared_bytes;
  cudaError_t status = cudaSuccess;
  for (; a.first < a.outer && status == cudaSuccess; a.first += plan.batch) {
    config.grid = dim3(static_cast<unsigned>(std::min(plan.batch, a.outer - a.first) * a.ranges * a.chunks));
    status = launch(stream, config, kernel, a);
  }
  return status;
}

}  // namespace jaxgpuops::segments
