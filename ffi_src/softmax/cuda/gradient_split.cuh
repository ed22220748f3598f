// Gradients of softmax and log_softmax from x and the cotangent, for rows that no cluster holds, and for few long
// columns that lie side by side: x and the cotangent are read twice, the second time backwards, from L2 where they are
// still there. (From the forward result, which takes three times the memory traffic of x to make, they would be read
// twice, too.) If there are so few elements that all multiprocessors hold them, they are read once.
//
// An outer index is a flat row of length * inner elements. It is cut into units, a block has one. It finds the largest
// logit of each column of its unit, the peak, and the sums that both gradients are made from, relative to it. The
// blocks of the second kernel each merge all units of their row, always in the same order, and write results. Elements
// are loaded one by one, so rows may begin anywhere. A warp goes on by a multiple of inner, so that each of its lanes
// has elements of one column.
//
// The elements at the peak are not in the sum of the others. So if one element has almost all of the probability, what
// it lacks to 1 is not lost.
#pragma once

#include <cooperative_groups.h>

#include "softmax/cuda/dispatch.cuh"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {

struct SplitParameters {
  const void *x, *cotangent;
  void* out;
  void* workspace;
  int64_t length, unit_length, result_length;  // elements of a flat row
  int inner, units;
  bool logs;  // log_softmax
};

// The lanes of a warp that have one column. (Lanes that are left over belong to no group.)
template <bool kColumns>
struct Group {
  int inner, groups, lanes, column, group;  // lanes: how many lanes of a warp have elements

  __device__ explicit Group(const SplitParameters& p) : inner(kColumns ? p.inner : 1), groups(32 / inner) {
    const int lane = threadIdx.x % 32;
    lanes = groups * inner;
    group = lane / inner;
    column = lane - group * inner;
  }

  // All lanes get what the lanes of their column have together.
  template <class T, class F>
  __device__ T fold(T value, F f) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const T other = shuffle_from(value, (threadIdx.x + step * inner) % 32);
      if (group + step < groups) value = f(value, other);
    }
    return shuffle_from(value, column);
  }
};

struct Share {
  float peak;
  float count, own;        // how many logits are equal to the peak, and the sum of their cotangents
  float others, weighted;  // of other logits: the sum of e^(z - peak), and of cotangents, times that for softmax

  // ExponentialSum::add() says why this is accurate enough.
  static __device__ float exponential(float x) { return fast_exp2(rounded_product(x, 1.44269504f)); }
  static __device__ Share none() { return {-infinity<float>(), 0, 0, 0, 0}; }
  // Makes the sums relative to another peak that is not below the present one. Where the weight is 0, cotangents are
  // dropped even if they are infinite, as they are where rows stay in registers.
  __device__ void raise(float to, bool logs) {
    if (to == peak) return;
    const float weight = exponential(peak - to);
    others = weight * (others + count);
    weighted += own;
    if (!logs) weighted = weight == 0 ? 0.f : weight * weighted;
    peak = to;
    count = own = 0;
  }
  __device__ void add(float z, float cotangent, bool logs) {
    const bool at_peak = z == peak;
    const float e = at_peak ? 0.f : exponential(z - peak);
    others += e;
    count += at_peak ? 1.f : 0.f;
    own += at_peak ? cotangent : 0.f;
    const float weight = logs && !at_peak ? 1.f : e;
    weighted = weight == 0 ? weighted : fused_multiply_add(weight, cotangent, weighted);
  }
  __device__ void add(Share share, bool logs) {
    const float larger = larger_number(peak, share.peak);
    raise(larger, logs);
    share.raise(larger, logs);
    count += share.count;
    own += share.own;
    others += share.others;
    weighted += share.weighted;
  }
  template <bool kColumns>
  __device__ void merge_lanes(const Group<kColumns>& of, bool logs) {
    const auto larger = [](float a, float b) { return larger_number(a, b); };
    raise(kColumns ? of.fold(peak, larger) : fold_lanes(peak, larger), logs);
    for (float* each : {&count, &own, &others, &weighted})
      *each = kColumns ? of.fold(*each, [](float a, float b) { return a + b; }) : row_engine::merged_sum(*each, 0, 5);
  }
  // All threads get the share of their column in the block.
  template <bool kColumns>
  __device__ void merge_block(const Group<kColumns>& of, bool logs) {
    __shared__ Share of_warps[kPartWarps * (kColumns ? kGradientColumns : 1)];
    const int lane = threadIdx.x % 32;
    merge_lanes(of, logs);
    if (lane < of.inner) of_warps[threadIdx.x / 32 * of.inner + lane] = *this;
    __syncthreads();
    *this = none();
    if (of.group < of.groups)
      for (int w = lane; w < kPartWarps * of.inner; w += of.lanes) add(of_warps[w], logs);
    merge_lanes(of, logs);
  }
  // All threads get the share of their column in the whole flat row, made of those of its units.
  template <bool kColumns>
  __device__ static Share of_row(const SplitParameters& p, const Group<kColumns>& of, int64_t row) {
    const auto* const shares = static_cast<const Share*>(p.workspace) + row * p.units * of.inner + of.column;
    auto all = none();
    if (of.group < of.groups)
#pragma unroll 1
      for (int u = threadIdx.x / 32 * of.groups + of.group; u < p.units; u += kPartWarps * of.groups)
        all.add(shares[u * of.inner], p.logs);
    all.merge_block(of, p.logs);
    return all;
  }
};

