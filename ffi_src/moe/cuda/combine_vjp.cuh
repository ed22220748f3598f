// combine's gradient. A block has a token and some of its rows of y. A thread keeps kUnits units of the token's
// cotangent in registers at a time. For kAtOnce rows at a time, whose loads are in flight together, it adds up the
// products of the cotangent and the row, and writes the scaled cotangent to the row. Other blocks write zeros to rows
// without an assignment.
//
// If kByRow, a block has one row. It goes by rows, not by assignments, so that it loads its row while it waits for the
// number of the row's assignment. Other blocks write zeros for assignments without a row.
//
// If there are many rows of 8 to 16 KB, a warp has a row, and a block the rows of a token, whose cotangent it keeps in
// shared memory. Its warps do not wait for each other, so that some read while others write.
//
// Bytes moved: y, its cotangent and that of the tokens once each. The order of additions depends on `inner` and the
// dtype alone: in each kernel, a lane adds up the products of kUnits units, the lanes of a warp are added, and these
// sums follow each other.
#pragma once

#include "common/cuda/async_copy.cuh"
#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/rows.cuh"

namespace jaxgpuops::moe {

constexpr int kGradientThreads = 512;  // the most threads of a block
constexpr int kGradientRows = 32;      // the most rows of a block: each lane of a warp keeps the index of one
constexpr int kAtOnce = 2;             // rows that a block works on at a time
constexpr int kUnits = 2;              // units that a thread works on at a time
constexpr int kRowWarps = 8;           // the most warps of a block, if each has a row
constexpr int kRowUnits = 4;           // units of a lane that are then loaded together, while as many are used

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
  __device__ __forceinline__ V read(const Bits* row, int64_t u) const {
    if constexpr (kWhole) return reinterpret_cast<const V*>(row)[u];
    V v = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (element(u, i) < inner) v.bits[i] = row[element(u, i)];
    return v;
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

// What a block works on: a token and `count` of its assignments. Tokens, assignments and rows are counted over all
// outer indices.
template <class Element>
struct Task {
  uint32_t token, count;
  int64_t assignment, row;    // the first assignment, and the row from which own_row counts
  int32_t own_row;            // the row of an assignment, which each lane keeps,
  Weight<Element> own_scale;  // and its weight
};

template <class Element>
__device__ __forceinline__ Task<Element> task_of_row(const MoveProblem& p, uint32_t row, int32_t assignment,
                                                     const void* weights) {
  const uint32_t o = p.outer == 1 ? 0 : row / static_cast<uint32_t>(p.rows);
  const auto token = static_cast<uint32_t>(assignment) / static_cast<uint32_t>(p.choices);
  return {static_cast<uint32_t>(o * p.tokens) + token,
          1,
          o * p.assignments() + assignment,
          row,
          0,
          Weight<Element>::load(p, weights, (p.outer == 1 ? 0 : offset_in(p.weight, o)) + assignment)};
}

// `parts` blocks share a token, each of which has at most `each` of its assignments. The last token comes first: the
// gradient of dispatch, which often follows and begins with the first one, then finds rows that were written last in
// L2.
template <class Element>
__device__ __forceinline__ Task<Element> task_of_token(const MoveProblem& p, uint32_t parts, uint32_t each,
                                                       const int32_t* row_of_assignment, const void* weights) {
  const auto choices = static_cast<uint32_t>(p.choices), lane = threadIdx.x % 32;
  const uint32_t block = parts == 1 ? blockIdx.x : blockIdx.x / parts, first = (blockIdx.x - block * parts) * each;
  const uint32_t token = static_cast<uint32_t>(p.outer * p.tokens) - 1 - block;
  const Shift shift = shift_of(p, token);
  Task<Element> task = {token, min(each, choices - first), int64_t{token} * choices + first, shift.row, -1, {}};
  if (lane < task.count) {
    task.own_row = row_of_assignment[task.assignment + shift.index + lane];
    task.own_scale = Weight<Element>::load(p, weights, task.assignment + shift.weight + lane);
  }
  return task;
}

// Writes zero for assignment `a` if it has no row.
template <class Element>
__device__ __forceinline__ void fill_dropped(const MoveProblem& p, int64_t a, const int32_t* row_of_assignment,
                                             void* dw) {
  if (a >= p.outer * p.assignments()) return;
  const uint32_t token = static_cast<uint32_t>(a) / static_cast<uint32_t>(p.choices);
  if (row_of_assignment[a + shift_of(p, token).index] < 0) put_weight<Element>(p, dw, a, 0);
}

template <class Element, bool kWhole, bool kByRow>
__global__ void __launch_bounds__(kGradientThreads)
    combine_vjp_kernel(const __grid_constant__ MoveProblem p, uint32_t blocks, uint32_t parts, uint32_t each,
                       const typename Element::Bits* __restrict__ y, const typename Element::Bits* __restrict__ ct,
                       const int32_t* __restrict__ row_of_assignment, const int32_t* __restrict__ assignment_of_row,
                       const void* __restrict__ weights, typename Element::Bits* __restrict__ dy,
                       void* __restrict__ dw) {
  using Acc = typename Element::Acc;
  using U = Units<Element, kWhole>;
  using V = typename U::V;
  // A vector of bytes would become too many numbers for the registers.
  constexpr bool kHeld = kWhole && sizeof(typename Element::Bits) > 1;
  constexpr int kRows = kByRow ? 1 : kAtOnce;
  __shared__ Acc sums[kByRow ? 1 : kGradientRows][kGradientThreads / 32];
  if (blockIdx.x >= blocks) {
    const uint32_t block = blockIdx.x - blocks;
    if constexpr (kByRow)
      return fill_dropped<Element>(p, int64_t{block} * blockDim.x + threadIdx.x, row_of_assignment, dw);
    else if constexpr (kWhole)
      return fill(p, block, assignment_of_row, p.inner / U::kVector, reinterpret_cast<V*>(dy));
    else
      return fill(p, block, assignment_of_row, p.inner, dy);
  }
  const U units(p.inner);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto unit_of = [&](uint32_t first, int n) { return first + 32 * (kUnits * warp + n) + lane; };
  Task<Element> task;
  V early[kRows][kUnits];
  if constexpr (kByRow) {
    const uint32_t row = blockIdx.x;
    const int32_t assignment = assignment_of_row[row + shift_of_rows(p, row)];
    if constexpr (kHeld) {
#pragma unroll
      for (int n = 0; n < kUnits; ++n)
        if (unit_of(0, n) < units.count) early[0][n] = units.read(y + int64_t{row} * p.inner, unit_of(0, n));
    }
    if (assignment < 0) {
#pragma unroll 1
      for (uint32_t u = threadIdx.x; u < units.count; u += blockDim.x) units.write(dy + int64_t{row} * p.inner, u, V{});
      return;
    }
    task = task_of_row<Element>(p, row, assignment, weights);
  } else {
    task = task_of_token<Element>(p, parts, each, row_of_assignment, weights);
  }
  y += task.row * p.inner;
  dy += task.row * p.inner;
  ct += task.token * p.inner;
#pragma unroll 1
  for (uint32_t first = 0; first == 0 || first < units.count; first += kUnits * blockDim.x) {
    const auto unit = [&](int n) { return unit_of(first, n); };
    V own[kUnits];
    if constexpr (kHeld) {
#pragma unroll
      for (int n = 0; n < kUnits; ++n)
        if (unit(n) < units.count) own[n] = units.read(ct, unit(n));
    }
#pragma unroll 1
    for (uint32_t j = 0; j < task.count; j += kRows) {
      int64_t row[kRows];
      Acc scale[kRows], dot[kRows] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Acc own_factor = task.own_scale.number(p);
        row[r] = kByRow ? task.own_row : __shfl_sync(kEveryLane, task.own_row, (j + r) % 32);
        scale[r] = kByRow ? own_factor : __shfl_sync(kEveryLane, own_factor, (j + r) % 32);
        if (j + r >= task.count) row[r] = -1;
      }
      // Takes a unit of the cotangent and of a row.
      const auto use = [&](int r, int64_t u, const V& c, const V& v) {
        V scaled;
#pragma unroll
        for (int i = 0; i < U::kVector; ++i) {
          const Acc wide = Element::load(c.bits[i]);
          dot[r] += wide * Element::load(v.bits[i]);
          scaled.bits[i] = Element::store(scale[r] * wide);
        }
        units.write(dy + row[r] * p.inner, u, scaled);
      };
      if constexpr (kHeld) {
        V v[kRows][kUnits];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int n = 0; n < kUnits; ++n)
            if (row[r] >= 0 && unit(n) < units.count)
              v[r][n] = kByRow && first == 0 ? early[r][n] : units.read(y + row[r] * p.inner, unit(n));
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int n = 0; n < kUnits; ++n)
            if (row[r] >= 0 && unit(n) < units.count) use(r, unit(n), own[n], v[r][n]);
      } else {
#pragma unroll 1
        for (int n = 0; n < kUnits && unit(n) < units.count; ++n) {
          const V c = units.read(ct, unit(n));
          V v[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (row[r] >= 0) v[r] = units.read(y + row[r] * p.inner, unit(n));
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            if (row[r] >= 0) use(r, unit(n), c, v[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dot[r] = sum_of_lanes(dot[r]);
        if (lane == 0 && j + r < task.count) sums[j + r][warp] = first == 0 ? dot[r] : sums[j + r][warp] + dot[r];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < task.count) {
    Acc total = 0;
#pragma unroll
    for (unsigned w = 0; w < kGradientThreads / 32; ++w)
      if (w < blockDim.x / 32) total += sums[threadIdx.x][w];
    put_weight<Element>(p, dw, task.assignment + threadIdx.x, total);
  }
}

// Adds up each of kCount numbers over the lanes of a warp, in the order of sum_of_lanes(). The sum of the n-th is in
// the lanes from 32 / kCount * n on.
template <int kCount, class T>
__device__ __forceinline__ T sums_of_lanes(T (&numbers)[kCount], uint32_t lane) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) {
    const int left = kCount * lanes / 32;
    const bool upper = lane & lanes;
    if (left == 0) numbers[0] += shuffle_xor(numbers[0], lanes);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const T kept = upper ? numbers[i + left] : numbers[i], given = upper ? numbers[i] : numbers[i + left];
      numbers[i] = kept + shuffle_xor(given, lanes);
    }
  }
  return numbers[0];
}

template <class Element>
__global__ void __launch_bounds__(32 * kRowWarps, sizeof(typename Element::Bits) > 4 ? 3 : 4)
    combine_vjp_by_warp_kernel(const __grid_constant__ MoveProblem p, uint32_t blocks, uint32_t parts,
                               const typename Element::Bits* __restrict__ y,
                               const typename Element::Bits* __restrict__ ct,
                               const int32_t* __restrict__ row_of_assignment,
                               const int32_t* __restrict__ assignment_of_row, const void* __restrict__ weights,
                               typename Element::Bits* __restrict__ dy, void* __restrict__ dw) {
  using Acc = typename Element::Acc;
  using V = typename Units<Element, true>::V;
  constexpr int kVector = Units<Element, true>::kVector, kSums = kRowUnits / kUnits;
  uint4* const own = reinterpret_cast<uint4*>(dynamic_shared_memory());
  const auto units = static_cast<uint32_t>(p.inner / kVector), choices = static_cast<uint32_t>(p.choices);
  if (blockIdx.x >= blocks) return fill(p, blockIdx.x - blocks, assignment_of_row, units, reinterpret_cast<V*>(dy));
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t block = blockIdx.x / parts, choice = (blockIdx.x - block * parts) * warps + warp;
  const uint32_t token = static_cast<uint32_t>(p.outer * p.tokens) - 1 - block;  // as in task_of_token()
  const Shift shift = shift_of(p, token);
  const int64_t assignment = int64_t{token} * choices + choice;
  int32_t row = -1;
  Weight<Element> weight = {};
  if (choice < choices) {
    row = row_of_assignment[assignment + shift.index];
    weight = Weight<Element>::load(p, weights, assignment + shift.weight);
  }
  const auto* const of_token = reinterpret_cast<const uint4*>(ct) + int64_t{token} * units;
#pragma unroll 1
  for (uint32_t u = threadIdx.x; u < units; u += blockDim.x) copy_async(own + u, of_token + u);
  commit_async_copies();
  const int64_t at = (shift.row + max(row, 0)) * units + lane;
  const auto* const from = reinterpret_cast<const uint4*>(y) + at;
  V* const to = reinterpret_cast<V*>(dy) + at;
  const uint32_t count = row >= 0 ? (units - lane + 31) / 32 : 0;  // units of the lane
  uint4 held[2][kRowUnits];
  const auto load = [&](uint4(&held)[kRowUnits], uint32_t first) {
#pragma unroll
    for (uint32_t n = 0; n < kRowUnits; ++n)
      if (first + n < count) held[n] = from[(first + n) * 32];
  };
  load(held[0], 0);
  wait_for_async_copies<0>();
  __syncthreads();
  const Acc scale = weight.number(p);
  Acc total = 0;
  const auto use = [&](const uint4(&held)[kRowUnits], uint32_t first) {
    Acc dots[kSums] = {};
#pragma unroll
    for (uint32_t n = 0; n < kRowUnits; ++n) {
      if (first + n >= count) continue;
      const auto c = bits_as<V>(own[(first + n) * 32 + lane]), v = bits_as<V>(held[n]);
      V scaled;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Acc wide = Element::load(c.bits[i]);
        dots[n / kUnits] += wide * Element::load(v.bits[i]);
        scaled.bits[i] = Element::store(scale * wide);
      }
      to[(first + n) * 32] = scaled;
    }
    const Acc sums = sums_of_lanes(dots, lane);
#pragma unroll
    for (int n = 0; n < kSums; ++n) total += shuffle_from(sums, 32 / kSums * n);
  };
#pragma unroll 1
  for (uint32_t first = 0; __any_sync(kEveryLane, first < count); first += 2 * kRowUnits) {
    load(held[1], first + kRowUnits);
    use(held[0], first);
    load(held[0], first + 2 * kRowUnits);
    use(held[1], first + kRowUnits);  // adds zeros if the row has ended
  }
  if (lane == 0 && choice < choices) put_weight<Element>(p, dw, assignment, total);
}

}  // namespace jaxgpuops::moe
