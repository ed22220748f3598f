// The row engine: computes everything that follows from statistics of a row (such as its maximum or a sum) and from its
// elements. An operation is a policy (policy.cuh); row_engine/plan.h says how rows are divided.
//
// A lane loads all it holds of a row, in the row's own type, before it looks at any of it. Lanes merge their statistics
// with shuffles, warps through shared memory, blocks through the shared memory of their cluster, so that a row is read
// once and its result written once. Split algorithms have three kernels. The first writes statistics of parts to the
// workspace. The second merges them, one block per row. The third sweeps over the array backwards and writes the
// results; it begins with what the first read last, which is still in the L2 cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "row_engine/cuda/columns.cuh"
#include "row_engine/cuda/columns_flat.cuh"
#include "row_engine/cuda/columns_stream.cuh"
#include "row_engine/cuda/columns_walk.cuh"
#include "row_engine/cuda/in_registers.cuh"
#include "row_engine/cuda/policy.cuh"
#include "row_engine/cuda/spread.cuh"
#include "row_engine/cuda/stream.cuh"
#include "row_engine/cuda/sweep.cuh"
#include "row_engine/cuda/tiles.cuh"

namespace jaxgpuops::row_engine {

// ---- Between the sweeps of a split row ------------------------------------------------------------------------------

// Each lane merges the units of one column; used if units are few.
template <class P>
__global__ void __launch_bounds__(32 * kAlongWarps) merge_few_kernel(const __grid_constant__ Parameters<P> p) {
  wait_for_predecessor();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  const int64_t outer = column / p.inner, i = column - outer * p.inner;
  const auto row = P::row(p.args, outer, i, p.length, p.inner);
  const auto all = merge_serially<P>([&](int u) { return *stat_at(p, outer, u, i); }, 0, 1, p.units);
  P::write_row(p.args, column, row, P::finish(p.args, row, all));
}

// A block merges the units of a column. If units are so few that a warp can merge them, each warp of a block merges a
// column.
template <class P>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) merge_kernel(const __grid_constant__ Parameters<P> p) {
  let_dependents_start();
  wait_for_predecessor();
  const bool alone = p.units <= kMaxFlatSpans;
  const int64_t column =
      alone ? int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32 : static_cast<int64_t>(blockIdx.x);
  const int64_t outer = column / p.inner, i = column - outer * p.inner;
  if (column >= p.columns) return;
  const auto stat = [&](int u) { return *stat_at(p, outer, u, i); };
  const int begin = alone ? threadIdx.x % 32 : threadIdx.x, step = alone ? 32 : blockDim.x;
  // A warp reads all its units at once: each read takes as long as all.
  Stat<P> all = !alone                      ? merge_lanes<P>(merge_serially<P>(stat, begin, step, p.units))
                : p.units <= kMostFlatParts ? merge_few_by_warp<P, kMostFlatParts / 32>(stat, p.units)
                                            : merge_few_by_warp<P, kMaxFlatSpans / 32>(stat, p.units);
  if (!alone) {
    auto* const of_warps = reinterpret_cast<Stat<P>*>(dynamic_shared_memory());
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    all = merge_by_warp<P>([&](int w) { return of_warps[w]; }, blockDim.x / 32);
  }
  if (begin != 0) return;
  const auto row = P::row(p.args, outer, i, p.length, p.inner);
  const auto final = P::finish(p.args, row, all);
  P::write_row(p.args, column, row, final);
  *final_at(p, outer, i) = final;
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Launches a kernel whose blocks wait for each other, or returns cudaErrorCooperativeLaunchTooLarge if the device (or
// the part of it that this process has) cannot run all of them at the same time.
template <auto kKernel, class Parameter>
cudaError_t launch_together(cudaStream_t stream, Launch shape, const Parameter& parameter) {
  static Residents residents;
  int most = 0;
  const cudaError_t status = residents.count(reinterpret_cast<const void*>(kKernel), shape, &most);
  if (status != cudaSuccess) return status;
  if (static_cast<unsigned>(most) < shape.grid.x) return cudaErrorCooperativeLaunchTooLarge;
  shape.together = true;
  return launch(stream, shape, kKernel, parameter);
}

// Whether rows, if they are aligned, take the kernel for statistics by clusters of small blocks.
template <class P>
bool takes_statistics(const RowPlan& plan, const Parameters<P>& p) {
  return kOftenStatistics<P> && plan.algorithm == RowAlgorithm::kRows && plan.spans > 1 && plan.blocks > 1 &&
         p.out == nullptr && plan.vectors == (P::kLarge ? 8 : kOnlyVectors) && plan.block_warps <= kPartWarps;
}

template <class P>
struct Call {
  cudaStream_t stream;
  const RowPlan& plan;
  Rows shape;
  Parameters<P> p;

  using Kernel = void (*)(Parameters<P>);

  template <int kVectors, Sharing kSharing>
  Kernel rows() const {
    if constexpr (P::kAlignedRows)
      if (p.aligned) return rows_kernel<P, kVectors, kSharing, true>;
    if constexpr (kSingle<P> && kVectors > 1)
      if (plan.single && p.out) return rows_kernel<P, kVectors, kSharing, false, true>;
    return rows_kernel<P, kVectors, kSharing, false>;
  }

  Kernel lean_rows() const {
    if (!p.aligned) return lean_rows_kernel<P, -1>;
    switch (plan.lane_bits) {
      case 1: return lean_rows_kernel<P, 1>;
      case 2: return lean_rows_kernel<P, 2>;
      case 3: return lean_rows_kernel<P, 3>;
      case 4: return lean_rows_kernel<P, 4>;
      case 5: return lean_rows_kernel<P, 5>;
    }
    return nullptr;
  }

  // The kernel that a plan of rows asks for.
  Kernel rows() const {
    if constexpr (kSpread<P>) {
      if (plan.spread) return p.aligned ? spread_kernel<P, true> : spread_kernel<P, false>;
      if (plan.wide) {
        if constexpr (kOneVector<P>)
          if (plan.wide == 1) return wide_kernel<P, 1>;
        return plan.wide == kWideVectors ? wide_kernel<P, kWideVectors> : nullptr;
      }
    }
    if constexpr (kSwept<P>) {
      if (plan.vectors == kOnlyVectors && plan.spans > 1)
        return p.aligned ? sweep_kernel<P, true> : sweep_kernel<P, false>;
    } else if constexpr (!P::kFast) {
      if (plan.vectors == kOnlyVectors) return rows<kOnlyVectors, Sharing::kAny>();
    } else if (plan.spans == 1) {
      if constexpr (!kSpread<P> || P::kOperands == 1)  // spread_kernel makes such results of two arrays
        if (plan.vectors == 1) return rows<1, Sharing::kTeam>();
      if (plan.vectors == kOnlyVectors) return rows<kOnlyVectors, Sharing::kTeam>();
      if constexpr (kLean<P>)
        if (plan.vectors == kLeanVectors && p.out == nullptr) return lean_rows();
      if constexpr (P::kLarge)
        if (plan.vectors == 8) return rows<8, Sharing::kTeam>();
    } else {
      constexpr int kVectors = P::kLarge ? 8 : kOnlyVectors;
      if constexpr (kOftenStatistics<P>)
        if (p.aligned && takes_statistics<P>(plan, p)) return rows_kernel<P, kVectors, Sharing::kStatistics, true>;
      if (plan.vectors == kVectors) return rows<kVectors, Sharing::kBlocks>();
    }
    return nullptr;
  }

  Kernel kernel() const {
    if (plan.algorithm == RowAlgorithm::kRows || plan.algorithm == RowAlgorithm::kRowsSplit) return rows();
    if constexpr (P::kAlong)
      if (plan.along) return along_kernel<P>;
    if constexpr (P::kPackColumns)
      if (plan.vector && !plan.along) return columns_kernel<P, true>;
    if constexpr (P::kSingleColumns)
      if (!plan.vector) return columns_kernel<P, false>;
    return nullptr;
  }

  // One launch for rows that all blocks share.
  cudaError_t rows_together() {
    if constexpr (kTogether<P>) {
      constexpr int kVectors = P::kLarge ? 8 : kOnlyVectors;
      constexpr Sharing kSharing = P::kFast ? Sharing::kBlocks : Sharing::kAny;
      Launch launched;
      launched.grid = dim3(static_cast<unsigned>(shape.outer * plan.blocks));
      launched.block = dim3(plan.threads());
      launched.shared_bytes = kRowsBarrierBytes + plan.block_warps * sizeof(Stat<P>);
      if constexpr (P::kAlignedRows)
        if (p.aligned) return launch_together<rows_together_kernel<P, kVectors, kSharing, true>>(stream, launched, p);
      return launch_together<rows_together_kernel<P, kVectors, kSharing, false>>(stream, launched, p);
    } else {
      return cudaErrorCooperativeLaunchTooLarge;
    }
  }

  // Launches a sweep over all flat rows.
  cudaError_t flat(Phase phase) {
    if constexpr (kFlat<P>) {
      p.phase = phase;
      const bool finish = phase == Phase::kFinish;
      p.part_length = finish ? plan.result_length : plan.part_length;
      if (!p.cluster) p.blocks = static_cast<int>((shape.length + p.part_length - 1) / p.part_length);
      FlatParameters<P> f{p, plan.period, plan.turns, plan.across, plan.deep, plan.slices, plan.ahead, plan.late, 0};
      const int64_t blocks = shape.outer * p.blocks * plan.slices;
      if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
      Launch launched;
      launched.grid = dim3(static_cast<unsigned>(blocks));
      launched.block = dim3(plan.threads());
      if constexpr (P::kOutput) {
        if (finish) {
          launched.overlap = plan.overlap;
          if (plan.late) launched.shared_bytes = shape.inner * sizeof(typename P::Final);
          return launch(stream, launched, flat_results_kernel<P>, f);
        }
      }
      const int64_t stats =
          int64_t{plan.across} * plan.deep * (16 / sizeof(typename P::Element::Bits)) * sizeof(Stat<P>);
      launched.shared_bytes = (stats + 15) / 16 * 16;
      if (phase == Phase::kWhole && p.out) launched.shared_bytes += shape.inner * sizeof(typename P::Final);
      if (phase == Phase::kWhole && p.cluster) {
        launched.shared_bytes =
            (launched.shared_bytes + 15) / 16 * 16 + (plan.blocks + 1) * shape.inner * sizeof(Stat<P>);
        launched.cluster = static_cast<int>(plan.blocks);
        launched.packed = true;
      }
      auto kernel = flat_kernel<P, false>;
      if constexpr (P::kOutput) {
        if (plan.staged && phase == Phase::kWhole) {
          kernel = flat_kernel<P, true>;
          f.stage = static_cast<int>((launched.shared_bytes + 15) / 16 * 16);
          launched.shared_bytes =
              f.stage + P::kOperands * (plan.part_length * shape.inner * sizeof(typename P::Element::Bits) + 32);
        }
      }
      const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
      if (status != cudaSuccess) return status;
      return launch(stream, launched, kernel, f);
    } else {
      return cudaErrorInvalidValue;
    }
  }
};

// Runs a call. The caller has set the operands, `out` and the arguments of the operation; the plan says the rest.
template <class P>
cudaError_t run(cudaStream_t stream, const RowPlan& plan, const Rows& rows, Parameters<P> p, void* workspace) {
  static_assert(is_policy<P>());
  if (plan.algorithm == RowAlgorithm::kEmpty) return cudaSuccess;
  if (plan.traits.stat_bytes != static_cast<int>(sizeof(Stat<P>)) ||
      plan.traits.final_bytes < static_cast<int>(sizeof(typename P::Final)))
    return cudaErrorInvalidValue;
  if (plan.algorithm == RowAlgorithm::kColumnsStream && !is_aligned(p))
    return run<P>(stream, held_in_registers(plan), rows, p, workspace);
  if (plan.algorithm == RowAlgorithm::kRowsStream && !is_alike(p))
    return run<P>(stream, held_in_registers(plan), rows, p, workspace);
  RowKernels kernels;
  kernels.merge = reinterpret_cast<const void*>(merge_kernel<P>);
  if constexpr (P::kAlong) kernels.merge_few = reinterpret_cast<const void*>(merge_few_kernel<P>);
  kernels.item_bytes = sizeof(typename P::Element::Bits);
  kernels.stat_bytes = sizeof(Stat<P>);
  kernels.final_bytes = sizeof(typename P::Final);
  kernels.wide_shared_bytes = wide_shared_bytes<P>(plan.block_warps, plan.wide);
  kernels.swept = kSwept<P>;
  kernels.ragged = P::kFast && P::kOperands == 1 && (!P::kOutput || takes_statistics<P>(plan, p));
  set_parameters(p, plan, rows, kernels, workspace);
  if (kStages<P, kWideVectors> && plan.wide == kWideVectors && p.out && !p.aligned)
    kernels.wide_shared_bytes = staged_shared_bytes<P, kWideVectors>(plan.block_warps);
  if (plan.algorithm == RowAlgorithm::kRowsTiles) return run_tiles<P>(stream, plan, p);
  if (plan.algorithm == RowAlgorithm::kRowsStream) return run_stream<P>(stream, plan, p);
  if (plan.algorithm == RowAlgorithm::kColumnsStream) return run_columns_stream<P>(stream, plan, p);
  if (plan.algorithm == RowAlgorithm::kColumnsWalk) return run_walk<P>(stream, plan, p);
  Call<P> call{stream, plan, rows, p};
  if (plan.algorithm == RowAlgorithm::kRowsTogether) {
    const cudaError_t status = call.rows_together();
    if (status != cudaErrorCooperativeLaunchTooLarge) return status;
    RowPlan split = plan;  // a part of a GPU may be too small for all blocks
    split.algorithm = RowAlgorithm::kRowsSplit;
    return run<P>(stream, split, rows, p, workspace);
  }
  if (plan.algorithm == RowAlgorithm::kColumnsFlat) {
    if (!plan.split) return call.flat(Phase::kWhole);
    cudaError_t status = call.flat(Phase::kPartial);
    if (status == cudaSuccess && !plan.late) status = merge(stream, plan, call.p, kernels);
    if (status == cudaSuccess && p.out) status = call.flat(Phase::kFinish);
    return status;
  }
  kernels.sweep = reinterpret_cast<const void*>(call.kernel());
  return run_sweeps(stream, plan, rows, p, kernels);
}

}  // namespace jaxgpuops::row_engine
