#include "row_engine/plan.h"

#include <algorithm>
#include <numeric>

#include "common/rounding.h"
#include "common/small.h"

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
constexpr int64_t kFewFlatParts = 16;  // so few parts are made longer, so that they fit into a cluster
constexpr int64_t kLateColumns = 2;    // the most columns whose statistics a warp merges before it writes results

constexpr int kPreferredSmallWarps = 4;  // warps of a block that small_form() prefers
constexpr int64_t kSmallFlat = 1 << 13;  // the most elements of a flat row for small_flat_kernel
constexpr int64_t kSmallFlatRows = 132;  // the most such rows; twice as many with results

constexpr int kTeamWarps = 4;        // warps of a block if each warp has its own rows
constexpr int kPreferredWarps = 16;  // warps of a block that holds a row, or a part of one
// Tiles with results: at most 2^4 lanes share a row. Up to 2^5 lanes share a row of one array that has at most
// kMostTiledVectors vectors; lanes of longer rows mostly store whole vectors anyway.
constexpr int kMaxTileLaneBits = 4, kMaxLongTileLaneBits = 5, kMostTiledVectors = 96;
constexpr int kMaxOddLaneBits = 2;  // the same for rows that are whole vectors
// Rows of float32 that 16 or 32 lanes load one element after the other are faster than tiles. Tiles are faster only for
// rows of 16 lanes with more than kMostSingleVectors vectors, in arrays of at least kLeastSingleBytes.
constexpr int kMostSingleVectors = 56;
constexpr int64_t kLeastSingleBytes = 16 << 20;
// Longer rows of float32 and float64 are also loaded one element after the other, up to this many bytes.
constexpr int64_t kLongestSingle = 16 << 10, kLongestWideSingle = 24 << 10;
// For arrays smaller than this, tiles take longer than other kernels of rows.
constexpr int64_t kLeastTiledBytes = 1 << 20;
constexpr int64_t kLeastTeamBytes = 3 << 20;     // the same where several lanes share a row
constexpr int64_t kLeastStagedBytes = 10 << 20;  // the same without results
// The same for rows of whole vectors that one lane has; twice as many bytes for two lanes, four times for four.
constexpr int64_t kLeastOddBytes = 8 << 20;
constexpr int kLeastWarps = 4;           // the least warps of a part: many small parts keep the device busy
constexpr int64_t kSpreadResident = 32;  // lanes have one vector each only up to so many warps per multiprocessor,
constexpr int64_t kFullResident = 60;    // or so many if all of them have one
// Float64 with results: the most spans of a block, since its registers hold no more.
constexpr int64_t kMostWidePart = 8;
// The most spans of aligned rows, and of others, and the most rows per multiprocessor, whose statistics are made by
// large clusters instead of persistent blocks.
constexpr int kMaxHeldSpans = kMaxCluster * kPreferredWarps, kMaxShiftedSpans = 40, kMaxHeldRows = 15;
// Sums of float32 rows that are not aligned take two kernels if all rows together have at least kManyParts spans per
// multiprocessor; few rows, only if each has so many, too. Statistics of one or two rows do if they have more than
// kHugeSpans.
constexpr int64_t kManyParts = 64, kHugeSpans = 320;
constexpr int kRoomyBlocks = 4;  // the most blocks per multiprocessor if rows are few and there are no results

// How far ahead of its own row a block prefetches into the L2 cache (RowPlan::ahead). Distances from 1 to 5 MiB were
// equally good; 8 MiB was worse than no prefetch. Rows of 1 MiB are prefetched six rows ahead.
constexpr int64_t kAheadBytes = 4 << 20, kAheadRows = 6;

int bits_for(int64_t n) {  // the exponent of the least power of two that is not below n
  int bits = 0;
  while (int64_t{1} << bits < n) ++bits;
  return bits;
}

