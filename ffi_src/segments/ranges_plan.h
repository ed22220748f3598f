// The geometry of kRanges that its plan and its kernel share.
#pragma once

#include <cstdint>

namespace jaxgpuops::segments {

// The most warps of a block, the most rows that a warp lists at a time, and the least rows of a piece.
constexpr int kMostRangeWarps = 32, kRangeList = 128, kLeastRangePiece = 8;
constexpr int64_t kMostRangeRows = 64 << 10;

// For kPicks: the segments of a range, the most warps of a block, and the shared memory of a warp: room for a list of
// rows, and later for its accumulators, which take as much with 32 columns of 8 bytes.
constexpr int kPickRange = 8, kMostPickWarps = 32, kPickBytes = 2048;

// Bytes of a block's results in shared memory.
constexpr int64_t range_result_bytes(int64_t range, int team_bits, int64_t cell_bytes) {
  return ((range << team_bits) * cell_bytes + 15) / 16 * 16;
}

}  // namespace jaxgpuops::segments
