#include "row_engine/cuda/launch.h"

#include <algorithm>

#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "common/rounding.h"

namespace jaxgpuops::row_engine {
namespace {

constexpr int kMergeWarps = 8;  // warps of a block if each warp merges a column

uintptr_t past_vector(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; }

cudaError_t launch_with(cudaStream_t stream, const Launch& launched, const void* kernel, RowParameters& p) {
  void* argument = &p;
  return launch_pointers(stream, launched, kernel, &argument);
}

// Launches a sweep over all columns.
cudaError_t sweep(cudaStream_t stream, const RowPlan& plan, const Rows& shape, RowParameters& p,
                  const RowKernels& kernels, Phase phase, bool overlap) {
  p.phase = phase;
  Launch launched;
  launched.block = dim3(plan.threads());
  launched.overlap = overlap;
  const bool whole = phase == Phase::kWhole;
  const int64_t stat = kernels.stat_bytes, of_vector = 16 / kernels.item_bytes;
  int64_t groups;  // how many groups of columns there are
  if (shape.inner == 1) {
    groups = p.columns;
    if (plan.wide) {
      launched.shared_bytes = kernels.wide_shared_bytes;
    } else if (plan.spans == 1) {
      const int64_t teams = plan.block_warps * (32 >> (plan.lane_bits + (plan.spread ? p.vector_bits : 0)));
      groups = (groups + teams - 1) / teams;
    } else {
      const int64_t spans = whole ? plan.spans : kernels.swept ? plan.part : plan.block_warps;
      launched.shared_bytes = std::max(plan.room, kRowsBarrierBytes + spans * stat);
    }
  } else if (plan.along) {
    const int64_t columns = of_vector << plan.column_lane_bits;
    groups = (p.columns + columns - 1) / columns;
    launched.shared_bytes = of_vector * plan.threads() * stat;
  } else {
    const int64_t columns = (plan.vector ? of_vector : 1) << (plan.column_lane_bits + plan.column_warp_bits);
    groups = (p.columns + columns - 1) / columns;
    if (phase != Phase::kFinish)
      launched.shared_bytes =
          columns * ((plan.axis_warps + 1 + (p.cluster ? plan.blocks + 1 : 0)) * stat + kernels.final_bytes);
  }
  const int64_t blocks = groups * plan.blocks;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  if (p.cluster) {
    launched.cluster = static_cast<int>(plan.blocks);
    launched.packed = plan.packed;
    const cudaError_t status = allow_cluster(kernels.sweep, launched.cluster);
    if (status != cudaSuccess) return status;
  }
  return launch_with(stream, launched, kernels.sweep, p);
}

}  // namespace

bool is_aligned(const RowParameters& p) {
  return past_vector(p.operands[0]) == 0 && past_vector(p.operands[1]) == 0 && past_vector(p.out) == 0;
}

bool is_alike(const RowParameters& p) {
  const auto alike = [&](const void* pointer) {
    return !pointer || past_vector(pointer) == past_vector(p.operands[0]);
  };
  return alike(p.operands[1]) && alike(p.out);
}

void set_parameters(RowParameters& p, const RowPlan& plan, const Rows& rows, const RowKernels& kernels,
                    void* workspace) {
  const bool split = plan.algorithm == RowAlgorithm::kRowsSplit || plan.algorithm == RowAlgorithm::kColumnsSplit;
  p.length = rows.length;
  p.inner = rows.inner;
  p.columns = rows.count();
  p.workspace = static_cast<unsigned char*>(workspace);
  p.workspace_stride = plan.workspace_bytes;
  p.finals_at = (rows.inner * plan.units * kernels.stat_bytes + 15) / 16 * 16;
  p.spans = static_cast<int>(plan.spans);
  p.units = static_cast<int>(plan.units);
  p.lane_bits = plan.lane_bits;
  p.vector_bits = bits_for(plan.vectors);
  p.blocks = static_cast<int>(plan.blocks);
  p.unit_warps = plan.unit_warps;
  p.part = plan.part;
  p.column_lane_bits = plan.column_lane_bits;
  p.column_warp_bits = plan.column_warp_bits;
  p.axis_warps = plan.axis_warps;
  p.part_length = (rows.length + plan.blocks - 1) / plan.blocks;
  p.ahead = plan.ahead;
  p.cluster = !split && !plan.split && plan.algorithm != RowAlgorithm::kRowsTogether && plan.blocks > 1;
  if (p.cluster) p.block_bits = bits_for(p.blocks);
  const bool ragged = kernels.ragged && rows.inner == 1 && p.columns == 1 && plan.spans > 1 && !plan.wide &&
                      (plan.algorithm == RowAlgorithm::kRows || plan.algorithm == RowAlgorithm::kRowsSplit);
  p.aligned = is_aligned(p) && (ragged || (rows.inner == 1 ? rows.length : rows.inner) * kernels.item_bytes % 16 == 0);
}

cudaError_t merge(cudaStream_t stream, const RowPlan& plan, RowParameters& p, const RowKernels& kernels) {
  Launch launched;
  launched.overlap = plan.overlap;
  if (kernels.merge_few && plan.along && plan.units <= kMaxSerialUnits) {
    const int threads = 32 * kAlongWarps;
    launched.grid = dim3(static_cast<unsigned>((p.columns + threads - 1) / threads));
    launched.block = dim3(threads);
    return launch_with(stream, launched, kernels.merge_few, p);
  }
  // If a warp merges a column, blocks have several warps when otherwise not all blocks would run at once.
  const int64_t warps = plan.units <= kMaxFlatSpans ? std::clamp<int64_t>(p.columns / 1024, 1, kMergeWarps) : 1;
  launched.grid = dim3(static_cast<unsigned>((p.columns + warps - 1) / warps));
  launched.block = dim3(plan.units <= kMaxFlatSpans ? 32 * static_cast<unsigned>(warps) : 32 * kMaxBlockWarps);
  launched.shared_bytes = kMaxBlockWarps * kernels.stat_bytes;
  return launch_with(stream, launched, kernels.merge, p);
}

cudaError_t run_sweeps(cudaStream_t stream, const RowPlan& plan, const Rows& rows, RowParameters& p,
                       const RowKernels& kernels) {
  if (!kernels.sweep) return cudaErrorInvalidValue;
  if (plan.algorithm != RowAlgorithm::kRowsSplit && plan.algorithm != RowAlgorithm::kColumnsSplit)
    return sweep(stream, plan, rows, p, kernels, Phase::kWhole, false);
  cudaError_t status = sweep(stream, plan, rows, p, kernels, Phase::kPartial, false);
  if (status == cudaSuccess) status = merge(stream, plan, p, kernels);
  if (status == cudaSuccess && p.out) status = sweep(stream, plan, rows, p, kernels, Phase::kFinish, plan.overlap);
  return status;
}

}  // namespace jaxgpuops::row_engine