// Bytes per outer index for the statistics and finals of split rows or columns.
int64_t split_bytes(const RowTraits& traits, int64_t inner, int64_t units) {
  const auto padded = [](int64_t bytes) { return ceil_div(bytes, 16) * 16; };
  return padded(inner * units * traits.stat_bytes) + padded(inner * int64_t{traits.final_bytes});
}

void plan_split(RowPlan& plan, const Rows& rows) {
  plan.workspace_bytes = split_bytes(plan.traits, rows.inner, plan.units);
}

constexpr int64_t kCounterBytes = 16;  // kRowsStream: bytes of a counter of the rows that clusters have taken

// With results and many rows, a multiprocessor has one block, each of whose warps holds two spans of a row; its ring
// also has room for half of the next row. Without results, or with few rows, a multiprocessor has several smaller
// blocks.
void plan_stream(RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  const RowTraits& traits = plan.traits;
  plan.algorithm = RowAlgorithm::kRowsStream;
  const auto part = [&] {  // spans of a block, which has every n-th chain, where n blocks share a row
    return plan.spans / kStreamChains * (kStreamChains / plan.blocks) +
           ceil_div(plan.spans % kStreamChains, plan.blocks);
  };
  const bool few = rows.outer <= gpu.multiprocessors, small = few || !traits.output;
  plan.workspace_bytes = few ? 0 : kCounterBytes;
  const auto more = [&] {
    if (traits.output && few) return part() >= 2 * kLeastWarps;
    // With labels, eight blocks that share multiprocessors in pairs are better than four that fill one each.
    if (traits.output) return part() > (traits.label && plan.blocks == 4 ? 27 : 2 * kStreamWarps);
    return rows.outer * plan.blocks < 4 * gpu.multiprocessors && part() >= 2 * kLeastWarps;
  };
  while (plan.blocks < kMaxCluster && more()) plan.blocks *= 2;
  // Small blocks have half the warps, unless their part of the row is very long.
  const int64_t most = small && part() < 8 * kStreamWarps ? kStreamWarps / 2 : kStreamWarps;
  plan.part = static_cast<int>(part());
  plan.block_warps = static_cast<int>(ceil_div(plan.part, ceil_div(plan.part, most)));
  const int64_t stage = (plan.vectors * 512 + 16) * traits.operands + 8;  // bytes of a stage with its barrier
  // How many stages a block can have if `blocks` of them share a multiprocessor.
  const auto stages = [&](int64_t blocks) {
    return (gpu.multiprocessor_shared / blocks - 1024 - 384 - 2 * (plan.part + kStreamChains) * traits.stat_bytes) /
           stage;
  };
  // So many blocks share a multiprocessor that each still has stages for its part of a row (without results: for its
  // warps). With one array, two blocks do: one computes while the other waits for its row. (Gradients with labels took
  // up to 36 % less.)
  int64_t resident = small ? 2 * kStreamWarps / plan.block_warps : traits.operands == 1 ? 2 : 1;
  if (few && traits.output) resident = std::max<int64_t>(resident, 6);
  while (resident > 1 && stages(resident) < (traits.output ? plan.part : plan.block_warps)) --resident;
  plan.stages = static_cast<int>(std::min<int64_t>(stages(resident), 32 * plan.block_warps));
  // Makes the number of stages a multiple of the number of warps, so that a span and the one that replaces it in its
  // stage belong to the same warp.
  if (plan.stages < plan.part) plan.stages -= plan.stages % plan.block_warps;
}

// Whether kRowsStream can take rows of this many spans, provided there are enough rows.
bool is_streamable(const RowPlan& plan, const Gpu& gpu) {
  return plan.traits.fast && gpu.max_cluster == kMaxCluster && plan.spans > kPreferredWarps * plan.traits.operands &&
         plan.spans <= kMaxFlatSpans;
}

