// The geometry of the argmax kernels (argmax.cu describes them) that the plan and the launch must agree on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/rows.h"
#include "common/small.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxMostThreads = 512;   // the most threads of a block of kColumns, or of kRows
constexpr int kArgmaxPlaneThreads = 128;  // kPlanes: the most threads of a block
constexpr int kArgmaxColumnThreads = 96;  // kColumns: about the threads of a block, if outer indices are few
constexpr int kArgmaxRowThreads = 128;    // kRows: threads of a block whose warps have rows of their own

// kSmall, kBlocks: a thread takes kArgmaxEach elements at a time. In kSmall it takes kSmallEach instead if the array
// has at most kArgmaxFew elements, if a column has at most kArgmaxFewRows, or if elements have 64 bits.
constexpr int kArgmaxEach = 8;
constexpr int64_t kArgmaxFew = 1 << 18;
constexpr int64_t kArgmaxFewRows = 32;

// kBlocks: the elements of a column that a block has, at most, unless these are a sixteenth of it; from which length on
// other kernels are faster where there are no clusters.
constexpr int64_t kArgmaxBlock = 4096, kArgmaxUnshared = 16 << 10;
constexpr int64_t kArgmaxLongest = 256;  // kSmall: the longest columns
// kBlocks: the longest columns; from which length on the bytes that come from memory decide, and their limit.
constexpr int64_t kArgmaxLongestColumn = 5 << 16, kArgmaxLongestWide = 1 << 16, kArgmaxLongColumn = 2048;
constexpr int64_t kArgmaxMostMoved = 36 << 20, kArgmaxMostMovedWide = 20 << 20;

// kTiles: the most bytes of a row, if inner is 1 and there are many rows, of bytes and of wider elements.
constexpr int64_t kArgmaxTileRow = 2304, kArgmaxTileByteRow = 1792;

constexpr int64_t kArgmaxWarpRow = 32 << 10;  // kRows: up to so many bytes, a warp may have a row
constexpr int64_t kArgmaxAlone = 128 << 10;   // kRows: up to so many bytes, blocks do not share a row
constexpr int kArgmaxMostCluster = 16;        // kRows: the most blocks of a cluster that shares a row

enum class ArgmaxForm { kTeams, kPacked, kSmall, kBlocks, kTiles, kRows, kColumns, kStrided, kSheets, kPlanes };

struct ArgmaxShape {
  ArgmaxForm form = ArgmaxForm::kTiles;
  int64_t outers = 1;   // kTiles: outer indices of a block
  int lane_bits = 0;    // kTeams, kTiles, kRows, kSmall: 2^lane_bits lanes share a column (a row)
  int each = 1;         // kTeams: windows of 16 bytes that a lane has of its row
  int column_bits = 0;  // kSmall: 2^column_bits neighbouring threads have neighbouring columns
  int columns = 1;      // kStrided: neighbouring columns of a thread, which are a word if they are several
  // kBlocks: blocks that share a column; kColumns, kStrided, kSheets: blocks that share the columns of an outer index.
  int64_t tiles = 1;
  // kColumns, kStrided, kSheets: threads of a block across the columns, and along the axis (see ColumnsCall).
  int beside = 0, deep = 1;
  bool narrow = false;  // kColumns: a vector has all columns, each equally often
  int period = 1;       // kColumns: slice i has positions i % period, i % period + period, .. of the axis
  int threads = kArgmaxThreads;
};

constexpr int64_t kArgmaxNarrow = 8;  // kColumns: the most columns that warps merge without shared memory

// kColumns: the least positions of a slice if lines are not whole vectors. (Only of 16 bits: of 32 bits, kStrided is as
// fast, and so it is of bytes, whose lines are often whole words.)
constexpr int64_t kArgmaxPeriods = 64;

// How many columns a thread of kSheets has.
constexpr int argmax_sheet_columns(int key_bytes) { return key_bytes == 8 ? 4 : 8; }