// The gradient of an element, given the share that the whole row is.
template <class E>
struct Gradient {
  using Acc = typename E::Acc;
  Acc peak, inverse, origin, total, of_likely;

  Gradient() = default;
  __device__ Gradient(const Share& row, bool logs) : peak(row.peak) {
    const Acc sum = row.others + row.count;
    const bool plain = sum < infinity<Acc>() && peak - peak == 0;  // there is no NaN or +inf, and not only -inf
    inverse = plain ? 1 / sum : nan<Acc>();
    const bool likely = inverse > Acc(0.75);  // then one element is at the peak
    origin = likely && !logs ? row.own : Acc(0);
    total = likely && !logs ? fused_multiply_add(-origin, row.others, row.weighted) : row.weighted + row.own;
    if (!logs) total *= inverse;
    of_likely = fused_multiply_add(row.others * inverse, total, -row.weighted);
  }
  __device__ Acc operator()(Acc z, Acc cotangent, bool logs) const {
    const Acc y = exponential<E>(z - peak) * inverse;
    const Acc product = rounded_product(y, logs ? total : (cotangent - origin) - total);
    return logs ? (y > Acc(0.75) ? of_likely : cotangent - product) : y == 0 ? Acc(0) : product;
  }
};

// The elements that a lane takes at a time: every 32nd of its warp's (of columns, fewer than 32 apart).
template <class E, bool kColumns>
struct Turn {
  using Bits = typename E::Bits;
  static constexpr int kEach = kGradientEach;
  Bits x[kEach], cotangent[kEach];

  // Loads what is below `end`, from the warp's first element on; the rest is -inf, and 0.
  __device__ void load(const SplitParameters& p, const Group<kColumns>& of, int64_t row, int64_t first, int64_t end) {
    const int64_t at = row * p.length + first;
    const auto* const from = static_cast<const Bits*>(p.x) + at;
    const auto* const cotangents = static_cast<const Bits*>(p.cotangent) + at;
    const Bits lowest = E::store(-infinity<typename E::Acc>());
    const int lane = threadIdx.x % 32;
    const int left = of.group < of.groups ? static_cast<int>(min(end - first, int64_t{kEach * of.lanes})) : 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = i * of.lanes + lane < left ? from[i * of.lanes + lane] : lowest;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      cotangent[i] = i * of.lanes + lane < left ? cotangents[i * of.lanes + lane] : Bits{};
  }

  __device__ void take_into(Share& share, bool logs) const {
    auto peak = share.peak;
#pragma unroll
    for (int i = 0; i < kEach; ++i) peak = larger_number(peak, E::load(x[i]));
    share.raise(peak, logs);
#pragma unroll
    for (int i = 0; i < kEach; ++i) share.add(E::load(x[i]), E::load(cotangent[i]), logs);
  }

  // Stores the gradients of what load() has loaded.
  __device__ void store(const SplitParameters& p, const Group<kColumns>& of, int64_t row, int64_t first, int64_t end,
                        const Gradient<E>& gradient) const {
    Bits* const to = static_cast<Bits*>(p.out) + row * p.length + first;
    const int lane = threadIdx.x % 32;
    const int left = of.group < of.groups ? static_cast<int>(min(end - first, int64_t{kEach * of.lanes})) : 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto value = gradient(E::load(x[i]), E::load(cotangent[i]), p.logs);
      if (i * of.lanes + lane < left) to[i * of.lanes + lane] = E::store(value);
    }
  }
};