// Rows that one block reads quickly (or a cluster, if rows are few) need no second kernel. Other rows are cut into
// parts, as large as still leaves enough of them.
void plan_sweep(RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  const bool many = rows.outer * plan.spans >= 4 * gpu.multiprocessors * 2 * kPreferredWarps;
  const auto part = [&] { return ceil_div(plan.spans, plan.blocks); };
  if (!many && plan.spans > kMaxSweptSpans / 4 && plan.spans <= kMaxFlatSpans) {
    const auto more = [&] { return rows.outer * plan.blocks < gpu.multiprocessors || part() > kMaxSweptSpans; };
    while (plan.blocks < gpu.max_cluster && part() > kPartWarps && more()) plan.blocks *= 2;
  }
  plan.part = static_cast<int>(std::min<int64_t>(part(), kMaxSweptSpans));
  if (part() > kMaxSweptSpans) {
    plan.algorithm = RowAlgorithm::kRowsSplit;
    plan.part = many ? 2 * kPreferredWarps : kPreferredWarps;
    plan.blocks = ceil_div(plan.spans, plan.part);
    plan.unit_warps = plan.spans <= kMaxFlatSpans ? 1 : kPreferredWarps;
    plan.units = ceil_div(plan.spans, plan.unit_warps);
    plan_split(plan, rows);
  }
  plan.block_warps = std::min(plan.part, many ? kPartWarps : kSweepWarps);
}

// The most warps of wide_kernel per multiprocessor, if its blocks have so many, as measured on an H200. With more, the
// kernels whose lanes have several vectors are faster. They are for the largest blocks, of which few share a
// multiprocessor, for float64, and for rows of float32 that are not aligned, which wide_kernel loads one by one.
int64_t wide_resident(const RowTraits& traits, int64_t row_bytes, int64_t warps) {
  const bool elements = traits.item_bytes == 4 && row_bytes % 16 != 0;
  if (!traits.output) return traits.wide_statistics;
  if (warps == 1) return elements ? 20 : traits.operands == 2 ? 12 : 8;
  if (traits.operands == 2) return 32;
  if (traits.label) return warps > 2 && warps <= 6 ? 26 : warps <= 20 ? 14 : 0;
  if (traits.item_bytes == 8) return warps <= 16 ? 16 : 0;
  if (elements) return warps > 16 ? 0 : warps > 8 ? 10 : warps == 5 ? 64 : warps == 6 ? 32 : warps > 2 ? 24 : 16;
  return warps > 24 ? 0 : warps > 16 ? 22 : warps > 2 ? 32 : 20;
}

// The same where lanes have one vector, if that is faster than two. It is so for short rows, and for statistics of
// 16-bit rows that are not aligned, whose vectors take most of the work to load. (Limits as measured on an H200.)
int64_t one_vector_resident(const RowTraits& traits, int64_t row_bytes, int64_t warps) {
  const bool loose = traits.item_bytes == 2 && row_bytes % 16 != 0;
  if (traits.operands != 1 || traits.label || traits.item_bytes == 8 || warps > kMaxBlockWarps) return 0;
  if (traits.output) return warps <= (loose ? 2 : 4) && row_bytes > 512 ? 8 : 0;
  if (!loose) return 0;
  if (traits.stat_bytes == 8) return 12;  // the log-sum-exp
  return warps >= 8 ? 56 : warps > 2 ? 32 : 6;
}

// See RowPlan::single. With eight vectors in a lane, only for arrays so small that memory does not limit them.
bool loads_elements(const RowPlan& plan, const Rows& rows) {
  const RowTraits& traits = plan.traits;
  const int64_t bytes = rows.length * traits.item_bytes;
  if (plan.algorithm != RowAlgorithm::kRows || plan.spread || plan.wide || plan.blocks > 1 || bytes % 16 == 0 ||
      !traits.tiled || traits.operands != 1)
    return false;
  if (traits.item_bytes == 8) return (plan.lane_bits == 5 || plan.spans > 1) && bytes <= kLongestWideSingle;
  return traits.item_bytes == 4 && plan.lane_bits >= kMaxTileLaneBits && bytes <= kLongestSingle &&
         (plan.vectors == kOnlyVectors || rows.outer * bytes <= kLeastSingleBytes);
}

