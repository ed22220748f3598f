// Chooses the kernel of a call, its geometry and the size of its workspace. The plan is a pure function of the problem
// and the compute capability: Python sizes the workspace and explains a call with it where there is no GPU, and the
// CUDA handler calls the same function.
#pragma once

#include "row_engine/plan.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax {

// `workspace_bytes` has the meaning that plan_row_engine() gives it.
RowPlan plan_softmax(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes = -1,
                     const RowTuning& tuning = {});

// Whether there is a kernel for a derivative with of_logits: for rows, for few long columns, and for columns of few
// positions. (Of float64: for rows of up to 512 KiB, and for columns of few positions.)
bool takes_logits(const Problem& problem);
// Whether that kernel is faster than the two of the forward pass and of a gradient from its result.
bool prefers_logits(const Problem& problem, const Gpu& gpu);

constexpr int kGradientWarps = 4;  // the most warps of a block of cuda/gradient_spread.cuh
// cuda/gradient_split.cu: the most columns; of how many columns lanes take vectors; elements that a lane takes at a
// time; blocks of a multiprocessor.
constexpr int kGradientColumns = 8;
constexpr int kWholeRows = -1;  // for `inner`: rows of which lanes take vectors
constexpr bool takes_vectors(int64_t inner) { return inner == kWholeRows || inner == 2 || inner == 4; }
constexpr int gradient_each(int item_bytes, int64_t inner) {
  if (inner == kWholeRows) return 4 * 16 / item_bytes;
  return takes_vectors(inner) && item_bytes == 2 ? 16 : 8;
}
constexpr int gradient_blocks(int64_t inner) { return inner == kWholeRows ? 3 : 4; }
// cuda/gradient_rows.cuh: vectors of a lane, as many as in the forward pass, and the most warps of a block.
constexpr int row_vectors(int item_bytes) { return item_bytes == 8 ? 4 : 8; }
constexpr int kRowWarps = 16;
// cuda/gradient_columns.cu: columns of a lane; where warps share a column, the most positions of a lane.
constexpr int columns_of_lane(int item_bytes, int64_t length) { return item_bytes == 2 && length <= 8 ? 2 : 1; }
constexpr int shared_positions(int item_bytes) { return item_bytes == 8 ? 8 : 16; }

// cuda/gradient_parts.cu: the most threads of a block, and columns.
constexpr int kGradientPartThreads = 512;

// Returns the value of Problem::general. Derivatives are general if they mask entries. The tangent of log_softmax is
// also general if it is not transposed, since the fast kernels have only the transpose, which gradients need.
bool is_general(Op op, double factor, bool scaled, bool biased, bool masked, bool transpose = false);

}  // namespace jaxgpuops::softmax
