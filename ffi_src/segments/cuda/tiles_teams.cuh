// Sums of segments whose rows have few vectors, in the order of their ids: another form of the kernel of tiles.cuh. A
// block has a tile. It brings the ids of the tile's rows into shared memory, and says there which rows they are. Teams
// of neighbouring threads have equal shares of the tile: a thread has a vector of 16 bytes of a row, or of 8, or an
// element. A thread reads its columns of the share's rows in order, and keeps the sum of the current segment in
// registers. What this sum is for depends on where the segment begins and ends:
//   if it begins and ends in the share: the segment's result;
//   if it begins before the share: the share's head, a partial result in shared memory;
//   if it begins in the share and ends behind it: the share's tail, another partial result.
// Then the block adds to each tail the heads of the shares behind it. Segments that cross the tile's front or end leave
// the tile's head and tail in the workspace, for tiles_join.cuh. So shares may be short, such that all blocks together
// read a small part of memory at a time, while few partial results are written.
//
// Passes and bytes moved: as in tiles.cuh.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/tiles_args.cuh"
#include "segments/cuda/tiles_gaps.cuh"

namespace jaxgpuops::segments {
namespace {

// Rows that a lane loads before it folds them.
constexpr int team_rows(int count) { return count == 4 ? 4 : 8; }
// Blocks of tiles that a multiprocessor holds: more would leave a lane with many elements too few registers.
constexpr int team_blocks(int count) { return count > 4 ? 3 : 4; }

// Loads elements of rows that are read once: whole packs are not kept in L1.
template <class Bits, int kCount>
__device__ __forceinline__ Elements<Bits, kCount> load_elements(const Bits* from) {
  if constexpr (kCount * sizeof(Bits) == 16) {
    uint4 pack;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
                 : "l"(__cvta_generic_to_global(from)));
    return bits_as<Elements<Bits, kCount>>(pack);
  } else {
    return *reinterpret_cast<const Elements<Bits, kCount>*>(from);
  }
}

template <class Monoid, int kCount>
__global__ void __launch_bounds__(kThreads, team_blocks(kCount)) segment_teams_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Result = typename Monoid::Result;
  using Sum = Partial<Monoid, kCount>;
  static_assert(sizeof(Sum) == kCount * sizeof(Acc));
  constexpr int kTeamRows = team_rows(kCount);
  static_assert(kTileStep % kTeamRows == 0);
  constexpr int32_t kBefore = -1, kBehind = -2;  // in place of ids out of range, before all segments and behind them
  wait_for_predecessor();                        // the kernel that orders the ids
  let_dependents_start();  // segment_join_kernel, which reads the ids at once, and so may not start before the wait
  if (blockIdx.x < a.fillers) return fill_gaps<Result>(a);
  const uint32_t block = blockIdx.x - static_cast<uint32_t>(a.fillers), place = block / a.pieces;
  const uint32_t o = place / static_cast<uint32_t>(a.tiles), tile = place - o * static_cast<uint32_t>(a.tiles);
  const int lanes = static_cast<int>(a.lanes);
  const int team = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) - team * lanes;
  const int64_t column = (static_cast<int64_t>(block - place * a.pieces) * lanes + lane) * kCount;
  const bool live = team < a.teams && column < a.inner;

  // Shared memory: the ids of the tile's rows, with those of the rows before and behind it; which rows these are; heads
  // and tails of shares.
  const int64_t first = tile * a.rows;  // the tile's first row
  const auto of_tile = static_cast<int>(min(a.rows, a.length - first));
  auto* const ids = reinterpret_cast<int32_t*>(dynamic_shared_memory()) + 1;
  int32_t* const rows = ids + a.shares * a.share + 1;
  auto* const heads = reinterpret_cast<Sum*>(dynamic_shared_memory() + a.lists_bytes()) + lane;
  Sum* const tails = heads + a.shares * lanes;
  {
    const int64_t ids_at = offset_of(a.ids_at, o) + first;
    for (int r = static_cast<int>(threadIdx.x) - 1; r <= a.shares * a.share; r += kThreads) {
      const int64_t row = first + r;
      const bool has = row >= 0 && row < a.length;
      int64_t id = row < 0 ? kBefore : a.segments;
      if (has) id = a.place_of(a.ids[ids_at + r]);
      const bool is_segment = id >= 0 && id < a.segments;
      if (r >= 0 && r < a.shares * a.share)
        rows[r] = !is_segment ? -1 : a.positions ? a.positions[ids_at + r] : static_cast<int32_t>(row);
      ids[r] = id < a.segments ? static_cast<int32_t>(id) : kBehind;
    }
  }
  char* const workspace = a.workspace + o * a.workspace_bytes;
  if (live && team == 0) a.clear_counter(workspace, tile, column);
  __syncthreads();

  const Bits* const data = static_cast<const Bits*>(a.data) + offset_of(a.data_at, o) + column;
  Result* const out = static_cast<Result*>(a.out) + static_cast<int64_t>(o) * a.segments * a.inner + column;