void plan_rows(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
  const RowTraits& traits = plan.traits;
  const int64_t vectors = std::max<int64_t>(1, ceil_div(rows.length, 16 / traits.item_bytes));
  if (!traits.fast) {
    plan.vectors = kOnlyVectors;
  } else if (vectors <= 2) {
    plan.vectors = 1;
  } else {
    plan.vectors = vectors <= (traits.output ? 32 * 4 : 8 * 4) || !traits.large ? 4 : 8;
    // True if all lanes hold the same number of elements.
    const bool whole = rows.length * traits.item_bytes == int64_t{16} << bits_for(vectors);
    if (traits.lean && !traits.label && whole && vectors <= kLeanVectors * 32) plan.vectors = kLeanVectors;
  }
  // (Tuning cannot ask for kLeanVectors: the kernel with so few vectors reads whole vectors only.)
  if (tuning.vectors && tuning.vectors != kLeanVectors) plan.vectors = tuning.vectors;
  plan.lane_bits = std::min(5, bits_for(ceil_div(vectors, plan.vectors)));
  plan.spans = ceil_div(vectors, int64_t{plan.vectors} << plan.lane_bits);

  plan.algorithm = RowAlgorithm::kRows;
  const int64_t row_bytes = rows.length * traits.item_bytes;
  // Tiles are for rows that are not whole vectors. They are also for large arrays of rows of 3 vectors, which one lane
  // would have, or 7 or 15, which two or four lanes would have.
  const bool whole = row_bytes % 16 == 0;
  // Longer rows fill more of the vectors of a team, so tiles pay only for larger arrays.
  const bool longer = traits.tiled && traits.fast && traits.operands == 1 && plan.lane_bits >= kMaxTileLaneBits &&
                      vectors <= kMostTiledVectors;
  const int64_t half = int64_t{2} << plan.lane_bits;
  const bool odd = whole && traits.operands == 1 && vectors > 2 && plan.lane_bits <= kMaxOddLaneBits &&
                   vectors == (int64_t{plan.vectors} << plan.lane_bits) - 1;
  const bool single =
      !whole && traits.tiled && traits.operands == 1 && traits.item_bytes == 4 && plan.lane_bits >= kMaxTileLaneBits;
  // Rows of float64 of three or four vectors, which one lane would have.
  const bool short_wide = traits.item_bytes == 8 && traits.operands == 1 && vectors > 2 && plan.lane_bits == 0 && whole;
  const int64_t least = short_wide       ? kLeastTeamBytes
                        : odd            ? kLeastOddBytes << plan.lane_bits
                        : single         ? kLeastSingleBytes
                        : traits.staged  ? kLeastStagedBytes
                        : longer         ? kLeastTeamBytes << std::max<int64_t>(0, 6 * (vectors - half) / half)
                        : plan.lane_bits ? kLeastTeamBytes
                                         : kLeastTiledBytes;
  const bool tiles = (((odd || short_wide) && traits.tiled) || (!whole && (traits.tiled || traits.staged))) &&
                     plan.vectors <= kOnlyVectors &&
                     plan.lane_bits <= (longer && !single ? kMaxLongTileLaneBits : kMaxTileLaneBits) &&
                     !(single && vectors <= kMostSingleVectors) && rows.outer * row_bytes >= least;
  if (plan.spans == 1 && (tiles || traits.swept)) {
    plan.algorithm = RowAlgorithm::kRowsTiles;
    plan.block_warps = kTileThreads / 32;
    return;
  }
  // Many warps whose lanes have one vector each are slower than fewer warps whose lanes have several, unless one lane
  // would have the whole row, or rows are not aligned. (Rows of two arrays with up to two vectors have no other
  // kernel.)
  const int64_t spread_warps = ceil_div(rows.outer * plan.vectors << plan.lane_bits, 32);
  const bool full = traits.fast && traits.operands == 1 && row_bytes == int64_t{16} * plan.vectors << plan.lane_bits;
  if (plan.spans == 1 && traits.tiled && plan.vectors << plan.lane_bits <= 32 &&
      (plan.lane_bits == 0 || row_bytes % 16 != 0 || (traits.operands == 2 && plan.vectors == 1) ||
       spread_warps <= (full ? kFullResident : kSpreadResident) * gpu.multiprocessors)) {
    plan.spread = true;
    plan.block_warps = tuning.block_warps ? std::min(tuning.block_warps, kSpreadWarps) : kSpreadWarps;
    while (plan.block_warps > 1 && ceil_div(spread_warps, plan.block_warps) < 2 * gpu.multiprocessors)
      plan.block_warps /= 2;
    return;
  }
  const bool tuned = tuning.cluster || tuning.split || tuning.vectors || tuning.block_warps;
  // If rows are longer but few, a block has a row, and a lane two vectors of it. (One vector, in spread_kernel, took up
  // to 1.7 times as long.)
  const int64_t one_warps = ceil_div(vectors, 32);
  if (traits.wide && !tuned && plan.vectors >= kOnlyVectors && plan.lane_bits >= 3 &&
      rows.outer * one_warps <= one_vector_resident(traits, row_bytes, one_warps) * gpu.multiprocessors) {
    plan.wide = 1;
    plan.block_warps = static_cast<int>(one_warps);
    return;
  }
  const int64_t wide_warps = ceil_div(vectors, 32 * kWideVectors);
  if (traits.wide && !tuned && plan.vectors >= kOnlyVectors && plan.lane_bits >= 4 && wide_warps <= kMaxBlockWarps &&
      rows.outer * wide_warps <= wide_resident(traits, row_bytes, wide_warps) * gpu.multiprocessors) {
    plan.wide = kWideVectors;
    plan.block_warps = static_cast<int>(wide_warps);
    return;
  }
  if (plan.spans == 1) {
    // A warp that writes a whole row is fastest in a block of its own; warps that hold several rows are fastest in
    // small blocks.
    const bool writes = traits.fast && traits.output;
    const int preferred = writes && plan.lane_bits == 5   ? 1
                          : writes && plan.lane_bits >= 3 ? kTeamWarps / 2
                                                          : kTeamWarps;
    plan.block_warps = tuning.block_warps ? tuning.block_warps : preferred;
    const int64_t warps = ceil_div(rows.outer, 32 >> plan.lane_bits);
    while (plan.block_warps > 1 && ceil_div(warps, plan.block_warps) < 2 * gpu.multiprocessors) plan.block_warps /= 2;
    return;
  }
  if (traits.swept) return plan_sweep(plan, rows, gpu);
  const int64_t most = gpu.max_cluster;
  const bool streamable = is_streamable(plan, gpu) && rows.outer * kMaxCluster > gpu.multiprocessors && !tuned;
  // If rows are few, clusters of small blocks are best: a multiprocessor has several blocks, and one loads while
  // another computes. If rows are many, each has a block that holds it. Persistent blocks (kRowsStream) are better than
  // that for gradients of rows with labels, for rows that are not aligned, and for rows of two arrays or without
  // results that are so long that they would take all registers. For two arrays that are not aligned, persistent blocks
  // are always better.
  const bool two = traits.operands == 2, aligned = rows.length * traits.item_bytes % 16 == 0;
  const bool longest = plan.spans > (traits.output && !two ? kMaxFlatSpans : kMaxCluster * kLeastWarps);
  const bool few = rows.outer <= (two && longest ? 1 : 8) * gpu.multiprocessors;
  const bool many = plan.spans > kPreferredWarps * traits.operands && traits.fast && aligned &&
                    (!traits.label || traits.lean) && !longest;
  // Persistent blocks are slower where each has a few rows, since some have one more than others. So statistics of up
  // to kMaxHeldRows rows per multiprocessor are made by clusters that hold them, if these are not too large. (Most took
  // 5 to 30 % less time; sums of 16 bits of rows that are not aligned did not.)
  const bool held = !few && rows.outer <= kMaxHeldRows * gpu.multiprocessors && !traits.output && !traits.label &&
                    !two &&
                    (aligned ? plan.spans <= kMaxHeldSpans
                             : plan.spans <= kMaxShiftedSpans && (traits.item_bytes == 4 || traits.stat_bytes == 8));
  const int64_t all_spans = rows.outer * plan.spans;
  const bool lean = traits.lean && !traits.label && is_streamable(plan, gpu);
  const bool many_parts = lean && !aligned && traits.item_bytes == 4 && traits.stat_bytes == 4 &&
                          plan.spans >= (few ? kManyParts : kMaxShiftedSpans) &&
                          all_spans >= kManyParts * gpu.multiprocessors;
  const bool huge = lean && plan.spans > kHugeSpans && all_spans <= 2 * kMaxFlatSpans && (rows.outer == 1 || !aligned);
  const bool stream = streamable && !held && !many_parts;
  const bool small = !many_parts && !huge && (few ? aligned || !two || !stream : many);
  const auto hold = [&] {
    plan.block_warps = static_cast<int>(ceil_div(plan.spans, plan.blocks));
    // For few rows without results, in large parts: a multiprocessor has room for five blocks, but most get four, and
    // those with five finish later. So none may have more than four. (With clusters of 16, this limit would let fewer
    // of them run at once.)
    if (few && traits.lean && aligned && plan.block_warps >= kPartWarps - 1 && plan.block_warps <= kPartWarps &&
        plan.blocks > 1 && plan.blocks < kMaxCluster && most == kMaxCluster)
      plan.room = gpu.multiprocessor_shared / (kRoomyBlocks + 1);
    // Packed blocks may share a multiprocessor. A cluster of 16 whose blocks are not packed must wait until nearly a
    // whole GPC is free. So if not all clusters run at once (many rows, or many registers), packed ones start sooner,
    // which took up to 10 % less time; for gradients with labels, smaller clusters gain, too. If all clusters run at
    // once, packing is worse: softmax of few rows took up to 10 % longer.
    plan.packed = (traits.label && traits.output) || (plan.blocks == kMaxCluster && (two || !few));
    if (!few && aligned && traits.fast && traits.output && !two && gpu.bulk_copy)
      plan.ahead = static_cast<int>(std::max<int64_t>(kAheadRows, kAheadBytes / (rows.length * traits.item_bytes)));
  };
  // For many rows that small blocks cannot hold, larger blocks that prefetch later rows are faster than kRowsStream.
  const int64_t widest = !few && traits.output && !two ? kPreferredWarps : kPartWarps;
  if (small && !tuned && most > 1 && ceil_div(plan.spans, most) <= widest) {
    const int64_t part = few && traits.output && !two ? kPartWarps - 1 : kPartWarps;
    while (plan.blocks < most && ceil_div(plan.spans, plan.blocks) > part) plan.blocks *= 2;
    return hold();
  }
  // Statistics of longer rows take two kernels, so that any number of blocks can share a row. Results of float64 take
  // three kernels of small blocks, some of which compute while others wait for memory. (Gradients of cross-entropy took
  // a third less time.)
  const bool wide = !traits.masked && traits.item_bytes == 8;
  // Sums of many long rows of float32 that are not aligned are also faster by two kernels (1145 x 58007: 63 us, and 73
  // by persistent blocks), and so are statistics of a row, or of two that are not aligned, that would take the largest
  // blocks of a cluster.
  const bool split = (stream && !traits.output && rows.outer <= gpu.multiprocessors) || many_parts || huge ||
                     (wide && traits.output && ceil_div(plan.spans, kMaxCluster) > kMostWidePart);
  if (stream && !split) return plan_stream(plan, rows, gpu);
  // A row of two operands has twice as many spans. One block alone is faster than two that wait for each other.
  const int64_t preferred = kPreferredWarps * (traits.output ? traits.operands : 1);
  while (plan.blocks < most && ceil_div(plan.spans, plan.blocks) > preferred) plan.blocks *= 2;
  while (plan.blocks < most && rows.outer * plan.blocks * 2 <= gpu.multiprocessors &&
         ceil_div(plan.spans, 2 * plan.blocks) >= kLeastWarps && (plan.blocks < 8 || rows.outer <= 4))
    plan.blocks *= 2;
  if (tuning.cluster) plan.blocks = tuning.cluster;
  if (ceil_div(plan.spans, plan.blocks) <= kMaxBlockWarps && !tuning.split && !split) return hold();
  plan.algorithm = RowAlgorithm::kRowsSplit;
  plan.unit_warps = plan.spans <= kMaxFlatSpans ? 1 : kPartWarps;
  plan.block_warps = huge && all_spans < kPartWarps * gpu.multiprocessors ? kPartWarps / 2 : kPartWarps;
  plan.blocks = ceil_div(plan.spans, plan.block_warps);
  plan.units = ceil_div(plan.spans, plan.unit_warps);
  plan_split(plan, rows);
}

