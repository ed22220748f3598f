// Plans of searches in sorted rows and of chosen places.
#include "search/plan.h"

#include <algorithm>

#include "common/rounding.h"
#include "search/distinct.h"

namespace jaxgpuops::search {
namespace {

// Divides the queries of a row among about `blocks` blocks, at least `least` each.
void cut_rows(int64_t blocks, int64_t least, int64_t turn, SearchPlan& plan) {
  plan.chunk = ceil_div(std::max(ceil_div(plan.queries, blocks), least), turn) * turn;
  plan.blocks = ceil_div(plan.queries, plan.chunk);
}

// Plans kRows: a block has one or several short rows with all their queries, or one row with some of its queries.
void plan_search_rows(const Search& problem, int64_t blocks, SearchPlan& plan) {
  constexpr int64_t kMost = 4096;  // queries of a block
  const int64_t bytes = (problem.length | 1) * problem.bits / 8, all = plan.rows * plan.queries;
  // Few queries have a thread each.
  const int64_t least = 8 * all <= 256 * blocks ? 256 : 1024;
  const int64_t wanted = std::clamp<int64_t>(all / blocks, least, kMost);
  const int64_t most_rows = std::min(ceil_div(wanted, plan.queries), kMost / plan.queries);
  plan.algorithm = Searching::kRows;
  plan.group_rows = static_cast<int>(std::clamp<int64_t>(std::min(most_rows, kMostSearchRows / bytes), 1, plan.rows));
  if (plan.group_rows > 4) plan.group_rows -= plan.group_rows % 4;  // queries and places begin at whole vectors
  plan.shared_bytes = plan.group_rows * bytes;
  if (plan.group_rows == 1) return cut_rows(std::max<int64_t>(1, blocks / plan.rows), least, 256, plan);
  plan.chunk = plan.group_rows * plan.queries;
  plan.blocks = 1;
  plan.reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 31, plan.queries));
  if (problem.length % 2 == 0 && problem.length > 0)
    plan.length_reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 32, problem.length));
}

}  // namespace

SearchPlan plan_search(const Search& problem, const Gpu& gpu) {
  SearchPlan plan;
  const Rows& rows = problem.rows;
  if (rows.elements() == 0) return plan;
  plan.algorithm = Searching::kEach;
  if (rows.elements() <= kMostTeamSearch && problem.length >= kLeastTeamSearch) plan.team = 32;
  if (rows.inner > 1 || (problem.sorted.axis_stride != 1 && problem.length > 1)) return plan;
  plan.rows = rows.outer, plan.queries = rows.length;
  const IndexMap& outer = problem.sorted.outer;
  if (std::all_of(outer.stride, outer.stride + outer.groups, [](int64_t stride) { return stride == 0; }))
    plan.rows = 1, plan.queries = rows.elements();  // all queries share one row
  const bool whole = plan.rows == 1 || (outer.groups == 1 && outer.stride[0] == problem.length);  // or some share one
  const int64_t most_blocks = 8 * gpu.multiprocessors, bytes = problem.length * problem.bits / 8;
  // If a row does not have many more elements than queries, searches read most of it. If a row has fewer than 8
  // queries, blocks need many rows, and rows must be still shorter.
  const int64_t all = plan.rows * plan.queries;
  const bool some = plan.queries >= 8, few_queries = plan.queries >= 2 && all >= 1 << 18;
  const int64_t most_for_two = some ? 6 : problem.bits == 64 ? 4 : 3;  // elements of a row for two of its queries
  const bool is_byte =
      whole && bytes <= kMostSearchRow && (some || few_queries) && 2 * problem.length <= most_for_two * plan.queries;
  if (problem.length <= 4 && all < 16 << 10) return plan;  // there is little to read and to do
  const int64_t least = all < 64 << 10 ? (is_byte ? all + 1 : 4096) : is_byte ? 2048 : 512;
  if (problem.bits == 8 && plan.queries >= least) {
    plan.algorithm = Searching::kTable;
    plan.threads = 256;
    cut_rows(std::max<int64_t>(std::max<int64_t>(1, most_blocks / plan.rows), plan.queries >> 14), 1024, 256, plan);
    return plan;
  }
  const int64_t few = std::max<int64_t>(1, gpu.multiprocessors / plan.rows);  // blocks of a row
  constexpr int64_t kTableBytes = 2 << 16, kLeastTable = 12288;
  if (problem.bits == 16 && problem.length >= 32 && problem.length < 1 << 16 && plan.queries >= kLeastTable * few &&
      gpu.shared_bytes >= kTableBytes + 1024) {
    plan.algorithm = Searching::kTable;
    plan.threads = 1024;
    plan.shared_bytes = kTableBytes;
    cut_rows(few, 1, 256, plan);
    return plan;
  }
  const bool trees = problem.bits > 8 && plan.queries >= 1024 * few && problem.length >= 32;
  // In rows of nearly 256 words, the searches of many lanes read the same banks; trees do not.
  if (is_byte && (!trees || problem.bits != 32 || bytes <= kMostSearchRow - 64)) {
    plan_search_rows(problem, most_blocks, plan);
    return plan;
  }
  constexpr int kMostWideGroup = 4;  // elements of 64 bits in larger groups come from too many sectors
  // Each block reads a tree of 2^levels words, which is worth while for at least half as many queries.
  if (!trees) return plan;
  constexpr int kMostThreads = 1024;
  const int64_t word = problem.bits / 8, most_near = (kMostThreads / 32 * word) << kNearBits;
  const int64_t most = std::min<int64_t>(gpu.shared_bytes - most_near, 128 << 10) / word;
  while ((2 << plan.levels) <= std::min(most, 2 * plan.queries / few) && int64_t{1} << plan.levels < problem.length)
    ++plan.levels;
  // The last group needs no splitter.
  while (ceil_div(problem.length, int64_t{1} << plan.group_bits) > int64_t{1} << plan.levels) ++plan.group_bits;
  if (problem.bits == 64 && plan.group_bits > kMostWideGroup) return plan;
  plan.algorithm = Searching::kTree;
  const int64_t tree = word << plan.levels, near = plan.group_bits ? most_near : 0;
  plan.threads = tree + near / 2 > gpu.multiprocessor_shared / 2 - 1024 ? kMostThreads : kMostThreads / 2;
  plan.shared_bytes = tree + near * plan.threads / kMostThreads;
  cut_rows(plan.threads == kMostThreads ? few : 2 * few, 1, kTreeTurn, plan);
  // Blocks check whether their queries are in order if the elements between the queries of a turn fit in shared memory,
  // and if there is room for all blocks in spite of the registers that the check takes. (Groups of 32 bits take as many
  // registers anyway.) Warps with few queries gain too little.
  const int64_t warps = plan.threads / 32;
  if (problem.bits == 64) return plan;  // the check and its windows would take too many registers
  const bool fit = 32 * plan.rows * plan.blocks * warps <= 1024 * gpu.multiprocessors;
  if (plan.chunk < kOrderTurn * warps || !(fit || (problem.bits == 32 && plan.group_bits > 0))) return plan;
  while ((word * warps << (plan.near_bits + 1)) <= plan.shared_bytes) ++plan.near_bits;
  if (plan.near_bits < 5 || problem.length > (plan.queries / kOrderTurn) << plan.near_bits) plan.near_bits = 0;
  return plan;
}