// Chooses so many lanes for a column that each reads about 96 bytes, and so many outer indices for a block that its
// threads have work. Small problems are spread over more blocks.
inline ArgmaxShape argmax_tiles_shape(Rows rows, int key_bytes) {
  ArgmaxShape shape;
  const int64_t column_bytes = rows.length * key_bytes, plane = column_bytes * rows.inner;
  while (shape.lane_bits < 5 && column_bytes > 96 << shape.lane_bits) ++shape.lane_bits;
  const auto lanes = [&] { return int64_t{1} << shape.lane_bits; };
  const int64_t several = column_bytes <= 24 ? 4 : 1;  // columns that a thread has
  shape.outers = std::max<int64_t>(1, several * kArgmaxThreads / (rows.inner * lanes()));
  shape.outers = std::max<int64_t>(1, std::min(shape.outers, 47 * 1024 / plane));
  shape.outers = std::min(shape.outers, std::max<int64_t>(1, rows.outer / 132));
  while (shape.lane_bits < 5 && 8 * lanes() < rows.length && 2 * lanes() * shape.outers * rows.inner <= kArgmaxThreads)
    ++shape.lane_bits;
  return shape;
}

// Rows of up to kArgmaxTeamWindows windows. A lane has few of a row's windows as long as that does not take too many
// warps: these numbers are the most warps whose lanes have one, or two.
constexpr int64_t kArgmaxTeams = 4 << 20, kArgmaxFullTeams = 16 << 20;  // bytes of the largest array
constexpr int64_t kArgmaxTeamWindows = 128, kArgmaxSingleWarps = 8 * 132, kArgmaxDoubleWarps = 60 * 132;

// The most windows of 16 bytes that a row lies in.
inline int64_t argmax_windows(Rows rows, int key_bytes) {
  const int64_t bytes = rows.length * key_bytes;
  return bytes % 16 == 0 ? bytes / 16 : (bytes + 2 * 15) / 16;
}

// Whether a vector of 16 bytes holds several whole rows. (Bytes in pairs or eights are as fast in XLA.)
inline bool argmax_is_packed(Rows rows, int key_bytes) {
  if (rows.inner != 1 || rows.outer > INT32_MAX) return false;
  return key_bytes == 2 ? rows.length == 2 || rows.length == 4 : key_bytes == 1 && rows.length == 4;
}

inline ArgmaxShape argmax_teams_shape(Rows rows, int key_bytes, bool aligned) {
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kTeams;
  const int64_t windows = argmax_windows(rows, key_bytes) + (aligned ? 0 : 1);
  const auto bits = [&](int each) {
    int bits = 0;
    while (int64_t{each} << bits < windows) ++bits;
    return bits;
  };
  const auto warps = [&](int each) { return (rows.outer << bits(each)) / 32; };
  const auto fits = [&](int each, int64_t most) { return bits(each) <= 5 && warps(each) <= most; };
  shape.each = windows == 1 || fits(1, kArgmaxSingleWarps) ? 1 : windows < 8 || fits(2, kArgmaxDoubleWarps) ? 2 : 4;
  shape.lane_bits = bits(shape.each);
  shape.threads = kArgmaxRowThreads;
  return shape;
}

// Whether the small kernel takes an array, and how many elements a thread of it has at a time. Like the other choices
// of forms, this follows the times of all forms on some six hundred problems on an H200.
inline bool argmax_is_small(Rows rows, int key_bytes) {
  const int64_t elements = rows.elements();
  const bool wide = key_bytes == 8;
  if (rows.length > (wide ? kArgmaxLongestWide : kArgmaxLongestColumn)) return false;
  if (rows.inner == 1) {
    if (rows.length > (wide ? 4096 : 3584)) return false;
    return elements <= (wide ? 1 << 20 : rows.length > kArgmaxFewRows ? 1 << 19 : 1 << 18);
  }
  if (rows.length >= kArgmaxLongColumn) {
    // Neighbouring threads read elements that are a line apart, so a whole sector of memory comes for each, at most.
    const int64_t moved = elements * std::min<int64_t>(rows.inner * key_bytes, 32);
    return moved <= (wide ? kArgmaxMostMovedWide : kArgmaxMostMoved);
  }
  if (rows.length <= kArgmaxFewRows) return elements <= 3 << 19;
  return elements <= (wide || rows.inner > 16 ? 1 << 19 : 7 << 18);
}

inline int argmax_small_each(Rows rows, int key_bytes) {
  const bool few = rows.elements() <= kArgmaxFew || rows.length <= kArgmaxFewRows || key_bytes == 8;
  return few ? kSmallEach : kArgmaxEach;
}

