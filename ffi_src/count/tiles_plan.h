// The geometry of tiles that their plan and their kernels share.
#pragma once

namespace jaxgpuops::count {

// The most threads of a block of segment_tiles_kernel, and the most rows of its tile if a row has few vectors.
constexpr int kTileThreads = 256, kMostTileRows = 2048;

}  // namespace jaxgpuops::count
