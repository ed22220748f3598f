// Long columns of the row engine, in one kernel that stays: a cluster of blocks has every n-th strip of columns, and a
// thread the same positions of all of them. The next strip is on its way to shared memory, as much as there is in
// registers, while statistics are exchanged and results written: one read, one write, and memory does not wait for
// either. A thread fetches what it will hold itself, so there is no barrier for that.
//
// The statistics of units go to all blocks of the cluster, each of which waits for them. Two places take turns: nobody
// sends those of the next strip but one before it has all of the next, which the others send after they have read all
// of this. There is no other barrier of the cluster: it would wait for results to be written.
//
// A unit, which is half of a block's warps, is a block of columns_kernel, and merged as there. Compute capability 9.0.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/bulk_copy.cuh"
#include "common/residents.cuh"
#include "common/row_columns.cuh"

namespace jaxgpuops::row_engine {

constexpr int kColumnSlots = 2;  // strips whose statistics are on their way
constexpr int kBlockUnits = 2;
constexpr int kStreamColumnWarps = kBlockUnits * kMaxColumnWarps;

template <class P>
struct ColumnsStreamParameters {
  Parameters<P> of;
  // Between strips of a cluster: columns, which are outer indices and others, and elements; and where i begins again.
  int64_t columns_apart, outers_apart, i_apart, elements_apart, elements_to_next_outer;
};

// Shared memory: of each column of a strip (with one place left over, so that columns are in different banks)
// statistics of warps, of units [kColumnSlots], and finals; barriers [kColumnSlots]; what is on its way
// [warps][operands][kCount][lanes].
template <class P>
struct ColumnsStreamLayout {
  static constexpr int kCount = column_vectors(P::kOperands), kWidth = Held<P, kCount, true>::kWidth;
  static constexpr int kWarpPlaces = kStreamColumnWarps + 1;
  int columns, unit_places, units_at, finals_at, barriers_at, next_at, bytes;

  __host__ __device__ ColumnsStreamLayout(int column_lane_bits, int blocks)
      : columns(kWidth << column_lane_bits), unit_places(kBlockUnits * blocks + 1) {
    const auto padded = [](int bytes) { return (bytes + 15) / 16 * 16; };
    const int stats = columns * static_cast<int>(sizeof(Stat<P>));
    units_at = padded(kWarpPlaces * stats);
    finals_at = units_at + padded(kColumnSlots * unit_places * stats);
    barriers_at = finals_at + padded(columns * static_cast<int>(sizeof(typename P::Final)));
    next_at = barriers_at + padded(8 * kColumnSlots);
    bytes = next_at + kStreamColumnWarps * P::kOperands * kCount * 512;
  }
};

template <class P>
__global__ void __launch_bounds__(32 * kStreamColumnWarps, 1)
    columns_stream_kernel(const __grid_constant__ ColumnsStreamParameters<P> s) {
  using Layout = ColumnsStreamLayout<P>;
  using Bits = typename P::Element::Bits;
  constexpr int kCount = Layout::kCount, kWidth = Layout::kWidth;
  using Lane = Held<P, kCount, true>;
  static_assert(!P::kDecoded && !P::kMasked && !P::kHole && !P::kPlainSum);
  const Parameters<P>& p = s.of;

  const int warp_lane = threadIdx.x % 32, warp = threadIdx.x / 32, half_lane = threadIdx.x % 16;
  const int axis_lane = warp_lane >> p.column_lane_bits;
  const int column_of_block = (warp_lane & ((1 << p.column_lane_bits) - 1)) * kWidth;
  const int block = blockIdx.x % static_cast<unsigned>(p.blocks), units = kBlockUnits * p.blocks;
  const Layout layout(p.column_lane_bits, p.blocks);
  const int columns = layout.columns, unit_places = layout.unit_places;
  unsigned char* const memory = dynamic_shared_memory();
  auto* const of_warps = reinterpret_cast<Stat<P>*>(memory);
  auto* const of_columns = reinterpret_cast<typename P::Final*>(memory + layout.finals_at);
  auto* const units_there = reinterpret_cast<uint64_t*>(memory + layout.barriers_at);
  auto* const next = reinterpret_cast<Pack*>(memory + layout.next_at) + warp * (P::kOperands * kCount * 32) + warp_lane;
  const auto next_at = [&](int o, int j) { return next + (o * kCount + j) * 32; };

  // Where this thread is: a column, which is (outer, i0), the first of its positions, and the element there.
  const int64_t first_strip = int64_t{blockIdx.x / static_cast<unsigned>(p.blocks)} * columns;
  const auto strips_from = [&](int64_t column) {
    return column < p.columns ? static_cast<int>((p.columns - column + s.columns_apart - 1) / s.columns_apart) : 0;
  };
  const int strips = strips_from(first_strip), mine = strips_from(first_strip + column_of_block);
  int64_t outer = (first_strip + column_of_block) / p.inner, i0 = first_strip + column_of_block - outer * p.inner;
  const int64_t first =
      ((int64_t{block} * kStreamColumnWarps + warp) * (32 >> p.column_lane_bits) + axis_lane) * kCount;
  int64_t at = (outer * p.length + first) * p.inner + i0;
  const int here = static_cast<int>(max(int64_t{0}, min(p.length - first, int64_t{kCount})));
  const auto go_on = [&](int64_t& outer, int64_t& i0, int64_t& at) {
    outer += s.outers_apart;
    i0 += s.i_apart;
    at += s.elements_apart;
    if (i0 < p.inner) return;
    ++outer;
    i0 -= p.inner;
    at += s.elements_to_next_outer;
  };

  const auto fetch = [&](int64_t at) {
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o) {
      const Bits* from = static_cast<const Bits*>(p.operands[o]) + at;
#pragma unroll
      for (int j = 0; j < kCount; ++j, from += p.inner)
        if (j < here) copy_async(next_at(o, j), from);
    }
  };
  // What is beyond the axis stays as it is.
#pragma unroll
  for (int o = 0; o < P::kOperands; ++o) {
    Pack padding;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(padding, i, P::pad(p.args, o));
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j >= here || mine == 0) *next_at(o, j) = padding;
  }
  if (mine > 0) fetch(at);
  if (threadIdx.x < kColumnSlots) make_copy_barrier(units_there + threadIdx.x);
  make_barriers_visible();
  __syncthreads();
  if (p.cluster) {  // others may send from here on
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
  }