#pragma unroll 1
  for (int share = team; live && share < a.shares; share += a.teams) {
    const int begin = share * a.share, end = min(begin + a.share, of_tile);
    if (begin >= end) break;
    int32_t id = ids[begin];
    bool begins = first + begin == 0 || ids[begin - 1] != id;
    Sum sum;
    sum.clear();
    // Stores the result of the current segment. `ends`: no later share has rows of it.
    const auto flush = [&](bool ends) {
      if (id < 0) return;
      if (begins && ends) {
        sum.store_result(out, id * a.inner, a.keys);
      } else {
        (begins ? tails : heads)[share * lanes] = sum;
      }
    };
    bool gaps = begins;  // whether there may be a gap before one of the rows
#pragma unroll 1
    for (int at = begin; at < end; at += kTeamRows) {
      Elements<Bits, kCount> elements[kTeamRows];
#pragma unroll
      for (int r = 0; r < kTeamRows; ++r) {
        const int32_t row = rows[at + r];
        if (row >= 0) elements[r] = load_elements<Bits, kCount>(data + row * a.inner);
      }
#pragma unroll
      for (int r = 0; r < kTeamRows; ++r) {
        const int32_t own = ids[at + r];
        if (own != id) {
          flush(true);
          gaps |= own - id != 1;
          id = own;
          begins = true;
          sum.clear();
        }
        if (id >= 0) sum.fold(elements[r], a.keys);
      }
    }
    const bool is_last = first + end == a.length;
    flush(is_last || ids[end] != id);
    if (!gaps && !is_last) continue;
    // Fills gaps of up to `gap` segments: those just before each row, and before the end of all rows.
    Elements<Result, kCount> empty;
#pragma unroll
    for (Result& value : empty.value) value = static_cast<Result>(a.keys.empty);
#pragma unroll 1
    for (int row = begin; row < end + is_last; ++row) {
      const int64_t next = ids[row] == kBehind ? a.segments : ids[row];
      int64_t s = first + row == 0 ? 0 : ids[row - 1] == kBehind ? next : ids[row - 1] + 1;
      if (next - s > a.gap) continue;
#pragma unroll 1
      for (; s < next; ++s) *reinterpret_cast<Elements<Result, kCount>*>(out + s * a.inner) = empty;
    }
  }
  if (a.shares > 1) __syncthreads();
  if (!live) return;

  // Folds the tail of each share with the heads of the shares behind it; and, as share -1, the heads at the front of
  // the tile.
  auto* const head = reinterpret_cast<Acc*>(workspace + (tile * a.inner + column) * sizeof(Acc));
  // The id of the segment that has rows on both sides of a share's front, or less than 0.
  const auto across = [&](int share) {
    const int row = share * a.share;
    return ids[row - 1] == ids[row] ? ids[row] : kBehind;
  };
#pragma unroll 1
  for (int share = team - 1; share < a.shares; share += a.teams) {
    const int32_t id = across(share + 1);
    if (id < 0 || (share >= 0 && across(share) == id)) continue;
    Sum sum = share < 0 ? heads[0] : tails[share * lanes];
    int next = max(share + 1, 1);
#pragma unroll 1
    for (; next < a.shares && across(next) == id; ++next) sum.fold(heads[next * lanes]);
    if (share < 0 || across(next) == id) {
      sum.store(reinterpret_cast<Acc*>(reinterpret_cast<char*>(head) + (share < 0 ? 0 : a.tails_at)));
    } else {
      sum.store_result(out, id * a.inner, a.keys);
    }
  }
}

}  // namespace
}  // namespace jaxgpuops::segments
