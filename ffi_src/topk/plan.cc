#include "topk/plan.h"

#include <algorithm>

#include "topk/radix_shape.h"
#include "topk/stream_shape.h"
#include "topk/warp_shape.h"

namespace jaxgpuops::topk {
namespace {

// Geometry follows the shape, not the device, so that results, workspace and explanations are the same everywhere.
// This is the H200's number of multiprocessors; others do well enough with it.
constexpr int64_t kMultiprocessors = 132;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One block of 512 threads on each multiprocessor while rows are few, so that the most bytes are in flight for each;
// two of 256 where rows come in waves, so that one reads while the other selects.
Plan plan_stream(Rows rows, int64_t k, int key_bytes, int compute_capability, int64_t workspace_bytes) {
  const int64_t composite = key_bytes == 8 ? 16 : 8;
  Plan plan;
  plan.algorithm = Algorithm::kStream;
  const bool wide = k > 256 || 2 * rows.count() <= kMultiprocessors;
  plan.threads = wide ? 512 : 256;
  if (rows.length <= whole_row_elements(key_bytes)) return plan;
  // Blocks that a row is worth: enough to fill the device, each with at least a tile to read.
  const int64_t tile = tile_elements(key_bytes, plan.threads), blocks = (wide ? 1 : 2) * kMultiprocessors;
  int64_t slices = std::min(blocks / rows.count(), rows.length / std::max(tile, 2 * k));
  if (slices <= 1) return plan;
  if (compute_capability >= 90 && slices <= 16 && k <= 256) {  // a cluster has 8 blocks at most, but saves a launch
    while (2 * plan.slices <= std::min<int64_t>(slices, 8)) plan.slices *= 2;
    return plan;
  }
  if (workspace_bytes >= 0) slices = std::min(slices, workspace_bytes / (rows.inner * k * composite));
  if (slices <= 1) return plan;
  plan.algorithm = Algorithm::kGrid;
  plan.slices = static_cast<int>(slices);
  plan.workspace_bytes = rows.inner * slices * k * composite;
  return plan;
}

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kArgmax: return "argmax";
    case Algorithm::kWarp: return "warp";
    case Algorithm::kStream: return "stream";
    case Algorithm::kGrid: return "grid";
    case Algorithm::kColumns: return "columns";
    case Algorithm::kRadix: return "radix";
  }
  return "?";
}

Plan plan_argmax(Rows rows, int key_bits, int64_t workspace_bytes) {
  Plan plan;
  if (rows.count() == 0) return plan;
  plan.algorithm = Algorithm::kArgmax;
  const int64_t row_bytes = rows.length * key_bits / 8, composite = key_bits == 64 ? 16 : 8;
  plan.threads = 256;
  // Blocks that can start on their own without sharing a row, and the blocks that a long row is worth.
  int64_t units;
  if (rows.inner > 1) {
    units = rows.outer * ceil_div(rows.inner, 32);
  } else {
    plan.lanes = row_bytes <= 512 ? 8 : row_bytes <= 8192 ? 32 : 256;
    units = plan.lanes == 256 ? rows.count() : ceil_div(rows.count() * plan.lanes, 256);
  }
  int64_t slices = std::min(ceil_div(8 * kMultiprocessors, units), row_bytes * (rows.inner > 1 ? 16 : 1) / 32768);
  if (workspace_bytes >= 0) slices = std::min(slices, workspace_bytes / (rows.inner * composite));
  if (slices <= 1) return plan;
  plan.lanes = 256;
  plan.slices = static_cast<int>(slices);
  plan.workspace_bytes = rows.inner * slices * composite;
  return plan;
}

Plan plan_topk(Rows rows, int64_t k, int key_bits, bool sorted, int compute_capability, int64_t workspace_bytes) {
  if (k == 0 || rows.count() == 0) return {};
  if (k == 1) return plan_argmax(rows, key_bits, workspace_bytes);
  const int key_bytes = key_bits / 8;
  if (k <= kMaxWarpK && key_bytes <= 4 && rows.length * key_bytes <= kMaxWarpRowBytes) {
    Plan plan;
    const bool columns = rows.inner > 1;
    plan.algorithm = columns ? Algorithm::kColumns : Algorithm::kWarp;
    plan.lanes = warp_lanes(rows.count(), rows.length, k);
    plan.threads = 32 * warps_per_block(columns);
    return plan;
  }
  if (k > kMaxStreamK && rows.length > whole_row_elements(key_bytes)) {
    Plan plan;
    plan.algorithm = Algorithm::kRadix;
    plan.threads = 512;
    plan.workspace_bytes = rows.inner * radix_shape(rows.length, k, key_bytes, sorted).bytes;
    return plan;
  }
  return plan_stream(rows, k, key_bytes, compute_capability, workspace_bytes);
}

}  // namespace jaxgpuops::topk
