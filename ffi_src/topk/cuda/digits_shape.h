// The geometry of the digits kernel that the plan, the launch and the kernel must agree on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/rounding.h"
#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxDigitsK = 32768, kMaxDigitsLength = 1 << 22;
constexpr int kMaxDigitsBlocks = 16;      // the most blocks of a cluster
constexpr int64_t kMostWideClusters = 7;  // of that many blocks, which run at the same time
constexpr int kDigitsBins = 8;            // bins for each thread of a block
constexpr size_t kDigitsControl = 2048;   // bytes of counters
constexpr int digits_bin_bits(int threads, int key_bits) {
  const int bits = threads == 512 ? 12 : 11;
  return bits < key_bits ? bits : key_bits;
}
constexpr int kDigitsItems = 4;    // selected elements that a thread sorts
constexpr int kDigitsSamples = 4;  // samples of a thread

struct DigitsShape {
  int threads = 0;
  int items = 0;      // selected elements that a thread sorts; 0: results are in the order of indices
  int blocks = 0;     // blocks of a cluster, which share a row; 0: the kernel does not take the rows
  int64_t part = 0;   // elements of a row that a block holds
  int64_t reach = 0;  // the number of samples that shall reach the first guess of the k-th key; 0: no guess
  size_t shared_bytes = 0;
};

// Divides rows among the blocks of a cluster. A block holds its part, which may begin anywhere in a vector, a bit for
// each element, and its share of the list of selected elements.
inline void divide_digits(DigitsShape& shape, int64_t length, int key_bytes, int blocks) {
  const int64_t vector = 16 / key_bytes;
  shape.blocks = blocks;
  shape.part = ceil_div(length, blocks * vector) * vector;
  shape.shared_bytes =
      static_cast<size_t>(shape.threads * (kDigitsBins * 4 + shape.items * 8) + shape.part * key_bytes + 16 +
                          round_up((shape.part + vector + 31) / 32 * 4, 16)) +
      kDigitsControl;
}

inline DigitsShape digits_shape(int64_t rows, int64_t length, int64_t k, int key_bytes, bool sorted, int64_t shared,
                                int64_t multiprocessors) {
  DigitsShape shape;
  shape.items = sorted ? kDigitsItems : 0;
  const int64_t bytes = length * key_bytes;
  shape.threads = bytes <= 16 << 10 && k <= 256 * kDigitsItems ? 256 : 512;
  // Blocks share a row while two of each multiprocessor have at least 16 KiB to read.
  int blocks = 1;
  while (blocks < 8 && blocks * rows <= multiprocessors && bytes / blocks >= 32 << 10) blocks *= 2;
  if (blocks == 8 && rows <= kMostWideClusters && bytes / blocks >= 48 << 10) blocks = kMaxDigitsBlocks;
  for (; blocks <= kMaxDigitsBlocks; blocks *= 2) {
    divide_digits(shape, length, key_bytes, blocks);
    if ((!sorted || k <= blocks * shape.threads * shape.items) &&
        static_cast<int64_t>(shape.shared_bytes + kReservedShared) <= shared)
      break;
  }
  if (blocks > kMaxDigitsBlocks) return {};
  const double samples = shape.threads * kDigitsSamples;
  const double best = samples * static_cast<double>(k) / static_cast<double>(length);
  const double reach = best + 5 * std::sqrt(best) + 4;
  if (reach < samples / 2) shape.reach = static_cast<int64_t>(reach);
  return shape;
}

}  // namespace jaxgpuops::topk
