// Segments of some thousand rows, in one launch, if they are not very many. A block has a range of eight segments and a
// chunk of columns. Its warps take the rows in turn: each lists those of the block's range, and reads only these. A row
// belongs to a team of lanes, one for each column. A lane has an accumulator in a register for each segment of the
// range, so there are no tables to clear, and all warps share a segment that has most of the rows. Accumulators are
// folded over the teams of a warp, then over the warps, in a fixed order.
//
// Passes: one. Bytes moved: each row and each result once; every block reads all ids, from L2.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/range_args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kLoads = 4, kIds = 8;    // rows, and ids, that a lane loads at a time
constexpr int kList = kPickBytes / 4;  // the most rows that a warp lists at a time

template <class Monoid>
__global__ void __launch_bounds__(32 * kMostPickWarps) segment_picks_kernel(const __grid_constant__ RangeArgs a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  static_assert(32 * kPickRange * sizeof(Acc) <= kPickBytes);
  const auto [o, left, first, own] = RangeBlock(a);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int lane = thread & 31, team = 1 << a.team_bits, teams = 32 >> a.team_bits, slot = lane >> a.team_bits;
  auto* const list = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + warp * kPickBytes);
  const int32_t* const ids = a.ids_of(o);
  const Bits* const data = a.template data_of<Bits>(o) + min(left + (lane & (team - 1)), a.inner - 1);
  Acc acc[kPickRange];
#pragma unroll
  for (Acc& value : acc) value = Monoid::identity();

  // Warps take 32 rows in turn, so that each has some of a segment whose rows are neighbours.
  const int step = 32 * warps;
#pragma unroll 1
  for (int at = 32 * warp; at < a.rows;) {
    int size = 0;
#pragma unroll 1
    for (; at < a.rows && size <= kList - 32 * kIds; at += kIds * step) {
      uint32_t segment[kIds];
#pragma unroll
      for (int i = 0; i < kIds; ++i) {
        const int row = at + i * step + lane;
        segment[i] = row < a.rows ? static_cast<uint32_t>(ids[row]) - first : own;
      }
#pragma unroll
      for (int i = 0; i < kIds; ++i) {
        const bool has = segment[i] < own;
        const unsigned mask = __ballot_sync(kEveryLane, has);
        if (mask == 0) continue;
        const uint32_t entry = segment[i] << 16 | static_cast<uint32_t>(at + i * step + lane);
        if (has) list[size + __popc(mask & ((1u << lane) - 1))] = entry;
        size += __popc(mask);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = slot; i - slot < size; i += kLoads * teams) {
      uint32_t entry[kLoads];
      Bits bits[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) entry[j] = list[min(i + j * teams, size - 1)];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) bits[j] = data[static_cast<int64_t>(entry[j] & 0xffff) * a.inner];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const uint32_t segment = i + j * teams < size ? entry[j] >> 16 : uint32_t{kPickRange};
        const Acc number = Monoid::load(bits[j], a.keys);
#pragma unroll
        for (uint32_t k = 0; k < kPickRange; ++k)
          if (segment == k) acc[k] = Monoid::fold(acc[k], number);
      }
    }
    __syncwarp();
  }

  // Folds what the teams of a warp have, and leaves it where the warp's list was.
#pragma unroll 1
  for (int lanes = team; lanes < 32; lanes *= 2) {
#pragma unroll
    for (Acc& value : acc) value = Monoid::fold(value, shuffle_xor(value, lanes));
  }
  if (lane < team) {
#pragma unroll
    for (int k = 0; k < kPickRange; ++k) reinterpret_cast<Acc*>(list)[(k << a.team_bits) + lane] = acc[k];
  }
  __syncthreads();
  constexpr int kPitch = kPickBytes / static_cast<int>(sizeof(Acc));
  for (int cell = thread; cell < static_cast<int>(own) << a.team_bits; cell += static_cast<int>(blockDim.x)) {
    const Acc* const from = reinterpret_cast<const Acc*>(dynamic_shared_memory()) + cell;
    Acc total = *from;
#pragma unroll 4
    for (int w = 1; w < warps; ++w) total = Monoid::fold(total, from[w * kPitch]);
    const int64_t column = left + (cell & (team - 1));
    if (column >= a.inner) continue;
    static_cast<Bits*>(a.out)[(o * a.segments + first + (cell >> a.team_bits)) * a.inner + column] =
        Monoid::store(total, a.keys);
  }
}

}  // namespace

cudaError_t launch_segment_picks(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers) {
  const RangeArgs a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) {
    return launch_range_blocks(stream, plan, a, segment_picks_kernel<decltype(monoid)>);
  });
}

}  // namespace jaxgpuops::segments
