// The geometry of the digits kernel that the plan, the launch and the kernel must agree on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/rounding.h"
#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxDigitsK = 8192;
constexpr int kMaxDigitsBlocks = 16;     // the most blocks of a cluster
constexpr int kDigitsBins = 8;           // bins for each thread of a block
constexpr size_t kDigitsControl = 1024;  // bytes of counters
constexpr int kDigitsSamples = 4;        // samples of a thread

struct DigitsShape {
  int threads = 0;
  int items = 0;       // selected elements that a thread sorts; 0: results are in the order of indices
  int blocks = 0;      // blocks of a cluster, which share a row; 0: rows are too long
  int64_t first = 0;   // elements of a row that the first block holds, which also has the list of selected elements
  int64_t part = 0;    // elements of a row that each other block holds
  int64_t reach = 0;   // the number of samples that shall reach the first guess of the k-th key; 0: no guess
  size_t shared_bytes = 0;
};

// Bytes of so many elements, which may begin anywhere in a vector, and of a bit for each of them.
constexpr int64_t digits_row_bytes(int64_t elements, int key_bytes) {
  return (elements * key_bytes + 15) / 16 * 16 + 16 + (elements + 16 + 31) / 32 * 4;
}

// Divides rows among the blocks of a cluster, so that all need about as much shared memory.
inline void divide_digits(DigitsShape& shape, int64_t length, int key_bytes, int blocks) {
  const int64_t vector = 16 / key_bytes, list = int64_t{8} * shape.threads * shape.items;
  const int64_t as_elements = 8 * list / (8 * key_bytes + 1);
  shape.blocks = blocks;
  shape.part = ceil_div(length + as_elements, blocks * vector) * vector;
  if (blocks > 1 && shape.part < as_elements) shape.part = ceil_div(length, (blocks - 1) * vector) * vector;
  shape.first = blocks == 1 ? length : std::max<int64_t>(length - (blocks - 1) * shape.part, 0) ;
  shape.first = blocks == 1 ? length : ceil_div(shape.first, vector) * vector;
  const int64_t most = std::max(list + digits_row_bytes(shape.first, key_bytes),
                                blocks > 1 ? digits_row_bytes(shape.part, key_bytes) : 0);
  shape.shared_bytes = static_cast<size_t>(shape.threads * kDigitsBins * 4 + kDigitsControl + (most + 15) / 16 * 16);
}

inline DigitsShape digits_shape(int64_t rows, int64_t length, int64_t k, int key_bytes, bool sorted, int64_t shared,
                                int64_t multiprocessors) {
  DigitsShape shape;
  const int64_t bytes = length * key_bytes;
  shape.threads = bytes <= 16 << 10 && k <= 1024 ? 256 : 512;
  if (sorted) shape.items = 4;
  while (sorted && int64_t{shape.threads} * shape.items < k) shape.items *= 2;
  // Blocks share a row while two of each multiprocessor have at least 16 KiB to read.
  int blocks = 1;
  while (blocks < 8 && blocks * rows <= multiprocessors && bytes / blocks >= 32 << 10) blocks *= 2;
  for (; blocks <= kMaxDigitsBlocks; blocks *= 2) {
    divide_digits(shape, length, key_bytes, blocks);
    if (static_cast<int64_t>(shape.shared_bytes + kReservedShared) <= shared) break;
  }
  if (blocks > kMaxDigitsBlocks) return {};
  const double samples = shape.threads * kDigitsSamples;
  const double best = samples * static_cast<double>(k) / static_cast<double>(length);
  const double reach = best + 5 * std::sqrt(best) + 4;
  if (reach < samples / 2) shape.reach = static_cast<int64_t>(reach);
  return shape;
}

}  // namespace jaxgpuops::topk
