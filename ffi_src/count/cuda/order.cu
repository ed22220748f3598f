// Finds the stable order of ids, by a counting sort by digits from the lowest up. Keys are ids; an id out of range has
// the number of segments as its key, which comes last. For each digit, one kernel counts its values in each tile, one
// adds up the counts of tiles for each value, and one moves the keys and positions of each tile to where they belong.
// Two passes suffice for up to 2^20 segments. Bytes moved for each id and pass: 4 to count, then 4 (the first pass) or
// 8 read and 8 written.
//
// A warp ranks 32 keys at a time, in order; lanes with equal digits find each other by match_any. Warps have
// neighbouring parts of a tile. The sort is stable in whatever order blocks run, since all counts are added up before
// anything moves.
#include <cuda_runtime.h>

#include "common/cuda/counting.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kWarps = kOrderThreads / 32;

struct Args {
  const int32_t* ids;
  IndexMap ids_at;
  char* workspace;
  int64_t workspace_bytes, length, tiles;
  uint32_t segments;
  int shift, bits;
  bool first;
  int64_t keys_in, positions_in, keys_out, positions_out, counts, totals;

  __device__ char* row_workspace(int64_t row) const { return workspace + row * workspace_bytes; }
  __device__ const uint32_t* keys_of(int64_t row) const {
    return first ? reinterpret_cast<const uint32_t*>(ids + ids_at(row))
                 : reinterpret_cast<const uint32_t*>(row_workspace(row) + keys_in);
  }
};

__global__ void __launch_bounds__(kOrderThreads) order_count_kernel(Args a) {
  __shared__ uint32_t counts[1 << kMaxDigitBits];
  const int digits = 1 << a.bits;
  const int64_t row = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
  for (int d = threadIdx.x; d < digits; d += kOrderThreads) counts[d] = 0;
  __syncthreads();
  const uint32_t* keys = a.keys_of(row);
  const int64_t begin = tile * kOrderTile;
#pragma unroll
  for (int i = 0; i < kOrderItems; ++i) {
    const int64_t at = begin + i * kOrderThreads + threadIdx.x;
    const bool has = at < a.length;
    const uint32_t key = has ? min(keys[at], a.segments) : 0;
    const uint32_t digit = has ? (key >> a.shift) & (digits - 1) : ~0u;
    const unsigned peers = __match_any_sync(kEveryLane, digit);
    if (has && (peers & lanes_below()) == 0) atomicAdd(counts + digit, __popc(peers));
  }
  __syncthreads();
  auto* to = reinterpret_cast<uint32_t*>(a.row_workspace(row) + a.counts);
  for (int d = threadIdx.x; d < digits; d += kOrderThreads) to[d * a.tiles + tile] = counts[d];
}

__global__ void __launch_bounds__(kOrderThreads) order_sum_kernel(Args a) {
  __shared__ uint32_t shared[kWarps];
  const int64_t digits = int64_t{1} << a.bits, row = blockIdx.x / digits, digit = blockIdx.x % digits;
  auto* counts = reinterpret_cast<uint32_t*>(a.row_workspace(row) + a.counts) + digit * a.tiles;
  uint32_t before = 0;
  for (int64_t tile = 0; tile < a.tiles; tile += kOrderThreads) {
    const int64_t at = tile + threadIdx.x;
    const uint32_t count = at < a.tiles ? counts[at] : 0;
    uint32_t total;
    const uint32_t sum = sum_before(count, shared, kWarps, total);
    if (at < a.tiles) counts[at] = before + sum;
    before += total;
  }
  if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(a.row_workspace(row) + a.totals)[digit] = before;
}

