// The geometry of the streaming kernels that the plan, the launch and the kernels must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/ordered_key.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxStreamK = 2048;

// Elements of a tile: 16 a thread, or 8 of 64 bits.
JAXGPUOPS_HD constexpr int tile_elements(int key_bytes, int threads) { return threads * (key_bytes == 8 ? 8 : 16); }

// Histogram, warp results and counters: what stands before the candidate buffer. candidates.cuh checks it.
JAXGPUOPS_HD constexpr size_t stream_control_bytes(size_t composite, int threads) {
  return threads * 32 + threads / 32 * (2 * composite + 4) + 32;
}

constexpr uint32_t kMaxGatherK = 128;  // up to here the blocks of a cluster hand over candidates, not sorted lists

// Rows that one block holds whole, twice over and with a tile in flight.
inline uint32_t whole_row_elements(int key_bytes, size_t shared_limit) {
  if (shared_limit >= 200 * 1024) return key_bytes == 8 ? 4096 : 8192;
  return key_bytes == 8 ? 1024 : 2048;
}

struct StreamShape {
  uint32_t keep = 0, room = 0, stages = 0;
  size_t shared_bytes = 0;
};

// Shared memory that the kernels take beside what is requested, and that the driver keeps for itself.
constexpr size_t kReservedShared = 1024;

// `shared_limit` is what one block may have on the device: one of 512 threads takes it all, one of 256 half.
//
// keep + tile never overflows: a tile is appended only when at most `keep` candidates wait. After the last tile the
// same room holds `keep` candidates and as much again to sort them, or to merge lists. A row that fits in the room
// whole needs no threshold, and may have any k.
inline StreamShape stream_shape(int key_bytes, int threads, uint32_t length, uint32_t k, int slices,
                                size_t shared_limit) {
  const size_t composite = key_bytes == 8 ? 16 : 8;
  const size_t control = stream_control_bytes(composite, threads);
  const uint32_t tile = static_cast<uint32_t>(tile_elements(key_bytes, threads));
  const size_t tile_bytes = static_cast<size_t>(tile) * key_bytes;
  StreamShape shape;
  const bool whole = slices == 1 && length <= whole_row_elements(key_bytes, shared_limit);
  const uint32_t slack = shared_limit < 96 * 1024 ? 256 : 1024;
  shape.keep = whole ? length : (k <= 256 ? slack : 2 * k) + threads;
  const uint32_t streaming = whole ? length : shape.keep + tile;
  shape.room = 2 * shape.keep > streaming ? 2 * shape.keep : streaming;
  const size_t budget = threads == 512 ? shared_limit - kReservedShared : shared_limit / 2 - 3 * kReservedShared / 2;
  const size_t tiles = (length / slices + tile - 1) / tile + 1;
  const size_t used = control + shape.room * composite;
  shape.stages = used + 2 * tile_bytes > budget ? 1 : static_cast<uint32_t>((budget - used) / tile_bytes);
  if (shape.stages > tiles) shape.stages = static_cast<uint32_t>(tiles);
  if (shape.stages > 6) shape.stages = 6;
  shape.shared_bytes = used + shape.stages * tile_bytes;
  return shape;
}

// Slices start at vector boundaries relative to the row.
JAXGPUOPS_HD uint32_t slice_elements(uint32_t length, uint32_t slices, int key_bytes) {
  const uint32_t vector = 16 / key_bytes;
  return ((length + slices - 1) / slices + vector - 1) / vector * vector;
}

// A step coprime to the number of tiles, near its golden section: consecutive steps land far apart.
JAXGPUOPS_HD uint32_t scattered_stride(uint32_t tiles) {
  uint32_t stride = static_cast<uint32_t>(tiles * 0.618f);
  if (stride < 1) return tiles > 1 ? 1 : 0;
  while (true) {
    uint32_t a = tiles, b = stride;
    while (b) {
      const uint32_t r = a % b;
      a = b;
      b = r;
    }
    if (a == 1) return stride;
    --stride;
  }
}

}  // namespace jaxgpuops::topk
