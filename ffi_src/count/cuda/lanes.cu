// Segments of rows of few columns where there are few: every lane of a warp has a table of all segments of its own, in
// its own bank of shared memory, and goes through every 32nd row of a slice. So nothing waits for anything else,
// whatever the ids are, and there are no atomics: lanes' tables are added up in a fixed order at the end of the slice,
// those of slices by the kernel of tables.cu. A warp has one column or two; warps of a block have neighbouring outer
// indices, whose data is often the same (sums of gradients and hessians by bin, for each of many features): it comes
// from L1 then.
//
// Moves each id once for each one or two columns, each number once for each outer index (from L2 if it is shared), and
// a table a slice. A step is a load, an addition and a store in shared memory, which depend on each other: four rows
// are taken at a time, and those of them that have one segment are added up on the way.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/slices.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kSteps = 8;     // of 32 rows, in flight
constexpr int kTogether = 4;  // of them

struct Args : Slices {
  int64_t outer, chunks;
  bool pairs;  // two columns are one load
};

template <class Bits, int kColumns>
struct alignas(kColumns * sizeof(Bits)) Columns {
  Bits value[kColumns];
};

// What a lane has of some steps.
template <class Monoid, int kColumns>
struct Rows32 {
  using Bits = typename Monoid::Bits;
  uint32_t id[kSteps];
  Columns<Bits, kColumns> number[kSteps];

  __device__ __forceinline__ void load(const Args& a, const int32_t* ids, const Bits* data, int64_t start,
                                       int64_t end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t at = start + 32 * i;
      id[i] = ~0u;
      if (at >= end) continue;
      id[i] = static_cast<uint32_t>(ids[at]);
      const Bits* from = data + at * a.inner;
      if (kColumns > 1 && a.pairs) {
        number[i] = *reinterpret_cast<const Columns<Bits, kColumns>*>(from);
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) number[i].value[c] = from[c];
      }
    }
  }

  // `cells` is the lane's table.
  __device__ __forceinline__ void fold_into(typename Monoid::Acc* cells, const Args& a) const {
    using Acc = typename Monoid::Acc;
    const auto segments = static_cast<uint32_t>(a.segments);
#pragma unroll
    for (int i = 0; i < kSteps; i += kTogether) {
      Acc* to[kTogether];
      Acc sum[kTogether][kColumns];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        to[t] = cells + min(id[i + t], segments - 1) * (32 * kColumns);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[t][c] = to[t][32 * c];
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int before = 0; before < t; ++before) {  // the last one counts
          if (id[i + before] != id[i + t]) continue;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sum[t][c] = sum[before][c];
        }
        if (id[i + t] < segments) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
            sum[t][c] = Monoid::fold(sum[t][c], Monoid::load(number[i + t].value[c], a.keys));
        }
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (id[i + t] >= segments) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) to[t][32 * c] = sum[t][c];
      }
    }
  }
};

template <class Monoid, int kColumns>
__global__ void __launch_bounds__(32 * kMostLaneWarps) segment_lanes_kernel(Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp;
  const int64_t o = unit % a.outer, chunk = unit / a.outer % a.chunks, slice = unit / a.outer / a.chunks;
  if (slice >= a.slices) return;
  const int cells = a.segments * kColumns;
  Acc* table = reinterpret_cast<Acc*>(dynamic_shared_memory()) + warp * cells * 32;
  for (int cell = 0; cell < cells; ++cell) table[cell * 32 + lane] = Monoid::identity();

  const int32_t* ids = a.ids + a.ids_at(o);
  const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o) + chunk * kColumns;
  const int64_t begin = slice * a.slice, end = min(a.length, begin + a.slice);
  Rows32<Monoid, kColumns> rows, next;
  rows.load(a, ids, data, begin + lane, end);
  for (int64_t start = begin; start < end; start += 32 * kSteps) {
    next.load(a, ids, data, start + 32 * kSteps + lane, end);
    rows.fold_into(table + lane, a);
    rows = next;
  }
  __syncwarp();

  // Lanes have different cells, and begin with different tables, so that no bank has two of them.
  Bits* out = static_cast<Bits*>(a.out) + o * a.segments * a.inner + chunk * kColumns;
  auto* partial =
      reinterpret_cast<Acc*>(a.workspace + o * a.workspace_bytes) + slice * a.segments * a.inner + chunk * kColumns;
  for (int cell = lane; cell < cells; cell += 32) {
    constexpr int kChains = 4;
    Acc sum[kChains];
#pragma unroll
    for (auto& s : sum) s = Monoid::identity();
#pragma unroll
    for (int i = 0; i < 32 / kChains; ++i)
#pragma unroll
      for (int c = 0; c < kChains; ++c)
        sum[c] = Monoid::fold(sum[c], table[cell * 32 + ((lane + i + c * (32 / kChains)) & 31)]);
    const Acc total = Monoid::fold(Monoid::fold(sum[0], sum[1]), Monoid::fold(sum[2], sum[3]));
    const int64_t at = static_cast<int64_t>(cell / kColumns) * a.inner + cell % kColumns;
    if (a.slices == 1) {
      out[at] = Monoid::store(total, a.keys);
    } else {
      partial[at] = total;
    }
  }
}

}  // namespace

cudaError_t launch_segment_lanes(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers) {
  Args a = {slices_of(plan, problem, buffers)};
  a.outer = problem.rows.outer;
  a.chunks = a.inner / plan.columns;
  a.pairs = reinterpret_cast<uintptr_t>(a.data) % (2 * bytes_of(problem.dtype)) == 0;
  Launch config;
  config.block = dim3(32 * plan.warps);
  config.grid = dim3(static_cast<unsigned>((a.outer * a.chunks * a.slices + plan.warps - 1) / plan.warps));
  config.shared_bytes = plan.shared_bytes;
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    if (plan.columns == 2) return launch(stream, config, segment_lanes_kernel<Monoid, 2>, a);
    return launch(stream, config, segment_lanes_kernel<Monoid, 1>, a);
  });
}

}  // namespace jaxgpuops::count