// How many elements of the axis a block has. If inner is 1, a multiple of 16, so that slices are whole vectors.
inline int64_t argmax_slice(Rows rows, int64_t slices) {
  const int64_t slice = (rows.length + slices - 1) / slices;
  return rows.inner == 1 && slices > 1 ? (slice + 15) / 16 * 16 : slice;
}

// A thread of kBlocks has up to kArgmaxEach elements, if they are not too many for that.
inline ArgmaxShape argmax_blocks_shape(Rows rows) {
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kBlocks;
  const auto each = [&] { return (rows.length + shape.tiles - 1) / shape.tiles; };
  while (each() > kArgmaxBlock / (shape.tiles > 1 ? 2 : 1) && shape.tiles < kArgmaxMostCluster) shape.tiles *= 2;
  shape.threads = 64;
  while (shape.threads < kArgmaxMostThreads && shape.threads * kArgmaxEach < each()) shape.threads *= 2;
  return shape;
}

inline ArgmaxShape argmax_small_shape(Rows rows, int key_bytes) {
  if (rows.length > kArgmaxLongest) return argmax_blocks_shape(rows);
  const SmallShape small = small_shape(rows, argmax_small_each(rows, key_bytes));
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kSmall;
  shape.lane_bits = small.part_bits;
  shape.column_bits = small.column_bits;
  shape.tiles = small.blocks;
  shape.threads = small.threads;
  return shape;
}

// How many blocks of a cluster share a row, where the device has clusters: 1, but for few rows of middle length.
inline int argmax_cluster(Rows rows, int key_bytes) {
  const int64_t bytes = rows.length * key_bytes;
  if (rows.outer > 32 && rows.outer <= 66 && bytes <= 256 << 10) {
    if (key_bytes == 1) return bytes >= 24 << 10 ? 2 : 1;
    return bytes >= (rows.outer <= 50 ? 80 : 96) << 10 ? 4 : 1;
  }
  if (rows.outer > 32 || bytes < (key_bytes == 1 ? 24 : 48) << 10) return 1;
  if (bytes <= 256 << 10) return bytes < 80 << 10 ? 4 : 8;
  const bool several = rows.outer <= 25 && (key_bytes == 2 || key_bytes == 4) && bytes <= 512 << 10;
  return several || (rows.outer <= 8 && bytes <= 768 << 10) ? kArgmaxMostCluster : 1;
}

// Gives a row to a warp where there are enough rows for that. Else few rows of middle length get large blocks, so that
// all of a row is on its way at once, but blocks that share a row are smaller.
inline ArgmaxShape argmax_rows_shape(Rows rows, int key_bytes) {
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kRows;
  const int64_t bytes = rows.length * key_bytes;
  const bool common = key_bytes == 2 || key_bytes == 4;
  if (bytes <= std::min(kArgmaxWarpRow, (common && bytes >= 6 << 10 ? 4 : 16) * rows.outer)) {
    shape.lane_bits = 5;
  } else if (rows.outer >= 264) {
    shape.lane_bits = bytes >= 96 << 10 || (common && bytes >= 16 << 10 && bytes <= 48 << 10) ? 8 : 7;
  } else if (bytes < 12 << 10) {
    shape.lane_bits = 7;
  } else {
    const int cluster = argmax_cluster(rows, key_bytes);
    const bool alone = bytes >= 24 << 10 && bytes <= kArgmaxAlone && cluster == 1;
    const bool large = (cluster == kArgmaxMostCluster && rows.outer <= 8) || (cluster == 2 && bytes > 192 << 10);
    shape.lane_bits = alone || large ? 9 : 8;
  }
  shape.threads = std::max(1 << shape.lane_bits, kArgmaxRowThreads);
  return shape;
}

// kColumns: about how many threads a block has if each outer index has one block. All blocks together then have some 23
// warps for each multiprocessor, so that all run at once. (Fitted on an H200. For bytes and a middle number of threads,
// three warps were as fast as any other number.)
inline int argmax_column_threads(int64_t outer, int key_bytes) {
  constexpr int64_t kAll = 96 << 10;
  const int64_t each = kAll / outer;
  if (outer < 200 || (key_bytes == 1 && each > 80 && each < 176)) return kArgmaxColumnThreads;
  if (each < 112) return each < 48 ? 32 : each < 80 ? 64 : kArgmaxColumnThreads;
  return each < 160 ? 128 : each < 224 ? 192 : kArgmaxThreads;
}

