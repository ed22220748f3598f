// The geometry of the argmax kernels (argmax.cu has what they are) that the plan and the launch must agree on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/rows.h"
#include "common/small.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxMostThreads = 512;  // columns
constexpr int kArgmaxRowThreads = 128;   // rows

constexpr int kArgmaxEach = 8;                 // small: elements that a thread takes at a time, where they are not few
constexpr int64_t kArgmaxFew = 1 << 17;        // these are: elements in all, ..
constexpr int64_t kArgmaxFewRows = 32;         // .. or of a column; and those of 64 bits
constexpr int64_t kArgmaxSmall = 1 << 18;      // elements in all, at most, ..
constexpr int64_t kArgmaxSmallMany = 1 << 19;  // .. with so many of a column that threads have eight, ..
constexpr int64_t kArgmaxSmallColumns = 3 << 18;  // .. of columns that blocks share, ..
constexpr int64_t kArgmaxSmallRow = 1 << 21;      // .. and of a single row that they share
constexpr int64_t kArgmaxMany = 8 << 10;          // elements of a column of kArgmaxSmallMany, at most
constexpr int64_t kArgmaxUnshared = 16 << 10;     // elements of a column that blocks do not share
constexpr int64_t kArgmaxSmallSlice = 1 << 10;    // elements of a block's slice, about

constexpr int64_t kArgmaxTilePlane = 24 << 10;  // bytes of an outer index that tiles take
constexpr int64_t kArgmaxTileRow = 6 << 10;     // the same, if inner is 1
constexpr int64_t kArgmaxWarpRow = 12 << 10;    // bytes of a row that a warp has, if inner is 1
constexpr int64_t kArgmaxAlone = 40 << 10;      // bytes of a row that blocks do not share, if inner is 1

enum class ArgmaxForm { kSmall, kTiles, kRows, kColumns, kStrided, kSheets };

struct ArgmaxShape {
  ArgmaxForm form = ArgmaxForm::kTiles;
  int64_t outers = 1;        // tiles: outer indices of a block
  int lane_bits = 0;         // tiles, small: 2^n lanes share a column
  int column_bits = 0;       // small: 2^n threads have columns beside each other
  int64_t tiles = 1;         // columns, strided, sheets: blocks beside each other
  int beside = 0, deep = 1;  // the same: threads of a block beside and behind each other (columns: see ColumnsCall)
  int threads = kArgmaxThreads;
};

// Columns of a thread of strided, where it has several.
constexpr int argmax_sheet_columns(int key_bytes) { return key_bytes == 8 ? 4 : 8; }

// Lanes that read about 96 bytes each of a column, and blocks that fill their threads; small problems are spread.
inline ArgmaxShape argmax_tiles_shape(Rows rows, int key_bytes) {
  ArgmaxShape shape;
  const int64_t column_bytes = rows.length * key_bytes, plane = column_bytes * rows.inner;
  while (shape.lane_bits < 5 && column_bytes > 96 << shape.lane_bits) ++shape.lane_bits;
  const auto lanes = [&] { return int64_t{1} << shape.lane_bits; };
  const int64_t several = column_bytes <= 24 ? 4 : 1;  // columns of a thread
  shape.outers = std::max<int64_t>(1, several * kArgmaxThreads / (rows.inner * lanes()));
  shape.outers = std::max<int64_t>(1, std::min(shape.outers, 47 * 1024 / plane));
  shape.outers = std::min(shape.outers, std::max<int64_t>(1, rows.outer / 132));
  while (shape.lane_bits < 5 && 8 * lanes() < rows.length && 2 * lanes() * shape.outers * rows.inner <= kArgmaxThreads)
    ++shape.lane_bits;
  return shape;
}

// Whether the small kernel takes an array, and how many elements a thread of it has at a time.
inline bool argmax_is_small(Rows rows, int key_bytes) {
  const int64_t elements = rows.elements();
  if (rows.length > kArgmaxUnshared)
    return elements <= (rows.inner > 1 ? kArgmaxSmallColumns : rows.outer == 1 ? kArgmaxSmallRow : kArgmaxSmall);
  const bool many = key_bytes < 8 && rows.length > kArgmaxFewRows && rows.length <= kArgmaxMany;
  return elements <= (many ? kArgmaxSmallMany : kArgmaxSmall);
}

inline int argmax_small_each(Rows rows, int key_bytes) {
  if (rows.length > int64_t{kSmallEach} * kMostSmallThreads) return kArgmaxEach;
  const bool few = rows.elements() <= kArgmaxFew || rows.length <= kArgmaxFewRows || key_bytes == 8;
  return few ? kSmallEach : kArgmaxEach;
}

// Elements of the axis that a block has. Whole vectors, where rows are.
inline int64_t argmax_slice(Rows rows, int64_t slices) {
  const int64_t slice = (rows.length + slices - 1) / slices;
  return rows.inner == 1 && slices > 1 ? (slice + 15) / 16 * 16 : slice;
}

