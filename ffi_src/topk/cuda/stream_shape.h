// The geometry of the streaming kernels that the plan, the launch and the kernels must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/ordered_key.h"
#include "topk/topk.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxStreamK = 2048;
constexpr int64_t kStreamBlocks = 8;  // the most blocks of a cluster that share a row

// How many elements a tile has: 64 bytes for each thread, or 32 bytes of 8-bit elements.
JAXGPUOPS_HD constexpr int tile_elements(int key_bytes, int threads) {
  return threads * (key_bytes == 1 ? 32 : 64 / key_bytes);
}

// Bytes before the tiles: histogram, warp results and counters. They are a multiple of a cache line, since asynchronous
// copies to other addresses are slow. candidates.cuh checks the number.
JAXGPUOPS_HD constexpr size_t stream_control_bytes(size_t composite, int threads) {
  return (threads * 32 + threads / 32 * (2 * composite + 4) + 32 + 127) / 128 * 128;
}

// The most elements of a row that one block holds whole. Shared memory has room for them twice, and for a tile in
// flight.
inline uint32_t whole_row_elements(int key_bytes, size_t shared_limit) {
  if (shared_limit >= 200 * 1024) return key_bytes == 8 ? 4096 : 8192;
  return key_bytes == 8 ? 1024 : 2048;
}

constexpr uint32_t kMaxStages = 5;

struct StreamShape {
  uint32_t keep = 0, room = 0, stages = 0;
  size_t shared_bytes = 0;
};

// Shared memory that is kept free for the kernels' own variables; no kernel has more of them.
constexpr size_t kReservedShared = 1024;

// `shared_limit` is the shared memory that the device allows a block. A block of 512 threads takes all of it, a block
// of 256 threads half.
//
// When the buffer of candidates is full, it is cut to `keep` of them. After the last tile it holds these, and room for
// as many again to sort them. A row that fits whole needs no threshold, and may have any k.
inline StreamShape stream_shape(int key_bytes, int threads, uint32_t length, uint32_t k, int slices,
                                size_t shared_limit) {
  const size_t composite = composite_bytes(key_bytes);
  const size_t control = stream_control_bytes(composite, threads);
  const uint32_t tile = static_cast<uint32_t>(tile_elements(key_bytes, threads));
  const size_t tile_bytes = static_cast<size_t>(tile) * key_bytes;
  StreamShape shape;
  const bool whole = slices == 1 && length <= whole_row_elements(key_bytes, shared_limit);
  const uint32_t slack = shared_limit < 96 * 1024 ? 256 : 1024;
  shape.keep = whole ? length : (k <= 256 ? slack : 2 * k) + threads;
  shape.room = 2 * shape.keep;
  const size_t budget = threads == 512 ? shared_limit - kReservedShared : shared_limit / 2 - 3 * kReservedShared / 2;
  const size_t tiles = (length / slices + tile - 1) / tile + 1;
  const size_t used = control + shape.room * composite;
  shape.stages = used + 2 * tile_bytes > budget ? 1 : static_cast<uint32_t>((budget - used) / tile_bytes);
  if (shape.stages > tiles) shape.stages = static_cast<uint32_t>(tiles);
  if (shape.stages > kMaxStages) shape.stages = kMaxStages;
  shape.shared_bytes = used + shape.stages * tile_bytes;
  return shape;
}

// A stride that has no common divisor with the number of tiles and is near their golden section, so that consecutive
// steps land far apart.
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
    ++stride;
  }
}

}  // namespace jaxgpuops::topk