// Up to so many elements (of a mask; of other arrays), each block counts everything before its own tile. Reading that
// takes less time than a second launch.
constexpr int64_t kMostRecount = 64 << 10, kMostRecountStarts = 16 << 10;
namespace {

// Cuts rows of `units` into tiles for kLookBack, so that blocks have few turns, and the last turn leaves few of them
// idle.
void cut_units(int64_t outer, int64_t units, bool starts, const Gpu& gpu, ChoosePlan& plan) {
  constexpr int64_t kWarps = kMostChooseThreads / 32, kListBytes = kWarps * kChooseList * 2;
  const int64_t unit_bytes = 4 * 32 + (starts ? 8 : 4);
  constexpr int64_t kTurn = 3;  // the waits of a turn take about as long as three units of each warp
  const int64_t each = starts ? kStartsBlocks : kMaskBlocks;
  const int64_t shared = std::min(gpu.shared_bytes, gpu.multiprocessor_shared / each) - 2048;
  const int64_t most = std::min<int64_t>((shared - kListBytes) / unit_bytes, kMostChooseThreads);
  const int64_t blocks = each * gpu.multiprocessors;
  const int64_t least = ceil_div(outer * ceil_div(units, most), blocks);
  int64_t best = 0;
  for (int64_t turns = least; turns < least + 8; ++turns) {
    const int64_t tiles = turns * blocks / outer;
    const int64_t own = std::min(std::max(ceil_div(units, std::max<int64_t>(tiles, 1)), kWarps), most);
    const int64_t cost = ceil_div(outer * ceil_div(units, own), blocks) * (ceil_div(own, kWarps) + kTurn);
    if (turns > least && cost >= best) continue;
    best = cost;
    plan.units = own;
  }
  plan.tiles = ceil_div(units, plan.units);
  // Warps with several units list places while they read, so that less work is left when other blocks have told their
  // counts. A third of the memory is left to L1, through which all elements pass.
  const int64_t bytes = plan.units * unit_bytes, own = gpu.multiprocessor_shared * 7 / 10 / each - 1024;
  const int64_t room = std::max<int64_t>(kChooseList, (own - bytes) / (2 * kWarps));
  const int64_t useful = ceil_div(plan.units, kWarps);
  plan.list = std::min(room, useful * kChooseList) / 2 * 2;
  plan.early = plan.units > kWarps;
  plan.shared_bytes = bytes + 2 * kWarps * plan.list;
}

}  // namespace