// The largest workspace that any number of such rows needs: a part of a batch may have another algorithm than the
// whole.
int64_t bytes_of_any_batch(const RowPlan& plan, const Gpu& gpu) {
  if (!is_streamable(plan, gpu)) return 0;
  return plan.traits.output ? kCounterBytes : split_bytes(plan.traits, 1, plan.spans);
}

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
  plan_split(plan, rows);
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
  const int64_t least = plan.traits.output ? 2 * batch : batch;
  int64_t parts = std::min<int64_t>(kMostFlatParts / plan.slices, rows.length / least);
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
  plan_split(plan, rows);  // for clusters, too, since a batch of another size may need the workspace
  if (few && plan.blocks > 1 && plan.blocks <= std::min<int64_t>(kFlatCluster, gpu.max_cluster) && !tuning.split &&
      ((plan.traits.output && plan.traits.fast) ||
       rows.outer * plan.blocks <= (plan.traits.output ? kFlatClusterWide : kFlatClusterBlocks) * gpu.multiprocessors))
    return;
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

void plan_columns(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
  const RowTraits& traits = plan.traits;
  plan.algorithm = RowAlgorithm::kColumns;
  plan.vectors = column_vectors(traits.operands);
  plan.vector = traits.fast && !traits.label && rows.inner * traits.item_bytes % 16 == 0;
  // On the shortest axes, what a lane holds in vectors would be mostly padding.
  if (plan.vector && traits.operands == 1 && rows.length < held_positions(1)) return plan_walk(plan, rows, gpu);
  if (plan.vector && walks_aligned(traits, rows)) return plan_walk(plan, rows, gpu);
  if (plan.vector && is_narrow(traits, rows)) return plan_flat(plan, rows, gpu, tuning);
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
  plan_split(plan, rows);
}

}  // namespace

