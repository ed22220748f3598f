// Columns along axes of up to some hundred positions, of which few lie side by side: lanes of walking kernels would
// read pieces of `inner` elements. A block has some outer indices, which are one run of memory. It copies them to
// shared memory in vectors, its threads have columns there, or parts of columns, and the results leave as vectors. The
// array is read once and written once. The order of additions is that of the walking kernels. Works on any GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/small.cuh"
#include "common/rounding.h"
#include "row_engine/cuda/columns_walk.cuh"
#include "row_engine/plan.h"

namespace jaxgpuops::row_engine {

// `Given` is what the arguments of the operation are made of (P::Args, or less).
template <class P, class Given>
struct ColumnTiles {
  const void* x;
  void* out;  // null: the call has no results of the full shape
  uint32_t outer, length, inner;
  uint32_t each;      // outer indices of a block
  uint32_t parts;     // threads that share a column: one has positions part, part + parts, ..
  uint32_t pitch;     // elements from one outer index to the next in shared memory
  uint32_t stats;     // where in shared memory the statistics of parts begin
  Quotient outer_of;  // of a column
  Quotient outer_at;  // of a vector, if outer indices are apart in shared memory; else 0
  Given given;
};

// kShares: several threads share a column.
template <class P, class Given, bool kShares>
__global__ void __launch_bounds__(32 * kTiledWarps)
    column_tiles_kernel(const __grid_constant__ ColumnTiles<P, Given> p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr uint32_t kCount = Walk<P>::kCount, kBytes = sizeof(Bits);
  using Lane = Held<P, kCount, false>;
  const typename P::Args& args = p.given;
  const uint32_t length = once(p.length), inner = once(p.inner), plane = length * inner, pitch = once(p.pitch);
  const uint32_t begin = blockIdx.x * p.each, count = min(p.each, p.outer - begin);
  const int64_t first = int64_t{begin} * plane;
  const auto* const from = reinterpret_cast<const unsigned char*>(static_cast<const Bits*>(p.x) + first);
  unsigned char* const stage = dynamic_shared_memory();
  const uint32_t gap = (pitch - plane) * kBytes;
  // The tile lies as far from a multiple of 16 bytes in shared memory as in x. If it begins or ends inside a vector,
  // there are no gaps.
  const auto before = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % 16);
  const uint32_t end = before + count * plane * kBytes, loose = (end & ~15u) + kBytes * threadIdx.x;
#pragma unroll 1
  for (uint32_t v = threadIdx.x; 16 * v + 16 <= end; v += blockDim.x)
    copy_async(stage + 16 * v + gap * p.outer_at(v), from - before + 16 * v);
  if (loose < end) *reinterpret_cast<Bits*>(stage + loose) = *reinterpret_cast<const Bits*>(from - before + loose);
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();

