// The geometry of the sort kernel that the plan and the launch must agree on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxSortLength = 8192;
constexpr int kSortBlock = 256;          // the most threads of a block, where a row has at most a warp
constexpr int64_t kSortTile = 80 << 10;  // the most bytes of the rows of such a block, if it has several rows

struct SortShape {
  int each = 16;       // elements of a thread
  int team = 1;        // threads that share a row, a power of two
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

inline SortShape sort_shape(Rows rows, int key_bytes, int64_t multiprocessors, int64_t shared_limit) {
  SortShape shape;
  // If there would be too few threads, each has fewer elements.
  if (rows.length <= 8 || (rows.length <= 256 && rows.elements() <= 1024 * multiprocessors)) shape.each = 8;
  while (shape.team * shape.each < rows.length) shape.team *= 2;
  // If there are few rows, blocks have few threads, so that all multiprocessors have work.
  shape.threads = std::max(shape.team, kSortBlock);
  if (shape.team > 32) shape.threads = shape.team;
  while (shape.threads > std::max(shape.team, 32) && rows.count() * shape.team < 2 * multiprocessors * shape.threads)
    shape.threads /= 2;
  shape.order = (sort_place(rows.length) + 1) / 2 * 2;
  if (shape.order % 4 == 0) shape.order += 2;
  // Rows that are side by side in memory are loaded together, in whole sectors, if enough blocks are left.
  const int64_t teams = shape.threads / shape.team;
  int64_t wanted = rows.inner == 1 ? teams : std::max<int64_t>(teams, 32 / key_bytes);
  while (wanted > teams && rows.count() < multiprocessors * wanted) wanted /= 2;
  const int64_t most = std::min(kSortTile * std::min(shape.threads, kSortBlock) / kSortBlock, shared_limit);
  for (;; wanted /= 2) {
    shape.width = std::min(rows.inner, wanted);
    shape.outers = std::min(rows.outer, wanted / shape.width);
    shape.pitch = shape.width > 1 && shape.team > 1 ? shape.width | 1 : shape.width;
    const int64_t tile = (shape.outers * rows.length * shape.pitch * key_bytes + 15) / 16 * 16;
    const int64_t order = (shape.outers * shape.width * shape.order * 2 + 15) / 16 * 16;
    const int64_t exchange = shape.team > 32 ? int64_t{4} * shape.each * shape.threads : 0;
    shape.shared_bytes = static_cast<size_t>(tile + order + exchange);
    if (wanted == 1 || static_cast<int64_t>(shape.shared_bytes) <= most) break;
  }
  shape.blocks = shape.width < rows.inner ? rows.outer * ((rows.inner + shape.width - 1) / shape.width)
                                          : (rows.outer + shape.outers - 1) / shape.outers;
  return shape;
}

}  // namespace jaxgpuops::topk