const char* name(RowAlgorithm algorithm) {
  switch (algorithm) {
    case RowAlgorithm::kEmpty: return "empty";
    case RowAlgorithm::kRows: return "rows";
    case RowAlgorithm::kRowsTiles: return "rows_tiles";
    case RowAlgorithm::kRowsStream: return "rows_stream";
    case RowAlgorithm::kRowsSplit: return "rows_split";
    case RowAlgorithm::kColumns: return "columns";
    case RowAlgorithm::kColumnsStream: return "columns_stream";
    case RowAlgorithm::kColumnsSplit: return "columns_split";
    case RowAlgorithm::kColumnsWalk: return "columns_walk";
    case RowAlgorithm::kColumnsFlat: return "columns_flat";
    case RowAlgorithm::kSmall: return "small";
  }
  return "?";
}

RowPlan held_in_registers(RowPlan plan) {
  plan.workspace_bytes = 0;
  if (plan.algorithm == RowAlgorithm::kColumnsStream) {
    plan.algorithm = RowAlgorithm::kColumns;
    return plan;
  }
  plan.algorithm = RowAlgorithm::kRows;
  plan.blocks = 1;
  while (plan.blocks < kMaxCluster && ceil_div(plan.spans, plan.blocks) > kPreferredWarps) plan.blocks *= 2;
  plan.block_warps = static_cast<int>(ceil_div(plan.spans, plan.blocks));
  return plan;
}

