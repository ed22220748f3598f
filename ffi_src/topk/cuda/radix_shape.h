// The workspace of the large-k kernels: what the plan and the launch must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "topk/topk.h"

namespace jaxgpuops::topk {

// Elements of a block, in selection and in sorting: 32 KB of composites.
constexpr int64_t radix_tile(int key_bytes) { return key_bytes == 8 ? 2048 : 4096; }

constexpr int64_t kMaxRadixRows = 65535;  // of a launch

struct RadixShape {
  bool select = false;     // find the k-th key and gather; otherwise the whole row is sorted
  int64_t sorted = 0;      // composites that are sorted (a row's, when it is sorted whole, else k)
  int64_t tiles = 0;       // of the row
  int64_t histograms = 0;  // byte offsets within a row's workspace
  int64_t counts = 0;
  int64_t first = 0, second = 0;
  int64_t bytes = 0;
};

// Selecting reads the row once per key byte and twice more; past half the row, sorting it all is no dearer.
inline RadixShape radix_shape(int64_t length, int64_t k, int key_bytes, bool sorted) {
  const int64_t composite = composite_bytes(key_bytes);
  RadixShape shape;
  shape.tiles = (length + radix_tile(key_bytes) - 1) / radix_tile(key_bytes);
  shape.select = !sorted || 2 * k < length;
  shape.sorted = !sorted ? 0 : shape.select ? k : length;
  shape.histograms = 0;
  shape.counts = shape.select ? key_bytes * 256 * 4 : 0;
  shape.first = shape.counts + (shape.select ? (shape.tiles * 8 + 15) / 16 * 16 : 0);
  shape.second = shape.first + shape.sorted * composite;
  shape.bytes = shape.second + shape.sorted * composite;
  return shape;
}

}  // namespace jaxgpuops::topk
