// The geometry of the radix sorts, on which the plan and the kernels must agree.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::sort {

constexpr int64_t kAlign = 256;  // alignment of the parts of a workspace
constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// ---- Rows that a block holds ----------------------------------------------------------------------------------------

constexpr int block_items(int key_bytes) { return key_bytes == 8 ? 8 : 16; }  // elements of a thread

// Shared memory of block_kernel: the counts of each warp, the keys, and indices of 16 bits.
constexpr int64_t block_shared_bytes(int key_bytes, int threads) {
  return threads / 32 * 1024 + threads * block_items(key_bytes) * (key_bytes + 2) + 64;
}

// ---- Longer ones ----------------------------------------------------------------------------------------------------

constexpr int kSweepThreads = 384, kSweepBlocks = 2;  // threads of a block; blocks that a multiprocessor holds at least
constexpr int sweep_items(int key_bytes) { return key_bytes == 8 ? 9 : 16; }
constexpr int64_t sweep_tile(int key_bytes) { return kSweepThreads * sweep_items(key_bytes); }
constexpr int64_t sweep_shared_bytes(int key_bytes, bool indices) {
  return kSweepThreads / 32 * 1024 + sweep_tile(key_bytes) * (key_bytes + (indices ? 4 : 0));
}
constexpr int64_t kCountElements = 1 << 15;  // elements that a block of count_kernel counts

// The state of a row at the front of the workspace. It is set to zero before every sort.
struct RowHead {
  uint32_t tickets[8];  // used in the first row only: tiles of each pass that blocks have taken
  uint32_t counted;     // blocks of the row that have finished counting
  uint32_t active;      // bit p: the digits of pass p differ, so the pass has to run
  uint32_t padding[6];
};

// The offset of each part of a workspace, and its total size in bytes.
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
  int64_t tiles;                                     // tiles of a row
  int64_t counts, status, keys, indices, more_keys;  // offsets; the RowHeads are at offset 0
  int64_t bytes;
};

// ---- Columns that become rows ---------------------------------------------------------------------------------------

// Offsets in front of the sort's own workspace: the transposed elements are at 0, the transposed results follow.
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
