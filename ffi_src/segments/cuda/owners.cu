// Segments of some thousand rows in no order, in one launch. A block owns a range of segments and a chunk of columns. It
// lists the rows of its range, in any order, from all ids, and folds them to its cells by atomics on integers, in shared
// memory. If a segment has most of the rows, one block reads all of these, but lanes fold them before an atomic.
//
// Passes: one. Bytes moved: each row and each result once; every block reads all ids, from L2.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/cells.cuh"
#include "segments/cuda/range_args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kIds = 8, kHeld = 8;  // ids that a thread loads at a time, and numbers that it holds between the passes

template <class Monoid>
__global__ void __launch_bounds__(kOwnerThreads) segment_owners_kernel(const __grid_constant__ RangeArgs a) {
  using Bits = typename Monoid::Bits;
  using Own = Cells<Monoid>;
  const RangeBlock block(a);
  const uint32_t first = block.first, own = block.own;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, team = 1 << a.team_bits;
  const int column = thread & (team - 1);
  const bool live = block.left + column < a.inner;
  const Own cells(dynamic_shared_memory(), a.range << a.team_bits);
  auto* const list = reinterpret_cast<uint16_t*>(dynamic_shared_memory() + cells.count * Own::kBytes);
  __shared__ int listed;
  const int32_t* const ids = a.ids_of(block.o);
  const Bits* const data = a.template data_of<Bits>(block.o) + min(block.left + column, a.inner - 1);
  cells.clear(thread, kOwnerThreads);

  // Lists the block's rows among the next kOwnerList ones.
  const auto list_rows = [&](int from) {
    __syncthreads();
    if (thread == 0) listed = 0;
    __syncthreads();
    const int end = min(from + kOwnerList, a.rows);
#pragma unroll 1
    for (int at = from + thread; at - thread < end; at += kIds * kOwnerThreads) {
      bool has[kIds];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kIds; ++i) {
        const int row = at + i * kOwnerThreads;
        has[i] = row < end && static_cast<uint32_t>(ids[row]) - first < own;
      }
#pragma unroll
      for (int i = 0; i < kIds; ++i) count += has[i];
      if (!__any_sync(kEveryLane, count > 0)) continue;
      int place = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(kEveryLane, place, step);
        if (lane >= step) place += before;
      }
      int begin = 0;
      if (lane == 31) begin = atomicAdd(&listed, place);
      place += __shfl_sync(kEveryLane, begin, 31) - count;
#pragma unroll
      for (int i = 0; i < kIds; ++i)
        if (has[i]) list[place++] = static_cast<uint16_t>(at + i * kOwnerThreads - from);
    }
    __syncthreads();
    return listed << a.team_bits;
  };

  constexpr int kBatch = kHeld * kOwnerThreads;
  uint32_t segment[kHeld];
  Bits bits[kHeld];
  int numbers = 0;
#pragma unroll 1
  for (int pass = Own::kTwice ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int from = 0; from < a.rows; from += kOwnerList) {
      const bool listed_before = Own::kTwice && pass == 1 && a.rows <= kOwnerList;
      if (!listed_before) numbers = list_rows(from);
#pragma unroll 1
      for (int start = 0; start < numbers; start += kBatch) {
        if (!(listed_before && numbers <= kBatch)) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            const int number = start + i * kOwnerThreads + thread;
            segment[i] = kNoCell;
            bits[i] = 0;
            if (number >= numbers || !live) continue;
            const int row = from + list[number >> a.team_bits];
            segment[i] = static_cast<uint32_t>(ids[row]) - first;
            bits[i] = data[static_cast<int64_t>(row) * a.inner];
          }
        }
        if (pass == 0) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i)
            if (segment[i] != kNoCell) cells.raise(static_cast<int>(segment[i] << a.team_bits) | column, bits[i]);
          continue;
        }
#pragma unroll 1
        for (int i = 0; i < kHeld && start + i * kOwnerThreads < numbers; ++i) {
          uint32_t to = kNoCell;
          Bits number = 0;
#pragma unroll
          for (int j = 0; j < kHeld; ++j)
            if (i == j) to = segment[j], number = bits[j];
          const int cell = static_cast<int>(to << a.team_bits) | column;
          const auto value = to == kNoCell ? typename Own::Value{} : cells.value(cell, number, a.keys);
          put_together(cells, to, cell, team, value);
        }
      }
    }
    __syncthreads();
  }
  auto* const out = static_cast<Bits*>(a.out) + (block.o * a.segments + first) * a.inner + block.left + column;
  for (int i = thread; i < static_cast<int>(own) << a.team_bits; i += kOwnerThreads)
    if (live) out[(i >> a.team_bits) * a.inner] = Monoid::store(cells.result(i), a.keys);
}

}  // namespace

cudaError_t launch_segment_owners(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers) {
  const RangeArgs a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) {
    return launch_range_blocks(stream, plan, a, segment_owners_kernel<decltype(monoid)>);
  });
}

}  // namespace jaxgpuops::segments
