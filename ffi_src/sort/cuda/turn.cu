// Transposes columns to rows and rows to columns, which the radix sorts need where the axis is not the last.
//
// Bytes moved: every element is read and written once. Tiles are transposed in shared memory, so that reads and writes
// are both coalesced. The sides of a tile are powers of two, since divisions would take longer than the copy.
#include "sort/cuda/kernels.h"

#include <algorithm>

#include "common/cuda/launch.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kTurnThreads = 256;

template <class T>
constexpr int kTileBits = sizeof(T) <= 2   ? 12
                          : sizeof(T) == 4 ? 11
                                           : 10;
template <class T>
constexpr uint32_t kTile = 1 << kTileBits<T>;  // elements of a tile

// A tile has 2^row_bits rows; there are `down` times `across` tiles for each outer index.
template <class T>
__global__ void __launch_bounds__(kTurnThreads)
    turn_kernel(const T* __restrict__ from, T* __restrict__ to, int64_t rows, int64_t columns, uint32_t down,
                uint32_t across, int row_bits) {
  __shared__ T tile[2 * kTile<T>];
  constexpr int kOwn = kTile<T> / kTurnThreads;
  const int column_bits = kTileBits<T> - row_bits;
  const uint32_t tile_rows = 1u << row_bits, tile_columns = 1u << column_bits, pitch = tile_columns + 1;
  const uint32_t line = blockIdx.x / across, outer = line / down;
  const int64_t row = int64_t{line - outer * down} << row_bits;
  const int64_t column = int64_t{blockIdx.x - line * across} << column_bits;
  const auto rows_left = static_cast<uint32_t>(min(rows - row, int64_t{tile_rows}));
  const auto columns_left = static_cast<uint32_t>(min(columns - column, int64_t{tile_columns}));
  from += outer * rows * columns + row * columns + column;
  to += outer * rows * columns + column * rows + row;
  T own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t e = i * kTurnThreads + threadIdx.x, r = e >> column_bits, c = e & (tile_columns - 1);
    if (r < rows_left && c < columns_left) own[i] = from[r * columns + c];
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t e = i * kTurnThreads + threadIdx.x, r = e >> column_bits, c = e & (tile_columns - 1);
    if (r < rows_left && c < columns_left) tile[r * pitch + c] = own[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t e = i * kTurnThreads + threadIdx.x, c = e >> row_bits, r = e & (tile_rows - 1);
    if (r < rows_left && c < columns_left) to[c * rows + r] = tile[r * pitch + c];
  }
}

}  // namespace

cudaError_t launch_turn(cudaStream_t stream, const void* from, void* to, int64_t outer, int64_t rows, int64_t columns,
                        int bits) {
  return dispatch_key(bits, [&](auto element) {
    using T = decltype(element);
    // Lines of a tile have 32 elements or more, both read and written. If the array has fewer rows or columns than
    // that, the other side is longer.
    int column_bits = 0, row_bits = 0;
    while (column_bits < (sizeof(T) <= 2 ? 6 : 5) && columns > 1 << column_bits) ++column_bits;
    while (row_bits < kTileBits<T> - column_bits && rows > 1 << row_bits) ++row_bits;
    column_bits = kTileBits<T> - row_bits;
    const int64_t down = ((rows - 1) >> row_bits) + 1, across = ((columns - 1) >> column_bits) + 1;
    return launch(stream, {dim3(static_cast<unsigned>(outer * down * across)), dim3(kTurnThreads)}, turn_kernel<T>,
                  static_cast<const T*>(from), static_cast<T*>(to), rows, columns, static_cast<uint32_t>(down),
                  static_cast<uint32_t>(across), row_bits);
  });
}

}  // namespace jaxgpuops::sort
