// The geometry of the few kernel that the plan, the launch and the kernel must agree on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxFewK = 8, kMaxFewLength = 1 << 20;
constexpr int kFewThreads = 256;
constexpr int kFewLoads = 8;         // elements that a lane loads at once
constexpr int kFewColumns = 8;       // columns of a block whose warps share them
constexpr int64_t kFewAlone = 1024;  // the longest columns that one warp reads

struct FewShape {
  int lanes = 1;              // that share a row or column: a power of two
  int threads = kFewThreads;  // of a block; if more, they share its columns
  int64_t blocks = 0;
  int64_t shared_bytes = 0;  // of a tile of neighbouring rows and of its results; 0: lanes read from memory
};

constexpr int64_t kMaxFewTile = 256;    // the longest rows that tiles have, in bytes
constexpr int64_t kFewTiled = 1 << 15;  // so many rows are enough for tiles

// The rows of a tile. A lane has several of two elements, so that enough bytes are on their way; then the block
// collects their results.
constexpr int64_t few_tile(int64_t rows, int64_t length, int key_bytes) {
  int64_t tile = kFewThreads;
  while (length == 2 && tile < 4 * kFewThreads && 2 * tile * length * key_bytes <= 16 << 10 && rows >= tile << 11)
    tile *= 2;
  return tile;
}
// The bytes of a tile in shared memory. Each row has room for padding, so that lanes of neighbouring rows read
// different banks.
constexpr int64_t few_tile_bytes(int64_t tile, int64_t length, int key_bytes) {
  return round_up(tile * (length * key_bytes + std::max(4, key_bytes)), 16);
}

// The lanes that share a row read neighbouring elements together, so long rows have several. Rows and columns that
// would leave the device idle have more, as long as each lane has a load of its own; fewer for a larger k, since
// merging what lanes have takes longer then. All lanes of a block share eight long columns (of 32 bits, a
// sector).
inline FewShape few_shape(Rows rows, int64_t k, int key_bytes, int64_t multiprocessors) {
  FewShape shape;
  if (rows.inner > 1 && rows.length > kFewAlone) {
    shape.blocks = ceil_div(rows.count(), kFewColumns);
    shape.threads = shape.blocks <= 2 * multiprocessors ? 1024 : 512;
    shape.lanes = shape.threads / kFewColumns;
    return shape;
  }
  const int64_t length = rows.length;
  if (rows.inner == 1 && k <= 4 && length * key_bytes <= (key_bytes == 8 ? 64 : kMaxFewTile) &&
      rows.count() >= kFewTiled) {
    const int64_t tile = few_tile(rows.count(), length, key_bytes);
    shape.blocks = ceil_div(rows.count(), tile);
    shape.shared_bytes =
        few_tile_bytes(tile, length, key_bytes) + (tile > kFewThreads ? tile * k * (4 + key_bytes) : 0);
    return shape;
  }
  const int64_t wanted = (k <= 2 ? 1024 : k <= 4 ? 512 : 128) * multiprocessors;
  if (rows.inner == 1) shape.lanes = length * key_bytes <= 32 ? 1 : length <= 64 ? 2 : length <= 160 ? 4 : 8;
  while (shape.lanes < 32 && shape.lanes * kFewLoads < length && rows.count() * shape.lanes < wanted) shape.lanes *= 2;
  shape.blocks = ceil_div(rows.count(), kFewThreads / shape.lanes);
  return shape;
}

}  // namespace jaxgpuops::topk