template <class E, bool kColumns>
__global__ void __launch_bounds__(32 * kPartWarps, 4) shares_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = Turn<E, kColumns>;
  const Group<kColumns> of(p);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.units), unit = blockIdx.x % static_cast<unsigned>(p.units);
  const int64_t begin = unit * p.unit_length, end = min(p.length, begin + p.unit_length);
  const int of_warp = of.lanes * Turn::kEach;
  auto mine = Share::none();
#pragma unroll 1
  for (int64_t first = begin + threadIdx.x / 32 * of_warp; first < end; first += kPartWarps * of_warp) {
    Turn turn;
    turn.load(p, of, row, first, end);
    turn.take_into(mine, p.logs);
  }
  let_dependents_start();
  mine.merge_block(of, p.logs);
  if (threadIdx.x < of.inner) static_cast<Share*>(p.workspace)[int64_t{blockIdx.x} * of.inner + threadIdx.x] = mine;
}

template <class E, bool kColumns>
__global__ void __launch_bounds__(32 * kPartWarps, 4) results_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = Turn<E, kColumns>;
  const Group<kColumns> of(p);
  const auto parts = static_cast<unsigned>((p.length + p.result_length - 1) / p.result_length);
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = block / parts, begin = block % parts * p.result_length;
  const int64_t end = min(p.length, begin + p.result_length);
  const int of_warp = of.lanes * Turn::kEach, of_block = kPartWarps * of_warp;
  int64_t first = begin + threadIdx.x / 32 * of_warp;
  first += (end - 1 - begin) / of_block * of_block;
  Gradient<E> gradient;
  bool merged = false;
#pragma unroll 1
  for (; first >= begin; first -= of_block) {
    Turn turn;
    turn.load(p, of, row, first, end);
    if (!merged) {  // the first elements are on their way meanwhile
      wait_for_predecessor();
      gradient = Gradient<E>(Share::of_row(p, of, row), p.logs);
      merged = true;
    }
    turn.store(p, of, row, first, end, gradient);
  }
}

// Few flat rows, as a cooperative launch: a block holds its unit, of which each warp has one turn, and waits for the
// shares of all others. So the arrays are read once, and there is one launch.
template <class E, bool kColumns>
__global__ void __launch_bounds__(32 * kPartWarps, 4) held_kernel(const __grid_constant__ SplitParameters p) {
  using Turn = Turn<E, kColumns>;
  const Group<kColumns> of(p);
  const int64_t row = blockIdx.x / static_cast<unsigned>(p.units), unit = blockIdx.x % static_cast<unsigned>(p.units);
  const int64_t begin = unit * p.unit_length, end = min(p.length, begin + p.unit_length);
  const int64_t first = begin + threadIdx.x / 32 * (of.lanes * Turn::kEach);
  Turn turn;
  turn.load(p, of, row, first, end);
  auto share = Share::none();
  turn.take_into(share, p.logs);
  share.merge_block(of, p.logs);
  if (threadIdx.x < of.inner) static_cast<Share*>(p.workspace)[int64_t{blockIdx.x} * of.inner + threadIdx.x] = share;
  cooperative_groups::this_grid().sync();
  turn.store(p, of, row, first, end, Gradient<E>(Share::of_row(p, of, row), p.logs));
}

template <class E, bool kColumns>
cudaError_t launch_split(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                         void* workspace) {
  if (plan.traits.stat_bytes != static_cast<int>(sizeof(Share))) return cudaErrorInvalidValue;
  const SplitParameters p = {buffers.y,
                             buffers.x,
                             buffers.out,
                             workspace,
                             problem.rows.length * problem.rows.inner,
                             plan.part_length,
                             plan.result_length,
                             static_cast<int>(problem.rows.inner),
                             static_cast<int>(plan.units),
                             problem.op == Op::kLogSoftmaxJvp};
  const int64_t blocks = problem.rows.outer * plan.units;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.block = dim3(plan.threads());
  launched.grid = dim3(static_cast<unsigned>(blocks));
  if (!plan.split) return row_engine::launch_together<held_kernel<E, kColumns>>(stream, launched, p);
  const cudaError_t status = launch(stream, launched, shares_kernel<E, kColumns>, p);
  if (status != cudaSuccess) return status;
  const int64_t parts = (p.length + p.result_length - 1) / p.result_length;
  launched.grid = dim3(static_cast<unsigned>(problem.rows.outer * parts));
  launched.overlap = plan.overlap;
  return launch(stream, launched, results_kernel<E, kColumns>, p);
}

}  // namespace jaxgpuops::softmax
