// Segments of few rows, in one launch. A block has a range of segments and a chunk of columns; each of its warps has a
// part of the rows, and each lane of a warp a table of the block's segments in shared memory, in its own bank. A row
// belongs to a team of lanes, one for each column. So no lane waits for another and there are no atomics: rows are
// folded in order, then the tables of a warp's teams, then those of the warps.
//
// If there are several ranges, most rows belong to other blocks. Then a warp first lists its rows in the block's range,
// and reads only these; every block reads all ids, from L2.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/range_args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kLoads = 6, kIds = 8;  // rows that a lane loads at a time, and ids if it looks for its block's rows
constexpr uint32_t kNone = 0xffff;   // in place of a segment: the row is in none

struct Args : RangeArgs {
  int share, stride;  // `share`: rows of a warp; `stride`: elements from row to row

  Args(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : RangeArgs(plan, problem, buffers),
        share(static_cast<int>((problem.rows.length + plan.warps - 1) / plan.warps)),
        stride(static_cast<int>(inner)) {}
};

// What a lane knows of its warp's rows.
template <class Bits>
struct WarpRows {
  const Args& a;
  const int32_t* ids;
  const Bits* data;  // the data of the lane's column, or of the last one if there are fewer columns than lanes
  uint32_t* list;    // the warp's rows in the block's range, as words: segment in the upper half, row below
  uint32_t first, own;
  int count, lane;
  bool live;

  // Calls `take(row, segment, bits)` for `size` rows of the list; without a list, for those of the warp. To spare
  // branches, a lane that has no more rows is given the last one again, in segment kNone.
  template <class Take>
  __device__ __forceinline__ void take_rows(int size, Take take) const {
    const int teams = 32 >> a.team_bits, slot = lane >> a.team_bits;
#pragma unroll 1
    for (int at = slot; at - slot < size; at += kLoads * teams) {
      int row[kLoads];
      uint32_t segment[kLoads];
      Bits bits[kLoads];
      if (a.ranges > 1) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const uint32_t entry = list[min(at + i * teams, size - 1)];
          row[i] = static_cast<int>(entry & 0xffff);
          segment[i] = entry >> 16;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          row[i] = min(at + i * teams, size - 1);
          segment[i] = static_cast<uint32_t>(ids[row[i]]);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) bits[i] = data[static_cast<int64_t>(row[i]) * a.stride];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool has = live && at + i * teams < size;
        take(has ? row[i] : -1, has ? segment[i] : kNone, bits[i]);
      }
    }
  }

  // Calls `take` for the warp's rows that are in the block's range.
  template <class Take>
  __device__ __forceinline__ void each_row(Take take) const {
    int at = 0, size = 0;
    do {
      if (a.ranges > 1) {
        uint32_t segment[kIds];
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
          const int row = at + 32 * i + lane;
          const uint32_t id = row < count ? static_cast<uint32_t>(ids[row]) : first + own;
          segment[i] = id - first;
        }
#pragma unroll
        for (int i = 0; i < kIds; ++i) {
          const bool has = segment[i] < own;
          const unsigned mask = __ballot_sync(kEveryLane, has);
          if (mask == 0) continue;
          uint32_t* const to = list + size + __popc(mask & ((1u << lane) - 1));
          const uint32_t entry = segment[i] << 16 | (at + 32 * i + lane);
          if (has) *to = entry;
          size += __popc(mask);
        }
        at += 32 * kIds;
        if (size <= kFewList - 32 * kIds && at < count) continue;
        __syncwarp();
      } else {
        at = size = count;
      }
      take_rows(size, take);
      __syncwarp();
      size = 0;
    } while (at < count);
  }
};

template <class Monoid>
__global__ void __launch_bounds__(32 * kMostFewWarps) segment_few_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  const auto [o, left, first, own_segments] = RangeBlock(a);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int team = 1 << a.team_bits, teams = 32 >> a.team_bits;
  auto* const tables = reinterpret_cast<Acc*>(dynamic_shared_memory());
  // One cell more than the range has segments, for rows that are in none.
  const int table_size = 32 * (a.range + 1);

  WarpRows<Bits> rows = {a};
  rows.lane = thread & 31;
  rows.first = first;
  rows.own = own_segments;
  const int begin = warp * a.share;
  rows.count = min(a.rows - begin, a.share);
  rows.list = reinterpret_cast<uint32_t*>(tables + warps * table_size) + warp * kFewList;
  rows.ids = a.ids_of(o) + begin;
  const int64_t column = left + (rows.lane & (team - 1));
  rows.live = column < a.inner;
  rows.data = a.template data_of<Bits>(o) + begin * a.inner + min(column, a.inner - 1);
  const auto own = static_cast<int>(rows.own);
  Acc* const table = tables + warp * table_size + rows.lane;
  for (int s = 0; s < own; ++s) table[32 * s] = Monoid::identity();

  rows.each_row([&](int, uint32_t segment, Bits bits) {
    Acc* const to = table + 32 * min(segment, rows.own);
    *to = Monoid::fold(*to, Monoid::load(bits, a.keys));
  });

  // Each lane folds a cell (a segment and a column) of the warp's teams. Lanes begin with different teams, so that no
  // two read the same bank. The fold replaces its first term.
  if (teams > 1) {
    __syncwarp();
    for (int cell = rows.lane; cell < own << a.team_bits; cell += 32) {
      const int s = cell >> a.team_bits, lane_of_team = cell & (team - 1);
      const auto term = [&](int i) -> Acc& {
        return tables[warp * table_size + 32 * s + (((s + i) & (teams - 1)) << a.team_bits) + lane_of_team];
      };
      Acc total = term(0);
#pragma unroll 4
      for (int i = 1; i < teams; ++i) total = Monoid::fold(total, term(i));
      term(0) = total;
    }
  }
  __syncthreads();
  auto* const out = static_cast<Bits*>(a.out) + left;
  for (int cell = thread; cell < own << a.team_bits; cell += static_cast<int>(blockDim.x)) {
    const int s = cell >> a.team_bits, lane_of_team = cell & (team - 1);
    const Acc* const term = tables + 32 * s + ((s & (teams - 1)) << a.team_bits) + lane_of_team;
    Acc total = *term;
#pragma unroll 4
    for (int w = 1; w < warps; ++w) total = Monoid::fold(total, term[w * table_size]);
    const int64_t to = (o * a.segments + first + s) * a.inner + lane_of_team;
    if (left + lane_of_team < a.inner) out[to] = Monoid::store(total, a.keys);
  }
}

}  // namespace

cudaError_t launch_segment_few(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                               const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  return dispatch_monoid(
      problem, [&](auto monoid) { return launch_range_blocks(stream, plan, a, segment_few_kernel<decltype(monoid)>); });
}

}  // namespace jaxgpuops::segments
