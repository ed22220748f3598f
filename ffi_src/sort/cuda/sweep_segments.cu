// Radix sort of the segments of long rows, in passes over memory: sweep.cuh says how. A segment is sorted as a row
// would be. Its tiles are pieces: they end at the multiples of the length of a tile, and where the segment ends. So the
// number of pieces, and of blocks, depends on shapes only. A first kernel finds them; a few are empty. If most segments
// are short enough for a block, block.cu sorts these first, and their pieces are empty.
#include "sort/cuda/offsets.cuh"
#include "sort/cuda/sweep.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kFindThreads = 256;

struct FindArgs {
  const int32_t* offsets;  // ascending
  IndexMap offsets_at;
  int64_t count;   // of offsets
  int64_t pieces;  // of a row
  int64_t rows, length;
  uint32_t tile;       // elements
  uint32_t in_blocks;  // longer segments are swept; blocks have sorted the others
  int passes;
  Piece* to;
  RowHead* heads;
  uint32_t *counts, *status;
};

// A piece begins at each offset, and at each multiple of the length of a tile, which comes after offsets of its place.
// A warp finds one, and sets to zero the words by which its blocks communicate later.
__global__ void __launch_bounds__(kFindThreads) find_kernel(const __grid_constant__ FindArgs a) {
  let_dependents_start();
  const int64_t warp = (int64_t{blockIdx.x} * kFindThreads + threadIdx.x) / 32;
  if (warp >= a.rows * a.pieces) return;
  const int64_t row = warp / a.pieces, item = warp - row * a.pieces;
  const uint32_t lane = threadIdx.x % 32;
  const int32_t* const offsets = a.offsets + a.offsets_at(row);
  const auto length = static_cast<uint32_t>(a.length);
  const auto offset_at = [&](int64_t i) {
    return i < a.count ? static_cast<uint32_t>(min(max(offsets[i], 0), static_cast<int32_t>(length))) : length;
  };
  int64_t after;  // the number of the first offset behind the place where the piece begins
  Piece piece;
  int64_t place;  // of the piece among those of the row
  if (item < a.count) {
    after = item + 1;
    piece.begin = offset_at(item);
    const uint32_t before = (piece.begin + a.tile - 1) / a.tile;  // multiples of the length of a tile
    place = item + before;
    piece.end = min(before * int64_t{a.tile}, int64_t{offset_at(after)});
  } else {
    const int64_t number = item - a.count;
    piece.begin = static_cast<uint32_t>(number * a.tile);
    after = offsets_below(offsets, a.count, int64_t{piece.begin} + 1);
    place = number + after;
    piece.end = min((number + 1) * a.tile, int64_t{offset_at(after)});
  }
  piece.first = after > 0 ? offset_at(after - 1) : 0;
  piece.last = after > 0 && after < a.count ? offset_at(after) : 0;
  if (piece.last > 0 && piece.last - piece.first <= a.in_blocks) piece.end = piece.begin;
  const int64_t to = row * a.pieces + place;
  if (lane == 0) a.to[to] = piece;
  if (lane < sizeof(RowHead) / 4) reinterpret_cast<uint32_t*>(a.heads + to)[lane] = 0;
  // Only pieces of one segment communicate, and count together.
  if (piece.begin == piece.end || piece.last == 0 || piece.count(a.tile) == 1) return;
#pragma unroll 1
  for (int p = 0; p < a.passes; ++p) {
    auto* const counts = reinterpret_cast<uint4*>(a.counts + (to * a.passes + p) * kDigits) + lane;
    auto* const status = reinterpret_cast<uint4*>(a.status + (p * a.rows * a.pieces + to) * kDigits) + lane;
    status[0] = status[32] = uint4{0, 0, 0, 0};
    if (piece.begin / a.tile == piece.first / a.tile) counts[0] = counts[32] = uint4{0, 0, 0, 0};
  }
}

template <class Key, bool kIndices>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const int64_t rows = problem.rows.count(), length = problem.rows.length;
  const SweepTiles size = plan.small ? kSmallTiles : kLargeTiles;
  const SweepShape shape(rows, length, length, sizeof(Key), buffers.values != nullptr, kIndices, size, problem.offsets);
  PassArgs a = pass_args(shape, plan, problem, buffers);
  const int64_t tile = sweep_tile(sizeof(Key), size, kIndices);
  cudaError_t error = plan.in_blocks > 0 ? launch_block_segments(stream, plan, problem, buffers) : cudaSuccess;
  if (error != cudaSuccess) return error;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(ceil_div(rows * shape.tiles, kFindThreads / 32)));
  config.block = dim3(kFindThreads);
  error = launch(stream, config, find_kernel,
                 FindArgs{buffers.offsets, problem.offsets_at.outer, problem.offsets, shape.tiles, rows, length,
                          static_cast<uint32_t>(tile), static_cast<uint32_t>(plan.in_blocks), shape.passes,
                          const_cast<Piece*>(a.pieces), a.heads, a.counts, a.status});
  if (error != cudaSuccess) return error;
  config.overlap = plan.overlap;
  config.grid = dim3(static_cast<unsigned>(rows * shape.tiles));
  config.block = dim3(kCountThreads);
  error = launch(stream, config, count_kernel<Key, true>,
                 CountArgs{buffers.x, a.heads, a.counts, a.status, a.pieces, nullptr, rows, length, shape.tiles, tile,
                           1, problem.order});
  if (error != cudaSuccess) return error;
  if (counts_bytes(problem, buffers)) {
    config.block = dim3(kFillThreads);
    return launch(stream, config, fill_kernel<true>,
                  FillArgs{static_cast<const uint8_t*>(buffers.x), static_cast<uint8_t*>(buffers.values), a.counts,
                           a.pieces, length, length, shape.tiles, 1, problem.order});
  }
  config.block = dim3(kSweepThreads);
  config.shared_bytes = sweep_shared_bytes(sizeof(Key), size, kIndices);
  constexpr SweepTiles kSmall = sizeof(Key) == 1 ? kLargeTiles : kSmallTiles;  // which are as large
  const auto kernel = plan.small ? pass_kernel<Key, kIndices, kSmall, false, true>
                                 : pass_kernel<Key, kIndices, kLargeTiles, false, true>;
  for (a.pass = 0; a.pass < shape.passes && error == cudaSuccess; ++a.pass) error = launch(stream, config, kernel, a);
  return error;
}

}  // namespace

cudaError_t launch_sweep_segments(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                  const Buffers& buffers) {
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return buffers.indices ? run<Key, true>(stream, plan, problem, buffers)
                           : run<Key, false>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::sort
