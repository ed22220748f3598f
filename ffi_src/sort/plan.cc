#include "sort/plan.h"

#include <algorithm>
#include <utility>

#include "common/rounding.h"
#include "sort/cuda/shape.h"

namespace jaxgpuops::sort {
namespace {

constexpr int64_t kMaxTeamLength = 1024;
constexpr int64_t kMostPairsLength = 2048;  // of many rows of 16 bits, if only values are wanted
// Offsets of longer rows must ascend if they are merged. jaxgpuops/lax/_sort.py has this number, too.
constexpr int64_t kMostUnordered = 8192;
constexpr int64_t kMostInBlocks = 4096;  // elements of the mean segment of which blocks sort the short ones
constexpr int64_t kMostExchanging = 32;  // tiles of a row of 8 or 64 bits
constexpr int64_t kMostTiny = 64;        // tiny tiles of a row
constexpr int64_t kMostColumns = 16;     // side by side, which are read and written in parts of sectors
constexpr int64_t kReserved = 1 << 10;   // shared memory for the system and for the static variables of kernels

// Plans a block for each row; returns false if none holds it.
bool plan_block(const Problem& problem, int64_t shared_limit, const Gpu& gpu, Plan& plan) {
  const int key_bytes = problem.key_bits / 8;
  for (const int threads : {256, 512, 1024}) {
    const int items = block_items(key_bytes, problem.rows.length, problem.rows.count() <= gpu.multiprocessors);
    const int64_t bytes = block_shared_bytes(key_bytes, threads, items);
    if (problem.rows.length > threads * items || bytes > shared_limit) continue;
    plan.algorithm = Algorithm::kBlock;
    plan.threads = threads;
    plan.items = items;
    plan.blocks = problem.rows.count();
    plan.shared_bytes = bytes;
    return true;
  }
  return false;
}

void plan_network(const Rows& rows, bool indices, bool pairs, Plan& plan) {
  const NetworkShape shape(rows, indices, pairs);
  plan.algorithm = Algorithm::kNetwork;
  plan.pairs = pairs;
  plan.threads = static_cast<int>(shape.threads);
  plan.blocks = shape.blocks;
  plan.shared_bytes = shape.shared_bytes;
}

// Whether a network sorts two rows at once.
bool sorts_pairs(const Problem& problem) { return problem.key_bits <= 16 && !problem.indices; }

// Whether networks in warps take less time than kTeam, which spreads few rows over more threads.
bool sorts_in_warps(const Problem& problem, const Gpu& gpu) {
  const Rows& rows = problem.rows;
  if (problem.key_bits == 64 || rows.length > kMostWarpLength) return false;
  if (problem.key_bits == 8 && problem.indices) return false;
  // Lanes with short rows read parts of sectors; blocks of columns read whole ones.
  if (rows.length <= (problem.indices ? 192 : rows.inner > 1 ? 32 : 64)) return false;
  const NetworkShape shape(rows, problem.indices, sorts_pairs(problem));
  // Threads without a column have nothing to do.
  if (rows.inner > 1 && 4 * rows.inner < (problem.indices ? 3 : 2) * shape.tiles * shape.teams) return false;
  return rows.count() * shape.team >= (problem.indices ? 12 : 3) * 32 * gpu.multiprocessors;
}

bool plan_compare_shape(const Problem& problem, int64_t shared_limit, Plan& plan) {
  const CompareShape shape = compare_shape(problem.rows, true);
  plan.algorithm = Algorithm::kCompare;
  plan.threads = kCompareThreads;
  plan.blocks = ceil_div(problem.rows.count(), shape.together) * shape.chunks;
  plan.shared_bytes = compare_shared_bytes(problem.rows, shape, problem.key_bits / 8);
  return plan.shared_bytes <= shared_limit - (8 << 10);
}

// Plans comparisons of all elements with the others of their segments. Returns false where a radix sort takes less
// time: for many elements, and for few long segments. If one of many segments has most of the elements, comparisons
// take up to three times as long as that.
bool plan_compare(const Problem& problem, int64_t shared_limit, Plan& plan) {
  constexpr int64_t kMostComparisons = int64_t{1} << 28;  // if a row is one segment
  const Rows& rows = problem.rows;
  const int key_bytes = problem.key_bits / 8;
  const int64_t elements = rows.elements(), most = key_bytes == 8 ? 1 << 16 : 1 << 15;
  if (rows.inner > 1 || rows.length > kMostCompared || elements > most) return false;
  if (elements * rows.length * (key_bytes == 8 ? 2 : 1) > kMostComparisons) return false;
  if (rows.length > 256 && elements > problem.offsets * (key_bytes == 1 ? 1024 : 2048)) return false;
  return plan_compare_shape(problem, shared_limit, plan);
}

// The same for rows without segments, where the steps of kTeam wait for each other. On an H200 it took longer for 57536
// elements in rows of 16, and for 14133 in rows of 673.
bool plan_compare_rows(const Problem& problem, int64_t shared_limit, Plan& plan) {
  constexpr int64_t kMostElements = 10 << 10, kMostPairs = 1 << 21;
  const Rows& rows = problem.rows;
  const int64_t pairs = rows.elements() * rows.length * (problem.key_bits == 64 ? 2 : 1);
  if (problem.k < rows.length || rows.length > kMaxTeamLength) return false;
  if (rows.elements() > kMostElements || pairs > kMostPairs) return false;
  return plan_compare_shape(problem, shared_limit, plan);
}

// Plans comparisons in many short rows that have the same segments, unless long segments of these take less time with
// other calls, as most of 8 and 16 bits do.
bool plan_compare_shared(const Problem& problem, const Gpu& gpu, Plan& plan) {
  constexpr int64_t kFew = 1 << 18, kBlocks = 8;  // elements in all, which other calls wait for; blocks at a time
  const Rows& rows = problem.rows;
  if (rows.inner > 1 || rows.length > kMostShared || !problem.shares_offsets()) return false;
  const bool narrow = problem.key_bits <= 16 && rows.elements() > kFew;
  const int64_t any = narrow ? 0 : 64;  // the longest rows that may be one segment
  const int64_t mean = narrow ? 8 : problem.key_bits == 64 ? 16 : 32;
  if ((narrow && rows.length > 32) || (rows.length > any && rows.length > mean * problem.offsets)) return false;
  plan.algorithm = Algorithm::kCompare;
  plan.threads = kCompareThreads;
  plan.together = kManyEach * kCompareThreads / rows.length;
  plan.blocks = std::min(ceil_div(rows.count(), plan.together), kBlocks * gpu.multiprocessors);
  plan.shared_bytes = kManyEach * kCompareThreads * std::max<int64_t>(4, problem.key_bits / 8);
  return true;
}

// Whether a network sorts the segments of tiles, which are merged then if they are long.
bool networks_tiles(const Problem& problem) {
  const int64_t elements = problem.rows.elements();
  const int64_t longest = problem.key_bits == 8 || elements < 1 << 22 ? 160 : 640;  // of the mean segment
  return !problem.indices && problem.key_bits <= 32 && elements >= 1 << 20 &&
         problem.rows.length <= longest * problem.offsets;
}

// Plans a block for each row, or for several short ones. If elements are few, most of a multiprocessor's warps would
// have none, so other kernels take less time.
bool plan_network_segments(const Problem& problem, Plan& plan, bool few = false) {
  const Rows& rows = problem.rows;
  const int64_t of_warp = segment_warp_places(problem.key_bits / 8);
  constexpr int64_t kFew = 3 << 17;
  const int64_t most = problem.key_bits <= 16 ? 3 * of_warp : kMostSegmentWarps * of_warp;
  if (problem.indices || rows.length < kLeastNetworked || rows.length > most) return false;
  if (rows.elements() < kFew && !few) return false;
  plan.algorithm = Algorithm::kNetwork;
  plan.together = std::max<int64_t>(1, of_warp / rows.length);
  plan.threads = static_cast<int>(32 * ceil_div(rows.length, of_warp));
  plan.blocks = ceil_div(rows.count(), plan.together);
  plan.shared_bytes = segment_network_bytes(problem.key_bits / 8, plan.threads);
  return true;
}

void plan_segments(const Problem& problem, int64_t shared_limit, const Gpu& gpu, Plan& plan) {
  if (problem.rows.inner == 1 && plan_network_segments(problem, plan)) return;
  if (plan_compare(problem, shared_limit, plan) || plan_compare_shared(problem, gpu, plan)) return;
  const int key_bytes = problem.key_bits / 8;
  const Rows& rows = problem.rows;
  plan.algorithm = Algorithm::kNone;
  // Many short rows are sorted faster by teams of lanes (kTeam), in calls without segments.
  const bool few = rows.length > 512 || rows.count() <= (key_bytes == 8 ? 4 : 2) * gpu.multiprocessors;
  if (rows.inner > 1 || !few) return;
  const auto [threads, items] = segments_block(key_bytes, rows.length, rows.count() <= gpu.multiprocessors);
  const int64_t bytes = segments_shared_bytes(key_bytes, threads, items);
  if (rows.length > threads * items || bytes > shared_limit) return;
  plan.algorithm = Algorithm::kSegments;
  plan.threads = threads;
  plan.items = items;
  plan.blocks = rows.count();
  plan.shared_bytes = bytes;
}

void plan_merge(const Problem& problem, const Gpu& gpu, int tile_bits, Plan& plan) {
  const Rows& rows = problem.rows;
  plan.algorithm = Algorithm::kMerge;
  plan.threads = kMergeThreads;
  plan.turns = false;
  plan.tile_bits = tile_bits;
  plan.blocks = rows.count() *
                ceil_div(rows.length, merge_each(rows, problem.offsets > 0) * merge_parts(rows, problem.offsets > 0));
  plan.workspace_bytes =
      MergeShape(rows.inner, rows.length, problem.key_bits / 8, tile_bits, problem.offsets > 0).bytes;
  plan.overlap = gpu.dependent_launch;
}

// Segments of fewer elements in the mean take longer to sweep than with other calls.
int64_t least_swept(const Problem& problem) {
  if (problem.key_bits == 64) return 8192;
  if (problem.indices) return 1536;
  if (problem.key_bits == 32) return 1024;
  return problem.key_bits == 16 ? 704 : 640;
}

// Whether segments are so short that large tiles would be empty for the most part.
bool sweeps_short(const Problem& problem) {
  return problem.offsets > 0 && (problem.key_bits <= 16 || problem.indices) &&
         problem.rows.length < 6144 * problem.offsets;
}

// Whether each segment is swept by itself, in one or two tiles more than a row of its length.
bool sweeps_segments(const Problem& problem) {
  const Rows& rows = problem.rows;
  return rows.inner == 1 && rows.length > kMostUnordered && rows.length >= least_swept(problem) * problem.offsets;
}

void plan_sweep(const Problem& problem, int64_t shared_limit, const Gpu& gpu, Plan& plan) {
  const int key_bytes = problem.key_bits / 8;
  const Rows& rows = problem.rows;
  plan.algorithm = Algorithm::kSweep;
  constexpr int64_t kFew = 1 << 20;  // elements, which small tiles spread
  const auto fits = [&](SweepTiles size) {
    return sweep_shared_bytes(key_bytes, size, problem.indices) <= shared_limit;
  };
  const bool always_small = !fits(kLargeTiles) || sweeps_short(problem);
  // Of so many rows. Tiny tiles are for few enough to exchange counts.
  const auto tiles_of = [&](int64_t count) {
    const int64_t elements = count * rows.length;
    // The smallest tiles of which each multiprocessor has one at most. They exchange counts in every pass, but others
    // skip the passes of bytes that are the same in all keys.
    if ((key_bytes == 2 || key_bytes == 4) && problem.offsets == 0 && !problem.low_keys) {
      const auto is_one = [&](SweepTiles size) {
        return count * ceil_div(rows.length, sweep_tile(key_bytes, size, problem.indices)) <= gpu.multiprocessors;
      };
      if (!is_one(kSmallTiles))
        for (const SweepTiles size : {kLargeTiles, kHugeTiles})
          if (is_one(size) && fits(size)) return size;
    }
    if (elements > kFew && !always_small) return kLargeTiles;
    const int64_t tiny = ceil_div(rows.length, sweep_tile(key_bytes, kTinyTiles, problem.indices));
    const int64_t most = key_bytes == 8 ? std::min(gpu.multiprocessors, count * kMostExchanging) : gpu.multiprocessors;
    const bool exchanges = key_bytes > 1 && problem.offsets == 0 && count * tiny <= most;
    return exchanges && tiny <= kMostTiny ? kTinyTiles : kSmallTiles;
  };
  const SweepTiles size = tiles_of(rows.count());
  plan.threads = sweep_threads(size);
  plan.small = size > kLargeTiles;
  // Sizes the workspace for a call with any number of rows, since a part of the batch is planned with the workspace of
  // the whole: for the smallest tiles of all these calls, which need the most bytes.
  const SweepTiles least = std::max(tiles_of(rows.inner), rows.inner * rows.length > kFew ? kLargeTiles : kSmallTiles);
  const SweepShape shape(rows.inner, rows.length, problem.k, key_bytes, problem.values, problem.indices, least,
                         problem.offsets);
  plan.blocks = rows.count() * (ceil_div(rows.length, sweep_tile(key_bytes, size, problem.indices)) + problem.offsets);
  plan.shared_bytes = sweep_shared_bytes(key_bytes, size, problem.indices);
  plan.workspace_bytes += shape.bytes;
  plan.counted = count_elements(rows.elements(), gpu.multiprocessors);
  const int64_t fit = std::min<int64_t>(sweep_blocks(key_bytes, size, problem.indices),
                                        gpu.multiprocessor_shared / (plan.shared_bytes + 2 * kReserved));
  plan.tickets = plan.blocks > fit * gpu.multiprocessors;
  // Passes that exchange counts are never skipped, so wider keys do it only where waiting takes most of the time.
  if (problem.offsets > 0)
    plan.exchanges = false;
  else if (key_bytes == 2)
    plan.exchanges = !plan.tickets;
  else if (key_bytes == 4)
    plan.exchanges = plan.blocks <= gpu.multiprocessors;
  else
    plan.exchanges =
        (plan.small || key_bytes == 1) && plan.blocks <= std::min(gpu.multiprocessors, rows.count() * kMostExchanging);
  plan.overlap = gpu.dependent_launch;
}

// Returns how many elements a thread has if one launch can sort so many rows (`count`); 0 if none can.
int items_to_split(const Problem& problem, int64_t count, int64_t shared_limit, const Gpu& gpu) {
  const int key_bytes = problem.key_bits / 8;
  if (key_bytes < 4 || problem.offsets > 0) return 0;
  for (int items = least_split_items(key_bytes); items <= kMostSplitItems; items *= 2) {
    // Passes of large tiles skip the digits that all elements share.
    if (key_bytes == 4 && items == kMostSplitItems && problem.low_keys) break;
    const int64_t tiles = ceil_div(problem.rows.length, int64_t{kSplitThreads} * items);
    if (count * tiles <= gpu.multiprocessors && split_shared_bytes(key_bytes, items) <= shared_limit) return items;
  }
  return 0;
}

// Plans one launch in place of a sweep that has been planned, if that is possible. The sweep remains as it is, for
// devices that cannot run all blocks at once.
void plan_split(const Problem& problem, int64_t shared_limit, const Gpu& gpu, int64_t workspace_bytes, Plan& sweep) {
  const Rows& rows = problem.rows;
  const int key_bytes = problem.key_bits / 8, items = items_to_split(problem, rows.count(), shared_limit, gpu);
  if (items == 0) return;
  const bool in_place = sweep.turns && rows.inner <= kMostColumns;  // columns are read and written there
  int64_t turned = 0;
  if (sweep.turns)
    turned = TurnShape({1, rows.length, rows.inner}, problem.k, key_bytes, problem.values, problem.indices).bytes;
  // A part of the batch, which may have smaller tiles, takes this launch if the workspace of the whole is enough.
  const int least = workspace_bytes < 0 ? items_to_split(problem, rows.inner, shared_limit, gpu) : items;
  const int64_t own = (in_place ? 0 : turned) + SplitShape(rows.inner, rows.length, key_bytes, least).bytes;
  const int64_t bytes = std::max(sweep.workspace_bytes - (in_place ? turned : 0), own);
  if (workspace_bytes >= 0 && bytes > workspace_bytes) return;
  sweep.items = items;
  sweep.turns &= !in_place;
  sweep.workspace_bytes = bytes;
}

// The longest rows that always have one block, or are merged. Longer ones are swept if they are few, or split in tiles
// of so many elements of a thread (`items`; 0: they cannot be).
constexpr int64_t longest_of_one_block(int key_bytes, int items) {
  if (items == 1 || items == 2) return 4096;
  return key_bytes == 8 ? 6656 : 8192;
}

// The logarithm of the longest tile, if merges take less time than what else is planned; else 0. Passes over few
// elements of 64 bits take longer than merges. Over many they do not, as digits that all elements share are skipped.
int merge_tile_bits(const Rows& rows, int key_bytes) {
  const int64_t elements = rows.elements();
  if (key_bytes < 8 || rows.inner > kMostColumns) return 0;
  if (elements <= (rows.length <= 2048 ? 1 << 16 : 1 << 17)) return kSmallMergeTileBits;
  const bool long_rows = rows.length > longest_of_one_block(key_bytes, 0) && rows.length <= 4 << kMergeTileBits;
  return long_rows && elements <= 1 << 19 ? kMergeTileBits : 0;
}

// The same for segments, which other calls would sort twice, or by one key of 32 bits: only those of more than half a
// tile take part in merges, so they must be short, or elements few.
bool merges_segments(const Problem& problem) {
  const Rows& rows = problem.rows;
  const int64_t elements = rows.elements();
  int64_t longest = 0;  // of the mean segment
  switch (problem.key_bits) {
    case 64: longest = elements <= 1 << 19 ? rows.length : 2048; break;
    case 32: longest = elements <= 1 << 18 ? 1536 : elements <= 1 << 21 ? 1280 : 640; break;
    default: {
      // Blocks hold shorter rows, and with indices only few elements were measured.
      const int64_t few = problem.indices || rows.length <= 16384 ? 0 : problem.key_bits == 8 ? 1 << 21 : 1 << 20;
      longest = elements <= 1 << 16 ? 1024 : elements <= few ? least_swept(problem) - 1 : 256;
    }
  }
  return rows.inner == 1 && rows.length > kMostUnordered && rows.length <= longest * problem.offsets;
}

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kShort: return "short";
    case Algorithm::kNetwork: return "network";
    case Algorithm::kTeam: return "team";
    case Algorithm::kPart: return "part";
    case Algorithm::kBlock: return "block";
    case Algorithm::kMerge: return "merge";
    case Algorithm::kSweep: return "sweep";
    case Algorithm::kSegments: return "segments";
    case Algorithm::kCompare: return "compare";
    case Algorithm::kNone: return "none";
  }
  return "?";
}

