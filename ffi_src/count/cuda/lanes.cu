// Segments where there are few: every lane of a warp has a table of all segments of its own, in its own bank of shared
// memory. A row belongs to a team of lanes, each of which has one column or two of it; a warp goes through as many rows
// at a time as it has teams. So nothing waits for anything else, whatever the ids are, and there are no atomics: lanes'
// tables are added up in a fixed order at the end of the slice, then those of the warps that share a slice, then those
// of slices by the kernel of tables.cu. Neighbouring units have neighbouring outer indices, whose data is often the
// same (sums of gradients and hessians by bin, for each of many features): it comes from L1 then.
//
// Moves each id once for each chunk of columns, each number once for each outer index (from L2 if it is shared), and a
// table a slice. A step is a load, an addition and a store in shared memory, which depend on each other: four rows are
// taken at a time, and those of them that have one segment are added up on the way.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/slices.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kTogether = 4;  // steps, each of as many rows as a warp has teams
// Steps in flight. Where tables leave a multiprocessor few warps, each must have more, or waits for memory.
constexpr int kSteps = 8, kDeepSteps = 24;
constexpr int64_t kDeepBytes = 24 << 10;  // of the tables of a warp

struct Args : Slices {
  int64_t outer, chunks, share;  // rows of a slice that each of its warps has
  int team_bits, parts;          // warps that share a slice
  bool pairs;                    // two columns are one load
};

template <class Bits, int kColumns>
struct alignas(kColumns * sizeof(Bits)) Columns {
  Bits value[kColumns];
};

// What a lane has of some steps.
template <class Monoid, int kColumns, int kCount>
struct Steps {
  using Bits = typename Monoid::Bits;
  uint32_t id[kCount];
  Columns<Bits, kColumns> number[kCount];

  // Of the rows from `start` on, the lane has every `step`-th.
  template <class Id>
  __device__ __forceinline__ void load(const Args& a, const Id* ids, const Bits* data, int64_t start, int64_t end,
                                       int step) {
    const bool whole = start + step * (kCount - 1) < end;
    const Id* own = ids + start;
    const Bits* from = data + start * a.inner;
    const int64_t stride = step * a.inner;
#pragma unroll
    for (int i = 0; i < kCount; ++i, own += step, from += stride) {
      id[i] = ~0u;
      if (!whole && start + step * i >= end) continue;
      id[i] = static_cast<uint32_t>(*own);
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
    for (int i = 0; i < kCount; i += kTogether) {
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

template <class Monoid, class Id, int kColumns, int kCount>
__global__ void __launch_bounds__(32 * kMostLaneWarps) segment_lanes_kernel(Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = warp % a.parts;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32 / a.parts) + warp / a.parts;
  const int64_t o = unit % a.outer, chunk = unit / a.outer % a.chunks, slice = unit / a.outer / a.chunks;
  const int cells = a.segments * kColumns, team = 1 << a.team_bits, teams = 32 >> a.team_bits;
  Acc* const tables = reinterpret_cast<Acc*>(dynamic_shared_memory()) + (warp - part) * cells * 32;
  Acc* const table = tables + part * cells * 32;
  for (int cell = 0; cell < cells; ++cell) table[cell * 32 + lane] = Monoid::identity();

  const int64_t first = chunk * kColumns << a.team_bits, column = first + (lane & (team - 1)) * kColumns;
  if (slice < a.slices && column < a.inner) {
    const Id* ids = reinterpret_cast<const Id*>(a.ids) + a.ids_at(o);
    const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
    const int64_t begin = slice * a.slice + part * a.share;
    const int64_t end = min(min(a.length, (slice + 1) * a.slice), begin + a.share);
    Steps<Monoid, kColumns, kCount> rows, next;
    int64_t at = begin + (lane >> a.team_bits);
    rows.load(a, ids, data, at, end, teams);
    for (; at < end; at += teams * kCount) {
      next.load(a, ids, data, at + teams * kCount, end, teams);
      rows.fold_into(table + lane, a);
      rows = next;
    }
  }
  __syncwarp();

  // A cell of a warp is that of one column of its teams together. Lanes have different cells, and begin with different
  // teams, so that no bank has two of them. The sum takes the place of one of its terms.
  for (int cell = lane; cell < cells * team; cell += 32) {
    const int at = cell >> a.team_bits, lane_of_team = cell & (team - 1);
    const auto term = [&](int i) -> Acc& {
      return table[at * 32 + (((at + i) & (teams - 1)) << a.team_bits) + lane_of_team];
    };
    Acc total = term(0);
#pragma unroll 8
    for (int i = 1; i < teams; ++i) total = Monoid::fold(total, term(i));
    term(0) = total;
  }
  __syncthreads();
  if (slice >= a.slices) return;
  Bits* out = static_cast<Bits*>(a.out) + o * a.segments * a.inner + first;
  auto* partial = reinterpret_cast<Acc*>(a.workspace + o * a.workspace_bytes) + slice * a.segments * a.inner + first;
  for (int cell = part * 32 + lane; cell < cells * team; cell += a.parts * 32) {
    const int at = cell >> a.team_bits, lane_of_team = cell & (team - 1);
    const int from = lane_of_team * kColumns + at % kColumns;  // the column of the chunk
    if (first + from >= a.inner) continue;
    const Acc* term = tables + at * 32 + ((at & (teams - 1)) << a.team_bits) + lane_of_team;
    Acc total = *term;
    for (int p = 1; p < a.parts; ++p) total = Monoid::fold(total, term[p * cells * 32]);
    const int64_t to = static_cast<int64_t>(at / kColumns) * a.inner + from;
    if (a.slices == 1) {
      out[to] = Monoid::store(total, a.keys);
    } else {
      partial[to] = total;
    }
  }
}

}  // namespace

cudaError_t launch_segment_lanes(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers) {
  Args a = {slices_of(plan, problem, buffers)};
  a.outer = problem.rows.outer;
  a.team_bits = plan.team_bits;
  a.chunks = (a.inner + (plan.columns << a.team_bits) - 1) / (plan.columns << a.team_bits);
  a.parts = plan.parts;
  const int64_t steps = (a.slice * (1 << a.team_bits) + 32 * a.parts - 1) / (32 * a.parts);
  a.share = steps * (32 >> a.team_bits);
  a.pairs = reinterpret_cast<uintptr_t>(a.data) % (2 * bytes_of(problem.dtype)) == 0;
  Launch config;
  config.block = dim3(32 * plan.warps);
  const int64_t units = plan.warps / plan.parts;
  config.grid = dim3(static_cast<unsigned>((a.outer * a.chunks * a.slices + units - 1) / units));
  config.shared_bytes = plan.shared_bytes;
  const bool deep = plan.shared_bytes >= kDeepBytes * plan.warps;
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    const auto run = [&](auto id) {
      using Id = decltype(id);
      const auto pairs =
          deep ? segment_lanes_kernel<Monoid, Id, 2, kDeepSteps> : segment_lanes_kernel<Monoid, Id, 2, kSteps>;
      const auto singles =
          deep ? segment_lanes_kernel<Monoid, Id, 1, kDeepSteps> : segment_lanes_kernel<Monoid, Id, 1, kSteps>;
      return launch(stream, config, plan.columns == 2 ? pairs : singles, a);
    };
    return problem.byte_ids ? run(uint8_t{}) : run(int32_t{});
  });
}

}  // namespace jaxgpuops::count
