// Segments in the order of their ids, where a row is one element. Tiles, heads and tails are those of tiles.cuh, but a
// warp has a tile, and each of its lanes takes kRows neighbouring rows at a time. A lane alone folds segments that
// begin and end in its rows; a scan over the lanes folds the others.
//
// Passes: a kernel that fills all segments (tiles_gaps.cuh), this one, and the join if there are several tiles. Bytes
// moved: each row is read once, with 4 bytes of id, and 4 more of position where ids do not ascend; segments with rows
// are written twice.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "segments/cuda/tiles_args.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kRows = 8;  // neighbouring rows that a lane takes at a time

// Loads kRows neighbouring numbers as packs of 16 bytes.
template <class Bits, class T>
__device__ __forceinline__ void load_packs(T (&to)[kRows], const void* from) {
  constexpr int kPerPack = 16 / sizeof(Bits);
  static_assert(sizeof(T) == sizeof(Bits) && kRows % kPerPack == 0);
#pragma unroll
  for (int i = 0; i < kRows / kPerPack; ++i) {
    const Pack pack = static_cast<const Pack*>(from)[i];
#pragma unroll
    for (int e = 0; e < kPerPack; ++e) to[i * kPerPack + e] = bits_as<T>(get<Bits>(pack, e));
  }
}

// Shuffles of partial results, which may have fewer than 32 bits.
template <class T>
__device__ __forceinline__ T shuffled_up(T value, int lanes) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_up_sync(kEveryLane, static_cast<uint32_t>(value), lanes));
  } else {
    return shuffle_up(value, lanes);
  }
}
template <class T>
__device__ __forceinline__ T of_last_lane(T value) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(__shfl_sync(kEveryLane, static_cast<uint32_t>(value), 31));
  } else {
    return shuffle_from(value, 31);
  }
}

template <class Monoid>
__global__ void __launch_bounds__(kThreads) segment_scalars_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  wait_for_predecessor();  // segment_fill_all_kernel
  let_dependents_start();  // segment_join_kernel
  const int lane = threadIdx.x & 31;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t tile = warp % a.tiles, o = warp / a.tiles;
  if (o >= a.outer) return;
  const int64_t ids_at = offset_of(a.ids_at, o);
  const int32_t* ids = a.ids + ids_at;
  const int32_t* positions = a.positions ? a.positions + ids_at : nullptr;
  const Bits* data = static_cast<const Bits*>(a.data) + offset_of(a.data_at, o);
  auto* out = static_cast<typename Monoid::Result*>(a.out) + o * a.segments;
  char* workspace = a.workspace + o * a.workspace_bytes;
  const int64_t begin = tile * a.rows, end = min(a.length, begin + a.rows);
  if (lane == 0) a.clear_counter(workspace, tile, 0);

  const int32_t first_id = ids[begin];
  const bool first_begins = begin == 0 || ids[begin - 1] != first_id;
  // Stores the result of a segment. `ends`: no later tile has rows of it.
  const auto finish = [&](int32_t id, Acc sum, bool ends) {
    if (!a.is_segment(id)) return;
    const bool begins = id != first_id || first_begins;
    if (begins && ends) {
      out[id] = Monoid::store(sum, a.keys);
    } else {
      reinterpret_cast<Acc*>(workspace + (begins ? a.tails_at : 0))[tile] = sum;
    }
  };
  // The segment of the last row before those at hand, and its fold so far.
  int32_t open_id = 0;
  Acc open = Monoid::identity();
  bool has_open = false;
  for (int64_t start = begin; start < end; start += 32 * kRows) {
    const int64_t at = start + lane * kRows;
    int32_t id[kRows];
    Elements<Bits, 1> elements[kRows];
    bool loaded = false;
    if constexpr (sizeof(Bits) > 1) {
      const auto from = reinterpret_cast<uintptr_t>(ids + at) | reinterpret_cast<uintptr_t>(data + at);
      if (!positions && at + kRows <= end && from % 16 == 0) {
        load_packs<uint32_t>(id, ids + at);
        load_packs<Bits>(elements, data + at);
        loaded = true;
      }
    }
    if (!loaded) {
      constexpr int32_t kNone = 0x7fffffff;  // an id that no segment has
#pragma unroll
      for (int r = 0; r < kRows; ++r) id[r] = at + r < end ? ids[at + r] : kNone;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (a.is_segment(id[r])) elements[r].value[0] = data[positions ? positions[at + r] : at + r];
    }
    Acc value[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      value[r] = a.is_segment(id[r]) ? Monoid::load(elements[r].value[0], a.keys) : Monoid::identity();

    // Other lanes may also have rows of the lane's first and last segment: `head` and `sum` are the lane's own folds.
    // The segments between are stored.
    Acc head = value[0], sum = value[0];
    bool breaks = false;  // whether the lane has several segments
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
      if (id[r] == id[r - 1]) {
        sum = Monoid::fold(sum, value[r]);
        continue;
      }
      if (breaks) {
        finish(id[r - 1], sum, true);
      } else {
        head = sum;
      }
      breaks = true;
      sum = value[r];
    }
    const int32_t last_id = id[kRows - 1];
    int32_t before_id = shuffle_up(last_id, 1);
    if (lane == 0) before_id = open_id;
    const bool joins = before_id == id[0] && (lane > 0 || has_open);  // whether its first segment begins before it
    bool starts = breaks || !joins;  // whether the lane's last segment begins in the lane
    if (lane == 0 && !starts) sum = Monoid::fold(open, sum);
    // A scan by segment: afterwards `sum` has all rows of the lane's last segment up to the lane, `before` those of the
    // last segment of the lane below.
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const Acc other = shuffled_up(sum, lanes);
      const bool other_starts = __shfl_up_sync(kEveryLane, starts, lanes);
      if (lane < lanes || starts) continue;
      sum = Monoid::fold(other, sum);
      starts = other_starts;
    }
    Acc before = shuffled_up(sum, 1);
    if (lane == 0) before = open;
    if (!joins && (lane > 0 || has_open)) finish(before_id, before, true);
    if (breaks) finish(id[0], joins ? Monoid::fold(before, head) : head, true);
    open_id = __shfl_sync(kEveryLane, last_id, 31);
    open = of_last_lane(sum);
    has_open = true;
  }
  if (lane == 0) finish(open_id, open, end == a.length || ids[end] != open_id);
}

}  // namespace
}  // namespace jaxgpuops::segments
