// The geometry of tiles that their plan and their kernels share.
#pragma once

#include <cstdint>

namespace jaxgpuops::segments {

// The most threads of a block of segment_tiles_kernel, the most rows of its tile if rows have few vectors, and the step
// of the rows of a share: threads load so many at a time, or a divisor of it.
constexpr int64_t kTileThreads = 256, kMostTileRows = 2048, kTileStep = 8;

}  // namespace jaxgpuops::segments