Plan plan_sort(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  const Rows& rows = problem.rows;
  const int key_bytes = problem.key_bits / 8;
  const int64_t shared_limit = gpu.shared_bytes - kReserved;
  if (rows.elements() == 0) return plan;
  if (problem.offsets > 0) {
    plan_segments(problem, shared_limit, gpu, plan);
    // Rows have offsets of their own in a program for several devices, since XLA splits these with the rows. Calls were
    // chosen for those of all rows.
    if (plan.algorithm == Algorithm::kNone && workspace_bytes >= 0 && rows.inner == 1 &&
        !plan_network_segments(problem, plan, true) && rows.length <= kMostShared)
      plan_compare_shape(problem, shared_limit, plan);
    // Several blocks share a long row, if there are few.
    constexpr int64_t kMostSpread = 1 << 19, kLongestSpread = 160;  // elements; of the mean segment
    const bool spreads = plan.algorithm == Algorithm::kSegments && rows.length > kMostUnordered &&
                         (rows.elements() <= kMostSpread || (rows.length <= kLongestSpread * problem.offsets &&
                                                             networks_tiles(problem) && merges_segments(problem)));
    if (plan.algorithm != Algorithm::kNone && !spreads) return plan;
    // A part of a batch that has another plan has less.
    const auto has_workspace = [&](const Plan& of) {
      return workspace_bytes < 0 || workspace_bytes >= of.workspace_bytes;
    };
    if (merges_segments(problem)) {
      Plan merge;
      plan_merge(problem, gpu, kMergeTileBits, merge);
      if (networks_tiles(problem)) merge.tile_bits = kNetworkTileBits;
      if (has_workspace(merge)) return merge;
    }
    if (sweeps_segments(problem) && (!spreads || rows.length >= 1536 * problem.offsets)) {
      Plan sweep;
      plan_sweep(problem, shared_limit, gpu, sweep);
      // Few elements are swept in less time than blocks take, unless segments are very short.
      const bool many = rows.elements() >= 1 << 20 || rows.length < 1536 * problem.offsets;
      if (many && !problem.indices && problem.offsets > 1 && rows.length <= kMostInBlocks * problem.offsets) {
        // Threads and elements of a thread as in block.cu.
        const auto [threads, items] = key_bytes == 8 ? std::pair(512, 8) : std::pair(256, 16);
        const auto fits = [&](int times) {
          return block_shared_bytes(std::max(key_bytes, 2), times * threads, items) <= shared_limit;
        };
        sweep.in_blocks = fits(2) ? 2 * kBlockSegments : fits(1) ? kBlockSegments : 0;
      }
      if (!spreads || has_workspace(sweep)) return sweep;
    }
    return plan;
  }
  if (problem.carries) {
    // A call with part of a batch gets the kernel that the whole batch has been given the workspace of.
    Problem alone = problem;
    alone.carries = false;
    const bool sweeps = workspace_bytes >= 0 || plan_sort(alone, gpu, -1).algorithm == Algorithm::kSweep;
    plan.algorithm = Algorithm::kNone;
    if (rows.inner == 1 && sweeps) {
      plan_sweep(problem, shared_limit, gpu, plan);
      plan_split(problem, shared_limit, gpu, workspace_bytes, plan);
    }
    return plan;
  }
  // kShort reads columns in place. That needs many columns side by side, or else tiles of whole outer indices in shared
  // memory: with few, the loads of a warp would use only parts of memory sectors.
  if (rows.length <= kMaxShortLength && (short_tile_outers(rows, problem.k) > 0 || rows.inner >= kLeastShortColumns)) {
    plan.algorithm = Algorithm::kShort;
    plan.threads = kShortThreads;
    plan.blocks = short_blocks(rows, problem.k);
    return plan;
  }
  Plan compare = plan;
  if (plan_compare_rows(problem, shared_limit, compare)) return compare;
  if (sorts_in_warps(problem, gpu)) {
    plan_network(rows, problem.indices, sorts_pairs(problem), plan);
    return plan;
  }
  if (rows.length <= kMaxTeamLength) {
    plan.algorithm = Algorithm::kTeam;
    plan.team = topk::sort_shape(rows, rows.length, key_bytes, true, gpu.multiprocessors, shared_limit);
    plan.threads = plan.team.threads;
    plan.blocks = plan.team.blocks;
    plan.shared_bytes = static_cast<int64_t>(plan.team.shared_bytes);
    return plan;
  }
  // The workspace below is sized for one outer index. A call with n outer indices gets n times as much, which is enough
  // for all its rows together.
  plan.turns = rows.inner > 1;
  const Rows own{1, rows.length, rows.inner};
  if (plan.turns) plan.workspace_bytes = TurnShape(own, problem.k, key_bytes, problem.values, problem.indices).bytes;
  // Partitions: a block sorts bytes in one pass, which takes less time than selecting and then moving elements.
  Plan sorted = plan;
  constexpr int64_t kLeastByteRow = 1500;
  if (problem.kth >= 0 &&
      !(key_bytes == 1 && rows.length >= kLeastByteRow && plan_block(problem, shared_limit, gpu, sorted))) {
    select::Select one;
    one.rows = {rows.outer * rows.inner, rows.length, 1};
    one.count = 1;
    one.bits = problem.key_bits;
    one.kth = problem.kth;
    const auto select = select::plan_select(one, gpu);
    const bool is_long = select.algorithm == select::Selecting::kLong;
    const bool is_shared = is_long || select.algorithm == select::Selecting::kCluster;
    // A pass of the radix sort sorts bytes of rows that no block sorts. Without indices, counts are enough.
    const bool sorts = key_bytes == 1 && (is_shared || (!problem.indices && rows.length >= kLeastByteRow));
    const int64_t bytes = plan.workspace_bytes + rows.inner * select.workspace_bytes;
    if (select.algorithm != select::Selecting::kNone && !sorts &&
        rows.count() * std::max<int64_t>(1, select.tiles) < int64_t{1} << 31 &&
        (workspace_bytes < 0 || bytes <= workspace_bytes)) {
      plan.algorithm = Algorithm::kPart;
      plan.select = select;
      plan.threads = select.threads;
      const bool persists = select.algorithm == select::Selecting::kTeams;
      plan.blocks = persists ? select.blocks : rows.count() * (is_long ? select.slices : select.blocks);
      plan.shared_bytes = select.shared_bytes;
      plan.workspace_bytes = bytes;
      return plan;
    }
  }
  // Digits of narrow keys, and indices, take less time in a radix sort.
  const bool pairs =
      problem.key_bits == 16 && rows.length <= kMostPairsLength && rows.count() >= 4 * gpu.multiprocessors;
  if ((problem.key_bits == 32 || pairs) && !problem.indices && problem.k == rows.length &&
      rows.length <= kMostNetworkLength) {
    plan_network({rows.outer * rows.inner, rows.length, 1}, false, sorts_pairs(problem), plan);
    return plan;
  }
  // Merges of few elements use more multiprocessors.
  if (problem.key_bits == 64 && problem.k == rows.length && rows.count() >= gpu.multiprocessors &&
      plan_network_segments(problem, plan))
    return plan;
  Plan block = plan, sweep = plan;
  const bool fits_block = plan_block(problem, shared_limit, gpu, block);
  plan_sweep(problem, shared_limit, gpu, sweep);
  // A few columns that lie side by side are read and written in place.
  if (rows.inner > 1 && rows.inner <= kMostColumns && sweep.exchanges && key_bytes > 1 && sweep.small) {
    sweep.turns = false;
    sweep.workspace_bytes -= plan.workspace_bytes;
  }
  plan_split(problem, shared_limit, gpu, workspace_bytes, sweep);
  // A few long rows take less time if several blocks share each, provided that all blocks run at the same time.
  const bool is_long = rows.length > longest_of_one_block(key_bytes, sweep.items);
  const bool spreads = is_long && (sweep.items > 0 || (sweep.exchanges && (sweep.small || key_bytes == 1))) &&
                       (key_bytes < 8 ? 1 : 2) * sweep.blocks <= gpu.multiprocessors;
  const auto has_workspace = [&](const Plan& of) {
    return workspace_bytes < 0 || workspace_bytes >= of.workspace_bytes;
  };
  // A part of a batch may have only the workspace of large tiles, which need less.
  const bool splits = sweep.items > 0 && is_long && has_workspace(sweep);
  for (int bits = splits ? 0 : merge_tile_bits(rows, key_bytes); bits;
       bits = bits == kSmallMergeTileBits ? kMergeTileBits : 0) {
    Plan merge = plan;
    plan_merge(problem, gpu, bits, merge);
    if (has_workspace(merge)) return merge;
  }
  return !fits_block || (spreads && has_workspace(sweep)) ? sweep : block;
}

}  // namespace jaxgpuops::sort
