// The geometry of the warp kernel that the plan and the launch must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgpuops::topk {

constexpr int64_t kMaxWarpK = 64;
constexpr int64_t kMaxWarpRowBytes = 16 * 1024;
constexpr int kParts = 4;  // of a lane's elements; each has a delegate
constexpr int warps_per_block(bool columns) { return columns ? 8 : 4; }

// Lanes that share a row: few, so that the shuffles of the selection serve several rows at once, but with twice as
// many delegates as candidates are wanted, no more than 32 elements each, and enough of them to fill the device.
constexpr int warp_lanes(int64_t rows, int64_t length, int64_t k) {
  int lanes = 4;
  while (lanes < 32 &&
         (lanes * kParts < 2 * k || length > 32 * lanes || (rows * lanes < 2048 * 32 && length > 8 * lanes)))
    lanes *= 2;
  return lanes;
}

// Candidates a row has room for, four of them padding. k of G delegates leave about G ln(G / (G - k)) elements above
// the threshold, 1.4 k at worst.
constexpr int warp_capacity(int64_t k) { return static_cast<int>((2 * k + 24 + 3) / 4 * 4); }

struct WarpShape {
  int rows = 1;           // rows of one warp
  size_t pitch = 0;       // elements from row to row in shared memory
  size_t tile_bytes = 0;  // shared memory of a block's columns
  size_t row_bytes = 0;   // shared memory of one warp's rows, with room to keep the source's alignment
  size_t bytes = 0;       // shared memory of one warp: its rows, candidates, counters, digit histogram
};

constexpr WarpShape warp_shape(int64_t length, int64_t k, int key_bytes, bool sorted, int lanes, bool columns) {
  WarpShape shape;
  shape.rows = 32 / lanes;
  if (columns) {
    // Rows of whole 16-byte vectors, one vector more than a multiple of 128 bytes: neighbouring columns written
    // together, and the vectors of a row read together, fall on different banks.
    shape.pitch = ((length * key_bytes + 127) / 128 * 128 + 16) / key_bytes;
    shape.tile_bytes = warps_per_block(true) * shape.rows * shape.pitch * key_bytes;
  } else {
    shape.pitch = length;
    shape.row_bytes = (shape.rows * length * key_bytes + 16 + 15) / 16 * 16;
  }
  shape.bytes = shape.row_bytes + shape.rows * (warp_capacity(k) + (sorted ? 0 : k)) * 8 + shape.rows * 4 + 256 * 4;
  shape.bytes = (shape.bytes + 15) / 16 * 16;
  return shape;
}

}  // namespace jaxgpuops::topk
