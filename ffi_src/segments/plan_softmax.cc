#include <algorithm>

#include "common/rounding.h"
#include "segments/plan.h"

namespace jaxgpuops::segments {
namespace {

constexpr int64_t kMostCellBytes = 226 << 10;  // in shared memory; GPUs that have less have the cells in the workspace

// The most rows that one block can take alone.
int64_t most_whole_rows(const Segments& problem) {
  return problem.dtype == DType::kFloat64 ? kMostWideRows : 4 * kMostCellThreads;
}
bool has_few_cells(const Segments& problem) {
  return problem.rows.length <= most_whole_rows(problem) && problem.segments * kBlockCellBytes <= kMostCellBytes;
}

// Plans cells of softmax for blocks that have all rows of some columns: eight columns (a sector of 32 bytes), or fewer
// where there would be few blocks. Returns false if there are too many rows or segments. That may not depend on the
// number of outer indices, because a part of a batch may be planned with the workspace of the whole.
bool plan_whole_cells(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 128, kFewElements = 64;
  const auto [outer, length, inner] = problem.rows;
  const bool wide = problem.dtype == DType::kFloat64;
  const int64_t most_elements = most_whole_rows(problem);
  const int64_t bytes = problem.segments * (wide ? 16 : kBlockCellBytes);  // of the cells of a column
  const int64_t most = (wide ? kGpus[0] : gpu).shared_bytes - 1024;
  if (!has_few_cells(problem) || bytes > most) return false;
  int64_t columns = 8;
  while (columns > 1 && (columns > inner || length * columns > most_elements || bytes * columns > most ||
                         (length * columns > kFewElements && ceil_div(inner, columns) * outer < kBlocks)))
    columns /= 2;
  plan.algorithm = Segmenting::kCells;
  plan.columns = static_cast<int>(columns);
  plan.rows = length;
  plan.tiles = 1;
  const int64_t elements = length * columns;
  const int64_t threads = elements <= kMostCellThreads ? elements : ceil_div(elements, 4);
  plan.warps = static_cast<int>(ceil_div(threads, 32));
  plan.shared_bytes = bytes * columns;
  return true;
}

// Plans cells of softmax for clusters of blocks, each of which has all rows of some columns in its registers. Returns
// false if all blocks do not run at the same time, if there are many cells, or if there are no clusters. A part of a
// batch has a cluster if the whole has.
bool plan_cluster_cells(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kHeld = 4 * kMostCellThreads;  // numbers that the registers of a block hold
  constexpr int64_t kLeast = 1024;                 // a block with fewer has too little to do
  constexpr int64_t kMostCells = 4096;             // of more, each block would have as much to do as with its rows
  const auto [outer, length, inner] = problem.rows;
  if (gpu.max_cluster < 2 || problem.segments > kMostCells) return false;
  // If blocks have more numbers than they hold, each pass reads these again, in up to four turns. That pays if an outer
  // index alone has blocks for half the GPU, and no block can take all rows alone.
  for (int64_t turns = 1; turns <= (has_few_cells(problem) ? 1 : 4); turns *= 2) {
    const int64_t most = turns * kHeld;
    int64_t columns = 8, cluster = 1;
    const auto chunks = [&, inner = inner] { return ceil_div(inner, columns); };
    while (columns > 1 && (columns > inner || length * columns > gpu.max_cluster * most ||
                           problem.segments * columns > kMostCells || chunks() * gpu.max_cluster < gpu.multiprocessors))
      columns /= 2;
    const int64_t numbers = length * columns;  // of a cluster
    const auto blocks = [&, outer = outer] { return outer * chunks() * cluster; };
    while (cluster < gpu.max_cluster &&
           (numbers > cluster * most || (numbers > cluster * kLeast && 2 * blocks() <= gpu.multiprocessors)))
      cluster *= 2;
    if (numbers > cluster * most || blocks() > gpu.multiprocessors) continue;
    if (turns > 1 && 2 * chunks() * cluster < gpu.multiprocessors) continue;
    plan.algorithm = Segmenting::kCells;
    plan.columns = static_cast<int>(columns);
    plan.cluster = static_cast<int>(cluster);
    plan.tiles = cluster;
    plan.rows = ceil_div(length, cluster);
    const int64_t each = plan.rows * columns;
    const int64_t threads = each <= kMostCellThreads ? each : std::min<int64_t>(ceil_div(each, 4), kMostCellThreads);
    plan.warps = static_cast<int>(ceil_div(threads, 32));
    plan.shared_bytes = problem.segments * columns * kBlockCellBytes;
    return true;
  }
  return false;
}

// Plans cells for blocks that share the rows. Returns false if other kernels are faster, which may not depend on the
// GPU.
bool plan_shared_cells(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kFew = 3 << 19;  // numbers
  const auto [outer, length, inner] = problem.rows;
  const int64_t segments = problem.segments, numbers = length * inner;
  const bool must = has_few_cells(problem);
  // If there are many numbers, and L2 holds few of their cells, sorting the ids is faster.
  const bool spread = numbers >= 4 << 20 && segments * inner > 1 << 20;
  // The cells must not take too much memory.
  if (!must && segments * inner > std::max<int64_t>(4 << 20, 4 * numbers)) return false;
  const auto blocks = [&, outer = outer, inner = inner](int64_t of_gpu) {
    return std::max<int64_t>(1, of_gpu / ceil_div(inner, plan.columns) / outer);
  };
  // Blocks have their cells in shared memory, if each block then has many rows: cells of up to 32 columns if two such
  // blocks fit on a multiprocessor, otherwise of fewer, at least 8.
  const int64_t most = gpu.shared_bytes - 1024, half = kMostCellBytes / 2 - 1024;
  plan.columns = static_cast<int>(std::min<int64_t>(inner, 32));
  const auto bytes = [&] { return segments * plan.columns * kBlockCellBytes; };
  while (plan.columns > 8 && bytes() > half) plan.columns /= 2;
  const bool fits = bytes() <= kMostCellBytes && length >= 8 * segments;
  // A block has as many rows as there are segments, or folding its cells would take longer than its rows. Of many cells
  // that leaves few blocks: then atomics in the workspace take less time, unless there are many rows for all blocks.
  const bool has_table = fits && segments * plan.columns <= 2048 + length * plan.columns / 128;
  if (has_table && bytes() <= most) {
    plan.shared_bytes = bytes();
    plan.warps = bytes() <= half ? 16 : 32;
    const int64_t most_tiles = blocks(gpu.multiprocessors * 32 / plan.warps);
    plan.tiles = std::clamp<int64_t>(length / std::max<int64_t>(64, segments), 1, most_tiles);
  } else if (must || fits || numbers <= kFew || (inner < 4 && !spread)) {
    plan.columns = static_cast<int>(std::min<int64_t>(inner, 32));
    plan.warps = 8;
    // The steps of a thread's rows wait for each other. So it has one row if all blocks then run at the same time.
    const int64_t step = 32 * plan.warps / plan.columns, resident = blocks(8 * gpu.multiprocessors);
    const int64_t each = ceil_div(length, step * resident) == 1       ? 1
                         : ceil_div(length, 4 * step * resident) == 1 ? 4
                                                                      : 8;
    plan.tiles = std::min(ceil_div(length, each * step), blocks(32 * gpu.multiprocessors));
  } else {
    return false;
  }
  plan.algorithm = Segmenting::kCells;
  plan.rows = ceil_div(length, plan.tiles);
  plan.tiles = ceil_div(length, plan.rows);
  plan.workspace_bytes = aligned(segments * inner * kCellBytes);
  plan.overlap = gpu.dependent_launch;
  return plan.rows < int64_t{1} << 31;
}

// Whether segment_max and segment_sum would both take kLanes. With many rows, these two take less time than cells.
bool prefers_lanes(const Segments& problem) {
  const Rows& rows = problem.rows;
  const bool narrow = rows.inner <= kMostTableColumns;
  return rows.length * rows.inner > 2 << 20 && problem.segments <= (narrow ? 64 : 128) &&
         (narrow || rows.inner > kMostAtomicColumns);
}

}  // namespace

SegmentsPlan plan_segment_softmax(const Segments& segments, const Gpu& gpu) {
  Segments problem = segments;
  problem.op = Op::kMax;  // whoever asks: the largest elements are folded, and sums have other tiles
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  plan.algorithm = Segmenting::kNone;
  if (rows.elements() == 0 || problem.segments == 0 || rows.count() > kMostBlocks) return plan;
  // Rows whose ids ascend are read in order, unless they are few. Cells are for few rows of float64: with many rows, a
  // fixed-point sum of 64 bits leaves too few bits for each exponential.
  const bool wide = problem.dtype == DType::kFloat64;
  const bool few = rows.length <= kFewRows || rows.length * rows.inner <= 8 << 10;
  if (wide || !problem.sorted || few) {
    // Of more rows, a cluster takes less time than a block.
    if (!wide && rows.length > kFewRows && plan_cluster_cells(problem, gpu, plan)) return plan;
    if (plan_whole_cells(problem, gpu, plan)) return plan;
    if (!wide && !has_few_cells(problem) && prefers_lanes(problem)) return plan;
    if (!wide && plan_cluster_cells(problem, gpu, plan)) return plan;
    if (!wide && plan_shared_cells(problem, gpu, plan)) return plan;
    plan = {};
  }
  if (wide) {
    plan.algorithm = Segmenting::kNone;
    return plan;
  }
  plan_tiles(problem, kPairBytes, gpu, plan);
  plan.pairs = plan.workspace_bytes;
  plan.workspace_bytes += aligned(problem.segments * rows.inner * kPairBytes);
  return plan;
}

}  // namespace jaxgpuops::segments