// So many slices as rows, the last perhaps shorter than the others.
inline Rows argmax_cut(Rows rows, int64_t slices) {
  const int64_t slice = argmax_slice(rows, slices);
  return {rows.outer * ((rows.length + slice - 1) / slice), slice, rows.inner};
}

inline ArgmaxShape argmax_small_shape(Rows rows, int key_bytes, int64_t slices) {
  const SmallShape small = small_shape(argmax_cut(rows, slices), argmax_small_each(rows, key_bytes));
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kSmall;
  shape.lane_bits = small.part_bits;
  shape.column_bits = small.column_bits;
  shape.tiles = small.blocks;
  shape.threads = small.threads;
  return shape;
}

// Whether a warp has a row, and not a block: of 16 and 32 bits, where that was measured.
constexpr bool argmax_has_warps(int key_bytes) { return key_bytes == 2 || key_bytes == 4; }

inline ArgmaxShape argmax_rows_shape(Rows rows, int key_bytes) {
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kRows;
  shape.lane_bits = argmax_has_warps(key_bytes) && rows.length * key_bytes <= kArgmaxWarpRow ? 5 : 7;
  shape.threads = kArgmaxRowThreads;
  return shape;
}

// `aligned`: the array begins at a multiple of 16 bytes, as XLA's do.
inline ArgmaxShape argmax_shape(Rows rows, int key_bytes, bool aligned) {
  ArgmaxShape shape;
  const int64_t vector = 16 / key_bytes, inner_bytes = rows.inner * key_bytes;
  const int64_t period = rows.inner / std::gcd(rows.inner, vector);  // vectors after which columns come again
  const bool whole = aligned && rows.inner % vector == 0;
  const auto spread = [&](int64_t units, int64_t most) {  // over blocks of at most so many threads
    shape.tiles = (units + most - 1) / most;
    shape.beside = static_cast<int>((units + shape.tiles - 1) / shape.tiles);
  };
  if (argmax_is_small(rows, key_bytes)) return argmax_small_shape(rows, key_bytes, 1);
  if (rows.inner == 1) {
    // Few rows, and those that warps take, leave tiles sooner.
    const bool sooner = rows.outer < 512 || argmax_has_warps(key_bytes);
    if (rows.length * key_bytes <= (sooner ? kArgmaxTileRow / 3 : kArgmaxTileRow))
      return argmax_tiles_shape(rows, key_bytes);
    return argmax_rows_shape(rows, key_bytes);
  } else if (inner_bytes >= 1024 && rows.length <= 24 && !(whole && rows.length > 8)) {
    // A thread has whole columns, several if there are enough of them.
    const bool several = rows.count() >= 1 << 17;
    shape.form = several ? ArgmaxForm::kSheets : ArgmaxForm::kStrided;
    shape.threads = several ? kArgmaxThreads : 128;
    const int64_t columns = several ? argmax_sheet_columns(key_bytes) : 1;
    spread((rows.inner + columns - 1) / columns, shape.threads);
  } else if (rows.length * inner_bytes <= kArgmaxTilePlane) {
    return argmax_tiles_shape(rows, key_bytes);
  } else if (period <= kArgmaxMostThreads * (key_bytes == 1 ? 3 : 4) / 4) {
    shape.form = ArgmaxForm::kColumns;
    const int64_t bytes = rows.elements() * key_bytes, most = kArgmaxMostThreads * (key_bytes == 1 ? 3 : 4) / 4;
    const int64_t threads = std::max(period, bytes >= 8 << 20 ? most : int64_t{kArgmaxThreads});
    shape.threads = static_cast<int>(threads / period * period);
  } else if (whole) {
    shape.form = ArgmaxForm::kColumns;
    shape.deep = rows.length < 16 ? 1 : 2;
    spread(rows.inner / vector, kArgmaxThreads / shape.deep);
    shape.threads = shape.beside * shape.deep;
  } else {
    shape.form = ArgmaxForm::kStrided;
    spread(rows.inner, kArgmaxThreads);
    shape.deep = kArgmaxThreads / shape.beside;
    shape.threads = shape.beside * shape.deep;
  }
  return shape;
}

// Shared memory of a block.
inline int64_t argmax_shared_bytes(Rows rows, int key_bytes, const ArgmaxShape& shape) {
  const int64_t candidate = composite_bytes(key_bytes);
  switch (shape.form) {
    case ArgmaxForm::kTiles: return shape.outers * rows.length * rows.inner * key_bytes + 16 + 128;
    case ArgmaxForm::kColumns: return shape.threads * (16 / key_bytes + 1) * candidate;  // see spaced()
    case ArgmaxForm::kStrided: return shape.threads * candidate;
    default: return 0;
  }
}

}  // namespace jaxgpuops::topk