RowPlan small_form(const RowPlan& plan, const Rows& rows, int64_t most) {
  if (plan.algorithm == RowAlgorithm::kColumnsFlat && plan.blocks == 1 && !plan.split && plan.slices == 1 &&
      rows.length * rows.inner <= kSmallFlat && rows.outer <= (plan.traits.output ? 2 : 1) * kSmallFlatRows) {
    RowPlan small = plan;
    small.algorithm = RowAlgorithm::kSmall;
    small.flat = true;
    small.block_warps = std::min(kSmallFlatWarps, plan.block_warps * 16 / plan.traits.item_bytes);
    return small;
  }
  // In kColumns, a lane adds up eight positions, and a warp then adds up to three of its lanes. small_kernel adds up
  // batches of eight positions in the same order. (But there all batches share one peak: RowPlan::vector.)
  const bool held = plan.algorithm == RowAlgorithm::kColumns && plan.vector && !plan.along &&
                    rows.length >= held_positions(1) && rows.length <= 3 * held_positions(1);
  const bool walked = held || (plan.algorithm == RowAlgorithm::kColumnsWalk && !plan.vector);
  if (!walked || rows.elements() == 0 || rows.elements() > most || rows.length > kWalkPositions * kSmallWarps)
    return plan;
  // The warps that share a column divide it as those of walking kernels do.
  RowPlan small;
  small.algorithm = RowAlgorithm::kSmall;
  small.traits = plan.traits;
  small.vector = held;
  if (rows.length > kWalkedAlone) small.axis_warps = static_cast<int>(ceil_div(rows.length, kWalkPositions));
  const int64_t positions = std::max<int64_t>(ceil_div(rows.length, small.axis_warps), kSmallStep);
  small.column_lane_bits = 5 - bits_for(positions);
  // Groups of columns; a warp has one.
  const int64_t groups = ceil_div(rows.count(), int64_t{1} << small.column_lane_bits);
  small.block_warps =
      small.axis_warps * static_cast<int>(std::clamp<int64_t>(kPreferredSmallWarps / small.axis_warps, 1, groups));
  return small;
}

RowPlan plan_row_engine(const Rows& rows, const RowTraits& traits, const Gpu& gpu, int64_t workspace_bytes,
                        const RowTuning& tuning) {
  RowPlan plan;
  plan.traits = traits;
  if (rows.count() == 0 || (rows.length == 0 && traits.output)) return plan;
  plan.overlap = gpu.dependent_launch;
  if (rows.inner == 1) {
    plan_rows(plan, rows, gpu, tuning);
    plan.single = loads_elements(plan, rows);
  } else {
    plan_columns(plan, rows, gpu, tuning);
  }
  if (workspace_bytes < 0) {
    if (rows.inner == 1) plan.workspace_bytes = std::max(plan.workspace_bytes, bytes_of_any_batch(plan, gpu));
  } else if (plan.workspace_bytes > workspace_bytes) {
    const bool too_long = plan.algorithm == RowAlgorithm::kColumnsSplit ||
                          plan.algorithm == RowAlgorithm::kColumnsFlat ||
                          (plan.algorithm == RowAlgorithm::kRowsSplit && !is_streamable(plan, gpu));
    if (!too_long) return held_in_registers(plan);
  }
  return plan;
}

}  // namespace jaxgpuops
