#include <algorithm>

#include "common/rounding.h"
#include "topk/cuda/argmax_shape.h"
#include "topk/plan.h"

namespace jaxgpuops::topk {

Plan plan_argmax(Rows rows, int key_bits, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  if (rows.count() == 0) return plan;
  plan.algorithm = Algorithm::kArgmax;
  const int64_t key_bytes = key_bits / 8, candidate = composite_bytes(key_bytes);
  ArgmaxShape shape = argmax_shape(rows, static_cast<int>(key_bytes), true);
  // The candidates of all slices take at most a sixteenth of the bytes of x.
  int64_t most_slices = rows.length * key_bytes / (16 * candidate);
  if (workspace_bytes >= 0) most_slices = std::min(most_slices, workspace_bytes / (rows.inner * candidate));
  const bool clusters = gpu.max_cluster >= shape.tiles;
  const bool unshared = shape.form == ArgmaxForm::kBlocks && !clusters && rows.length > kArgmaxUnshared;
  if (unshared || (shape.period > 1 && shape.period > most_slices))
    shape = argmax_strided_shape(rows, static_cast<int>(key_bytes), true);
  if (shape.form == ArgmaxForm::kBlocks && clusters) plan.slices = static_cast<int>(shape.tiles);
  const bool shared = shape.form == ArgmaxForm::kTeams || shape.form == ArgmaxForm::kTiles ||
                      shape.form == ArgmaxForm::kSmall || shape.form == ArgmaxForm::kRows;
  plan.lanes = shared ? 1 << shape.lane_bits : shape.threads;
  plan.threads = static_cast<int>(ceil_div(shape.threads, 32) * 32);
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = argmax_shared_bytes(rows, static_cast<int>(key_bytes), shape);
  if (shape.form == ArgmaxForm::kBlocks) return plan;
  // `units` is the number of blocks if no blocks share a column. `slices` is limited by the number of blocks that the
  // device should have, and by how many blocks a column is worth.
  const int64_t units = rows.outer * shape.tiles;
  int64_t slices = 1;
  if (shape.form == ArgmaxForm::kRows && shape.lane_bits > 5) {
    const int64_t bytes = rows.length * key_bytes;
    const int cluster = argmax_cluster(rows, static_cast<int>(key_bytes));
    if (cluster > 1 && gpu.max_cluster >= cluster) {
      plan.slices = cluster;  // they need no workspace, and no second kernel
      return plan;
    }
    // If a row is short, a second kernel takes longer than one block that reads all of it. More slices than a block of
    // that kernel has threads are worth it only for long ones.
    const int64_t most =
        std::min({4 * gpu.multiprocessors / units, bytes / (16 << 10), std::max<int64_t>(128, bytes / (64 << 10))});
    if (bytes > (rows.outer < 40 ? kArgmaxAlone / 2 : kArgmaxAlone))
      while (2 * slices <= most) slices *= 2;
  } else if (shape.form == ArgmaxForm::kColumns && shape.beside) {
    const int64_t blocks = shape.period > 1 ? 4 : 2;  // for each multiprocessor
    slices = std::min(blocks * gpu.multiprocessors / units, rows.length / (4 * shape.deep));
  } else if (shape.form == ArgmaxForm::kColumns) {
    // How many rows a block reads in one step.
    const int64_t step = shape.threads * (16 / key_bytes) / rows.inner, longest = rows.length / (4 * step);
    if (argmax_is_vast(rows, static_cast<int>(key_bytes))) {
      slices = std::min(2 * gpu.multiprocessors / units, longest);
    } else {
      slices = std::min(4 * 128 * gpu.multiprocessors / shape.threads / units, longest);
      if (slices < 4) slices = 1;  // a second kernel would take longer
    }
  } else if (shape.form == ArgmaxForm::kStrided) {
    const int64_t blocks = shape.columns > 1 && shape.beside <= 32 ? 8 : 4;  // for each multiprocessor
    slices = std::min(blocks * gpu.multiprocessors / units, rows.length / (8 * shape.deep));
  }
  slices = std::min(slices, most_slices);
  if (shape.period > 1) slices = std::max<int64_t>(slices / shape.period, 1) * shape.period;
  if (slices <= 1) return plan;
  plan.slices = static_cast<int>(slices);
  plan.overlap = gpu.dependent_launch;
  plan.workspace_bytes = rows.inner * slices * candidate;
  return plan;
}

}  // namespace jaxgpuops::topk
