// Few segments: every lane of a warp has its own table of all segments, in its own bank of shared memory. A row belongs
// to a team of lanes, each of which has one column or two of it; a warp goes through as many rows at a time as it has
// teams. So no lane waits for another, whatever the ids are, and there are no atomics. At the end of a slice the tables
// of its lanes are added up in a fixed order, then those of the warps that share it; the kernel of tables.cu adds up
// the tables of the slices. Neighbouring warps have neighbouring outer indices, which often share their data (sums of
// gradients and hessians by bin, for each of many features): they find it in L1.
//
// Moves each id once for each chunk of columns, each number once for each outer index (from L2 if it is shared), and a
// table a slice. A step is a load, an addition and a store in shared memory, each of which waits for the one before. So
// a lane takes four rows at a time, and adds up those of the same segment before it stores.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/slices.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kTogether = 4;  // steps that a lane folds together; in a step, each team of a warp takes a row
// Steps whose loads are in flight. If large tables leave a multiprocessor few warps, each must have more of them, or it
// waits for memory; then kDeepSteps are in flight. Only sums of 4 bytes, such as gradients of boosted trees, have a
// kernel with so many.
constexpr int kSteps = 8, kDeepSteps = 24;
// Sums of pairs in long slices have kPairSteps, and their ids are brought into L2 kAhead batches of steps before.
constexpr int kPairSteps = 48, kAhead = 2, kLeastPairSteps = 5 * kPairSteps;
constexpr int64_t kDeepBytes = 24 << 10;  // with tables of a warp as large as this, kDeepSteps are in flight

struct Args : Slices {
  using Slices::Slices;
  int64_t chunks, share;  // `share`: the rows of a slice that one of its warps has
  int team_bits, parts;   // `parts`: the warps that share a slice
};

// Brings the cache line of an address into L2.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

template <class Bits, int kColumns>
struct alignas(kColumns * sizeof(Bits)) Columns {
  Bits value[kColumns];
};

// The ids and numbers that a lane has loaded for kCount steps. When steps are folded, the next ones take their place.
// If rows are known to have kInner columns, all of a team, addresses of steps are constants apart; kInner is 0 for any.
// Full batches have no bounds checks: with few warps in a multiprocessor, the number of instructions limits the speed.
template <class Monoid, class Id, int kColumns, int kCount, bool kPairs, int kInner>
struct Steps {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  uint32_t id[kCount];
  Columns<Bits, kColumns> number[kCount];

  // Loads step i of the lane, whose rows begin at `ids` and `data` and are `step` apart.
  __device__ __forceinline__ void load(int i, const Id* ids, const Bits* data, int step, int stride) {
    id[i] = static_cast<uint32_t>(ids[i * step]);
    const Bits* from = data + static_cast<int64_t>(i) * stride;
    if constexpr (kPairs) {
      number[i] = *reinterpret_cast<const Columns<Bits, kColumns>*>(from);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) number[i].value[c] = from[c];
    }
  }

  // `cells` is the lane's table. A row whose id is out of range reads the last cell and writes none.
  __device__ __forceinline__ void fold(int first, Acc* cells, const Args& a) const {
    const auto segments = static_cast<uint32_t>(a.segments);
    Acc* to[kTogether];
    Acc sum[kTogether][kColumns];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      to[t] = cells + min(id[first + t], segments - 1) * (32 * kColumns);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[t][c] = to[t][32 * c];
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
#pragma unroll
      for (int before = 0; before < t; ++before) {  // the sum continues that of the last row before with the same id
        const bool same = id[first + before] == id[first + t];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[t][c] = same ? sum[before][c] : sum[t][c];
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        sum[t][c] = Monoid::fold(sum[t][c], Monoid::load(number[first + t].value[c], a.keys));
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      if (id[first + t] >= segments) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) to[t][32 * c] = sum[t][c];
    }
  }

  // Folds all rows of a lane. The warp has `rows` rows, and in each step the lane takes row `slot` of `step`.
  __device__ __forceinline__ void fold_rows(const Id* ids, const Bits* data, int64_t rows, int slot, int step,
                                            Acc* cells, const Args& a) {
    if constexpr (kInner > 0) step = 32 * kColumns / kInner;
    const int stride = kInner > 0 ? 32 * kColumns : static_cast<int>(step * a.inner);
    const int batch = kCount * step;
    if (rows >= batch) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) load(i, ids, data, step, stride);
      for (rows -= batch; rows >= batch; rows -= batch) {
        ids += batch;
        data += static_cast<int64_t>(kCount) * stride;
        if (kInner > 0 && rows >= (kAhead + 1) * batch) {  // ids of a later batch, a cache line for each lane
          const int line = static_cast<int>(threadIdx.x & 31) * (128 / static_cast<int>(sizeof(Id)));
          if (line < batch) prefetch(ids - slot + kAhead * batch + line);
        }
#pragma unroll
        for (int first = 0; first < kCount; first += kTogether) {
          fold(first, cells, a);
#pragma unroll
          for (int i = first; i < first + kTogether; ++i) load(i, ids, data, step, stride);
        }
      }
