#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/rounding.h"
#include "row_engine/plan_parts.h"

namespace jaxgpuops {
namespace {

// Walking kernels: one warp walks axes of up to kWalkedAlone positions; longer axes get a warp for every
// kWalkPositions, which are so few that the second walk finds them in the caches. Even longer axes, and those of few
// columns, are read as flat rows.
constexpr int64_t kWalkedAlone = kHeldWalk, kWalkPositions = 16;
constexpr int64_t kMostWalked = 1024, kFewColumns = 64, kManyColumns = 256;
constexpr int64_t kStripWarps = 8;  // the least warps per multiprocessor for which strips are walked
// The least warps per multiprocessor for walks that hold packs in registers: along axes of up to kFewPacks positions,
// along longer ones, and of two arrays.
constexpr int64_t kHeldWarps = 8, kHeldLongWarps = 16, kHeldPairWarps = 4;
constexpr int64_t kFlatThreads = 256;  // threads of a block, where several blocks share a flat row
constexpr int64_t kFlatParts = 3;      // the least parts of a flat row; with fewer, more kernels are not worth it
constexpr int64_t kFlatResults = 4;    // blocks per multiprocessor, at most, in the kernel that writes results
// A block prefetches kFlatAhead bytes of its part if the part or the array is small. (For large ones, prefetching took
// up to a tenth longer.)
constexpr int64_t kFlatAhead = 64 << 10, kMostAhead = 4 << 20, kMostAheadOfPart = 24 << 10;
constexpr int64_t kFlatVectors = 4;  // vectors in a lane where several blocks share a short flat row
// Columns that are 16 bytes side by side are read as flat rows if they have at least kNarrow positions (kNarrowPair: if
// there are two arrays), since lanes of column kernels have parts of the axis, and would read pieces of 16 bytes.
// Columns that are 32 bytes side by side are read as flat rows if an outer index has more than kNarrowBytes.
constexpr int64_t kNarrow = 200, kNarrowPair = 1500, kNarrowBytes = 256 << 10;
// The blocks that share a flat row are a cluster, and there is only one kernel, if they are at most kFlatCluster and
// have at most kFlatClusterColumns columns. Without results, a multiprocessor has at most kFlatClusterBlocks blocks in
// all; with results of float64, kFlatClusterWide. (Clusters of 16, blocks of 512 threads, and smaller parts took up to
// twice as long.)
constexpr int64_t kFlatCluster = 8, kFlatClusterColumns = 32, kFlatClusterBlocks = 3, kFlatClusterWide = 6;
// A block reads so many bytes in the time in which it merges a result of a part.
constexpr int64_t kMergedForBytes = 512;
// Log-sum-exps of float64: the least batches of a part, and from how many elements of a flat row on, because
// exponentials make each merge slow. (With half as many parts, 56 x 2891 x 149 took 179 us instead of 209.)
constexpr int64_t kSlowBatches = 2, kManySlow = 1 << 18;
constexpr int64_t kFewFlatParts = 16;  // so few parts are made longer, so that they fit into a cluster
// The blocks of a cluster copy their parts to shared memory if these have at most kMostStaged bytes, and if there are
// at most kStagedBlocks blocks per multiprocessor: then a block waits for memory once. (If blocks are many, some
// compute meanwhile.)
constexpr int64_t kMostStaged = 100 << 10, kStagedBlocks = 2;
constexpr int64_t kLateColumns = 2;  // the most columns whose statistics a warp merges before it writes results

constexpr int kSmallHeldPositions = 32;  // the most positions of a column of kColumns that small_form() replaces
constexpr int kPreferredSmallWarps = 4;  // warps of a block that small_form() prefers
constexpr int64_t kSmallFlat = 1 << 13;  // the most elements of a flat row for small_flat_kernel
constexpr int64_t kSmallFlatRows = 132;  // the most such rows; twice as many with results
// Longer flat rows of at least so many elements are shared by a cluster of kFlatCluster blocks, if there are at most so
// many blocks per multiprocessor.
constexpr int64_t kLeastShared = 4096, kSharedBlocks = 2;

constexpr int kFlatFold = 8;  // as in cuda/small.cuh

// Tiles: about the bytes of a block, and the most if a smaller one has few threads; few threads; the most bytes of an
// outer index; the least blocks per multiprocessor that large tiles leave.
constexpr int64_t kColumnTile = 4 << 10, kLargeColumnTile = 8 << 10, kFewTileThreads = 96;
constexpr int64_t kMostTiledPlane = 48 << 10, kTileBlocks = 2;
constexpr int64_t kMostTiledResults = 16 << 10;  // the most bytes of an outer index with results

// Statistics of columns. Lanes across columns cover 128 bytes. They cover more if that spreads the blocks more evenly
// over the GPU, or as evenly in fewer rounds, or if the axis is too short for the other lanes. If columns are few,
// several blocks share the axis, each with a part that is not too short.
void plan_along(RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  constexpr int kLaneBits = 8;  // a block has 2^8 lanes
  const int64_t resident = along_resident(plan.traits.item_bytes) * gpu.multiprocessors;
  plan.along = true;
  plan.block_warps = kAlongWarps;
  const int64_t across = rows.inner * plan.traits.item_bytes / 16;
  const auto strips = [&](int bits) { return ceil_div(across, int64_t{1} << bits); };
  // Positions that a block takes at a time.
  const auto batch = [&](int bits) { return int64_t{plan.vectors} << (kLaneBits - bits); };
  const auto evenly = [&](int bits) {
    const int64_t blocks = strips(bits), step = blocks > resident ? resident : gpu.multiprocessors;
    return static_cast<double>(blocks) / (ceil_div(blocks, step) * step);
  };
  int& bits = plan.column_lane_bits;
  bits = std::min(3, bits_for(across));
  for (int more = bits + 1; more <= 5 && strips(more) >= 2 * gpu.multiprocessors * 9 / 10; ++more)
    if (evenly(more) > evenly(bits) || (evenly(more) == evenly(bits) && strips(bits) > resident)) bits = more;
  while (bits < kLaneBits && batch(bits) >= 2 * rows.length) ++bits;
  plan.blocks = std::min(resident / strips(bits), rows.length / (2 * batch(bits)));
  if (plan.blocks < 3) plan.blocks = 1;  // two blocks are not worth a second kernel
  if (plan.blocks == 1) return;
  plan.algorithm = RowAlgorithm::kColumnsSplit;
  plan.units = plan.blocks;
  plan.workspace_bytes = split_bytes(plan.traits, rows.inner, plan.units);
}

// Whether a walking kernel takes the columns; otherwise they are read as flat rows. If there are results, long axes are
// walked twice, which is slow.
bool walks(const RowTraits& traits, const Rows& rows) {
  if (!traits.output) {
    // Lanes that walk read pieces of 64 bytes of 16-bit columns.
    const int64_t least = traits.item_bytes == 2 && rows.length > kWalkPositions * kSmallWarps ? 32 : 16;
    return rows.length <= 128 || (rows.length <= kMostWalked / 2 && rows.inner >= least) ||
           (rows.length <= kMostWalked && (rows.inner >= 120 || traits.label));
  }
  const bool full = traits.fast && traits.item_bytes == 4;  // float32
  const int64_t longest = full && traits.operands == 1 && !traits.label ? kMostWalked / 2 : kMostWalked;
  return rows.length <= (traits.operands == 1 ? 4
                         : traits.fast        ? 3
                                              : 2) *
                            kWalkPositions ||
         (full && rows.length <= 7 * kWalkPositions && rows.inner >= 6) ||
         (rows.length <= kMostWalked / 2 && rows.inner >= kFewColumns) ||
         (rows.length <= longest && rows.inner >= kManyColumns) || (rows.length <= kMostWalked && traits.label);
}

// Whether results of aligned columns are walked. In other kernels, a lane holds eight positions (four of two arrays),
// and a column has a power of two of such lanes, so that on some axes much of what the lanes hold is padding. A walk of
// so few positions also reads the array once. (Limits as measured on an H200.)
bool walks_aligned(const RowTraits& traits, const Rows& rows) {
  if (!traits.output || traits.masked) return false;
  const bool two = traits.operands == 2, half = traits.item_bytes == 2;
  if (rows.length <= held_positions(traits.operands)) return two || half;
  if (two) return rows.length > (half ? 16 : 8) && rows.length <= (half ? 48 : 128);
  return (half && rows.length <= kHeldWalk) || (rows.length > 32 && rows.length <= (half ? 80 : 64));
}

// Whether the kernels of flat rows make the results of aligned columns.
bool is_narrow(const RowTraits& traits, const Rows& rows) {
  if (!traits.output || traits.masked) return false;
  const int64_t beside = rows.inner * traits.item_bytes;
  if (beside == 16) return rows.length >= (traits.operands == 2 ? kNarrowPair : kNarrow);
  return beside == 32 && rows.length * beside > kNarrowBytes;
}

// For results along a short axis: how many warps there are if lanes hold packs of columns, or 0 if columns one by one
// are better. Packs are better if they fill most of a warp's lanes and there are enough warps. (With few warps, their
// long code takes most of the time: log_softmax of 271 x 6 x 468 bfloat16 took 9.4 us, and 3 one by one.) If packs of
// float32 are not aligned, loading columns one by one is faster, except on axes of two positions; of 16 bits, on axes
// of more than kFewPacks. Results have the same bits either way.
int64_t warps_of_packs(const RowTraits& traits, const Rows& rows, const Gpu& gpu) {
  if (!traits.fast || !traits.output || traits.label || traits.masked) return 0;
  const int64_t packs = ceil_div(rows.inner, 16 / traits.item_bytes), strips = ceil_div(packs, 32);
  const bool aligned = rows.inner * traits.item_bytes % 16 == 0;
  const bool held = rows.length >= 2 && rows.length <= held_positions(traits.operands) &&
                    (traits.item_bytes == 2 || aligned || rows.length == 2);
  const int64_t warps = rows.outer * strips;
  const bool longer = rows.length > kFewPacks, full = 5 * packs >= 4 * 32 * strips;
  const int64_t least = traits.operands == 2 ? kHeldPairWarps : longer ? kHeldLongWarps : kHeldWarps;
  return held && full && (aligned || !longer) && warps >= least * gpu.multiprocessors ? warps : 0;
}

// Whether, for statistics, each warp walks a strip of columns of one outer index, so that lanes find their columns
// without a division. It does so if strips are at least half full and there are enough warps. Results have the same
// bits either way.
bool walks_in_strips(const RowTraits& traits, const Rows& rows, int axis_warps, const Gpu& gpu) {
  if (!traits.strips) return false;
  const int64_t columns = 32 * kStripColumns, strips = ceil_div(rows.inner, columns);
  return 2 * rows.inner >= strips * columns && rows.outer * strips * axis_warps >= kStripWarps * gpu.multiprocessors;
}

// A thread walks a short axis alone; several warps share a longer one.
void plan_walk(RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  plan.algorithm = RowAlgorithm::kColumnsWalk;
  if (rows.length > kWalkedAlone)
    plan.axis_warps = static_cast<int>(std::min<int64_t>(ceil_div(rows.length, kWalkPositions), kMaxColumnWarps));
  int64_t strips = warps_of_packs(plan.traits, rows, gpu);
  plan.vector = strips > 0;
  if (!plan.vector) strips = ceil_div(rows.count(), 32 * walk_columns(plan.traits.item_bytes, plan.traits.label));
  if (walks_in_strips(plan.traits, rows, plan.axis_warps, gpu)) {
    plan.vector = true;
    strips = rows.outer * ceil_div(rows.inner, 32 * kStripColumns);
  }
  while (plan.axis_warps << (plan.column_warp_bits + 1) <= kWalkWarps &&
         strips >> (plan.column_warp_bits + 1) >= 2 * gpu.multiprocessors)
    ++plan.column_warp_bits;
  plan.block_warps = plan.axis_warps << plan.column_warp_bits;
  // If there are few blocks, lanes have one column each, so that there are more. (The log-sum-exp of 11 x 526 x 177
  // bfloat16 took 7.6 us with two.)
  plan.single = !plan.vector && strips * walk_columns(plan.traits.item_bytes, plan.traits.label) <=
                                    (plan.axis_warps == 1 ? 4 : 2) * gpu.multiprocessors;
}

// A block takes a flat row, or several blocks share it if their parts are not too short.
void plan_flat(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
  plan.algorithm = RowAlgorithm::kColumnsFlat;
  const int64_t width = 16 / plan.traits.item_bytes, shared = std::gcd(rows.inner, width);
  plan.period = static_cast<int>(rows.inner / shared);
  plan.turns = static_cast<int>(width / shared);
  plan.slices = static_cast<int>(ceil_div(plan.period, 32 * kFlatWarps));
  plan.across = static_cast<int>(ceil_div(plan.period, plan.slices));
  const auto set_threads = [&](int64_t threads) {
    plan.deep = static_cast<int>(std::max<int64_t>(1, threads / plan.across));
    plan.block_warps = static_cast<int>(ceil_div(int64_t{plan.across} * plan.deep, 32));
  };
  set_threads(kFlatThreads);
  // Positions of a block at a time.
  const int64_t batch = int64_t{flat_vectors(plan.traits.operands)} * plan.deep * plan.turns;
  // With results, parts must be longer to be worth it: blocks that share flat rows read them from memory twice, while a
  // block that has a whole one finds it in the cache the second time.
  const bool slow = plan.traits.item_bytes == 8 && plan.traits.stat_bytes > 8 && rows.length * rows.inner >= kManySlow;
  const int64_t least = plan.traits.output ? 2 * batch : slow ? kSlowBatches * batch : batch;
  int64_t parts = std::min<int64_t>(kMostFlatParts / plan.slices, rows.length / least);
  // Each part of a slice has `turns` results for each column, and few blocks merge all of them. So there are fewer
  // parts if the merge would take longer than reading a part. (116 parts of the mean of 5525 x 521 bfloat16 took 15
  // us.)
  if (plan.slices > 1 && plan.turns > 1) {
    const int64_t bytes = rows.length * rows.inner * plan.traits.item_bytes;
    parts = std::min(parts, static_cast<int64_t>(std::sqrt(bytes / (plan.slices * plan.turns * kMergedForBytes))));
  }
  const bool few = plan.slices == 1 && rows.inner <= kFlatClusterColumns;  // columns
  if (few && parts > kFlatCluster && parts <= kFewFlatParts) parts = kFlatCluster;
  const bool whole = plan.slices == 1 || (plan.turns == 1 && !plan.traits.output);
  if (whole && parts < kFlatParts) {
    set_threads(std::clamp<int64_t>(ceil_div(rows.length * rows.inner, width * kFlatVectors), 32, 32 * kFlatWarps));
    plan.part_length = rows.length;
    return;
  }
  plan.part_length = ceil_div(ceil_div(rows.length, std::max<int64_t>(1, parts)), plan.turns) * plan.turns;
  plan.blocks = ceil_div(rows.length, plan.part_length);
  plan.units = plan.blocks * (plan.slices > 1 ? plan.turns : 1);
  // For clusters, too, since a batch of another size may need the workspace.
  plan.workspace_bytes = split_bytes(plan.traits, rows.inner, plan.units);
  if (few && plan.blocks > 1 && plan.blocks <= std::min<int64_t>(kFlatCluster, gpu.max_cluster) && !tuning.split &&
      ((plan.traits.output && plan.traits.fast) ||
       rows.outer * plan.blocks <=
           (plan.traits.output ? kFlatClusterWide : kFlatClusterBlocks) * gpu.multiprocessors)) {
    plan.staged =
        plan.traits.output && plan.traits.fast && plan.traits.operands == 1 &&
        plan.part_length * rows.inner * plan.traits.item_bytes <= std::min(kMostStaged, gpu.shared_bytes / 2) &&
        rows.outer * plan.blocks <= kStagedBlocks * gpu.multiprocessors;
    return;
  }
  plan.split = true;
  // The bits of results do not depend on the length of these parts, so there are blocks for all multiprocessors, if
  // there are enough positions.
  const int64_t most = std::max<int64_t>(1, kFlatResults * gpu.multiprocessors / (rows.outer * plan.slices));
  plan.result_length = batch * std::max<int64_t>(1, ceil_div(rows.length, most * batch));
  const bool small = rows.elements() * plan.traits.item_bytes <= kMostAhead ||
                     plan.part_length * rows.inner * plan.traits.item_bytes <= kMostAheadOfPart;
  if (plan.slices == 1 && small) plan.ahead = kFlatAhead;
  plan.late = plan.traits.output && plan.units <= kMaxFlatSpans && rows.inner <= kLateColumns * plan.block_warps;
}

// Persistent blocks, if there are enough tiles for them. A tile is what one block of kColumns holds in registers.
// Statistics are merged in the order of kColumns, so results have the same bits.
void plan_columns_stream(RowPlan& plan, const Rows& rows, int64_t lanes, const Gpu& gpu) {
  const int64_t tiles = ceil_div(lanes, int64_t{1} << plan.column_lane_bits) * plan.blocks;
  if (plan.axis_warps != kMaxColumnWarps || tiles < 4 * gpu.multiprocessors) return;
  plan.algorithm = RowAlgorithm::kColumnsStream;
  if (plan.blocks > 1) plan.workspace_bytes = rows.inner * plan.blocks * (ceil_div(plan.traits.stat_bytes, 8) * 8);
}

// Whether a block has a flat row, and all of a period.
bool is_whole(const RowPlan& plan) {
  return plan.algorithm == RowAlgorithm::kColumnsFlat && plan.blocks == 1 && !plan.split && plan.slices == 1;
}

}  // namespace

void plan_columns(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
  const RowTraits& traits = plan.traits;
  plan.algorithm = RowAlgorithm::kColumns;
  plan.vectors = column_vectors(traits.operands);
  plan.vector = (traits.fast || traits.packs) && !traits.label && rows.inner * traits.item_bytes % 16 == 0;
  // On the shortest axes, what a lane holds in vectors would be mostly padding.
  if (plan.vector && traits.operands == 1 && rows.length < held_positions(1)) return plan_walk(plan, rows, gpu);
  if (plan.vector && walks_aligned(traits, rows)) return plan_walk(plan, rows, gpu);
  if (plan.vector && is_narrow(traits, rows)) return plan_flat(plan, rows, gpu, tuning);
  // Sums and log-sum-exps of columns that are 16 bytes side by side, as those of columns that are not aligned.
  if (plan.vector && traits.lean && !traits.label && rows.inner * traits.item_bytes == 16)
    return walks(traits, rows) ? plan_walk(plan, rows, gpu) : plan_flat(plan, rows, gpu, tuning);
  if (plan.vector && !traits.output) return plan_along(plan, rows, gpu);
  if (!plan.vector && !traits.masked) {
    if (walks(traits, rows)) return plan_walk(plan, rows, gpu);
    if (!traits.label) return plan_flat(plan, rows, gpu, tuning);
  }
  // Lanes that the columns of an outer index keep busy.
  const int64_t across = plan.vector ? rows.inner * traits.item_bytes / 16 : rows.inner;
  const int64_t units = std::max<int64_t>(1, ceil_div(rows.length, plan.vectors));
  // Lanes across columns cover at least 128 bytes; 256 where several blocks share an axis, if a cluster still holds it.
  // (Memory was a third slower with pieces of 128 bytes that lie far apart. Larger pieces were no faster.)
  const bool wide = units > kMaxColumnWarps * 4 && units <= kMaxColumnWarps * kMaxColumnWarps * 2;
  const int line = !plan.vector ? 5 : wide ? 4 : 3;
  const int line_bits = std::min(line, bits_for(across));
  const int axis_bits = std::min(5 - line_bits, bits_for(units));
  plan.column_lane_bits = 5 - axis_bits;
  plan.axis_warps = static_cast<int>(std::min<int64_t>(kMaxColumnWarps, ceil_div(units, int64_t{1} << axis_bits)));
  plan.blocks = ceil_div(units, int64_t{plan.axis_warps} << axis_bits);
  if (plan.blocks <= kMaxColumnWarps) plan.blocks = int64_t{1} << bits_for(plan.blocks);  // clusters are powers of two

  const int64_t lanes = plan.vector ? ceil_div(rows.count() * traits.item_bytes, 16) : rows.count();
  if (plan.axis_warps == 1) {
    plan.column_warp_bits = bits_for(kTeamWarps);
    while (plan.column_warp_bits > 0 &&
           ceil_div(lanes, int64_t{1} << (plan.column_lane_bits + plan.column_warp_bits)) < 2 * gpu.multiprocessors)
      --plan.column_warp_bits;
  }
  plan.block_warps = plan.axis_warps << plan.column_warp_bits;
  const int64_t most = std::min<int64_t>(kMaxColumnWarps, gpu.max_cluster);
  if (plan.blocks <= most && !(tuning.split && plan.blocks > 1)) {
    if (plan.vector && most == kMaxCluster && !tuning.cluster) plan_columns_stream(plan, rows, lanes, gpu);
    return;
  }
  if (plan.vector && plan.blocks > kMaxColumnWarps) {  // more blocks than the largest cluster of any GPU has
    plan.blocks = 1;
    return plan_flat(plan, rows, gpu, tuning);
  }
  plan.algorithm = RowAlgorithm::kColumnsSplit;
  plan.units = plan.blocks;
  plan.workspace_bytes = split_bytes(traits, rows.inner, plan.units);
}

RowPlan small_form(const RowPlan& plan, const Rows& rows, int64_t most) {
  if (is_whole(plan) && rows.length * rows.inner <= kSmallFlat &&
      rows.outer <= (plan.traits.output ? 2 : 1) * kSmallFlatRows) {
    RowPlan small = plan;
    small.algorithm = RowAlgorithm::kSmall;
    small.flat = true;
    small.block_warps = std::min(kSmallFlatWarps, plan.block_warps * 16 / plan.traits.item_bytes);
    return small;
  }
  // In kColumns, a lane adds up eight positions, and a warp then adds up to four of its lanes, in pairs. small_kernel
  // adds up batches of eight positions in the same order. (But there all batches share one peak: RowPlan::vector.)
  const bool held = plan.algorithm == RowAlgorithm::kColumns && plan.vector && !plan.along &&
                    rows.length >= held_positions(1) && rows.length <= kSmallHeldPositions;
  const bool walked = held || (plan.algorithm == RowAlgorithm::kColumnsWalk && !plan.vector);
  if (!walked || rows.elements() == 0 || rows.elements() > most || rows.length > kWalkPositions * kSmallWarps)
    return plan;
  // The warps that share a column divide it as those of walking kernels do.
  RowPlan small;
  small.algorithm = RowAlgorithm::kSmall;
  small.traits = plan.traits;
  small.vector = held;
  if (!held && rows.length > kWalkedAlone) small.axis_warps = static_cast<int>(ceil_div(rows.length, kWalkPositions));
  const int64_t positions = std::max<int64_t>(ceil_div(rows.length, small.axis_warps), kSmallStep);
  small.column_lane_bits = 5 - bits_for(positions);
  // Groups of columns; a warp has one.
  const int64_t groups = ceil_div(rows.count(), int64_t{1} << small.column_lane_bits);
  small.block_warps =
      small.axis_warps * static_cast<int>(std::clamp<int64_t>(kPreferredSmallWarps / small.axis_warps, 1, groups));
  return small;
}

RowPlan shared_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  // Elements that a block takes at a time.
  const int64_t batch = int64_t{plan.period} * plan.deep * (16 / plan.traits.item_bytes);
  if (!is_whole(plan) || gpu.max_cluster < kFlatCluster || batch <= rows.inner ||
      rows.length * rows.inner < kLeastShared || rows.outer * kFlatCluster > kSharedBlocks * gpu.multiprocessors)
    return plan;
  RowPlan shared = plan;
  shared.algorithm = RowAlgorithm::kSmall;
  shared.flat = true;
  shared.blocks = kFlatCluster;
  // A thread has a statistic of a batch. A block has kFlatFold of them for each that it leaves to the others.
  const int64_t slice = ceil_div(ceil_div(batch / rows.inner, kFlatFold) * rows.inner, kFlatCluster);
  shared.block_warps = static_cast<int>(std::min<int64_t>(ceil_div(slice * kFlatFold, 32), kSmallFlatWarps));
  return shared;
}

