// How a warp counts.
#pragma once

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops::count {

// Counts how often each target occurs: a target is a bin or a place in the result. The warp counts its hot target in a
// register, and the others in a table.
template <class Target>
struct Counter {
  // A target becomes hot if so many lanes have it; for fewer, atomics one by one are as fast.
  static constexpr int kMany = 8;
  static constexpr Target kNone = ~Target{0};

  uint32_t* table;
  Target size;  // targets below this are counted
  Target hot = kNone;
  uint32_t count = 0;

  __device__ void flush() {
    if ((threadIdx.x & 31) == 0 && hot < size && count) atomicAdd(table + hot, count);
    count = 0;
  }

  // Counts one target of each lane. All lanes of the warp must call it.
  __device__ void add(Target target, bool may_change) {
    unsigned mask = __ballot_sync(kEveryLane, target == hot);
    // Of nine lanes in ten with one target, the first lane may be the tenth.
#pragma unroll
    for (int lane = 0; lane < 32; lane += 11) {
      if (!may_change || __popc(mask) >= kMany) break;
      const Target candidate = shuffle_from(target, lane);
      const unsigned other = __ballot_sync(kEveryLane, target == candidate);
      if (__popc(other) >= kMany) {
        flush();
        hot = candidate;
        mask = other;
      }
    }
    count += __popc(mask);
    if (target != hot && target < size) atomicAdd(table + target, 1u);
  }
};

}  // namespace jaxgpuops::count