#pragma unroll
      for (int first = 0; first < kCount; first += kTogether) fold(first, cells, a);
      ids += batch;
      data += static_cast<int64_t>(kCount) * stride;
    }
    for (int start = 0; start < rows; start += kTogether * step) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        id[i] = ~0u;
        if (start + i * step + slot < rows) load(i, ids + start, data + start * a.inner, step, stride);
      }
      fold(0, cells, a);
    }
  }
};

template <class Monoid, class Id, int kColumns, int kCount, bool kPairs, int kInner = 0>
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
    const int slot = lane >> a.team_bits;
    const int64_t begin = slice * a.slice + part * a.share + slot;
    const int64_t end = min(min(a.length, (slice + 1) * a.slice), begin - slot + a.share);
    const Id* ids = reinterpret_cast<const Id*>(a.ids) + a.ids_at(o) + begin;
    const Bits* data = static_cast<const Bits*>(a.data) + a.data_at(o) + column + begin * a.inner;
    Steps<Monoid, Id, kColumns, kCount, kPairs, kInner> steps;
    steps.fold_rows(ids, data, end - (begin - slot), slot, teams, table + lane, a);
  }
  __syncwarp();

  // Each lane adds up one cell (a segment and a column) over the teams of the warp. Lanes begin with different teams,
  // so that no two read the same bank. The sum replaces one of its terms.
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
    const int from = lane_of_team * kColumns + at % kColumns;  // the column within the chunk
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
  Args a(plan, problem, buffers);
  a.team_bits = plan.team_bits;
  a.chunks = (a.inner + (plan.columns << a.team_bits) - 1) / (plan.columns << a.team_bits);
  a.parts = plan.parts;
  const int64_t steps = (a.slice * (1 << a.team_bits) + 32 * a.parts - 1) / (32 * a.parts);
  a.share = steps * (32 >> a.team_bits);
  const bool pairs = reinterpret_cast<uintptr_t>(a.data) % (2 * bytes_of(problem.dtype)) == 0;
  Launch config;
  config.block = dim3(32 * plan.warps);
  const int64_t units = plan.warps / plan.parts;
  config.grid = dim3(static_cast<unsigned>((a.outer * a.chunks * a.slices + units - 1) / units));
  config.shared_bytes = plan.shared_bytes;
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    const auto run = [&](auto id) {
      using Id = decltype(id);
      auto* kernel = segment_lanes_kernel<Monoid, Id, 1, kSteps, false>;
      if (plan.columns == 2)
        kernel = pairs ? segment_lanes_kernel<Monoid, Id, 2, kSteps, true>
                       : segment_lanes_kernel<Monoid, Id, 2, kSteps, false>;
      // Extremes with tables so large are rare, and gain nothing.
      if constexpr (sizeof(typename Monoid::Bits) == 4 && !is_extreme<Monoid>)
        if (plan.shared_bytes >= kDeepBytes * plan.warps) {
          if (plan.columns == 2 && pairs) kernel = segment_lanes_kernel<Monoid, Id, 2, kDeepSteps, true>;
          if (plan.columns == 1)
            kernel = a.inner == 2 && steps >= kLeastPairSteps
                         ? segment_lanes_kernel<Monoid, Id, 1, kPairSteps, false, 2>
                         : segment_lanes_kernel<Monoid, Id, 1, kDeepSteps, false>;
        }
      return launch(stream, config, kernel, a);
    };
    if constexpr (takes_byte_ids(is_extreme<Monoid> ? Op::kMax : Op::kSum, sizeof(typename Monoid::Bits)))
      if (problem.byte_ids) return run(uint8_t{});
    return run(int32_t{});
  });
}

}  // namespace jaxgpuops::segments