// Threads read neighbouring columns, or words of columns of 8 or 16 bits, and `deep` groups of them share the axis. If
// blocks are few, they are narrower.
inline ArgmaxShape argmax_strided_shape(Rows rows, int key_bytes, bool aligned) {
  ArgmaxShape shape;
  shape.form = ArgmaxForm::kStrided;
  if (aligned && key_bytes <= 2 && rows.inner >= 64 && rows.elements() * key_bytes % 4 == 0)
    shape.columns = 4 / key_bytes;
  const int64_t units = (rows.inner + shape.columns - 1) / shape.columns, blocks = rows.outer * ((units + 63) / 64);
  // (Widths of words as measured on an H200.)
  const int64_t width = shape.columns > 1 ? (blocks >= 400 && blocks <= 1000 ? 64 : 32)
                        : blocks <= 528   ? 64
                                          : kArgmaxThreads;
  shape.tiles = (units + width - 1) / width;
  shape.beside = static_cast<int>((units + shape.tiles - 1) / shape.tiles);
  shape.deep = static_cast<int>(std::min<int64_t>(kArgmaxThreads / shape.beside, (rows.length + 7) / 8));
  shape.threads = shape.beside * shape.deep;
  return shape;
}

// Whether a block of kColumns has much to read, if blocks share columns.
inline bool argmax_is_vast(Rows rows, int key_bytes) {
  return rows.outer < 264 && rows.elements() * key_bytes >= 64 << 20;
}

// Whether single elements are faster than vectors, if inner is more than 1: blocks of the columns kernel take longer to
// begin and to end, which counts in small arrays, and in larger ones of 32 bits, of which a vector has few. They do not
// if a vector has all columns (`narrow`).
inline bool argmax_is_strided(Rows rows, int key_bytes, bool narrow) {
  const int64_t elements = rows.elements();
  if (narrow) return false;
  if (key_bytes == 8) return rows.inner >= 256 && elements <= 7 << 19;
  if (key_bytes == 4 && rows.outer < 264 && rows.inner <= 128) return !argmax_is_vast(rows, key_bytes);
  return elements <= (key_bytes == 4 || rows.inner >= 500 ? 6 << 20 : 1 << 22);
}

