// Segments without rows, whose result is `keys.empty`. A gap is a run of such segments between two ids that follow each
// other. Gaps of up to `gap` segments are filled by the tile that has the row behind the gap (tiles.cuh), which writes
// the neighbouring segments, too. Longer ones are filled by blocks of their own in the same launch, which find them by
// a binary search of the ids. So each segment is written once. Where a row is one element, a kernel fills all segments
// instead, before the results are written.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/tiles_args.cuh"

namespace jaxgpuops::segments {
namespace {

// The longest gap that tiles fill is `gap` segments, of up to kGapBytes: if tiles wrote long gaps of wide rows, those
// whose ids lie far apart would write many times what others read, and run long after these. Other blocks fill longer
// gaps: they cut the segments into cells of `gap` segments, so that each longer gap contains the first one of a cell.
constexpr int64_t kGap = 32, kGapBytes = 16 << 10;
constexpr int kMostCells = kThreads - 32;  // of a block: it needs one thread more than it has cells

// Fills gaps of more than `gap` segments. Each thread of a block has the front of a cell, and searches the ids for a
// gap that reaches to it. No such gap fits into a cell, so long gaps lie at the front or at the end of a cell. Then
// warps fill the cells.
template <class Result>
__device__ __noinline__ void fill_gaps(const Args& a) {
  // How many segments of a long gap are behind the front of a cell, and before it; `gap` at most.
  __shared__ uint8_t behind[kThreads], before[kThreads];
  const int64_t blocks = a.fillers / a.outer, o = blockIdx.x / blocks;
  const int64_t first = (blockIdx.x - o * blocks) * a.cells * a.gap;
  const int32_t* const ids = a.ids + offset_of(a.ids_at, o);
  if (threadIdx.x <= a.cells) {
    const int64_t front = min(first + int64_t{threadIdx.x} * a.gap, a.segments);
    int64_t low = 0, high = a.length;
#pragma unroll 1
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (a.place_of(ids[middle]) < front) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t last = low > 0 ? a.place_of(ids[low - 1]) : -1;
    const int64_t next = low < a.length ? a.place_of(ids[low]) : a.segments;
    const bool is_long = next - last > a.gap + 1;
    behind[threadIdx.x] = is_long ? static_cast<uint8_t>(min(next - front, a.gap)) : 0;
    before[threadIdx.x] = is_long ? static_cast<uint8_t>(min(front - 1 - last, a.gap)) : 0;
  }
  __syncthreads();
  const auto empty = static_cast<Result>(a.keys.empty);
  constexpr int kPerPack = 16 / sizeof(Result);
  Pack pack;
#pragma unroll
  for (int i = 0; i < kPerPack; ++i) set<Result>(pack, i, empty);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  constexpr int kWarps = kThreads / 32;
  // The cells of a warp are lane * kWarps + warp. Most have nothing to fill, so a ballot finds those that have.
  const int of_lane = lane * kWarps + warp;
  const bool has_cell = of_lane < a.cells && first + of_lane * a.gap < a.segments;
  unsigned cells = __ballot_sync(kEveryLane, has_cell && (behind[of_lane] | before[of_lane + 1]) != 0);
#pragma unroll 1
  for (; cells; cells &= cells - 1) {
    const int cell = (__ffs(cells) - 1) * kWarps + warp;
    const int64_t front = first + cell * a.gap, end = min(front + a.gap, a.segments);
    const int64_t middle = front + behind[cell], next = max(middle, end - before[cell + 1]);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {  // from `front` to `middle`, and from `next` to `end`
      const int64_t from = part ? next : front, count = ((part ? end : middle) - from) * a.inner;
      Result* const to = static_cast<Result*>(a.out) + (o * a.segments + from) * a.inner;
      const bool packs = count % kPerPack == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
      const int64_t units = packs ? count / kPerPack : count;
#pragma unroll 1
      for (int64_t i = lane; i < units; i += 32) {
        if (packs) {
          reinterpret_cast<Pack*>(to)[i] = pack;
        } else {
          to[i] = empty;
        }
      }
    }
  }
}

// Fills all segments if a row is one element, before another kernel writes the segments that have rows. To find the
// segments without rows would take longer. This kernel also runs if there are no rows at all. Bytes moved: each segment
// is written once.
template <class Bits>
__global__ void __launch_bounds__(kThreads) segment_fill_all_kernel(const __grid_constant__ Args a) {
  let_dependents_start();  // segment_scalars_kernel
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.outer * a.segments * a.inner;
       i += stride)
    static_cast<Bits*>(a.out)[i] = static_cast<Bits>(a.keys.empty);
}

}  // namespace
}  // namespace jaxgpuops::segments
