// Transposes columns to rows and rows to columns, which the radix sorts need where the axis is not the last.
//
// Bytes moved: every element is read and written once. Tiles of 1024 elements are transposed in shared memory, so that
// reads and writes are both coalesced.
#include "sort/cuda/kernels.h"

#include <algorithm>

#include "common/cuda/launch.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kTurnThreads = 256;
constexpr uint32_t kTurnTile = 1024;

template <class T>
__global__ void __launch_bounds__(kTurnThreads)
    turn_kernel(const T* __restrict__ from, T* __restrict__ to, int64_t rows, int64_t columns, uint32_t tile_rows,
                uint32_t tile_columns) {
  __shared__ T tile[2 * kTurnTile];
  const int64_t down = (rows + tile_rows - 1) / tile_rows, across = (columns + tile_columns - 1) / tile_columns;
  const int64_t outer = blockIdx.x / (down * across), number = blockIdx.x % (down * across);
  const int64_t row = number / across * tile_rows, column = number % across * tile_columns;
  from += outer * rows * columns;
  to += outer * rows * columns;
  const uint32_t pitch = tile_columns + 1, size = tile_rows * tile_columns;
#pragma unroll
  for (uint32_t u = 0; u < kTurnTile; u += kTurnThreads) {
    const uint32_t e = u + threadIdx.x, r = e / tile_columns, c = e % tile_columns;
    if (e < size && row + r < rows && column + c < columns)
      tile[r * pitch + c] = from[(row + r) * columns + column + c];
  }
  __syncthreads();
#pragma unroll
  for (uint32_t u = 0; u < kTurnTile; u += kTurnThreads) {
    const uint32_t e = u + threadIdx.x, c = e / tile_rows, r = e % tile_rows;
    if (e < size && row + r < rows && column + c < columns) to[(column + c) * rows + row + r] = tile[r * pitch + c];
  }
}

}  // namespace

cudaError_t launch_turn(cudaStream_t stream, const void* from, void* to, int64_t outer, int64_t rows, int64_t columns,
                        int bits) {
  // A tile is a square of 32 x 32. If the array has fewer rows or columns than that, the other side is longer.
  constexpr int64_t side = 32;
  int64_t across = side;
  if (columns < side) across = columns;
  if (rows < side) across = kTurnTile / rows;
  across = std::min(across, columns);
  const int64_t down = std::min<int64_t>(rows, kTurnTile / across);
  const int64_t blocks = outer * ((rows + down - 1) / down) * ((columns + across - 1) / across);
  return dispatch_key(bits, [&](auto element) {
    using T = decltype(element);
    return launch(stream, {dim3(static_cast<unsigned>(blocks)), dim3(kTurnThreads)}, turn_kernel<T>,
                  static_cast<const T*>(from), static_cast<T*>(to), rows, columns, static_cast<uint32_t>(down),
                  static_cast<uint32_t>(across));
  });
}

}  // namespace jaxgpuops::sort
