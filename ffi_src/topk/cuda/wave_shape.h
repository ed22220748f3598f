// The geometry of the wave kernels that the plan, the launch and the kernels must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxWaveK = 256, kMaxWaveRows = 64, kMinWaveBytes = 1 << 17;
constexpr int kWaveThreads = 512;    // threads of a block
constexpr int kWaveLoads = 4;        // vectors of 16 bytes that a thread loads together; two such groups are in flight
constexpr uint32_t kWaveBounds = 3;  // bounds that a block publishes besides its elements
constexpr uint32_t kMaxWaveSlices = 320;
constexpr uint32_t kWaveAgain = 128;  // warps that are read again at a time
constexpr uint32_t kWaveKeep = 1024;  // candidates, as in stream_shape.h

// Elements that all blocks of a row publish, and candidates for which there is room.
constexpr uint32_t max_wave_entries(int64_t composite) { return composite == 16 ? 3584 : 6144; }
constexpr uint32_t wave_room(int64_t composite) { return composite == 16 ? 2048 : 3584; }

// Whether threads read many vectors.
constexpr bool is_wave_deep(int64_t row_bytes, int64_t slices) {
  return row_bytes > int64_t{2 * kWaveLoads * 16} * kWaveThreads * slices;
}

// The elements that a thread keeps: the best at each place of its vectors if it reads few of them, else the best of
// all, since that takes less time to read. Up to this limit, the former took up to 12 % longer for random rows on an
// H200, and 36 to 43 % less for rows in order.
constexpr uint32_t wave_places(int key_bytes, int64_t row_bytes, int64_t slices) {
  constexpr int64_t kMost = 128;  // bytes of a thread
  if (key_bytes == 1 || row_bytes > kMost * kWaveThreads * slices) return 1;
  return key_bytes == 8 ? 2 : 4;
}

// The number of threads whose elements a block publishes: about four times its share of k, so that few blocks have more
// of the k best than they publish.
constexpr uint32_t wave_lanes(int64_t k, int64_t slices, uint32_t places) {
  if (places == 1) return k <= 2 * slices ? 8 : k <= 5 * slices ? 16 : k <= 10 * slices ? 32 : 48;
  if (2 * k <= slices || (k <= slices && slices > 175)) return 4;
  return k <= (slices > 91 ? 3 : 2) * slices ? 8 : k <= 6 * slices ? 16 : k <= 10 * slices ? 32 : 48;
}
constexpr uint32_t wave_entries(int64_t k, int64_t slices, uint32_t places) {
  return static_cast<uint32_t>(slices) * (wave_lanes(k, slices, places) * places + kWaveBounds);
}
constexpr bool wave_tells_enough(int64_t k, int64_t slices, uint32_t places, int64_t composite) {
  return k <= 16 * slices && slices <= kMaxWaveSlices && wave_entries(k, slices, places) <= max_wave_entries(composite);
}

// Bytes of the workspace of a row: what its blocks publish, and the best element of each warp.
constexpr int64_t wave_exchange_bytes(int64_t k, int64_t slices, uint32_t places, int64_t composite) {
  return (wave_entries(k, slices, places) + slices * (kWaveThreads / 32)) * composite;
}

// Shared memory of the second kernel: the candidates; the list of warps whose elements are read again; and, for each
// block of the first kernel, a place in a list of blocks and a flag.
constexpr size_t wave_shared_bytes(size_t composite) {
  return stream_control_bytes(composite, kWaveThreads) + wave_room(composite) * composite +
         kWaveAgain * sizeof(uint32_t) + kMaxWaveSlices * (sizeof(uint32_t) + 1);
}

}  // namespace jaxgpuops::topk
