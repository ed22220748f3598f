// The offsets of the segments of a row.
#pragma once

#include <cstdint>

#include "common/cuda/warp.cuh"

namespace jaxgpuops::sort {
namespace {

struct Range {
  uint32_t begin, end;
};

// The places of the first and of the last bit of a word, whose bits are those of 32 neighbouring places.
__device__ __forceinline__ uint32_t first_bit(uint32_t number, uint32_t word) {
  return number * 32 + static_cast<uint32_t>(__ffs(static_cast<int>(word)) - 1);
}
__device__ __forceinline__ uint32_t last_bit(uint32_t number, uint32_t word) {
  return number * 32 + static_cast<uint32_t>(31 - __clz(static_cast<int>(word)));
}

// Calls mark(place) for every offset, and returns the places between which all segments are. Offsets need not ascend:
// one that is less than any before it counts as the largest of those. All threads of the block, kThreads or any number
// if that is 0, call it. `largest` is shared memory for a number of each warp.
template <int kThreads, class Mark>
__device__ __forceinline__ Range mark_offsets(const int32_t* offsets, int64_t count, uint32_t length, uint32_t* largest,
                                              Mark mark) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, threads = kThreads ? kThreads : blockDim.x;
  const auto offset_at = [&](int64_t i) {
    return static_cast<uint32_t>(min(max(offsets[i], 0), static_cast<int32_t>(length)));
  };
  bool descends = false;  // mostly they do ascend
#pragma unroll 4
  for (int64_t i = threadIdx.x; i + 1 < count; i += threads) descends |= offset_at(i + 1) < offset_at(i);
  if (!__syncthreads_or(descends)) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += threads) mark(offset_at(i));
    return {offset_at(0), offset_at(count - 1)};
  }
  uint32_t most = 0;  // the largest offset so far
#pragma unroll 1
  for (int64_t start = 0; start < count; start += threads) {
    const int64_t i = start + threadIdx.x;
    uint32_t offset = i < count ? offset_at(i) : 0;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(kEveryLane, offset, lanes);
      if (lane >= static_cast<uint32_t>(lanes)) offset = max(offset, other);
    }
    __syncthreads();
    if (lane == 31) largest[warp] = offset;
    __syncthreads();
    offset = max(offset, most);
#pragma unroll 1
    for (uint32_t w = 0; w < threads / 32; ++w) {
      const uint32_t other = largest[w];
      if (w < warp) offset = max(offset, other);
      most = max(most, other);
    }
    if (i < count) mark(offset);
  }
  return {offset_at(0), most};
}

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

}  // namespace
}  // namespace jaxgpuops::sort
