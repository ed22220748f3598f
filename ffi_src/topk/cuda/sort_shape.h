// The geometry of the sort kernel that the plan and the launch must agree on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxSortLength = 8192;
constexpr int kSortBlock = 256;          // the most threads of a block, where a row has at most a warp
constexpr int kSortFew = 4;              // elements of a thread if a selection is sorted
constexpr int64_t kSortTile = 80 << 10;  // the most bytes of the rows of such a block, if it has several rows
constexpr int kPickEach = 32;            // elements of a thread if a warp selects from a long row

// Whether a block of threads sorts each row, not a part of a warp.
constexpr bool sorts_by_block(int each, int64_t team) { return each == 4 || team > 32; }

struct SortShape {
  int each = 16;       // elements of a thread: 4, 8, 16 or kPickEach
  int team = 1;        // threads that share a row, a power of two
  int64_t picked = 0;  // see pick_room()
  int threads = 0;     // threads of a block
  int64_t outers = 1;  // outer indices of a block's rows
  int64_t width = 1;   // inner indices of a block's rows: all, or some if `outers` is 1
  int64_t pitch = 1;   // elements from one index of a row to the next in shared memory
  int64_t order = 0;   // distance from the order (indices of 16 bits) of one row to that of the next
  size_t shared_bytes = 0;
  int64_t blocks = 0;
};

// The index in a row's order of the entry for `place`: neighbouring threads write 8 words apart, and no two meet in a
// bank.
constexpr int64_t sort_place(int64_t place) { return place + place / 64 * 2; }

// Shared memory of a block's elements. Rows that follow each other begin there where they do in memory, in bytes modulo
// 16, so that they are copied in vectors.
constexpr int64_t sort_tile_bytes(int64_t elements, int64_t key_bytes, int64_t inner) {
  return (elements * key_bytes + (inner == 1 ? 15 : 0) + 15) / 16 * 16;
}

// Whether the selected elements need not be sorted: results in the order of indices, unless k is so small, or keys so
// long, that the steps to exactly k elements take longer than a sort.
constexpr bool selects_exactly(int64_t length, int64_t k, int key_bytes, bool sorted) {
  return !sorted && 32 * k >= length && (key_bytes < 8 || length > 512 || 2 * k > length);
}

// The most elements that a warp selects from a row of more than 256 elements, to be sorted in its place; 0: another
// kernel takes the row. Blocks are faster for few rows of narrow keys, and teams of fewer elements a thread for short
// ones.
inline int64_t pick_room(Rows rows, int64_t k, int key_bytes, bool sorted, int64_t multiprocessors) {
  if (rows.length <= 256 || rows.length > 32 * kPickEach || k == rows.length || key_bytes == 1) return 0;
  if (key_bytes == 2 && (rows.length <= 512 || rows.count() < 8 * multiprocessors)) return 0;
  if (selects_exactly(rows.length, k, key_bytes, sorted)) return key_bytes == 8 ? 0 : k;
  int64_t few = 64;
  while (few < 512 && 9 * k > 8 * few) few *= 2;
  const bool many = key_bytes < 8 && rows.count() >= (key_bytes == 4 ? 8 : 32) * multiprocessors;
  const int64_t most = rows.length <= 512 ? (key_bytes == 8 ? 128 : 256) : many ? 512 : 256;
  return 9 * k <= 8 * few && few <= most ? few : 0;
}

// The most elements of a row that are selected, to be sorted in its place; 0: rows are sorted whole. They are sorted by
// the team, or by as many warps of a block as they need.
inline int64_t sort_selection(const SortShape& shape, int64_t length, int64_t k, int key_bytes, bool sorted) {
  if (shape.picked) return shape.picked;
  if (selects_exactly(length, k, key_bytes, sorted)) return shape.each == 16 && length > 128 && k < length ? k : 0;
  int64_t few = kSortFew * std::min(shape.team, 32);
  while (few < kSortFew * shape.team && 5 * k > 4 * few) few *= 2;
  return shape.each == 16 && 5 * k <= 4 * few && length > 128 && length >= 2 * few ? few : 0;
}

