// combine's gradient. A warp has a row of y at a time: it adds up the products of the row and its token's cotangent,
// and writes the scaled cotangent to the row of dy. The warps of a block have rows of one token, whose cotangent they
// share in shared memory; none waits for another after that.
//
// If there are few rows, each has a block instead, whose warps share it. Blocks go by rows, not by assignments, so that
// they load their rows while they wait for the numbers of the rows' assignments.
//
// Other blocks write zeros to rows without an assignment, and for assignments without a row.
//
// Bytes moved: y, its cotangent and that of the tokens once each. The order of additions depends on `inner` and the
// dtype alone: a row is cut into strips, a lane adds up its part of a strip, then those of all strips in order, and
// lanes are added up last.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/rows.cuh"

namespace jaxgpuops::moe {

constexpr int kGradientRows = 8;     // the most rows of a block
constexpr int kGradientWarps = 16;   // the most warps of a block that has one row
constexpr uint32_t kStripUnits = 7;  // the most units that a lane has of a strip
constexpr uint32_t kStripsHeld = 8;  // the most strips of a cotangent that shared memory holds at a time

// Reads and writes units of rows. A unit has as many elements as a vector. If `inner` is a multiple of that, they are
// one vector; else they lie apart, so that neighbouring threads have neighbouring elements. If rows are not aligned to
// vectors, kWhole is false.
template <class Element, bool kWhole>
struct Units {
  using Bits = typename Element::Bits;
  static constexpr int kVector = 16 / sizeof(Bits);
  using V = Vector<Element, kVector>;

  int64_t inner;
  uint32_t count;  // units of a row; fits in 32 bits, since rows have less than 64 GB
  bool apart;

  __device__ __forceinline__ explicit Units(int64_t inner)
      : inner(inner), count(static_cast<uint32_t>((inner + kVector - 1) / kVector)), apart(inner % kVector != 0) {}

  __device__ __forceinline__ int64_t element(int64_t u, int i) const {
    return apart ? u + i * int64_t{count} : u * kVector + i;
  }
  // Returns a unit as it was loaded. As elements it would be taken apart, and waited for, before the next load.
  __device__ __forceinline__ uint4 read(const Bits* row, int64_t u) const {
    if constexpr (kWhole) return reinterpret_cast<const uint4*>(row)[u];
    V v = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (element(u, i) < inner) v.bits[i] = row[element(u, i)];
    return bits_as<uint4>(v);
  }
  __device__ __forceinline__ void write(Bits* row, int64_t u, const V& v) const {
    if constexpr (kWhole) {
      reinterpret_cast<V*>(row)[u] = v;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (element(u, i) < inner) row[element(u, i)] = v.bits[i];
    }
  }
};

// The strips of a row. They are as long as each other, so that the loads of a lane that are in flight together are as
// many for each.
struct Strips {
  uint32_t count, depth;  // units that a lane has of a strip

  __host__ __device__ uint32_t width() const { return 32 * depth; }  // units of a strip
};
inline Strips strips_of(int64_t units) {
  const int64_t of_lane = std::max<int64_t>(ceil_div(units, 32), 1), count = ceil_div(of_lane, kStripUnits);
  return {static_cast<uint32_t>(count), static_cast<uint32_t>(ceil_div(of_lane, count))};
}

// A lane's part of a row of y and of dy.
template <class Element, bool kWhole>
struct RowOfWarp {
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using U = Units<Element, kWhole>;
  // Units that are loaded together. A unit of bytes becomes many numbers, and one of single elements is many loads.
  static constexpr uint32_t kTogether = !kWhole ? 1 : sizeof(Bits) == 1 ? 2 : kStripUnits;

  U units;
  Strips strips;
  const Bits* y;
  Bits* dy;
  uint4 loaded[kTogether];

