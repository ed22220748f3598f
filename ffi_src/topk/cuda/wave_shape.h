// The geometry of the wave kernels that the plan, the launch and the kernels must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxWaveK = 256, kMaxWaveRows = 16, kMinWaveBytes = 1 << 17;
constexpr int kWaveThreads = 512;    // threads of a block
constexpr int kWaveLoads = 4;        // vectors of 16 bytes that a thread loads together; two such groups are in flight
constexpr uint32_t kWaveBounds = 3;  // bounds that a block publishes besides its elements
constexpr uint32_t kMaxWaveEntries = 3072;  // elements that all blocks of a row publish
constexpr uint32_t kMaxWaveSlices = kMaxWaveEntries / (8 + kWaveBounds);
constexpr uint32_t kWaveAgain = 128;                    // warps that are read again at a time
constexpr uint32_t kWaveKeep = 1024, kWaveRoom = 2048;  // candidates, as in stream_shape.h

// The number of elements that a block publishes: about four times its share of k, so that few blocks have more of the k
// best than they publish.
constexpr uint32_t wave_told(int64_t k, int64_t slices) {
  return k <= 2 * slices ? 8 : k <= 5 * slices ? 16 : k <= 10 * slices ? 32 : 48;
}
constexpr bool wave_tells_enough(int64_t k, int64_t slices) {
  return k <= 16 * slices && slices * (wave_told(k, slices) + kWaveBounds) <= kMaxWaveEntries;
}

// Bytes of the workspace of a row: what its blocks publish, and the best element of each warp.
constexpr int64_t wave_exchange_bytes(int64_t k, int64_t slices, int64_t composite) {
  return slices * (wave_told(k, slices) + kWaveBounds + kWaveThreads / 32) * composite;
}

// Shared memory of the second kernel: the candidates; the list of warps whose elements are read again; and, for each
// block of the first kernel, a place in a list of blocks and a flag.
constexpr size_t wave_shared_bytes(size_t composite) {
  return stream_control_bytes(composite, kWaveThreads) + kWaveRoom * composite + kWaveAgain * sizeof(uint32_t) +
         kMaxWaveSlices * (sizeof(uint32_t) + 1);
}

}  // namespace jaxgpuops::topk