RowPlan tiled_form(const RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  const RowTraits& traits = plan.traits;
  const int64_t plane = rows.length * rows.inner * traits.item_bytes;
  // Exponentials of float64 take more time than memory does. Results of 16 bits that several threads share are slower.
  const bool slow = (traits.item_bytes == 8 && traits.stat_bytes > 8) ||
                    (traits.item_bytes == 2 && traits.output && plan.axis_warps > 1);
  if (plan.algorithm != RowAlgorithm::kColumnsWalk || plan.vector || slow || plane == 0 ||
      plane > (traits.output ? kMostTiledResults : kMostTiledPlane))
    return plan;
  RowPlan tiles = plan;
  tiles.algorithm = RowAlgorithm::kRowsTiles;
  const int64_t threads = rows.inner * plan.axis_warps;
  const int64_t few = std::min(ceil_div(kFewTileThreads, threads), kLargeColumnTile / plane);
  tiles.part_length = std::max<int64_t>(
      1, std::min(std::max(kColumnTile / plane, few), rows.outer / (kTileBlocks * gpu.multiprocessors)));
  tiles.block_warps = static_cast<int>(std::min<int64_t>(ceil_div(tiles.part_length * threads, 32), kTiledWarps));
  return tiles;
}

}  // namespace jaxgpuops
