// The geometry of the held kernel that the plan and the launch must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgpuops::topk {

constexpr int64_t kMaxHeldK = 64, kMaxHeldLength = 1 << 17;
constexpr int kHeldLoads = 8;       // vectors of 16 bytes that a thread has in registers, and in shared memory
constexpr int kHeldThreads = 1024;  // threads of all blocks of a multiprocessor
constexpr int kMaxHeldBlocks = 8;   // the most blocks of a cluster
constexpr uint32_t kHeldDelegates = 128;
constexpr uint32_t kHeldKeep = 224;  // the most candidates that a block gives to the cluster

// The number of candidates for which a block has room; the bytes of shared memory that it needs besides the row.
constexpr uint32_t held_room(int threads) { return 4 * threads; }
constexpr size_t held_board_bytes(int threads) { return 8 * held_room(threads) + 1200; }

struct HeldShape {
  int threads = 256;  // threads of a block; 0: rows are too long for this kernel
  int blocks = 1;     // blocks of a cluster, which share a row
};

// Bytes of a row that a block holds.
constexpr int64_t held_bytes(int threads) { return int64_t{2 * 16 * kHeldLoads} * threads; }

// Chooses as many blocks for a row as there are multiprocessors for it, if each block has enough to read.
constexpr HeldShape held_shape(int64_t rows, int64_t row_bytes, int64_t multiprocessors) {
  HeldShape shape;
  while (shape.blocks < kMaxHeldBlocks &&
         (row_bytes > shape.blocks * held_bytes(kHeldThreads) ||
          (2 * shape.blocks * rows <= multiprocessors && row_bytes > shape.blocks * held_bytes(256))))
    shape.blocks *= 2;
  while (shape.threads < kHeldThreads && row_bytes > shape.blocks * held_bytes(shape.threads)) shape.threads *= 2;
  if (row_bytes > shape.blocks * held_bytes(shape.threads)) shape.threads = 0;
  // If a row has few blocks, each gets more threads, provided that each thread has enough to read. Clusters of more
  // than two blocks fit only if two of their blocks share a multiprocessor.
  const int64_t together = shape.blocks > 2 ? 2 : 1;
  while (shape.threads && shape.threads < kHeldThreads / together &&
         2 * rows * shape.blocks * shape.threads <= multiprocessors * kHeldThreads / together &&
         64 * shape.blocks * shape.threads <= row_bytes)
    shape.threads *= 2;
  return shape;
}

// Whether all rows are held at once, or the next ones wait no longer than it pays off. Clusters load a whole row at
// once, select, and then load the next; if rows come in many waves, it is better that a block loads while another one
// selects.
constexpr bool held_fits(HeldShape shape, int64_t rows, int64_t length, int64_t multiprocessors) {
  const int64_t waves = length <= kMaxHeldLength ? 4 : 1;
  return shape.threads != 0 && rows * shape.blocks * shape.threads <= waves * multiprocessors * kHeldThreads;
}

// Bytes of shared memory: half of the block's part of the row, and the board.
constexpr size_t held_shared_bytes(int threads, int blocks) {
  return held_bytes(threads) / 2 + held_board_bytes(threads) + (blocks > 1 ? 8 * kHeldKeep * blocks : 0);
}

}  // namespace jaxgpuops::topk