ChoosePlan plan_choose(const Choose& problem, const Gpu& gpu) {
  ChoosePlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.size == 0) return plan;
  // A block has one row at least.
  if (rows.inner > 1 || (rows.length < 128 && rows.outer > 2048) || rows.outer > kMostBlocks) {
    plan.algorithm = Choosing::kNone;
    return plan;
  }
  // A row begins anywhere in its first vector of 16 bytes.
  const int64_t words = (rows.length + 15) / 32 + 1, units = ceil_div(words, 32);
  const int64_t wanted = std::max(words, problem.size / 8);  // enough threads that each fills few results
  plan.threads = static_cast<int>(std::min<int64_t>(kMostChooseThreads, ceil_div(wanted, int64_t{32}) * 32));
  plan.units = plan.threads / 32;
  plan.tiles = ceil_div(units, plan.units);
  // A part of a batch, with the same workspace, may have other tiles, or be small enough for the other algorithm.
  if (plan.tiles > 1) plan.workspace_bytes = aligned((problem.starts ? 8 : 4) * plan.tiles);
  const bool few = rows.elements() <= (problem.starts ? kMostRecountStarts : kMostRecount);
  plan.algorithm = plan.tiles == 1 || few ? Choosing::kRecount : Choosing::kLookBack;
  plan.shared_bytes = plan.threads / 32 * kRecountList * 2;
  if (plan.algorithm == Choosing::kLookBack) {
    cut_units(rows.outer, units, problem.starts, gpu, plan);
    plan.overlap = gpu.dependent_launch;
  }
  // Two blocks share a multiprocessor. All parts are filled at the same time, since a block first finds out where the
  // fills begin.
  const int64_t together = std::max(2 * gpu.multiprocessors - rows.outer * plan.tiles, int64_t{gpu.multiprocessors});
  plan.fill = std::max(kChooseFill, aligned(ceil_div(rows.outer * problem.size, together)));
  plan.parts = ceil_div(problem.size, plan.fill);
  plan.blocks = rows.outer * (plan.tiles + plan.parts - 1);
  return plan;
}

// Of fewer elements, a sort takes too little time: to find out that all are different would take a considerable part.
constexpr int64_t kLeastTable = 1 << 18;
constexpr int64_t kMostCounted = 1 << 14;                 // elements of kCounts: each block of a row reads all
constexpr int64_t kLeastCounted = 1 << 12;                // elements of a block that counts those of a long row
constexpr int64_t kMostCountsSize = 1 << 17;              // results of a row that one block writes
constexpr int64_t kLeastCollected = 8 * kCollectThreads;  // elements of a block
// Of kCompare: pairs of elements of all rows, and results that a block fills.
constexpr int64_t kMostUniquePairs = 1 << 24, kUniqueFill = 4096;

