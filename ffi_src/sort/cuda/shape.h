// The geometry of the radix sorts that the plan and the kernels must agree on.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::sort {

constexpr int64_t kAlign = 256;  // of the parts of a workspace
constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// ---- Rows that a block holds ----------------------------------------------------------------------------------------

constexpr int block_items(int key_bytes) { return key_bytes == 8 ? 8 : 16; }  // of a thread

// Counts of each warp; keys and 16-bit indices.
constexpr int64_t block_shared_bytes(int key_bytes, int threads) {
  return threads / 32 * 1024 + threads * block_items(key_bytes) * (key_bytes + 2) + 64;
}

// ---- Longer ones ----------------------------------------------------------------------------------------------------

constexpr int kSweepThreads = 384, kSweepBlocks = 2;  // of a block; blocks of a multiprocessor, at least
constexpr int sweep_items(int key_bytes) { return key_bytes == 8 ? 9 : 16; }
constexpr int64_t sweep_tile(int key_bytes) { return kSweepThreads * sweep_items(key_bytes); }
constexpr int64_t sweep_shared_bytes(int key_bytes, bool indices) {
  return kSweepThreads / 32 * 1024 + sweep_tile(key_bytes) * (key_bytes + (indices ? 4 : 0));
}
constexpr int64_t kCountElements = 1 << 15;  // that a block counts

// What a row has at the front of the workspace. It is set to zero before every sort.
struct RowHead {
  uint32_t tickets[8];  // of the first row: how many tiles of each pass are taken
  uint32_t counted;     // blocks of the row that are done with counting
  uint32_t active;      // a bit for each pass that has more than one digit
  uint32_t padding[6];
};

// Where the parts of a workspace begin, and how many bytes there are of it in all.
struct SweepShape {
  SweepShape(int64_t rows, int64_t length, int key_bytes, bool values, bool indices)
      : passes(key_bytes), tiles((length + sweep_tile(key_bytes) - 1) / sweep_tile(key_bytes)) {
    counts = aligned(rows * static_cast<int64_t>(sizeof(RowHead)));
    status = counts + rows * passes * 1024;
    keys = status + rows * tiles * passes * 1024;
    this->indices = keys + aligned(rows * length * key_bytes);
    more_keys = this->indices + (indices ? aligned(rows * length * 4) : 0);
    bytes = more_keys + (values ? 0 : aligned(rows * length * key_bytes));
  }

  int passes;
  int64_t tiles;                                     // of a row
  int64_t counts, status, keys, indices, more_keys;  // the row heads come first
  int64_t bytes;
};

// ---- Columns that become rows ---------------------------------------------------------------------------------------

// What stands before the sort's own workspace: the elements as rows, from the front on, and the results as rows.
struct TurnShape {
  TurnShape(Rows rows, int key_bytes, bool values, bool indices) {
    this->values = aligned(rows.elements() * key_bytes);
    this->indices = this->values + (values ? this->values : 0);
    bytes = this->indices + (indices ? aligned(rows.elements() * 4) : 0);
  }

  int64_t values, indices;
  int64_t bytes;
};

}  // namespace jaxgpuops::sort
