// Shared memory that a block may have, in bytes, on devices of a compute capability. For plans.
#pragma once

#include <cstdint>

namespace jaxgpuops {

constexpr int64_t shared_bytes(int compute_capability) {
  switch (compute_capability) {
    case 75: return 64 << 10;
    case 80:
    case 87: return 163 << 10;
    case 90:
    case 100:
    case 103:
    case 110: return 227 << 10;
    default: return 99 << 10;  // 8.6, 8.9, 12.x
  }
}

}  // namespace jaxgpuops
