#include <algorithm>

#include "common/rounding.h"
#include "row_engine/plan_parts.h"

namespace jaxgpuops {
namespace {

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
constexpr int kLeastWarps = 4;  // the least warps of a part: many small parts keep the device busy
constexpr int64_t kAnyResident = INT32_MAX;
constexpr int64_t kSpreadResident = 32;  // lanes have one vector each only up to so many warps per multiprocessor,
constexpr int64_t kFullResident = 60;    // or so many if all of them have one
// The same for rows with labels: if they are not whole vectors, where a warp has one row, and where it has more; and if
// they are.
constexpr int64_t kLabelResident = 32, kShortLabelResident = 80, kWholeLabelResident = 16;
constexpr int64_t kHalfLabelResident = 11, kShortHalfLabelResident = 112;  // the first two, of 16 bits
// Float64 with results: the most spans of a block, since its registers hold no more.
constexpr int64_t kMostWidePart = 8;
// The most spans of aligned rows, and of others, and the most rows per multiprocessor, whose statistics are made by
// large clusters instead of persistent blocks.
constexpr int kMaxHeldSpans = kMaxCluster * kPreferredWarps, kMaxShiftedSpans = 40, kMaxHeldRows = 15;
// Statistics of one or two rows take two kernels if they have more than kHugeSpans.
constexpr int64_t kHugeSpans = 320;
// Sums of at least kManyHuge rows of so many spans do, too: not all of their clusters would run at once. The
// log-sum-exp of any number of them does, since the few blocks of a cluster take long to compute.
constexpr int64_t kManyHuge = 8;
constexpr int kRoomyBlocks = 4;  // the most blocks per multiprocessor if rows are few and there are no results

// How far ahead of its own row a block prefetches into the L2 cache (RowPlan::ahead). Distances from 1 to 5 MiB were
// equally good; 8 MiB was worse than no prefetch. Rows of 1 MiB are prefetched six rows ahead.
constexpr int64_t kAheadBytes = 4 << 20, kAheadRows = 6;

// Results that all multiprocessors make together: the least spans of a row, and the same for float64.
constexpr int64_t kLeastTogether = 160, kLeastWideTogether = 129;

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
    plan.workspace_bytes = split_bytes(plan.traits, rows.inner, plan.units);
  }
  plan.block_warps = std::min(plan.part, many ? kPartWarps : kSweepWarps);
}

// The most warps of wide_kernel per multiprocessor, if its blocks have so many, as measured on an H200. With more, the
// kernels whose lanes have several vectors are faster. They are for the largest blocks, of which few share a
// multiprocessor, for float64, and for rows of float32 that are not aligned, which wide_kernel loads one by one.
int64_t wide_resident(const RowTraits& traits, int64_t row_bytes, int64_t warps) {
  const bool elements = traits.item_bytes == 4 && row_bytes % 16 != 0;
  if (!traits.output) return traits.wide_statistics;
  if (traits.label && traits.item_bytes < 8) {
    if (warps <= 16) return warps == 1 ? 8 : warps == 2 ? 16 : 32;
    return warps <= 20 ? warps : 0;
  }
  if (warps == 1) return elements ? 20 : traits.operands == 2 ? 12 : 8;
  if (traits.operands == 2) return 32;
  if (traits.label) return warps == 3 ? kAnyResident : warps > 2 && warps <= 6 ? 26 : warps <= 20 ? 14 : 0;
  if (traits.item_bytes == 8) return warps <= 16 ? 16 : 0;
  if (elements) return warps > 16 ? 0 : warps > 8 ? 24 : warps == 5 ? 64 : warps == 6 ? 32 : warps > 2 ? 24 : 16;
  return warps > 24 ? 0 : warps > 16 ? 22 : warps > 2 ? 32 : 20;
}

// The same where lanes have one vector, if that is faster than two. It is so for short rows, few rows with labels of up
// to 6 KiB (longer ones of float32 that are not aligned, if each has a multiprocessor), and for statistics of 16-bit
// rows that are not aligned, whose vectors take most of the work to load.
// (Limits as measured on an H200.)
int64_t one_vector_resident(const RowTraits& traits, int64_t row_bytes, int64_t warps) {
  const bool loose = traits.item_bytes == 2 && row_bytes % 16 != 0;
  if (traits.label) {
    if (traits.item_bytes == 8) return warps <= 4 ? 8 : 0;
    if (warps <= 4) return 14;
    const bool single = traits.item_bytes == 4 && row_bytes % 16 != 0;
    return warps <= (loose ? 8 : 12) ? 8 : single && warps <= kMaxBlockWarps ? warps : 0;
  }
  if (traits.operands != 1 || traits.item_bytes == 8 || warps > kMaxBlockWarps) return 0;
  if (traits.output) return warps <= (loose ? 2 : 4) && row_bytes > 512 ? 8 : 0;
  if (!loose) return 0;
  return traits.stat_bytes == 8 ? 12 : 6;  // of sums, longer rows have a kernel of their own
}

// See RowPlan::single. With eight vectors in a lane, only for arrays so small that memory does not limit them.
bool loads_elements(const RowPlan& plan, const Rows& rows) {
  const RowTraits& traits = plan.traits;
  const int64_t bytes = rows.length * traits.item_bytes;
  if (plan.algorithm != RowAlgorithm::kRows || plan.spread || plan.wide || plan.blocks > 1 || bytes % 16 == 0 ||
      !(traits.tiled || (traits.label && traits.output && traits.item_bytes >= 4)) || traits.operands != 1)
    return false;
  if (traits.item_bytes == 8) return (plan.lane_bits == 5 || plan.spans > 1) && bytes <= kLongestWideSingle;
  return traits.item_bytes == 4 && plan.lane_bits >= kMaxTileLaneBits && bytes <= kLongestSingle &&
         (plan.vectors == kOnlyVectors || rows.outer * bytes <= kLeastSingleBytes);
}

