// Rows so short that few lanes have a row: a lane has 16 bytes, a pack, of each operand, whatever rows it belongs to.
// Operands are read once, results written once. The lanes of a row take turns, so that the order of folding is that of
// a lane that has the row: all step over their packs, and each passes its state on to the next. If rows lie across
// warps, the first row of a warp may begin in packs of the warp before it. So the first lanes of a warp (the last ones,
// if the scan runs backward) read these packs, too, but do not write them. A block has whole rows.
#pragma once

#include <cstdint>

#include "scan/cuda/block.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

// kApart: whether rows lie across warps.
template <class Policy, bool kApart>
__device__ __forceinline__ void scan_packed_rows(const Parameters& p) {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int n = 16 / sizeof(Bits);
  const int lane = threadIdx.x % 32;
  int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * n, left = p.columns * p.length - first;
  // A bit for each element of the pack, and of the one after it, in the direction of the scan: whether a row begins.
  uint32_t row_begins = static_cast<uint32_t>(p.row_begins);
  bool writes = true;
  if constexpr (kApart) {
    const int own = 32 - p.lanes_before, in_warp = p.backward ? lane : lane - p.lanes_before;
    const int length = static_cast<int>(p.length), of_block = static_cast<int>(p.block_columns) * length;
    const int in_block = (static_cast<int>(threadIdx.x / 32) * own + in_warp) * n;
    first = int64_t{blockIdx.x} * of_block + in_block;
    left = in_block < 0 || in_block >= of_block ? 0 : p.columns * p.length - first;
    writes = in_warp >= 0 && in_warp < own;
    const int in_row = in_block < 0 ? 0 : in_block - static_cast<int>(__umulhi(in_block, p.of_length)) * length;
    row_begins = funnel_right(row_begins, static_cast<uint32_t>(p.row_begins >> 32), in_row);
    if (p.backward) row_begins = __brev(row_begins) >> (31 - n);
  }
  const int part = lane & (p.row_lanes - 1);
  const auto begins = [&](int i) {
    if (kApart || (i > 0 && i < n)) return (row_begins >> i & 1) != 0;
    return part == ((i == 0) != p.backward ? 0 : p.row_lanes - 1);
  };
  const int lane_before = p.backward ? lane + 1 : lane - 1, lane_after = p.backward ? lane - 1 : lane + 1;
  // The last rows of the array, and arrays that are not aligned, pass through shared memory byte by byte.
  __shared__ Pack bytewise[kThreads];
  const bool whole = p.aligned && left >= n;
  const auto copy = [&](void* to, const void* from) {
    const int bytes = static_cast<int>(max(min(left, int64_t{n}), int64_t{0})) * static_cast<int>(sizeof(Bits));
#pragma unroll 1
    for (int i = 0; i < bytes; ++i) static_cast<unsigned char*>(to)[i] = static_cast<const unsigned char*>(from)[i];
  };

  Pack operand[Policy::kOperands][1];
#pragma unroll
  for (int o = 0; o < Policy::kOperands; ++o) {
    if (Policy::kBroadcast && o == 1 && p.a_axis_stride == 0 && p.a_outer_stride == 0) {  // one factor
      const Bits factor = *static_cast<const Bits*>(p.operands[o]);
#pragma unroll
      for (int i = 0; i < n; ++i) set<Bits>(operand[o][0], i, factor);
      continue;
    }
    const Bits* const from = static_cast<const Bits*>(p.operands[o]) + first;
    if (whole) {
      operand[o][0] = *reinterpret_cast<const Pack*>(from);
    } else {
      copy(bytewise + threadIdx.x, from);
      operand[o][0] = bytewise[threadIdx.x];
    }
  }
  if (p.backward) reverse_each<Bits>(operand);

  constexpr int kLast = Policy::kOperands - 1;
  Acc outside[2] = {};  // the neighbours of the pack
  if constexpr (Policy::kNeighbour) {
    outside[0] = shuffle_from(Element::load(get<Bits>(operand[kLast][0], n - 1)), lane_before);
    outside[1] = shuffle_from(Element::load(get<Bits>(operand[kLast][0], 0)), lane_after);
  }
  const auto at = [&](int i) {
    const auto load = [&](int o, int i) { return Element::load(get<Bits>(operand[o][0], i)); };
    In<Acc> in = {};
    in.x = load(0, i);
    if (Policy::kOperands > 1) in.a = load(1, i);
    if (Policy::kOperands > 2) in.y = load(2, i);
    if constexpr (Policy::kNeighbour) {
      const Acc before = i > 0 ? load(kLast, i > 0 ? i - 1 : 0) : outside[0];
      const Acc after = i + 1 < n ? load(kLast, i + 1 < n ? i + 1 : i) : outside[1];
      in.neighbour = p.neighbour_before ? before : after;
      if (begins(p.neighbour_before ? i : i + 1)) in.neighbour = Policy::edge(p.options);
    }
    return in;
  };
  Acc results[Policy::kResults][n];
  const auto none = Policy::identity(p.options);
  auto state = none;
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    const auto put = [&](int i, const Out<Acc>& out) {
      results[0][i] = out.first;
      if constexpr (Policy::kResults == 2) results[1][i] = out.second;
      if (i + 1 < n && begins(i + 1)) state = none;
    };
    if constexpr (kByParts<Policy>) {  // rows begin within a pack, so it is no
                                       // part
#pragma unroll
      for (int i = 0; i < n; ++i) put(i, Policy::step(state, at(i), p.options));
    } else {
      step_run<Policy, n, Policy::kKind != Kind::kLinear>(state, at, p.options, put);
    }
    if (turn == p.row_lanes) break;
    state = shuffle_from(state, lane_before);
    if (begins(0)) state = none;
  }

  Pack packed[Policy::kResults][1];
#pragma unroll
  for (int r = 0; r < Policy::kResults; ++r) packed[r][0] = pack_of<Element>(results[r]);
  if (p.backward) reverse_each<Bits>(packed);
#pragma unroll
  for (int r = 0; r < Policy::kResults; ++r) {
    Bits* const to = static_cast<Bits*>(p.results[r]) + first;
    if (!writes) {
    } else if (whole) {
      *reinterpret_cast<Pack*>(to) = packed[r][0];
    } else {
      bytewise[threadIdx.x] = packed[r][0];
      copy(to, bytewise + threadIdx.x);
    }
  }
}

template <class Policy, bool kApart>
__global__ void __launch_bounds__(kThreads) scan_packs(const __grid_constant__ Parameters p) {
  scan_packed_rows<Policy, kApart>(p);
}

}  // namespace jaxgpuops::scan
