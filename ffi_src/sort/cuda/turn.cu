// Transposes columns to rows and rows to columns, which the radix sorts need where the axis is not the last.
//
// Bytes moved: every element is read and written once. Tiles are transposed in shared memory, so that reads and writes
// are both coalesced. The sides of a tile are powers of two, since divisions would take longer than the copy.
#include "sort/cuda/kernels.h"

#include <algorithm>

#include "common/cuda/launch.cuh"
#include "topk/cuda/quotient.cuh"

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

// Few columns of whole vectors: a thread turns as many rows as a vector has elements, with whole vectors on both sides.
constexpr int kMostNarrow = 8, kNarrowThreads = 128;

template <class T, int kColumns>
__global__ void __launch_bounds__(kNarrowThreads)
    turn_narrow_kernel(const T* __restrict__ from, T* __restrict__ to, uint32_t vectors, uint32_t blocks) {
  constexpr int kVector = 16 / sizeof(T);
  struct alignas(16) Vector {
    T element[kVector];
  };
  const uint32_t outer = blockIdx.x / blocks, v = (blockIdx.x - outer * blocks) * kNarrowThreads + threadIdx.x;
  if (v >= vectors) return;
  const int64_t first = int64_t{outer} * vectors * kColumns;
  const auto* const in = reinterpret_cast<const Vector*>(from) + first + int64_t{v} * kColumns;
  auto* const out = reinterpret_cast<Vector*>(to) + first + v;
  Vector rows[kColumns], column[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) rows[i] = in[i];
#pragma unroll
  for (int e = 0; e < kColumns * kVector; ++e)
    column[e % kColumns].element[e / kColumns] = rows[e / kVector].element[e % kVector];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c * int64_t{vectors}] = column[c];
}

template <class T, int kColumns = kMostNarrow>
cudaError_t launch_narrow(cudaStream_t stream, const T* from, T* to, int64_t outer, int64_t rows, int64_t columns) {
  if constexpr (kColumns > 2)
    if (columns < kColumns) return launch_narrow<T, kColumns - 1>(stream, from, to, outer, rows, columns);
  const auto vectors = static_cast<uint32_t>(rows * sizeof(T) / 16);
  const uint32_t blocks = (vectors + kNarrowThreads - 1) / kNarrowThreads;
  return launch(stream, {dim3(static_cast<unsigned>(outer * blocks)), dim3(kNarrowThreads)},
                turn_narrow_kernel<T, kColumns>, from, to, vectors, blocks);
}

// Other arrays of few columns: a block copies neighbouring rows to shared memory as they lie, and then writes the
// columns. Rows of an even length have a gap between them there, so that threads read from different banks.
constexpr uint32_t kMostFlat = 24, kFlatBytes = 24 << 10;

template <class T>
__global__ void __launch_bounds__(kTurnThreads)
    turn_flat_kernel(const T* __restrict__ from, T* __restrict__ to, int64_t rows, uint32_t columns, uint32_t tile_rows,
                     uint32_t tiles, uint32_t reciprocal) {
  __shared__ T tile[kFlatBytes / sizeof(T)];
  constexpr uint32_t kLoads = 8;
  const uint32_t outer = blockIdx.x / tiles, gap = 1 - columns % 2;
  const int64_t row = int64_t{blockIdx.x - outer * tiles} * tile_rows;
  const auto left = static_cast<uint32_t>(min(rows - row, int64_t{tile_rows})), elements = left * columns;
  from += (outer * rows + row) * columns;
  to += int64_t{outer} * columns * rows + row;
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < elements; e += kLoads * kTurnThreads) {
    T own[kLoads];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) own[u] = from[min(e + u * kTurnThreads, elements - 1)];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      const uint32_t at = e + u * kTurnThreads;
      if (at < elements) tile[gap ? at + topk::quotient(at, columns, reciprocal) : at] = own[u];
    }
  }
  __syncthreads();
  const uint32_t pitch = columns + gap;
#pragma unroll 1
  for (uint32_t c = 0; c < columns; ++c, to += rows) {
#pragma unroll 4
    for (uint32_t r = threadIdx.x; r < left; r += kTurnThreads) to[r] = tile[r * pitch + c];
  }
}

}  // namespace

cudaError_t launch_turn(cudaStream_t stream, const void* from, void* to, int64_t outer, int64_t rows, int64_t columns,
                        int bits) {
  return dispatch_key(bits, [&](auto element) {
    using T = decltype(element);
    const auto address = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
    if (columns > 1 && columns <= kMostNarrow && (address | rows * sizeof(T)) % 16 == 0)
      return launch_narrow(stream, static_cast<const T*>(from), static_cast<T*>(to), outer, rows, columns);
    if (columns > 1 && columns <= kMostFlat && rows >= 4 * kTurnThreads) {
      uint32_t tile_rows = 4 * kTurnThreads;
      while (tile_rows * (columns + 1) * sizeof(T) > kFlatBytes) tile_rows /= 2;
      const int64_t tiles = (rows - 1) / tile_rows + 1;
      return launch(stream, {dim3(static_cast<unsigned>(outer * tiles)), dim3(kTurnThreads)}, turn_flat_kernel<T>,
                    static_cast<const T*>(from), static_cast<T*>(to), rows, static_cast<uint32_t>(columns), tile_rows,
                    static_cast<uint32_t>(tiles), topk::reciprocal(columns));
    }
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