void choose_kernel(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
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
  const bool of_16_bits = traits.item_bytes == 2;
  const int64_t of_labels = row_bytes % 16 == 0                    ? kWholeLabelResident
                            : plan.vectors << plan.lane_bits == 32 ? (of_16_bits ? kHalfLabelResident : kLabelResident)
                            : of_16_bits                           ? kShortHalfLabelResident
                                                                   : kShortLabelResident;
  const bool labelled = traits.label && traits.output && spread_warps <= of_labels * gpu.multiprocessors;
  if (plan.spans == 1 && (traits.tiled || labelled) && plan.vectors << plan.lane_bits <= 32 &&
      (labelled || plan.lane_bits == 0 || row_bytes % 16 != 0 || (traits.operands == 2 && plan.vectors == 1) ||
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
  const bool exponentials = traits.stat_bytes == 8;
  const bool huge = lean && plan.spans > kHugeSpans &&
                    ((!streamable && (exponentials || rows.outer >= kManyHuge)) ||
                     (all_spans <= 2 * kMaxFlatSpans && (rows.outer == 1 || !aligned)));
  // Clusters would hold all that their registers hold. (8 x 1013030 float16 take 19 us in parts, and would take 32.)
  const bool crowded = traits.output && traits.item_bytes == 2 && traits.operands == 1 && !traits.label &&
                       traits.fast && !streamable && plan.spans > kHugeSpans;
  const bool stream = streamable && !held;
  const bool small = !huge && (few ? aligned || !two || !stream : many);
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
    // If blocks are few, more of them with fewer warps compute in less time. (Exponentials without results are worth
    // more blocks than multiprocessors.) With labels, a block that has a row alone is faster than two.
    const int64_t resident = !traits.output && traits.stat_bytes > 4 ? 3 : 1;
    while (!two && (!traits.label || plan.blocks > 1) && plan.blocks < most &&
           ceil_div(plan.spans, plan.blocks) > kLeastWarps &&
           rows.outer * plan.blocks * 2 <= resident * gpu.multiprocessors)
      plan.blocks *= 2;
    return hold();
  }
  // Statistics of longer rows take two kernels, so that any number of blocks can share a row. Results of float64 take
  // three kernels of small blocks, some of which compute while others wait for memory. (Gradients of cross-entropy took
  // a third less time.)
  const bool wide = !traits.masked && traits.item_bytes == 8;
  // Statistics of a row, or of two that are not aligned, are split, too, if they would take the largest blocks of a
  // cluster.
  const bool split = (stream && !traits.output && rows.outer <= gpu.multiprocessors) || huge || crowded ||
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
  plan.workspace_bytes = split_bytes(traits, rows.inner, plan.units);
}

// Whether kRowsTogether can take rows, provided there are few enough. (Rows of fewer spans are faster in a cluster,
// whose blocks wait for each other for less time.)
bool fits_together(const RowPlan& plan) {
  const RowTraits& traits = plan.traits;
  return traits.output && traits.operands == 1 && !traits.masked && !traits.label &&
         plan.spans >= (traits.item_bytes == 8 ? kLeastWideTogether : kLeastTogether) &&
         plan.spans <= kMaxFlatSpans * kPartWarps;
}

// Statistics are merged in the order of kRows or kRowsSplit.
int unit_warps_together(const RowPlan& plan) { return plan.spans <= kMaxFlatSpans ? 1 : kPartWarps; }

int64_t bytes_together(const RowPlan& plan) {
  return split_bytes(plan.traits, 1, ceil_div(plan.spans, unit_warps_together(plan)));
}

void plan_together(RowPlan& plan, const Rows& rows, const Gpu& gpu) {
  const int64_t all = rows.outer * plan.spans;
  const int64_t most = together_resident(plan.traits.item_bytes) * kPartWarps * gpu.multiprocessors;
  if (!fits_together(plan) || all > most) return;
  plan.algorithm = RowAlgorithm::kRowsTogether;
  plan.packed = false;
  plan.ahead = plan.room = 0;
  plan.unit_warps = unit_warps_together(plan);
  // So many blocks for each multiprocessor, and then as few warps in each as that takes.
  const int64_t slots = ceil_div(all, kPartWarps * gpu.multiprocessors) * gpu.multiprocessors;
  plan.block_warps = static_cast<int>(std::max<int64_t>(plan.unit_warps, ceil_div(all, slots)));
  plan.blocks = ceil_div(plan.spans, plan.block_warps);
  plan.units = ceil_div(plan.spans, plan.unit_warps);
  plan.workspace_bytes = bytes_together(plan);
}

}  // namespace

void plan_rows(RowPlan& plan, const Rows& rows, const Gpu& gpu, const RowTuning& tuning) {
  choose_kernel(plan, rows, gpu, tuning);
  const bool tuned = tuning.cluster || tuning.split || tuning.vectors || tuning.block_warps;
  if (!tuned) plan_together(plan, rows, gpu);
  plan.single = loads_elements(plan, rows);
}

bool is_streamable(const RowPlan& plan, const Gpu& gpu) {
  return plan.traits.fast && gpu.max_cluster == kMaxCluster && plan.spans > kPreferredWarps * plan.traits.operands &&
         plan.spans <= kMaxFlatSpans;
}

int64_t bytes_of_any_batch(const RowPlan& plan, const Gpu& gpu) {
  if (fits_together(plan)) return bytes_together(plan);
  if (!is_streamable(plan, gpu)) return 0;
  return plan.traits.output ? kCounterBytes : split_bytes(plan.traits, 1, plan.spans);
}

}  // namespace jaxgpuops