  __device__ __forceinline__ uint32_t unit(uint32_t strip, uint32_t i) const {
    return strip * strips.width() + 32 * i + threadIdx.x % 32;
  }
  __device__ __forceinline__ bool has(uint32_t strip, uint32_t i) const {
    return i < strips.depth && unit(strip, i) < units.count;
  }
  __device__ __forceinline__ void load(uint32_t strip, uint32_t from) {
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i)
      if (has(strip, from + i)) loaded[i] = units.read(y, unit(strip, from + i));
  }
  // Adds up a strip and writes it, scaled. `cotangent(u)` returns a unit of the token's cotangent. `ready`: whether the
  // strip's first units have been loaded.
  template <class Cotangent>
  __device__ __forceinline__ Acc use(uint32_t strip, Acc scale, bool ready, Cotangent cotangent) {
    using V = typename U::V;
    Acc dot = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < strips.depth; from += kTogether) {
      if (from > 0 || !ready) load(strip, from);
      uint4 of_token[kTogether];
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i)
        if (has(strip, from + i)) of_token[i] = cotangent(unit(strip, from + i));
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i) {
        if (!has(strip, from + i)) continue;
        const V c = bits_as<V>(of_token[i]), v = bits_as<V>(loaded[i]);
        V scaled;
#pragma unroll
        for (int e = 0; e < U::kVector; ++e) {
          const Acc wide = Element::load(c.bits[e]);
          dot += wide * Element::load(v.bits[e]);
          scaled.bits[e] = Element::store(scale * wide);
        }
        units.write(dy, unit(strip, from + i), scaled);
      }
    }
    return dot;
  }
};

// `parts` blocks share a token, each of which has `each` of its rows, or fewer. The last token comes first: the
// gradient of dispatch, which often follows and begins with the first one, then finds rows that were written last in
// L2.
template <class Element, bool kWhole>
__global__ void __launch_bounds__(32 * kGradientRows, 2)
    combine_vjp_kernel(const __grid_constant__ MoveProblem p, uint32_t blocks, uint32_t parts, uint32_t each,
                       Strips strips, const typename Element::Bits* __restrict__ y,
                       const typename Element::Bits* __restrict__ ct, const int32_t* __restrict__ row_of_assignment,
                       const int32_t* __restrict__ assignment_of_row, const void* __restrict__ weights,
                       typename Element::Bits* __restrict__ dy, void* __restrict__ dw) {
  using Acc = typename Element::Acc;
  using U = Units<Element, kWhole>;
  if (blockIdx.x >= blocks) {
    const uint32_t block = blockIdx.x - blocks;
    if constexpr (kWhole)
      return fill(p, block, assignment_of_row, p.inner / U::kVector, reinterpret_cast<typename U::V*>(dy));
    else
      return fill(p, block, assignment_of_row, p.inner, dy);
  }
  uint4* const held = reinterpret_cast<uint4*>(dynamic_shared_memory());
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t block = parts == 1 ? blockIdx.x : blockIdx.x / parts;
  const uint32_t choice = (blockIdx.x - block * parts) * each + warp;
  const uint32_t token = static_cast<uint32_t>(p.outer * p.tokens) - 1 - block;
  ct += token * p.inner;
  const U units(p.inner);
  // Brings the cotangent's part from strip `first` on. The first part is on its way while the warp waits for its row.
  const auto begin_copies = [&](uint32_t first) {
    const uint32_t begin = first * strips.width(), end = min(begin + kStripsHeld * strips.width(), units.count);
#pragma unroll 1
    for (uint32_t u = begin + threadIdx.x; u < end; u += blockDim.x) {
      if constexpr (kWhole)
        copy_async(held + (u - begin), reinterpret_cast<const uint4*>(ct) + u);
      else
        held[u - begin] = units.read(ct, u);
    }
    commit_async_copies();
  };
  begin_copies(0);
  const bool there = choice < static_cast<uint32_t>(p.choices);
  const Shift shift = shift_of(p, token);
  const int64_t assignment = int64_t{token} * p.choices + choice;
  const int32_t row = there ? row_of_assignment[assignment + shift.index] : -1;
  Weight<Element> weight = {};
  if (there) weight = Weight<Element>::load(p, weights, assignment + shift.weight);
  const int64_t at = (shift.row + row) * p.inner;
  RowOfWarp<Element, kWhole> own{units, strips, y + at, dy + at, {}};
  if (row >= 0) own.load(0, 0);
  Acc total = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < strips.count; first += kStripsHeld) {
    if (first > 0) {
      __syncthreads();  // all have used what is overwritten now
      begin_copies(first);
    }
    wait_for_async_copies<0>();
    __syncthreads();
    if (row < 0) continue;
    const uint32_t begin = first * strips.width(), last = min(first + kStripsHeld, strips.count);
#pragma unroll 1
    for (uint32_t strip = first; strip < last; ++strip)
      total += own.use(strip, weight.number(p), strip == 0, [&](uint32_t u) { return held[u - begin]; });
  }
  total = sum_of_lanes(total);
  if (there && lane == 0) put_weight<Element>(p, dw, assignment, total);
}