__global__ void __launch_bounds__(kOrderThreads) order_move_kernel(Args a) {
  extern __shared__ uint32_t ranks[];  // [warp][digit]: the digit's count in the warp, later where its keys start
  __shared__ uint32_t shared[kWarps];
  const int digits = 1 << a.bits, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
  char* workspace = a.row_workspace(row);
  for (int d = threadIdx.x; d < digits * kWarps; d += kOrderThreads) ranks[d] = 0;
  __syncthreads();

  const uint32_t* keys = a.keys_of(row);
  const auto* positions = reinterpret_cast<const uint32_t*>(workspace + a.positions_in);
  const int64_t begin = tile * kOrderTile + warp * 32 * kOrderItems + lane;
  uint32_t key[kOrderItems], position[kOrderItems], rank[kOrderItems];
#pragma unroll
  for (int i = 0; i < kOrderItems; ++i) {
    const int64_t at = begin + i * 32;
    const bool has = at < a.length;
    key[i] = has ? min(keys[at], a.segments) : 0;
    position[i] = a.first ? static_cast<uint32_t>(at) : has ? positions[at] : 0;
  }
  uint32_t* own = ranks + warp * digits;
#pragma unroll
  for (int i = 0; i < kOrderItems; ++i) {
    const bool has = begin + i * 32 < a.length;
    rank[i] = rank_in_warp(has ? static_cast<int32_t>((key[i] >> a.shift) & (digits - 1)) : -1, own);
  }
  __syncthreads();

  const auto* counts = reinterpret_cast<const uint32_t*>(workspace + a.counts);
  const auto* totals = reinterpret_cast<const uint32_t*>(workspace + a.totals);
  uint32_t smaller = 0;
  for (int first = 0; first < digits; first += kOrderThreads) {
    const int digit = first + threadIdx.x;
    uint32_t total;
    uint32_t start = smaller + sum_before(digit < digits ? totals[digit] : 0u, shared, kWarps, total);
    smaller += total;
    if (digit >= digits) continue;
    start += counts[digit * a.tiles + tile];
    for (int w = 0; w < kWarps; ++w) {
      const uint32_t count = ranks[w * digits + digit];
      ranks[w * digits + digit] = start;
      start += count;
    }
  }
  __syncthreads();
  auto* keys_out = reinterpret_cast<uint32_t*>(workspace + a.keys_out);
  auto* positions_out = reinterpret_cast<uint32_t*>(workspace + a.positions_out);
#pragma unroll
  for (int i = 0; i < kOrderItems; ++i) {
    if (begin + i * 32 >= a.length) continue;
    const uint32_t to = own[(key[i] >> a.shift) & (digits - 1)] + rank[i];
    keys_out[to] = key[i];
    positions_out[to] = position[i];
  }
}

}  // namespace

cudaError_t launch_order(cudaStream_t stream, const OrderPlan& plan, const Segments& problem,
                         const SegmentsBuffers& buffers) {
  Args a = {};
  a.ids = buffers.ids;
  a.ids_at = problem.ids;
  a.workspace = buffers.workspace;
  a.workspace_bytes = buffers.workspace_bytes;
  a.length = problem.rows.length;
  a.tiles = plan.tiles;
  a.segments = static_cast<uint32_t>(problem.segments);
  a.bits = plan.digit_bits;
  a.counts = plan.counts;
  a.totals = plan.totals;
  const int64_t rows = problem.shared ? 1 : problem.rows.outer;
  Launch tiles, digits;
  tiles.block = digits.block = dim3(kOrderThreads);
  tiles.grid = dim3(static_cast<unsigned>(rows * plan.tiles));
  digits.grid = dim3(static_cast<unsigned>(rows << plan.digit_bits));
  Launch moves = tiles;
  moves.shared_bytes = (size_t{4} << plan.digit_bits) * kWarps;
  for (int pass = 0; pass < plan.passes; ++pass) {
    a.first = pass == 0;
    a.shift = pass * plan.digit_bits;
    a.keys_in = plan.keys[(pass + 1) & 1];
    a.positions_in = plan.positions[(pass + 1) & 1];
    a.keys_out = plan.keys[pass & 1];
    a.positions_out = plan.positions[pass & 1];
    cudaError_t status = launch(stream, tiles, order_count_kernel, a);
    if (status == cudaSuccess) status = launch(stream, digits, order_sum_kernel, a);
    if (status == cudaSuccess) status = launch(stream, moves, order_move_kernel, a);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace jaxgpuops::count