UniquePlan plan_unique(const Unique& problem, const Gpu& gpu, bool counted) {
  UniquePlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || (problem.size == 0 && !problem.inverse)) return plan;
  plan.algorithm = Finding::kNone;
  if (problem.size == 0) return plan;  // the inverse alone
  const int64_t length = rows.length;
  const auto plan_compare = [&](int64_t elements) {
    plan.slot_bits = 5;
    while (int64_t{1} << plan.slot_bits < 2 * elements) ++plan.slot_bits;
    plan.shared_bytes = 2 * round_up(elements, 4) * std::max(problem.bits / 8, 4) + (int64_t{8} << plan.slot_bits);
    return plan.shared_bytes + 1024 <= gpu.shared_bytes;
  };
  // Counting elements of few bits takes less time, unless one block would have to write many fills.
  const bool counts = problem.bits <= 16 && !problem.index && !problem.inverse;
  if (!(counts && problem.size <= kMostCountsSize) && rows.inner == 1 && length > 0 && length <= kMostUniqueCompared &&
      rows.outer * length * length <= kMostUniquePairs &&
      rows.outer * ceil_div(length, int64_t{kUniquePart}) <= 8 * gpu.multiprocessors) {
    const int64_t fills = std::min(ceil_div(problem.size, kUniqueFill), 2 * gpu.multiprocessors / rows.outer);
    plan.blocks = std::max(ceil_div(length, int64_t{kUniquePart}), fills);
    if (plan_compare(length)) {
      plan.algorithm = Finding::kCompare;
      return plan;
    }
  }
  if (counts) {
    const int64_t keys = int64_t{1} << problem.bits;
    plan.blocks = std::max<int64_t>(1, keys / kCountsRange);
    const bool is_short = rows.length > 0 && rows.length <= kMostCounted && problem.size <= kMostCountsSize;
    if (is_short && rows.inner == 1 && rows.outer * plan.blocks <= 2 * gpu.multiprocessors) {
      plan.algorithm = Finding::kCounts;
      return plan;
    }
    plan.shared_bytes = problem.bits == 8 ? 4 * keys : 2 * keys;
    if (rows.count() == 1 && rows.length > 0 && plan.shared_bytes + 1024 <= gpu.shared_bytes) {
      plan.algorithm = Finding::kCounts;
      const int64_t most = (problem.bits == 8 ? 2 : 1) * gpu.multiprocessors;
      plan.chunk = std::max(kLeastCounted, aligned(ceil_div(rows.length, most)));
      plan.blocks += std::min(ceil_div(problem.size, kMostCounted), gpu.multiprocessors) - 1;
      plan.workspace_bytes = aligned(16 + 4 * keys);
      plan.overlap = gpu.dependent_launch;
      return plan;
    }
    if (counted) return plan;
  }
  const bool orders = problem.index || problem.inverse;
  if (rows.count() != 1 || rows.length < kLeastTable) return plan;
  constexpr int64_t kStatic = 1024;  // bytes of shared memory that the kernel declares itself, and the system
  if ((8 + std::max(problem.bits, 32) / 8) * (kSlots + 1) + kStatic > gpu.shared_bytes) return plan;
  sort::Problem& sorting = plan.sorting;
  sorting.rows = rows;
  sorting.k = rows.length;
  sorting.key_bits = problem.bits;
  sorting.order = problem.order;
  sorting.indices = orders;
  plan.sort = sort::plan_sort(sorting, gpu, -1);
  if (plan.sort.algorithm != sort::Algorithm::kSweep || plan.sort.turns) return plan;  // others cannot be left out
  Choose& choosing = plan.choosing;
  choosing.rows = rows;
  choosing.size = problem.size;
  choosing.starts = true;
  choosing.bits = problem.bits;
  choosing.order = problem.order;
  choosing.arrays = problem.index ? 2 : 1;
  choosing.bytes[0] = problem.bits / 8;
  if (problem.has_fill) choosing.fill[0] = problem.fill;
  choosing.is_row[0] = !problem.has_fill;
  choosing.is_row[1] = true;
  plan.choose = plan_choose(choosing, gpu);
  plan.choose.shared_bytes = std::max<int64_t>(plan.choose.shared_bytes, kMostDistinct * sizeof(uint64_t));
  plan.algorithm = Finding::kTable;
  const int64_t most = kCollectBlocks * gpu.multiprocessors;
  plan.chunk = std::max(kLeastCollected, aligned(ceil_div(rows.length, most)));
  plan.blocks = ceil_div(rows.length, plan.chunk);
  plan.sorted = aligned(int64_t{sizeof(Distinct)});
  plan.order = plan.sorted + aligned(rows.length * problem.bits / 8);
  plan.sort_workspace = plan.order + (orders ? aligned(4 * rows.length) : 0);
  plan.choose_workspace = plan.sort_workspace + aligned(plan.sort.workspace_bytes);
  plan.bits = plan.choose_workspace + aligned(plan.choose.workspace_bytes);
  plan.units = plan.choose.tiles * plan.choose.units;
  plan.before = plan.bits + (problem.inverse ? aligned(4 * 32 * plan.units) : 0);
  plan.workspace_bytes = plan.before + (problem.inverse ? aligned(4 * plan.units) : 0);
  // If few of many elements are wanted, a sample tells a bound below which there are about kCandidates elements.
  constexpr int64_t kCandidates = kMostLeast * 5 / 8, kMostSamples = 256, kLeastBits = int64_t{1} << 24;
  const bool few = problem.size <= kMostLeast / 4 && rows.length * problem.bits >= kLeastBits;
  if (!few || orders || problem.bits < 32 || plan.blocks * kLeastWords > kCollectThreads * kSampledWords ||
      !plan_compare(kMostLeast))
    return plan;
  plan.samples =
      static_cast<int>(std::clamp<int64_t>(plan.chunk * kLeastWords / kCandidates, kLeastWords, kMostSamples));
  plan.sampled_rank = static_cast<int>(
      std::clamp<int64_t>(kCandidates * plan.samples / plan.chunk, 2, std::min<int64_t>(kLeastWords, plan.samples)));
  plan.least = plan.workspace_bytes;
  plan.least_at = plan.least + aligned(kMostLeast * problem.bits / 8);
  plan.sample = plan.least_at + aligned(4 * kMostLeast);
  plan.workspace_bytes = plan.sample + aligned(4 * kLeastWords * plan.blocks);
  return plan;
}

}  // namespace jaxgpuops::search
