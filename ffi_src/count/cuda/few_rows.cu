// Segments of few rows, in one launch: a block has a range of segments and some columns. It orders the rows that belong
// to its segments in shared memory, by a stable counting sort, and then does what segments.cu does: teams of lanes go
// through equal shares of the rows, segments within a share are stored at once, and parts of those that cross shares
// are folded in order.
//
// Every block reads all ids, which come from L2, and its own part of the data once.
#include <cuda_runtime.h>

#include "common/cuda/counting.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"
#include "count/cuda/monoid.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kFewThreads, kWarps = kThreads / 32, kItems = kFewRows / kThreads;
constexpr int kLoads = 8;  // rows that a lane loads before it folds them

struct Args {
  const void* data;
  const int32_t* ids;
  IndexMap ids_at, data_at;
  void* out;
  int64_t outer, inner, segments, ranges, chunks;
  int length, range, team_bits;
  Keys keys;
};

template <class Monoid>
__global__ void __launch_bounds__(kThreads) segment_few_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  __shared__ uint16_t counts[kWarps][kFewSegments];  // of a warp; later where its rows of a segment start
  __shared__ uint16_t begins[kFewSegments + 1];
  __shared__ uint16_t row_at[kFewRows], key_at[kFewRows];  // in order of the segments
  __shared__ Acc heads[kThreads], tails[kThreads];
  __shared__ uint32_t sums[kWarps];
  const int64_t chunk = blockIdx.x % a.chunks, part = blockIdx.x / a.chunks % a.ranges;
  const int64_t o = blockIdx.x / a.chunks / a.ranges, first = part * a.range;
  const int range = static_cast<int>(min(static_cast<int64_t>(a.range), a.segments - first));
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int s = lane; s < range; s += 32) counts[warp][s] = 0;
  __syncwarp();

  const int32_t* const ids = a.ids + a.ids_at(o);
  int32_t key[kItems];
  uint16_t rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = (warp * kItems + i) * 32 + lane;
    const int64_t id = row < a.length ? ids[row] - first : -1;
    key[i] = id >= 0 && id < range ? static_cast<int32_t>(id) : -1;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if ((warp * kItems + i) * 32 < a.length) rank[i] = rank_in_warp(key[i], counts[warp]);
  __syncthreads();
  uint32_t rows = 0;  // rows that belong to the block's segments
  for (int start = 0; start < range; start += kThreads) {
    const int s = start + threadIdx.x;
    uint32_t own = 0, total;
    for (int w = 0; w < kWarps; ++w) own += s < range ? counts[w][s] : 0;
    uint32_t at = rows + sum_before(own, sums, kWarps, total);
    rows += total;
    if (s >= range) continue;
    begins[s] = static_cast<uint16_t>(at);
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t count = counts[w][s];
      counts[w][s] = static_cast<uint16_t>(at);
      at += count;
    }
  }
  if (threadIdx.x == 0) begins[range] = static_cast<uint16_t>(rows);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if ((warp * kItems + i) * 32 >= a.length || key[i] < 0) continue;
    const int place = counts[warp][key[i]] + rank[i];
    row_at[place] = static_cast<uint16_t>((warp * kItems + i) * 32 + lane);
    key_at[place] = static_cast<uint16_t>(key[i]);
  }
  __syncthreads();

  const int team_size = 1 << a.team_bits, teams = kThreads >> a.team_bits, team = threadIdx.x >> a.team_bits;
  const int64_t column = (chunk << a.team_bits) + (threadIdx.x & (team_size - 1));
  const bool live = column < a.inner;
  Bits* const out = static_cast<Bits*>(a.out) + (o * a.segments + first) * a.inner;
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  const int share = (static_cast<int>(rows) + teams - 1) / teams, end = min(static_cast<int>(rows), (team + 1) * share);
  if (live && team * share < end) {
    int own = key_at[team * share];
    bool begun = begins[own] == team * share;
    Acc sum = Monoid::identity();
    const auto flush = [&](bool ends) {
      if (begun && ends) {
        out[own * a.inner + column] = Monoid::store(sum, a.keys);
      } else {
        (begun ? tails : heads)[threadIdx.x] = sum;
      }
    };
    for (int at = team * share; at < end; at += kLoads) {
      Bits bits[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (at + i < end) bits[i] = data[row_at[at + i] * a.inner];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (at + i >= end) break;
        const int next = key_at[at + i];
        if (next != own) {
          flush(true);
          own = next;
          begun = true;
          sum = Monoid::identity();
        }
        sum = Monoid::fold(sum, Monoid::load(bits[i], a.keys));
      }
    }
    flush(begins[own + 1] == end);
  }
  for (int s = team; live && s < range; s += teams)
    if (begins[s] == begins[s + 1]) out[s * a.inner + column] = Monoid::store(Monoid::identity(), a.keys);
  __syncthreads();
  if (!live || team * share >= end) return;
  const int own = key_at[end - 1], stop = begins[own + 1];  // a segment that begins in this share and crosses its end
  if (begins[own] < team * share || stop == end) return;
  Acc sum = tails[threadIdx.x];
#pragma unroll 8
  for (int other = team + 1; other * share < stop; ++other)
    sum = Monoid::fold(sum, heads[threadIdx.x + ((other - team) << a.team_bits)]);
  out[own * a.inner + column] = Monoid::store(sum, a.keys);
}

}  // namespace

cudaError_t launch_segment_few(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                               const SegmentsBuffers& buffers) {
  Args a = {};
  a.data = buffers.data;
  a.ids = buffers.ids;
  a.ids_at = problem.ids;
  a.data_at = problem.data;
  a.out = buffers.out;
  a.outer = problem.rows.outer;
  a.inner = problem.rows.inner;
  a.segments = problem.segments;
  a.length = static_cast<int>(problem.rows.length);
  a.range = static_cast<int>(plan.rows);
  a.ranges = plan.tiles;
  a.team_bits = plan.team_bits;
  a.chunks = (a.inner + (int64_t{1} << a.team_bits) - 1) >> a.team_bits;
  a.keys = keys_of(problem);
  return dispatch_monoid(problem, [&](auto monoid) {
    Launch config;
    config.block = dim3(kThreads);
    config.grid = dim3(static_cast<unsigned>(a.outer * a.ranges * a.chunks));
    return launch(stream, config, segment_few_kernel<decltype(monoid)>, a);
  });
}

}  // namespace jaxgpuops::count