// `aligned`: the array begins at a multiple of 16 bytes, as XLA's do.
inline ArgmaxShape argmax_shape(Rows rows, int key_bytes, bool aligned) {
  ArgmaxShape shape;
  const int64_t vector = 16 / key_bytes, inner_bytes = rows.inner * key_bytes;
  // After so many vectors, the columns of a vector repeat.
  const int64_t period = rows.inner / std::gcd(rows.inner, vector);
  const bool whole = aligned && rows.inner % vector == 0;
  const bool narrow = aligned && vector % rows.inner == 0 && rows.inner <= kArgmaxNarrow;
  const int64_t most = kArgmaxMostThreads * (key_bytes == 1 ? 3 : 4) / 4;  // threads of kColumns
  // Spreads `units` evenly over blocks of at most so many threads.
  const auto spread = [&](int64_t units, int64_t threads) {
    shape.tiles = (units + threads - 1) / threads;
    shape.beside = static_cast<int>((units + shape.tiles - 1) / shape.tiles);
  };
  if (aligned && argmax_is_packed(rows, key_bytes)) {
    shape.form = ArgmaxForm::kPacked;
    return shape;
  }
  if (rows.inner == 1 && argmax_windows(rows, key_bytes) < kArgmaxTeamWindows) {
    // Large arrays are faster from shared memory, and arrays of some MiB if many lanes have fewer windows than others.
    const ArgmaxShape teams = argmax_teams_shape(rows, key_bytes, aligned);
    const int64_t bytes = rows.elements() * key_bytes, slots = int64_t{teams.each} << teams.lane_bits;
    const bool full = 3 * slots <= 4 * argmax_windows(rows, key_bytes);
    if (bytes <= (full ? kArgmaxFullTeams : kArgmaxTeams)) return teams;
  }
  if (argmax_is_small(rows, key_bytes)) return argmax_small_shape(rows, key_bytes);
  const int64_t threads = whole ? rows.outer * rows.inner / vector : 0;  // if each has a vector of columns
  if (rows.inner == 1) {
    const int64_t row = rows.length * key_bytes;
    const int64_t most = key_bytes == 1 ? kArgmaxTileByteRow : kArgmaxTileRow;
    return row <= 1408 || (row <= most && rows.outer >= 8192) ? argmax_tiles_shape(rows, key_bytes)
                                                              : argmax_rows_shape(rows, key_bytes);
  } else if (threads >= 1 << 14 && inner_bytes >= 512 && rows.length <= 24 &&
             rows.length >= (key_bytes == 1 ? 6 : 2)) {  // all of a block's threads are beside each other
    shape.form = ArgmaxForm::kPlanes;
    spread(rows.inner / vector, kArgmaxPlaneThreads);
    shape.threads = shape.beside;
  } else if (inner_bytes >= 1024 && rows.length <= 24 && !(whole && rows.length > 8)) {
    // A thread has whole columns: several if there are many.
    const bool several = rows.count() >= 1 << 17;
    shape.form = several ? ArgmaxForm::kSheets : ArgmaxForm::kStrided;
    shape.threads = several ? kArgmaxThreads : 128;
    const int64_t columns = several ? argmax_sheet_columns(key_bytes) : 1;
    spread((rows.inner + columns - 1) / columns, shape.threads);
  } else if (rows.length * inner_bytes <= (key_bytes == 8 ? 20 : 10) << 10) {
    return argmax_tiles_shape(rows, key_bytes);
  } else if (argmax_is_strided(rows, key_bytes, narrow) && !(threads >= 1 << 13 && rows.length >= 48)) {
    return argmax_strided_shape(rows, key_bytes, aligned);
  } else if (period <= most) {
    shape.form = ArgmaxForm::kColumns;
    shape.narrow = narrow;
    // A block has whole periods of threads. All threads exchange candidates through shared memory, so there are not
    // many threads, except where blocks read so much that the exchange does not matter.
    const int64_t threads = argmax_column_threads(rows.outer, key_bytes);
    if (argmax_is_vast(rows, key_bytes)) {
      shape.threads = static_cast<int>(std::max(period, most) / period * period);
    } else if (narrow && rows.outer < 200) {  // they exchange little, so there may be more
      shape.threads = rows.outer <= 16 && rows.elements() * key_bytes >= 3 << 20 ? kArgmaxThreads : 128;
    } else if (threads == kArgmaxColumnThreads) {
      shape.threads = static_cast<int>((threads + period - 1) / period * period);
    } else {  // a warp that is not full takes as long as one that is
      const int64_t all = threads == 32 && 32 / period * period < 30 ? 64 : threads;
      shape.threads = static_cast<int>(std::max(period, all / period * period));
    }
  } else if (whole) {
    shape.form = ArgmaxForm::kColumns;
    shape.deep = rows.length < 16 ? 1 : rows.length < 48 ? 2 : 4;
    spread(rows.inner / vector, kArgmaxThreads / shape.deep);
    shape.threads = shape.beside * shape.deep;
  } else {
    // Positions that are a period apart begin equally far from a whole vector.
    const int period = static_cast<int>(16 / std::gcd<int64_t>(inner_bytes, 16));
    if (!aligned || key_bytes != 2 || rows.length < kArgmaxPeriods * period)
      return argmax_strided_shape(rows, key_bytes, aligned);
    shape.form = ArgmaxForm::kColumns;
    shape.period = period;
    shape.deep = 8;
    spread((rows.inner + 2 * (vector - 1)) / vector, kArgmaxThreads / shape.deep);
    shape.threads = shape.beside * shape.deep;
  }
  return shape;
}

// Bytes of shared memory of a block.
inline int64_t argmax_shared_bytes(Rows rows, int key_bytes, const ArgmaxShape& shape) {
  const int64_t candidate = composite_bytes(key_bytes);
  switch (shape.form) {
    case ArgmaxForm::kTiles: return shape.outers * rows.length * rows.inner * key_bytes + 16 + 128;
    // A thread has one place more than it has elements: see spaced().
    case ArgmaxForm::kColumns:
      if (shape.narrow) return (shape.threads + 31) / 32 * rows.inner * candidate;
      return shape.threads * (16 / key_bytes + 1) * candidate;
    case ArgmaxForm::kStrided: return shape.threads * shape.columns * candidate;
    default: return 0;
  }
}

}  // namespace jaxgpuops::topk