inline SortShape sort_shape(Rows rows, int64_t k, int key_bytes, bool sorted, int64_t multiprocessors,
                            int64_t shared_limit) {
  SortShape shape;
  const auto team = [&](int64_t each) {
    int64_t threads = 1;
    while (threads * each < rows.length) threads *= 2;
    return threads;
  };
  const bool is_short = rows.length <= 1024;
  // If there would be too few threads, each has fewer elements. Not of columns, of which a block may have several, nor
  // where elements may be selected, which takes less than to sort all of them: on an H200, the best 66 of each of 14
  // rows of 1024 float32 with ties, by index, took 10 us so, and 16 with 4 elements each.
  const bool whole = rows.inner == 1 && k == rows.length, short_rows = rows.length <= 256;
  if (rows.length <= 8 || (short_rows && rows.elements() <= (whole ? 2048 : 1024) * multiprocessors)) shape.each = 8;
  const int64_t team_of_few = std::max<int64_t>(32, team(4));
  if (whole && rows.length > 32 && is_short && rows.count() * team_of_few <= (short_rows ? 256 : 512) * multiprocessors)
    shape.each = 4;
  // So has a block of a column, if columns are few. It reads parts of sectors, but its loads do not wait for each
  // other.
  const bool column = rows.inner > 1 && k == rows.length && rows.length > 16 && is_short;
  const int64_t most_threads = key_bytes <= 2 && rows.length <= 128 ? 1024 : rows.length > 256 ? 256 : 128;
  if (column && rows.count() * team_of_few <= most_threads * multiprocessors) shape.each = 4;
  shape.picked = pick_room(rows, k, key_bytes, sorted, multiprocessors);
  if (shape.picked) shape.each = kPickEach;
  shape.team = static_cast<int>(shape.each == 4 ? team_of_few : shape.picked ? 32 : team(shape.each));
  // If there are few rows, blocks have few threads, so that all multiprocessors have work.
  shape.threads = std::max(shape.team, kSortBlock);
  if (sorts_by_block(shape.each, shape.team)) shape.threads = shape.team;
  while (shape.threads > std::max(shape.team, 32) && rows.count() * shape.team < 2 * multiprocessors * shape.threads)
    shape.threads /= 2;
  const int64_t selected = sort_selection(shape, rows.length, k, key_bytes, sorted);
  shape.order = (sort_place(selected ? selected : rows.length) + 1) / 2 * 2;
  if (shape.order % 4 == 0) shape.order += 2;
  // Rows that are side by side in memory are loaded together, in whole sectors, if enough blocks are left.
  const int64_t teams = shape.threads / shape.team;
  int64_t wanted = rows.inner == 1 || shape.each == 4 ? teams : std::max<int64_t>(teams, 32 / key_bytes);
  while (wanted > teams && rows.count() < multiprocessors * wanted) wanted /= 2;
  const int64_t most = std::min(kSortTile * std::min(shape.threads, kSortBlock) / kSortBlock, shared_limit);
  for (;; wanted /= 2) {
    shape.width = ceil_div(rows.inner, ceil_div(rows.inner, wanted));  // tiles have about equally many columns
    shape.outers = std::min(rows.outer, wanted / shape.width);
    shape.pitch = shape.width > 1 && shape.team > 1 ? shape.width | 1 : shape.width;
    const int64_t tile = sort_tile_bytes(shape.outers * rows.length * shape.pitch, key_bytes, rows.inner);
    const int64_t order = (shape.outers * shape.width * shape.order * 2 + 15) / 16 * 16;
    const int64_t exchange =
        sorts_by_block(shape.each, shape.team) ? int64_t{4} * (selected ? kSortFew : shape.each) * shape.threads : 0;
    shape.shared_bytes = static_cast<size_t>(tile + order + exchange);
    if (wanted == 1 || static_cast<int64_t>(shape.shared_bytes) <= most) break;
  }
  shape.blocks = shape.width < rows.inner ? rows.outer * ((rows.inner + shape.width - 1) / shape.width)
                                          : (rows.outer + shape.outers - 1) / shape.outers;
  return shape;
}

}  // namespace jaxgpuops::topk