#pragma unroll 1
  for (int n = 0; n < strips; ++n) {
    const int slot = n % kColumnSlots;
    auto* const of_units = reinterpret_cast<Stat<P>*>(memory + layout.units_at) + slot * columns * unit_places;
    if (p.cluster && threadIdx.x == 0)
      expect_copies(units_there + slot, columns * units * static_cast<int>(sizeof(Stat<P>)));

    typename P::Row row[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      row[i] = n < mine ? P::row(p.args, outer, i0 + i, p.length, p.inner) : typename P::Row{};
    Lane lane;
    wait_for_async_copies();
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o)
#pragma unroll
      for (int j = 0; j < kCount; ++j) lane.raw[o][j] = *next_at(o, j);
    lane.forget();
    if (n + 1 < mine) {
      int64_t next_outer = outer, next_i0 = i0, next = at;
      go_on(next_outer, next_i0, next);
      fetch(next);
    }
    // Where that is is not kept, but found again below.
    asm volatile("" : "+l"(i0), "+l"(at));

    Stat<P> stat[kWidth];
    warp_statistics<P>(p, lane, 0, stat);
    if (axis_lane == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) of_warps[(column_of_block + i) * Layout::kWarpPlaces + warp] = stat[i];
    }
    __syncthreads();
    merge_by_halves<P>(of_warps, Layout::kWarpPlaces, columns, kStreamColumnWarps,
                       [&](int c, int unit, const Stat<P>& merged) {
                         Stat<P>* const to = of_units + c * unit_places + block * kBlockUnits + unit;
                         if (p.cluster) {
                           if (half_lane < p.blocks) copy_to_block(to, units_there + slot, half_lane, merged);
                         } else if (half_lane == 0) {
                           *to = merged;
                         }
                       });
    if (p.cluster) {
      wait_for_copies(units_there + slot, n / kColumnSlots & 1);
    } else {
      __syncthreads();
    }
    merge_by_halves<P>(of_units, unit_places, columns, units, [&](int c, int, const Stat<P>& all) {
      const int64_t column = first_strip + n * s.columns_apart + c;
      if (half_lane != 0 || column >= p.columns) return;
      const auto of_column = P::row(p.args, column / p.inner, column % p.inner, p.length, p.inner);
      of_columns[c] = P::finish(p.args, of_column, all);
      if (block == 0) P::write_row(p.args, column, of_column, of_columns[c]);
    });
    __syncthreads();

    make_results<P>(p, lane, row, of_columns + column_of_block, -1);
    if (n >= mine) continue;
    Bits* to = static_cast<Bits*>(p.out) + at;
#pragma unroll
    for (int j = 0; j < kCount; ++j, to += p.inner)
      if (j < here) store_once(reinterpret_cast<Pack*>(to), lane.raw[0][j]);
    go_on(outer, i0, at);
  }
}

template <class P>
cudaError_t run_columns_stream(cudaStream_t stream, const RowPlan& plan, const Parameters<P>& p) {
  if constexpr (P::kPackColumns && P::kOperands == 2) {
    const auto kernel = columns_stream_kernel<P>;
    const ColumnsStreamLayout<P> layout(p.column_lane_bits, p.blocks);
    if (plan.axis_warps != kStreamColumnWarps || kBlockUnits * p.blocks > kMaxColumnWarps) return cudaErrorInvalidValue;
    Launch launched;
    launched.block = dim3(plan.threads());
    launched.shared_bytes = layout.bytes;
    launched.cluster = p.blocks;
    static Residents of_kernel;
    int resident = 0;
    const cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(kernel), launched, &resident);
    if (status != cudaSuccess) return status;
    const int64_t strips = (p.columns + layout.columns - 1) / layout.columns;
    const int64_t clusters = std::min<int64_t>(strips, resident);
    ColumnsStreamParameters<P> s = {p};
    s.columns_apart = clusters * layout.columns;
    s.outers_apart = s.columns_apart / p.inner;
    s.i_apart = s.columns_apart % p.inner;
    s.elements_apart = s.outers_apart * p.length * p.inner + s.i_apart;
    s.elements_to_next_outer = (p.length - 1) * p.inner;
    launched.grid = dim3(static_cast<unsigned>(clusters * p.blocks));
    return launch(stream, launched, kernel, s);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::row_engine
