// Segments of some thousand rows, in one launch. A block has a range of segments and a chunk of columns. It reads all
// ids and lists the rows of its range, puts them in order by segment with a counting sort in shared memory, and reads
// them in that order. The list is cut into pieces: a team of lanes, one for each column or for some, folds a piece in
// registers. If a segment lies in several pieces, their results are folded in order. So there are no atomics, no
// workspace, and a segment with most of the rows is shared by all teams of its blocks.
//
// If a warp has more rows in the range than its list has room for, the block takes windows of rows, one after the
// other, that fit; its segments' results stay in shared memory.
//
// Passes: one. Bytes moved: each row once, each segment once; every block reads all ids, from L2 (twice if it needs
// windows).
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/range_args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kIds = 8;                   // ids that a lane loads at a time
constexpr int kSteps = kRangeList / 32;   // steps in which a warp goes through its list
constexpr int kLoads = kLeastRangePiece;  // rows that a lane loads at a time

struct Args : RangeArgs {
  int pieces;  // the most that a list is cut into

  Args(const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers)
      : RangeArgs(plan, problem, buffers), pieces(plan.parts) {}
};

template <class Bits, int kCount>
struct alignas(kCount * sizeof(Bits)) Vector {
  Bits value[kCount];
};

// Lists the warp's rows from `begin` to `end` whose segment is in the range, as words: segment in the upper half, row
// below, counted from `begin`. Warps take 32 rows in turn, so that each has some of a segment whose rows are
// neighbours. Returns how many there are, even if the list is too short for them.
__device__ __forceinline__ uint32_t list_rows(const int32_t* ids, int begin, int end, uint32_t first, uint32_t own,
                                              uint32_t* list) {
  const int lane = static_cast<int>(threadIdx.x & 31), step = static_cast<int>(blockDim.x);
  const uint32_t below = (1u << lane) - 1;
  uint32_t size = 0;
#pragma unroll 1
  for (int at = begin + static_cast<int>(threadIdx.x) - lane; at < end; at += kIds * step) {
    uint32_t segment[kIds];
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const int row = at + i * step + lane;
      segment[i] = row < end ? static_cast<uint32_t>(ids[row]) - first : own;
    }
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const bool has = segment[i] < own;
      const unsigned mask = __ballot_sync(kEveryLane, has);
      if (mask == 0) continue;
      const uint32_t place = size + __popc(mask & below);
      if (has && place < kRangeList)
        list[place] = segment[i] << 16 | static_cast<uint32_t>(at + i * step + lane - begin);
      size += __popc(mask);
    }
  }
  return size;
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(32 * kMostRangeWarps) segment_ranges_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  __shared__ uint32_t sums[kMostRangeWarps];
  const auto [o, left, first, own] = RangeBlock(a);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / 32, warps = threads / 32, lane = thread & 31;

  // Results of the block's segments; ordered rows; lists of warps, and later what pieces leave for their segment; for
  // each warp and segment how many rows are before, in the warp's list; where segments begin among the ordered rows.
  auto* const results = reinterpret_cast<Acc*>(dynamic_shared_memory());
  auto* const ordered =
      reinterpret_cast<uint32_t*>(dynamic_shared_memory() + range_result_bytes(a.range, a.team_bits, sizeof(Acc)));
  uint32_t* const lists = ordered + kRangeList * warps;
  auto* const heads = reinterpret_cast<Acc*>(lists);
  uint32_t* const starts = lists + kRangeList * warps;
  auto* const tables = reinterpret_cast<uint16_t*>(starts + a.range + 1);
  uint32_t* const list = lists + warp * kRangeList;
  uint16_t* const table = tables + warp * a.range;

  const int32_t* const ids = a.ids_of(o);
  // The lane's columns, or the last ones if there are fewer columns than lanes.
  const int lane_bits = a.team_bits - (kCount == 4 ? 2 : kCount == 2 ? 1 : 0);
  const int own_column = (thread & ((1 << lane_bits) - 1)) * kCount, team = thread >> lane_bits;
  const int64_t column = min(left + own_column, a.inner - kCount);
  const Bits* const data = a.template data_of<Bits>(o) + column;
  // Every monoid's identity is 0.
  const auto packs = static_cast<int>(range_result_bytes(own, a.team_bits, sizeof(Acc)) / 16);
  for (int i = thread; i < packs; i += threads) reinterpret_cast<uint4*>(results)[i] = uint4{0, 0, 0, 0};

  int window = a.rows;