// Writes zero for assignment `a` if it has no row.
template <class Element>
__device__ __forceinline__ void fill_dropped(const MoveProblem& p, int64_t a, const int32_t* row_of_assignment,
                                             void* dw) {
  if (a >= p.outer * p.assignments()) return;
  const uint32_t token = static_cast<uint32_t>(a) / static_cast<uint32_t>(p.choices);
  if (row_of_assignment[a + shift_of(p, token).index] < 0) put_weight<Element>(p, dw, a, 0);
}

template <class Element>
__global__ void __launch_bounds__(32 * kGradientWarps)
    combine_vjp_by_row_kernel(const __grid_constant__ MoveProblem p, uint32_t blocks, Strips strips,
                              const typename Element::Bits* __restrict__ y,
                              const typename Element::Bits* __restrict__ ct,
                              const int32_t* __restrict__ row_of_assignment,
                              const int32_t* __restrict__ assignment_of_row, const void* __restrict__ weights,
                              typename Element::Bits* __restrict__ dy, void* __restrict__ dw) {
  using Acc = typename Element::Acc;
  using U = Units<Element, true>;
  if (blockIdx.x >= blocks)
    return fill_dropped<Element>(p, int64_t{blockIdx.x - blocks} * blockDim.x + threadIdx.x, row_of_assignment, dw);
  auto* const sums = reinterpret_cast<Acc(*)[32]>(dynamic_shared_memory());  // of each strip and lane
  const uint32_t row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t of_row = assignment_of_row[row + shift_of_rows(p, row)];
  RowOfWarp<Element, true> own{U(p.inner), strips, y + row * p.inner, dy + row * p.inner, {}};
  own.load(warp, 0);
  if (of_row < 0) {
#pragma unroll 1
    for (uint32_t u = threadIdx.x; u < own.units.count; u += blockDim.x) own.units.write(own.dy, u, typename U::V{});
    return;
  }
  const uint32_t o = p.outer == 1 ? 0 : row / static_cast<uint32_t>(p.rows);
  const uint32_t token = static_cast<uint32_t>(of_row) / static_cast<uint32_t>(p.choices);
  const auto weight = Weight<Element>::load(p, weights, (p.outer == 1 ? 0 : offset_in(p.weight, o)) + of_row);
  ct += (o * p.tokens + token) * p.inner;
#pragma unroll 1
  for (uint32_t strip = warp; strip < strips.count; strip += blockDim.x / 32)
    sums[strip][lane] =
        own.use(strip, weight.number(p), strip == warp, [&](uint32_t u) { return own.units.read(ct, u); });
  __syncthreads();
  if (warp > 0) return;
  Acc total = 0;
  for (uint32_t strip = 0; strip < strips.count; ++strip) total += sums[strip][lane];
  total = sum_of_lanes(total);
  if (lane == 0) put_weight<Element>(p, dw, o * p.assignments() + of_row, total);
}

}  // namespace jaxgpuops::moe
