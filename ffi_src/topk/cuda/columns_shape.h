// The geometry of the columns kernel that the plan and the launch must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgpuops::topk {

constexpr int64_t kMaxColumnsK = 64;
constexpr int64_t kMaxColumnBytes = 16 * 1024;
constexpr int kParts = 4;  // parts of a lane's elements; each part has a delegate
constexpr int kColumnWarps = 8;
constexpr int kStreamedThreads = 128;  // threads of a block that streams columns

// How many lanes share a column: few, so that a shuffle serves several columns at once; but so many that there are two
// delegates for each of k, that a lane has at most 32 elements, and that lanes fill the GPU.
constexpr int column_lanes(int64_t columns, int64_t length, int64_t k) {
  int lanes = 4;
  while (lanes < 32 &&
         (lanes * kParts < 2 * k || length > 32 * lanes || (columns * lanes < 2048 * 32 && length > 8 * lanes)))
    lanes *= 2;
  return lanes;
}

// How many candidates a column has room for; four are padding. If k of G delegates reach the threshold, about G ln(G /
// (G - k)) elements do, which is at most 1.4 k.
constexpr int columns_capacity(int64_t k) { return static_cast<int>((2 * k + 24 + 3) / 4 * 4); }

struct ColumnsShape {
  int columns = 1;        // columns of a warp
  size_t pitch = 0;       // distance between columns in shared memory, in elements
  size_t tile_bytes = 0;  // shared memory of a block's columns
  size_t bytes = 0;       // shared memory of one warp: its candidates, counters, digit histogram
};

constexpr ColumnsShape columns_shape(int64_t length, int64_t k, int key_bytes, bool sorted, int lanes) {
  ColumnsShape shape;
  shape.columns = 32 / lanes;
  // The pitch is a multiple of 128 bytes and 16 more: so neighbouring columns written together, and the vectors of a
  // column read together, fall on different banks.
  shape.pitch = ((length * key_bytes + 127) / 128 * 128 + 16) / key_bytes;
  shape.tile_bytes = kColumnWarps * shape.columns * shape.pitch * key_bytes;
  shape.bytes = shape.columns * (columns_capacity(k) + (sorted ? 0 : k)) * 8 + shape.columns * 4 + 256 * 4;
  shape.bytes = (shape.bytes + 15) / 16 * 16;
  return shape;
}

}  // namespace jaxgpuops::topk