#pragma unroll 1
  for (int begin = 0; begin < a.rows;) {
    const int end = min(begin + window, a.rows);
    for (int s = lane; s < static_cast<int>(own); s += 32) table[s] = 0;
    const uint32_t size = list_rows(ids, begin, end, first, own, list);
    if (__syncthreads_or(size > kRangeList)) {
      window = kRangeList * warps;
      continue;
    }

    // A counting sort. `place`: of a row among those of the warp in its segment.
    uint32_t entry[kSteps], place[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (32 * i >= size) break;
      const bool has = 32 * i + lane < size;
      const unsigned mask = __ballot_sync(kEveryLane, has);
      unsigned same = 0;
      if (has) {
        entry[i] = list[32 * i + lane];
        same = __match_any_sync(mask, entry[i] >> 16);
        place[i] = table[entry[i] >> 16];
      }
      __syncwarp();
      const unsigned before = same & ((1u << lane) - 1);
      if (has && before == 0) table[entry[i] >> 16] = static_cast<uint16_t>(place[i] + __popc(same));
      place[i] += __popc(before);
      __syncwarp();
    }
    __syncthreads();
    uint32_t count = 0;
    if (thread < static_cast<int>(own)) {
#pragma unroll 1
      for (uint16_t* at = tables + thread; at < tables + warps * a.range; at += 4 * a.range) {
        uint32_t more[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) more[i] = at[i * a.range];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          at[i * a.range] = static_cast<uint16_t>(count);
          count += more[i];
        }
      }
    }
    const uint32_t up_to = sum_up_to_lane(count);
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    const uint32_t of_warps = sum_up_to_lane(lane < warps ? sums[lane] : 0), total = shuffle_from(of_warps, 31);
    const uint32_t start = up_to - count + (warp > 0 ? shuffle_from(of_warps, warp - 1) : 0);
    if (thread < static_cast<int>(own)) starts[thread] = start;
    if (thread == 0) starts[own] = total;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (32 * i + lane >= size) break;
      const uint32_t segment = entry[i] >> 16;
      ordered[starts[segment] + table[segment] + place[i]] = entry[i];
    }
    __syncthreads();

    const int rows = static_cast<int>(total), length = max(kLoads, (rows + a.pieces - 1) / a.pieces);
    const int pieces = (rows + length - 1) / length;
#pragma unroll 1
    for (int piece = team; piece < pieces; piece += threads >> lane_bits) {
      const int stop = min((piece + 1) * length, rows);
      uint32_t segment = ordered[piece * length] >> 16;
      bool is_head = static_cast<int>(starts[segment]) < piece * length;  // an earlier piece has rows of the segment
      Acc sum[kCount];
#pragma unroll
      for (Acc& value : sum) value = Monoid::identity();
      const auto flush = [&] {
        Acc* const to = (is_head ? heads + (piece << a.team_bits) : results + (segment << a.team_bits)) + own_column;
#pragma unroll
        for (int c = 0; c < kCount; ++c) to[c] = Monoid::fold(is_head ? Monoid::identity() : to[c], sum[c]);
      };
#pragma unroll 1
      for (int at = piece * length; at < stop; at += kLoads) {
        uint32_t rows_at[kLoads];
        Vector<Bits, kCount> bits[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) rows_at[i] = ordered[min(at + i, stop - 1)];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          bits[i] = *reinterpret_cast<const Vector<Bits, kCount>*>(data + (begin + (rows_at[i] & 0xffff)) * a.inner);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (at + i >= stop) break;
          if (rows_at[i] >> 16 != segment) {
            flush();
            segment = rows_at[i] >> 16;
            is_head = false;
#pragma unroll
            for (Acc& value : sum) value = Monoid::identity();
          }
#pragma unroll
          for (int c = 0; c < kCount; ++c) sum[c] = Monoid::fold(sum[c], Monoid::load(bits[i].value[c], a.keys));
        }
      }
      flush();
    }
    __syncthreads();
    // The first of the pieces that continue a segment folds them all.
    for (int i = thread; i < pieces << a.team_bits; i += threads) {
      const int piece = i >> a.team_bits;
      const uint32_t segment = ordered[piece * length] >> 16;
      const int from = static_cast<int>(starts[segment]);
      if (from >= piece * length || from < (piece - 1) * length) continue;
      const int last = (static_cast<int>(starts[segment + 1]) - 1) / length, c = i & ((1 << a.team_bits) - 1);
      Acc sum = results[(segment << a.team_bits) + c];
#pragma unroll 4
      for (int p = piece; p <= last; ++p) sum = Monoid::fold(sum, heads[(p << a.team_bits) + c]);
      results[(segment << a.team_bits) + c] = sum;
    }
    __syncthreads();
    begin = end;
  }
  auto* const out = static_cast<Bits*>(a.out) + (o * a.segments + first) * a.inner + left + own_column;
  if (left + own_column >= a.inner) return;
#pragma unroll 2
  for (int s = team; s < static_cast<int>(own); s += threads >> lane_bits) {
    const Acc* const from = results + (s << a.team_bits) + own_column;
    Vector<Bits, kCount> result;
#pragma unroll
    for (int c = 0; c < kCount; ++c) result.value[c] = Monoid::store(from[c], a.keys);
    *reinterpret_cast<Vector<Bits, kCount>*>(out + s * a.inner) = result;
  }
}

}  // namespace

cudaError_t launch_segment_ranges(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                  const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  const auto has = [&](int count) {
    return a.inner % count == 0 && (reinterpret_cast<uintptr_t>(a.data) | reinterpret_cast<uintptr_t>(a.out)) %
                                           (count * bytes_of(problem.dtype)) ==
                                       0;
  };
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    auto* kernel = has(2) ? segment_ranges_kernel<Monoid, 2> : segment_ranges_kernel<Monoid, 1>;
    if constexpr (sizeof(typename Monoid::Bits) < 8)
      if (has(4)) kernel = segment_ranges_kernel<Monoid, 4>;
    return launch_range_blocks(stream, plan, a, kernel);
  });
}

}  // namespace jaxgpuops::segments
