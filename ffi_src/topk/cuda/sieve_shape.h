// The geometry of the sieve kernel that the plan, the launch and the kernel must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "topk/cuda/stream_shape.h"

namespace jaxgpuops::topk {

// For smaller k, the plan takes the kernel only where rows are not shared.
constexpr int64_t kMinSieveK = 257, kMaxSieveK = 4096;
constexpr int kSieveThreads = 512;      // threads of a block
constexpr int kSieveLoads = 4;          // vectors of 16 bytes that a thread reads in a step
constexpr int kSieveStages = 3;         // steps in flight
constexpr int kSieveScattered = 8;      // elements of a thread's second sample
constexpr uint32_t kSieveRoom = 12288;  // the most survivors that a block holds
// A block that has too many survivors keeps this many. Up to this many are sorted without bins.
constexpr uint32_t kSieveKeep = 4608;
constexpr uint32_t kSieveMany = 2048;   // survivors of a block that may be too many to share bins with those of others
constexpr uint32_t kSieveBins = 4096;   // bins among which the survivors of a row are divided
constexpr uint32_t kSieveSample = 256;  // elements of a sample of the survivors, which divides their range
constexpr uint32_t kSieveCrowd = 256;   // survivors in one bin that make another way the better choice
constexpr int64_t kSieveStep = int64_t{16} * kSieveLoads * kSieveThreads;  // bytes that a block loads at once
constexpr int64_t kSieveLeast = 4 * kSieveStep;  // bytes of a row that make one more block worth while

// Bytes of the data that the blocks of a row publish for each other: counters, four composites of each block, bins and
// a list. A multiple of 16 bytes, since the exchange of the next row follows.
constexpr int64_t sieve_exchange_bytes(int64_t slices) { return 128 + slices * 32 + kSieveBins * 4 + kSieveKeep * 8; }
static_assert(sieve_exchange_bytes(33) % 16 == 0);
static_assert(kMaxSieveK + kSieveCrowd <= kSieveKeep);

// Bytes of shared memory: bins and counters, the ring, and the survivors. When the row has been read, the ring holds
// the survivors' places within their bins, a sorted sample of them, and the part of the list that a block ranks.
constexpr size_t kSieveControl = stream_control_bytes(8, kSieveThreads) + 256;
constexpr size_t kSieveRing = kSieveStages * kSieveStep;
constexpr size_t kSieveShared = kSieveControl + kSieveRing + kSieveRoom * 8;
static_assert(kSieveRoom * 4 + (kMaxSieveK + 2 * kSieveCrowd + 2 * kSieveSample) * 8 <= kSieveRing);

// Rows of 16-bit keys that one block holds whole: a key and an index are one word. Shared memory has bins and counters,
// the row (in whole vectors of 16 bytes), the numbers of survivors, and two lists.
constexpr int64_t kMinWholeLength = 1 << 14, kMaxWholeLength = 1 << 16;
constexpr uint32_t kWholeRoom = 16384;  // the most survivors of a row
constexpr uint32_t kWholeCrowd = 64;    // survivors in one bin that make another way the better choice
constexpr uint32_t kWholeSort = 4608;   // the most elements that the exact selection sorts
constexpr size_t kWholeControl = kSieveBins * 4 + 512;
constexpr size_t kWholeRow = kMaxWholeLength * 2 + 512;
constexpr size_t kWholeShared = kWholeControl + kWholeRow + kWholeRoom * 2 + 2 * kWholeSort * 4;
static_assert(kMaxSieveK + kWholeCrowd <= kWholeSort);

constexpr bool sieve_holds_whole(int64_t length, int key_bytes) {
  return key_bytes == 2 && length >= kMinWholeLength && length <= kMaxWholeLength;
}

}  // namespace jaxgpuops::topk
