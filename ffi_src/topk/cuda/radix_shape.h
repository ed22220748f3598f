// The workspace of the large-k kernels: what the plan and the launch must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "topk/topk.h"

namespace jaxgpuops::topk {

// Elements of a tile, which a block selects from or sorts: 32 KB of composites.
constexpr int64_t radix_tile(int key_bytes) { return key_bytes == 8 ? 2048 : 4096; }

constexpr int64_t kMaxRadixRows = 65535;  // the most rows of a launch

struct RadixShape {
  int64_t sorted = 0;      // composites that are sorted: k, or none
  int64_t tiles = 0;       // tiles of a row
  int64_t histograms = 0;  // from here on: byte offsets within a row's workspace
  int64_t counts = 0;
  int64_t first = 0, second = 0;
  int64_t bytes = 0;
};

inline RadixShape radix_shape(int64_t length, int64_t k, int key_bytes, bool sorted) {
  const int64_t composite = composite_bytes(key_bytes);
  RadixShape shape;
  shape.tiles = (length + radix_tile(key_bytes) - 1) / radix_tile(key_bytes);
  shape.sorted = sorted ? k : 0;
  shape.counts = key_bytes * 256 * 4;
  shape.first = shape.counts + (shape.tiles * 8 + 15) / 16 * 16;
  shape.second = shape.first + shape.sorted * composite;
  shape.bytes = shape.second + shape.sorted * composite;
  return shape;
}

}  // namespace jaxgpuops::topk
