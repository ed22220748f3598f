// Plans of selections by rank.
#include "select/plan.h"

#include <algorithm>

#include "common/rounding.h"

namespace jaxgpuops::select {
namespace {

// Whether columns are so few that the caches deliver them to warps as fast as rows.
bool reads_columns(const Rows& rows, int bits) {
  const int64_t most = bits <= 16 ? 1 << 20 : bits == 32 && rows.inner <= 4 ? 1 << 18 : (1 << 22) / bits;
  return rows.elements() <= most;
}

// Whether a warp sorts rows of more than kMostThreadSelect elements, if it takes them.
bool warp_sorts(const Select& problem) {
  const int64_t length = problem.rows.length, rows = problem.rows.count();
  return problem.bits <= 32 &&
         ((length <= 128 && rows <= 2048) || (length <= 256 && rows <= 1000 && problem.bits <= 16));
}

// Chooses the kernel for rows of up to kMostWarpSelect elements, or kNone where sorting them takes less time. If a
// kernel takes the whole batch, one must take every part of it, too: that part only has its part of the workspace.
Selecting plan_short_select(const Select& problem, const Gpu& gpu) {
  const Rows& rows = problem.rows;
  constexpr int64_t kMostTiny = 4096;  // rows of up to 8 elements, each of which a warp takes
  const bool reads = rows.inner == 1 || reads_columns(rows, problem.bits);
  // Threads select from rows of up to 8 elements, for three ranks only if the rows are not too many.
  const bool sorts = problem.bits == 64 || problem.count > 3 || (problem.count > 1 && rows.count() > 1 << 18);
  if (rows.length <= 8 && sorts) return rows.count() <= kMostTiny && reads ? Selecting::kWarp : Selecting::kNone;
  // The largest tables of threads do not fit in the shared memory of every GPU.
  if (rows.length == kMostThreadSelect && problem.bits == 32 && gpu.shared_bytes <= 64 << 10) return Selecting::kNone;
  const bool few = rows.count() <= 2048;
  if (problem.bits <= 32 && rows.length <= kMostThreadSelect) {
    // A warp finishes a row sooner than a thread does, so warps take the rows if these are few. Not if there are many
    // ranks, which a warp finds one after another, nor if there are many columns, which a warp cannot read in place.
    const bool many_ranks = problem.count > 3;
    const bool by_warp = rows.length <= 16 ? rows.count() <= 1024
                         : many_ranks      ? rows.length > 32 && few && rows.count() < 64 * rows.length
                                           : rows.count() <= 128 * rows.length;
    return by_warp && reads ? Selecting::kWarp : Selecting::kThread;
  }
  // Networks sort many such rows in less time than warps take for the elements beside a quantile. (A single rank needs
  // an index, with which networks take longer.)
  constexpr int64_t kLeastSorted = 8192;
  if (rows.inner == 1 && problem.count > 1 && problem.bits <= 32 && problem.bits > 8 &&
      rows.length > kMostThreadSelect && rows.length <= 256 && rows.count() >= kLeastSorted)
    return Selecting::kNone;
  if (problem.count > 3)
    return warp_sorts(problem) || (rows.length > 512 && problem.bits == 32) ? Selecting::kWarp : Selecting::kNone;
  return rows.length > kMostThreadSelect || few ? Selecting::kWarp : Selecting::kNone;
}

// Chooses how a warp selects: it compares all elements of short rows, sorts rows of few bits or elements, bisects other
// rows, or goes by steps: of many long rows, or if ranks are many.
void plan_warp_select(const Select& problem, SelectPlan& plan) {
  const int64_t length = problem.rows.length, rows = problem.rows.count();
  const bool few_ranks = problem.count <= 3;
  if (length <= kMostThreadSelect) {
    plan.bisects = few_ranks && problem.bits <= 32 && (length > 50 || (length > 16 && rows > 1024));
    return;
  }
  if (warp_sorts(problem)) return;
  plan.bisects = few_ranks && (length <= 256 || rows <= 1000);
  if (plan.bisects) return;
  constexpr int64_t kStep = 128;  // elements that a warp takes at a time
  // Many columns come to shared memory together, with room between them, so that threads write to different banks.
  const bool together = problem.rows.inner * problem.bits > 128 && !reads_columns(problem.rows, problem.bits);
  plan.pitch = round_up(length, kStep) + (together ? 8 : 0);
  plan.shared_bytes = kShortSelectThreads / 32 * plan.pitch * (problem.bits == 64 ? 8 : 4);
}

// Plans a cluster of blocks for each row, or returns false if other kernels are faster: where a row has no room, and
// where blocks would have much of it each. `must`: whether a block has no room for a row. If a cluster takes the whole
// batch, one takes every part of it, too, or kernels that need no more workspace.
bool plan_select_cluster(const Select& problem, bool must, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kStatic = 8 << 10;       // bytes of shared memory that the kernel declares itself
  constexpr int64_t kLargePart = 104 << 10;  // bytes of a row in a block
  const Rows& rows = problem.rows;
  const bool parts = problem.kth >= 0, many = parts || problem.count > 3;
  // Shorter rows than these are faster in one block.
  const int64_t least = parts ? 16384 : problem.bits == 64 ? 12000 : 24000;
  if (!must && (rows.length < least || rows.count() * 2 > gpu.multiprocessors)) return false;
  const int64_t packs = rows.length * problem.bits / 128 + 2, tables = problem.count * int64_t{4} << kSelectBinBits;
  const int64_t most = gpu.shared_bytes - kStatic - tables;
  // Elements that a block should have at least.
  const int64_t least_part = parts ? 2000 : problem.bits == 64 ? 3000 : 6000;
  const auto part = [&](int64_t blocks) { return 16 * ceil_div(packs, blocks); };
  // Elements of a part, if all clusters run at the same time. (Long rows of few bits have intervals of single keys.)
  const int64_t most_elements = problem.bits > 16 || (problem.bits == 16 && !must) ? 50000
                                : problem.bits == 16 && many                       ? 44000
                                                                                   : 25000;
  // Elements of a row with more ranks, if clusters take turns.
  const int64_t most_in_turns = problem.bits == 32 ? 90000 : problem.bits == 16 ? 240000 : 5 << 16;
  // Whether all clusters run at the same time. Not every multiprocessor gets a block of a large one: an H200 runs 66
  // clusters of 2 blocks, 30 of 4, 15 of 8 and 7 of 16.
  const auto alone = [&](int64_t blocks) {
    return blocks * rows.count() <= (blocks == 2 ? gpu.multiprocessors : gpu.multiprocessors * 10 / 11);
  };
  int64_t blocks = 2;
  while (blocks <= gpu.max_cluster && part(blocks) > most) blocks *= 2;
  if (blocks > gpu.max_cluster || rows.count() * gpu.max_cluster >= int64_t{1} << 31) return false;
  while (2 * blocks <= gpu.max_cluster && (alone(2 * blocks) ? rows.length >= 2 * blocks * least_part
                                                             : many && !alone(blocks) && part(blocks) > kLargePart))
    blocks *= 2;
  const int64_t elements = ceil_div(rows.length, blocks);
  const bool fast = alone(blocks) && elements <= most_elements;
  if (!fast && !parts && (!many || rows.length > most_in_turns)) return false;
  // All multiprocessors share a partition of longer rows.
  if (parts && problem.bits > 8 && rows.length * problem.bits >= 1 << 24) return false;
  plan.algorithm = Selecting::kCluster;
  plan.threads = alone(blocks) && elements > 19000 ? kMostClusterThreads : kMostClusterThreads / 2;
  plan.blocks = blocks;
  plan.table_at = part(blocks);
  plan.shared_bytes = plan.table_at + tables;
  return true;
}

// Whether blocks with a row in registers read columns in place: if the sectors of a line have few others, or if these
// columns are few.
bool registers_read_columns(const Rows& rows, int bits) {
  return rows.inner * bits <= 128 || rows.elements() <= (1 << 22) / bits;
}

// Plans a team of warps for each row, or returns false where other kernels are faster: where rows are few, since one
// row takes a team longer than it takes a block, and where few rows have room in a multiprocessor.
bool plan_select_teams(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kMostAlone = 32, kMostWarps = 24, kStatic = 6 << 10;
  const Rows& rows = problem.rows;
  const int64_t length = rows.length, count = rows.count();
  const bool is_long = problem.bits == 32, parts = problem.kth >= 0;
  if ((problem.bits != 32 && problem.bits != 16) || !gpu.bulk_copy) return false;
  if (rows.inner > 1 && registers_read_columns(rows, problem.bits)) return false;
  const int64_t some = 8 * gpu.multiprocessors, many = 16 * gpu.multiprocessors, most = 31 * gpu.multiprocessors;
  int64_t least = many;  // rows
  plan.team = 1;
  if (length <= kMostWarpSelect) {
    // Of shorter rows, warps have the elements in registers, or a sort takes less time.
    if (rows.inner > 1 || length <= 256 || (problem.count > 3 && (length <= 512 || !is_long))) return false;
    least = length <= 512 ? some : problem.count == 1 ? 2 * gpu.multiprocessors : 1;
  } else if (parts) {
    if (length > 4096) return false;
    if (!is_long) least = (length <= 2048 ? 1 : 4) * gpu.multiprocessors;
  } else if (problem.count > 3) {
    if (length > (is_long ? 3072 : 4096)) return false;
    if (length > 2048) least = most;
  } else if (length > 4096) {
    if (length > (is_long ? 6144 : 8192)) return false;
    least = is_long ? many : 2 * most;
    plan.team = 2;
  } else if (is_long && length > 3072) {
    if (problem.count == 1) return false;
    least = most;
  }
  // Rows may begin anywhere in 16 bytes.
  const int64_t room = round_up(length * problem.bits / 8, 16) + 16, own = room + (int64_t{4} << kSelectBinBits);
  const int64_t fitting = std::min((gpu.shared_bytes - kStatic) / own, plan.team == 1 ? kMostAlone : kMostWarps / 2);
  if (count < least || fitting < 6) return false;
  plan.algorithm = Selecting::kTeams;
  plan.blocks = std::min(count, gpu.multiprocessors);
  const int64_t teams = std::min(fitting, ceil_div(count, plan.blocks));
  plan.threads = 32 * plan.team * static_cast<int>(teams);
  plan.table_at = room;
  plan.shared_bytes = teams * own;
  return true;
}

// Plans the registers of a block for each row, or returns false where shared memory is faster.
bool plan_select_registers(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  const Rows& rows = problem.rows;
  const bool parts = problem.kth >= 0;
  // A block of fewer threads has parts with more elements in longer rows.
  constexpr int64_t kMostOfFew = kMostRegisterSelect / 2, kLong = kMostOfFew * 3 / 4;
  if ((problem.bits != 32 && problem.bits != 16) || rows.length > (parts ? kMostOfFew : kMostRegisterSelect))
    return false;
  const bool is_long = rows.length > kLong && rows.length <= kMostOfFew;
  if (parts) {
    // Whole vectors of the results are written.
    if (problem.bits != 32 || rows.length % 4 != 0 || (is_long && 2 * rows.count() < gpu.multiprocessors)) return false;
  } else if (is_long && problem.bits == 32 && problem.count <= 3 && rows.count() > 4 * gpu.multiprocessors) {
    return false;
  }
  plan.algorithm = Selecting::kRegisters;
  plan.threads = 64;
  while (rows.length > plan.threads * kRegisterSelect) plan.threads *= 2;
  // If rows are few, the GPU has room for more threads for each.
  const bool few = rows.count() <= gpu.multiprocessors;
  if (rows.count() <= 2 * gpu.multiprocessors) {
    const bool most = !parts && rows.length >= 4096 + !few;
    plan.threads = std::max(plan.threads, most ? 512 : few ? 256 : 128);
  }
  if (!parts && registers_read_columns(rows, problem.bits))
    plan.turns = false, plan.workspace_bytes = plan.turned_bytes = 0;
  plan.shared_bytes = parts ? rows.length * problem.bits / 8 : 0;  // of a partition, the results
  return true;
}

void plan_long(const Select& problem, const Gpu& gpu, SelectPlan& plan) {
  constexpr int64_t kStatic = 3072;  // bytes of shared memory that the kernel declares itself
  const Rows& rows = problem.rows;
  plan.algorithm = Selecting::kLong;
  plan.threads = kLongThreads;
  const int64_t counts = problem.count * int64_t{4} << kLongBinBits;
  const int64_t packs = rows.length * problem.bits / 128 + 2;
  plan.slices = std::clamp<int64_t>(2 * gpu.multiprocessors / rows.count(), 1, ceil_div(packs, 4 * kLongThreads));
  plan.slice_packs = ceil_div(packs, plan.slices);
  // Two blocks share a multiprocessor. A thread keeps some elements, and 2 bytes for each of its steps, in which it
  // reads 16 elements (8 of 64 bits).
  const int64_t steps = ceil_div(plan.slice_packs * 16, kLongThreads * (problem.bits == 64 ? 64 : 2 * problem.bits));
  plan.kept_steps = static_cast<int>(std::min<int64_t>(steps, kMostKeptSteps));
  const int64_t declared = problem.bits == 64 ? 4096 : kStatic;
  const int64_t room = gpu.multiprocessor_shared / 2 - 1024 - declared - counts - kLongThreads * 2 * plan.kept_steps;
  const bool is_byte = problem.bits == 8;  // a block keeps its own counts of bytes
  if (room < 0 || is_byte) plan.kept_steps = 0;
  if (!is_byte) plan.kept = 32 * static_cast<int>(std::max<int64_t>(0, room) / (kLongThreads * problem.bits / 8));
  const int64_t kept_bytes = kLongThreads * (plan.kept / 32 * problem.bits / 8 + 2 * plan.kept_steps);
  // In the end a list and counts of its keys take the same place.
  plan.shared_bytes = std::max<int64_t>(counts + (is_byte ? counts : kept_bytes),
                                        kLongFew * (4 + problem.bits / 8) + (int64_t{4} << kLongBinBits));
  plan.table_at = kLongHeadBytes;
  plan.list_at = plan.table_at + kLongTables * counts;
  plan.list_size = std::max<int64_t>(kLongFew, plan.slices);
  if (problem.kth >= 0) plan.tiles = ceil_div(rows.length + 128 / problem.bits - 1, kPartitionTile);
  plan.list_bytes = plan.list_size * (4 + problem.bits / 8);
  plan.row_bytes = aligned(plan.list_at + problem.count * plan.list_bytes + 8 * plan.tiles);
  plan.workspace_bytes += rows.inner * plan.row_bytes;
  // One block of a multiprocessor counts all keys of 16 bits, unless it would have more elements than a count can say.
  constexpr int64_t kCountsStatic = 24 << 10, kMostOfBlock = (1 << 16) - 8;
  const int64_t of_row = std::min(gpu.multiprocessors / rows.count(), ceil_div(packs, int64_t{2} * kLongThreads));
  if (problem.bits == 16 && of_row > 1 && 8 * ceil_div(packs, of_row) <= kMostOfBlock &&
      kKeyCountsBytes + kCountsStatic <= gpu.shared_bytes) {
    plan.counts = true;
    plan.slices = of_row;
    plan.slice_packs = ceil_div(packs, of_row);
    return;
  }
  // A launch for the samples takes some microseconds. It pays where each block would take a sample for many ranks, or
  // where intervals must be narrow.
  const int64_t most_own = int64_t{1} << (problem.count > 3 ? 20 : 21);
  plan.apart = !is_byte && plan.slices > 1 && rows.elements() > most_own;
  plan.overlap = plan.apart && gpu.dependent_launch;
}

}  // namespace

SelectPlan plan_select(const Select& problem, const Gpu& gpu) {
  SelectPlan plan;
  const Rows& rows = problem.rows;
  if (rows.count() == 0 || problem.count == 0) return plan;
  plan.algorithm = rows.length <= kMostWarpSelect ? plan_short_select(problem, gpu) : Selecting::kBlock;
  if (problem.count > kMostRanks || rows.count() >= int64_t{1} << 31) {
    plan.algorithm = Selecting::kNone;
    return plan;
  }
  if (rows.length <= kMostWarpSelect && plan_select_teams(problem, gpu, plan)) return plan;
  if (plan.algorithm == Selecting::kNone) return plan;
  if (plan.algorithm == Selecting::kThread) {
    plan.threads = kShortSelectThreads;
    plan.pitch = rows.length | 1;  // threads read from different banks
    const int64_t words = kShortSelectThreads * plan.pitch;
    plan.table_at = problem.bits > 16 ? 4 * words : kShortSelectThreads * rows.length * problem.bits / 8;
    plan.shared_bytes = plan.table_at + 4 * words;
    return plan;
  }
  // Warps read columns in place, but for many short ones of 64 bits.
  const bool in_place = rows.length > kMostThreadSelect || reads_columns(rows, problem.bits);
  plan.turns = rows.inner > 1 && !(plan.algorithm == Selecting::kWarp && in_place);
  if (plan.turns) plan.turned_bytes = aligned(rows.length * rows.inner * problem.bits / 8);
  plan.workspace_bytes = plan.turned_bytes;
  if (plan.algorithm == Selecting::kWarp) {
    plan.threads = kShortSelectThreads;
    plan_warp_select(problem, plan);
    return plan;
  }
  if (plan_select_teams(problem, gpu, plan) || plan_select_registers(problem, gpu, plan)) return plan;
  constexpr int64_t kStatic = 3072;  // bytes of shared memory that the kernel declares itself
  const int64_t tables = problem.count * int64_t{4} << kSelectBinBits;
  // 32 more, since keys begin at the same distance from a multiple of 16 bytes as the elements.
  const int64_t bytes = aligned(rows.length * problem.bits / 8 + 32);
  if (bytes + tables + kStatic <= gpu.shared_bytes) {
    if (plan_select_cluster(problem, false, gpu, plan)) return plan;
    const int64_t own = ceil_div(rows.count(), gpu.multiprocessors);  // rows of a multiprocessor
    plan.threads = rows.length <= 2048    ? (problem.count > 3 || own <= 9 ? 128 : 64)
                   : rows.length <= 4096  ? 128
                   : rows.length <= 8192  ? 256
                   : rows.length <= 16384 ? 384
                                          : 1024;
    // If rows are few, the GPU has room for more threads for each.
    if (own <= 2)
      plan.threads = std::max(plan.threads, problem.kth >= 0 ? 512 : std::min(2 * plan.threads, 512));
    else if (own <= 4 && rows.length > 2048 && rows.length <= 4096)
      plan.threads *= 2;
    plan.table_at = bytes;
    plan.shared_bytes = plan.table_at + tables;
    return plan;
  }
  if (plan_select_cluster(problem, true, gpu, plan)) return plan;
  plan_long(problem, gpu, plan);
  return plan;
}

SelectPlan plan_firsts(const Rows& rows, int64_t k, int bits, const Gpu& gpu) {
  SelectPlan plan;
  plan_long(firsts_of(rows, k, bits), gpu, plan);
  return plan;
}

}  // namespace jaxgpuops::select