  const uint32_t columns = count * inner, parts = kShares ? once(p.parts) : 1;
  Bits* const elements = reinterpret_cast<Bits*>(stage + before);
  auto* const stats = reinterpret_cast<Stat<P>*>(stage + p.stats);
  auto* const finals = reinterpret_cast<typename P::Final*>(stats + (columns * parts + 1) / 2 * 2);
  const auto column_at = [&](uint32_t c) { return elements + c + p.outer_of(c) * (pitch - inner); };
  const auto finish = [&](uint32_t c, const Stat<P>& stat) {
    const uint32_t outer = p.outer_of(c);
    const auto row = P::row(args, begin + outer, c - outer * inner, length, inner);
    const auto final = P::finish(args, row, stat);
    P::write_row(args, int64_t{begin} * inner + c, row, final);
    return final;
  };
  const auto write = [&](Bits* own, uint32_t part, const typename P::Final& final) {
    if constexpr (P::kOutput) {
      if (p.out == nullptr) return;
      const auto row = P::row(args, 0, 0, length, inner);
#pragma unroll 4
      for (uint32_t j = part; j < length; j += parts) {
        Bits& element = own[j * inner];
        element = Element::store(P::output(args, row, final, P::value(args, Element::load(element)), Acc(0)));
      }
    }
  };
#pragma unroll 1
  for (uint32_t m = threadIdx.x; m < columns * parts; m += blockDim.x) {
    const uint32_t part = kShares ? m / columns : 0, c = m - part * columns;
    Bits* const own = column_at(c);
    Stat<P> stat = Stat<P>::none();
#pragma unroll 1
    for (uint32_t j = part; j < length; j += kCount * parts) {
      Lane lane;
#pragma unroll
      for (uint32_t k = 0; k < kCount; ++k)
        lane.raw[0][k] = j + k * parts < length ? own[(j + k * parts) * inner] : P::pad(args, 0);
      Acc peak[1] = {};
      if constexpr (P::kPeak) lane.peaks(args, peak);
      take_in<P>(stat, peak[0], [&](int k, const auto& shift) { return lane.sum(args, k, shift, 0, 1); });
    }
    if constexpr (kShares) {
      stats[m] = stat;
    } else {
      write(own, 0, finish(c, stat));
    }
  }
  if constexpr (kShares) {
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < columns; c += blockDim.x) {
      const auto all = merge_serially<P>([&](int w) { return stats[w * columns + c]; }, 0, 1, parts);
      const auto final = finish(c, all);
      if constexpr (P::kOutput)
        if (p.out != nullptr) finals[c] = final;  // without results there is no room for finals
    }
  }
  if constexpr (P::kOutput) {
    if (p.out == nullptr) return;
    __syncthreads();
    if constexpr (kShares) {
#pragma unroll 1
      for (uint32_t m = threadIdx.x; m < columns * parts; m += blockDim.x) {
        const uint32_t part = m / columns, c = m - part * columns;
        write(column_at(c), part, finals[c]);
      }
      __syncthreads();
    }
    auto* const to = reinterpret_cast<unsigned char*>(static_cast<Bits*>(p.out) + first);
    if (reinterpret_cast<uintptr_t>(to) % 16 == before) {
#pragma unroll 1
      for (uint32_t v = threadIdx.x; 16 * v + 16 <= end; v += blockDim.x)
        if (16 * v >= before)
          store_pack(reinterpret_cast<Pack*>(to - before + 16 * v),
                     load_pack(reinterpret_cast<const Pack*>(stage + 16 * v + gap * p.outer_at(v))));
      // The elements before the first whole vector, and those after the last one.
      const uint32_t head = before + kBytes * threadIdx.x;
      const auto store = [&](uint32_t at) {
        *reinterpret_cast<Bits*>(to - before + at) = *reinterpret_cast<const Bits*>(stage + at);
      };
      if (before > 0 && head < min(16u, end)) store(head);
      if (loose < end && loose >= (before > 0 ? 16 : 0)) store(loose);
    } else {  // without gaps
#pragma unroll 1
      for (uint32_t b = before + kBytes * threadIdx.x; b < end; b += kBytes * blockDim.x)
        *reinterpret_cast<Bits*>(to - before + b) = *reinterpret_cast<const Bits*>(stage + b);
    }
  }
}

template <class P, class Given>
cudaError_t run_column_tiles(cudaStream_t stream, const RowPlan& plan, const Rows& rows, const void* x, void* out,
                             const Given& given) {
  constexpr int64_t kBytes = sizeof(typename P::Element::Bits), kBanks = 32, kVectorWords = 4;
  if (rows.outer > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t plane = rows.length * rows.inner * kBytes, words = plane / 4;
  const bool whole =
      plane % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  // If outer indices are whole vectors, gaps between them bring the columns of neighbouring ones to different banks.
  const int64_t beside = ceil_div(rows.inner * kBytes, 16) * kVectorWords;
  const int64_t gap = whole && words >= 2 * kBanks ? ((beside - words) % kBanks + kBanks) % kBanks : 0;
  ColumnTiles<P, Given> t = {x, out, 0, 0, 0, 0, 0, 0, 0, {}, {}, given};
  t.outer = static_cast<uint32_t>(rows.outer);
  t.length = static_cast<uint32_t>(rows.length);
  t.inner = static_cast<uint32_t>(rows.inner);
  t.each = static_cast<uint32_t>(plan.part_length);
  t.parts = static_cast<uint32_t>(plan.axis_warps);
  t.pitch = static_cast<uint32_t>(rows.length * rows.inner + gap * 4 / kBytes);
  t.outer_of = Quotient(rows.inner);
  if (gap > 0) t.outer_at = Quotient(plane / 16);
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(ceil_div(rows.outer, plan.part_length)));
  launched.block = dim3(plan.threads());
  t.stats = static_cast<uint32_t>((plan.part_length * t.pitch * kBytes + 31) / 16 * 16);
  const int64_t columns = plan.part_length * rows.inner;
  launched.shared_bytes = t.stats;
  if (t.parts > 1) launched.shared_bytes += (columns * t.parts + 1) / 2 * 2 * sizeof(Stat<P>);
  if (t.parts > 1 && out) launched.shared_bytes += columns * sizeof(typename P::Final);
  return launch(stream, launched,
                t.parts > 1 ? column_tiles_kernel<P, Given, true> : column_tiles_kernel<P, Given, false>, t);
}

}  // namespace jaxgpuops::row_engine
