#include "topk/plan.h"

#include <algorithm>

#include "common/rounding.h"
#include "select/plan.h"
#include "sort/cuda/shape.h"
#include "topk/cuda/buckets_shape.h"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/compare_shape.h"
#include "topk/cuda/digits_shape.h"
#include "topk/cuda/few_shape.h"
#include "topk/cuda/held_shape.h"
#include "topk/cuda/radix_shape.h"
#include "topk/cuda/rows_shape.h"
#include "topk/cuda/sieve_shape.h"
#include "topk/cuda/sort_shape.h"
#include "topk/cuda/stream_shape.h"
#include "topk/cuda/wave_shape.h"
#include "topk/limits.h"

namespace jaxgpuops::topk {
namespace {

bool fits(const Plan& plan) { return plan.shared_bytes + static_cast<int64_t>(kReservedShared) <= plan.shared_limit; }

Plan plan_rows(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  Plan plan;
  const RowsShape shape = rows_shape(rows.count(), rows.length, k, key_bytes);
  plan.algorithm = Algorithm::kRows;
  plan.lanes = std::min(shape.team, 32);
  plan.threads = shape.team > 32 ? shape.team : kRowsBlock;
  plan.blocks = ceil_div(rows.count(), plan.threads / shape.team);
  plan.shared_limit = gpu.shared_bytes;
  return plan;
}

Plan plan_few(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  Plan plan;
  const FewShape shape = few_shape(rows, k, key_bytes, gpu.multiprocessors);
  plan.algorithm = Algorithm::kFew;
  plan.lanes = shape.lanes;
  plan.threads = shape.threads;
  plan.blocks = shape.blocks;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = shape.shared_bytes;
  return plan;
}

Plan plan_sort(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  Plan plan;
  plan.algorithm = Algorithm::kSort;
  plan.sort = sort_shape(rows, k, key_bytes, sorted, gpu.multiprocessors,
                         gpu.shared_bytes - static_cast<int64_t>(kReservedShared));
  plan.lanes = std::min(plan.sort.team, 32);
  plan.threads = plan.sort.threads;
  plan.blocks = plan.sort.blocks;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(plan.sort.shared_bytes);
  return plan;
}

Plan plan_compare(Rows rows, int key_bytes, bool sorted, bool in_teams, const Gpu& gpu) {
  Plan plan;
  plan.compare = in_teams ? compare_team_shape(rows) : compare_shape(rows, key_bytes, sorted, gpu.multiprocessors);
  if (!sorted && plan.compare.slices > 1 && gpu.max_cluster < kCompareSlices) return plan;
  if (rows.elements() > kMaxCompared || (!in_teams && plan.compare.blocks > kMaxCompareBlocks)) return plan;
  plan.algorithm = Algorithm::kCompare;
  plan.lanes = plan.compare.lanes;
  plan.threads = plan.compare.threads;
  plan.slices = static_cast<int>(plan.compare.slices);
  plan.blocks = plan.compare.blocks;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(plan.compare.shared_bytes);
  return plan;
}

Plan plan_held(Rows rows, int key_bytes, const Gpu& gpu) {
  Plan plan;
  const HeldShape shape = held_shape(rows.count(), rows.length * key_bytes, gpu.multiprocessors);
  if (!held_fits(shape, rows.count(), rows.length, gpu.multiprocessors)) return plan;
  if (key_bytes == 4 && shape.threads == 256) return plan;  // rows so short that kRows takes them
  plan.algorithm = Algorithm::kHeld;
  plan.threads = shape.threads;
  plan.slices = shape.blocks;
  plan.blocks = rows.count() * plan.slices;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(held_shared_bytes(shape.threads, shape.blocks));
  return plan;
}

Plan plan_columns(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  Plan plan;
  plan.algorithm = Algorithm::kColumns;
  plan.shared_limit = gpu.shared_bytes;
  // Long columns are streamed if they fill the device: the kernel that holds them whole needs so much shared memory
  // that no second block fits on a multiprocessor.
  const int64_t blocks = rows.inner >= 16 ? rows.outer * ceil_div(rows.inner, 32) : 0;
  if (blocks >= 3 * gpu.multiprocessors && rows.length >= 2048) {
    plan.lanes = 1;
    plan.threads = kStreamedThreads;
    plan.blocks = blocks;
    return plan;
  }
  plan.lanes = column_lanes(rows.count(), rows.length, k);
  plan.threads = 32 * kColumnWarps;
  const ColumnsShape shape = columns_shape(rows.length, k, key_bytes, sorted, plan.lanes);
  plan.blocks = rows.outer * ceil_div(rows.inner, shape.columns * kColumnWarps);
  plan.shared_bytes = static_cast<int64_t>(shape.tile_bytes + shape.bytes * kColumnWarps);
  return plan;
}

// Few rows get one block of 512 threads on each multiprocessor, so that each row has the most bytes in flight. If rows
// come in waves, or the larger block does not fit, two blocks of 256 threads share a multiprocessor, so that one reads
// while the other selects.
Plan plan_stream(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  Plan plan;
  const auto attempt = [&](int threads) {
    plan = {};
    plan.algorithm = Algorithm::kStream;
    plan.threads = threads;
    plan.shared_limit = gpu.shared_bytes;
    const int64_t slices = most_slices(rows, k, key_bytes, threads, gpu);
    while (has_clusters(gpu) && k <= 256 && 2 * plan.slices <= std::min(slices, kStreamBlocks)) plan.slices *= 2;
    const StreamShape shape = stream_shape(key_bytes, threads, static_cast<uint32_t>(rows.length),
                                           static_cast<uint32_t>(k), plan.slices, gpu.shared_bytes);
    plan.blocks = rows.count() * plan.slices;
    plan.shared_bytes = static_cast<int64_t>(shape.shared_bytes);
    return fits(plan);
  };
  const bool few = has_few(rows, k, gpu);
  if (few && attempt(512)) return plan;
  const bool paired = attempt(256) && plan.shared_bytes <= gpu.shared_bytes / 2 - 3 * int64_t{kReservedShared} / 2;
  if (!few && k > 256 && !paired && !attempt(512)) attempt(256);
  return plan;
}

// One block on each multiprocessor gives the lowest latency, if a thread then reads no more than it can load at once.
// Else there are two, so that more loads are in flight.
Plan plan_wave(Rows rows, int64_t k, int key_bytes, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  const int64_t vectors = rows.length * key_bytes / 16, composite = composite_bytes(key_bytes);
  int64_t slices = std::min(gpu.multiprocessors / rows.count(), ceil_div(vectors, 2 * kWaveThreads));
  if (slices * kWaveLoads * kWaveThreads < vectors) slices = 2 * gpu.multiprocessors / rows.count();
  const auto places = [&] { return wave_places(key_bytes, rows.length * key_bytes, slices); };
  while (slices > 1 && workspace_bytes >= 0 && wave_exchange_bytes(k, slices, places(), composite) > workspace_bytes)
    --slices;
  if (slices <= 1 || !wave_tells_enough(k, slices, places(), composite)) return plan;
  plan.algorithm = Algorithm::kWave;
  plan.threads = kWaveThreads;
  plan.slices = static_cast<int>(slices);
  plan.overlap = gpu.dependent_launch;
  plan.blocks = rows.count() * slices;
  plan.workspace_bytes = wave_exchange_bytes(k, slices, places(), composite);
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(wave_shared_bytes(composite));
  return plan;
}

// At most one wave of blocks that share rows, each with several steps to read. The first loads of the blocks serve as a
// sample for the threshold.
Plan plan_sieve(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  const bool whole = sieve_holds_whole(rows.length, key_bytes);
  const int64_t bytes = rows.length * key_bytes, most = whole ? 1 : std::max<int64_t>(bytes / kSieveLeast, 1);
  // In a row of few steps, some warps may read a step more than others. The sample of first loads then says less.
  if ((bytes < 2 * kSieveStep && !whole) || rows.length < (bytes < kSieveLeast && !whole ? 24 : 16) * k) return plan;
  int64_t slices = std::clamp<int64_t>(gpu.multiprocessors / rows.count(), 1, most);
  if (workspace_bytes >= 0)
    while (slices > 1 && sieve_exchange_bytes(slices) > workspace_bytes) --slices;
  plan.algorithm = Algorithm::kSieve;
  plan.threads = kSieveThreads;
  plan.slices = static_cast<int>(slices);
  plan.overlap = !sorted && gpu.dependent_launch;
  plan.blocks = rows.count() * slices;
  if (slices > 1) plan.workspace_bytes = sieve_exchange_bytes(slices);
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(whole ? kWholeShared : kSieveShared);
  return plan;
}

// Sorts rows whole; the plan is kEmpty where the kernels of sorts do not take them.
Plan plan_whole(Rows rows, int64_t k, int key_bytes, const Gpu& gpu, int64_t workspace_bytes = 0) {
  Plan plan;
  sort::Problem problem;
  problem.rows = rows;
  problem.k = k;
  problem.key_bits = 8 * key_bytes;
  plan.whole = sort::plan_sort(problem, gpu, workspace_bytes);
  if (plan.whole.algorithm == sort::Algorithm::kShort) plan.algorithm = Algorithm::kShort;
  if (plan.whole.algorithm == sort::Algorithm::kBlock) plan.algorithm = Algorithm::kBlock;
  if (plan.whole.algorithm == sort::Algorithm::kSweep || plan.whole.algorithm == sort::Algorithm::kMerge)
    plan.algorithm = Algorithm::kSweep;
  plan.threads = plan.whole.threads;
  plan.blocks = plan.whole.blocks;
  plan.workspace_bytes = plan.whole.workspace_bytes;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = plan.whole.shared_bytes;
  return plan;
}

// Sorts the chosen elements of rows, and carries their indices: by a block for each row, if one holds it and rows are
// many or short.
sort::Plan plan_chosen(Rows rows, int key_bytes, const Gpu& gpu) {
  sort::Problem problem;
  problem.rows = rows;
  problem.k = rows.length;
  problem.key_bits = 8 * key_bytes;
  problem.carries = true;
  sort::Plan plan = sort::plan_sort(problem, gpu);
  if (rows.length > (key_bytes == 8 ? 6656 : 8192) && 8 * rows.count() <= gpu.multiprocessors) return plan;
  for (const int threads : {256, 512, 1024}) {
    const int items = sort::block_items(key_bytes, rows.length, rows.count() <= gpu.multiprocessors);
    const int64_t bytes = sort::block_shared_bytes(key_bytes, threads, items);
    if (rows.length > threads * items || bytes + static_cast<int64_t>(kReservedShared) > gpu.shared_bytes) continue;
    plan.algorithm = sort::Algorithm::kBlock;
    plan.threads = threads;
    plan.items = items;
    plan.blocks = rows.count();
    plan.shared_bytes = bytes;
    return plan;
  }
  return plan;
}

// Selects the k-th element of contiguous rows, gathers all up to it and, if results are sorted, sorts these.
Plan plan_radix(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  Plan plan;
  const select::SelectPlan select = select::plan_firsts(rows, k, 8 * key_bytes, gpu);
  plan.algorithm = Algorithm::kRadix;
  plan.threads = select.threads;
  plan.slices = static_cast<int>(select.slices);
  plan.blocks = rows.count() * std::max(select.tiles, select.slices);
  plan.workspace_bytes = select.workspace_bytes;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = select.shared_bytes;
  plan.whole.select = select;
  if (!sorted) return plan;
  plan.whole = plan_chosen({rows.count(), k, 1}, key_bytes, gpu);
  plan.workspace_bytes =
      RadixShape({1, rows.length, 1}, k, key_bytes).bytes + std::max(plan.workspace_bytes, plan.whole.workspace_bytes);
  plan.shared_bytes = std::max(plan.shared_bytes, plan.whole.shared_bytes);
  plan.whole.select = select;
  return plan;
}

// Transposes columns to rows, and the results back.
Plan plan_turned(Rows rows, int64_t k, int key_bits, bool sorted, const Gpu& gpu, int64_t workspace_bytes, int forced) {
  const int64_t turned = sort::TurnShape({1, rows.length, rows.inner}, k, key_bits / 8, true, true).bytes;
  if (workspace_bytes >= 0 && workspace_bytes < turned) return {};
  Plan plan = plan_topk({rows.count(), rows.length, 1}, k, key_bits, sorted, gpu,
                        workspace_bytes < 0 ? -1 : (workspace_bytes - turned) / rows.inner, forced);
  if (plan.algorithm == Algorithm::kEmpty) return plan;
  if (plan.algorithm == Algorithm::kBlock || plan.algorithm == Algorithm::kSweep)  // they transpose columns themselves
    return plan_whole(rows, k, key_bits / 8, gpu);
  plan.whole.turns = true;
  plan.workspace_bytes = turned + rows.inner * plan.workspace_bytes;
  return plan;
}

// Plans kRadix, which takes any problem.
Plan plan_any(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  if (rows.inner == 1) return plan_radix(rows, k, key_bytes, sorted, gpu);
  return plan_turned(rows, k, 8 * key_bytes, sorted, gpu, -1, static_cast<int>(Algorithm::kRadix));
}

Plan plan_buckets(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu, int64_t workspace_bytes) {
  Plan plan;
  // On a part of a GPU that cannot run these kernels, the kernels of kRadix run instead, in the same workspace.
  const Plan radix = rows.inner > 1 ? plan_any(rows, k, key_bytes, sorted, gpu) : Plan{};
  const int64_t bytes = std::max(rows.inner * buckets_shape(rows.length, k, key_bytes).bytes, radix.workspace_bytes);
  if (workspace_bytes >= 0 && bytes > workspace_bytes) return plan;
  plan.whole = radix.whole;
  plan.algorithm = Algorithm::kBuckets;
  plan.threads = kBucketsThreads;
  const int64_t blocks = gpu.multiprocessors;
  const int64_t one = std::min(blocks / rows.count(), rows.length / kBucketsSlice);
  const int64_t two = std::min(kBucketsResident * blocks / rows.count(), rows.length / kBucketsSliceOfTwo);
  plan.slices = static_cast<int>(std::max<int64_t>({one, two, 1}));
  plan.blocks = rows.count() * plan.slices;
  plan.overlap = gpu.dependent_launch;
  plan.workspace_bytes = bytes;
  plan.shared_limit = gpu.shared_bytes;
  const size_t composite = composite_bytes(key_bytes);
  plan.shared_bytes = static_cast<int64_t>(std::max(buckets_shared(composite), buckets_sort_shared(composite)));
  return plan;
}

Plan plan_digits(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  Plan plan;
  if (k > kMaxDigitsK || key_bytes > 4 || rows.length > kMaxDigitsLength || gpu.max_cluster < kMaxDigitsBlocks)
    return plan;
  plan.digits = digits_shape(rows.count(), rows.length, k, key_bytes, sorted, gpu.shared_bytes, gpu.multiprocessors);
  if (plan.digits.blocks == 0) return plan;
  plan.algorithm = Algorithm::kDigits;
  plan.threads = plan.digits.threads;
  plan.slices = plan.digits.blocks;
  plan.blocks = rows.count() * plan.slices;
  plan.shared_limit = gpu.shared_bytes;
  plan.shared_bytes = static_cast<int64_t>(plan.digits.shared_bytes);
  return plan;
}

// Plans kernels that read rows and columns where they are.
Plan plan_in_place(Rows rows, int64_t k, int key_bits, bool sorted, const Gpu& gpu, int64_t workspace_bytes,
                   int forced) {
  if (k == 0 || rows.count() == 0) return {};
  if (k == 1) return plan_argmax(rows, key_bits, gpu, workspace_bytes);
  const int key_bytes = key_bits / 8;
  const auto may = [&](Algorithm algorithm) { return forced < 0 || forced == static_cast<int>(algorithm); };
  const auto has_room = [&](const Plan& plan) {
    return workspace_bytes < 0 || plan.workspace_bytes <= workspace_bytes;
  };
  if (may(Algorithm::kWave) && rows.inner == 1 && k <= kMaxWaveK &&
      (forced < 0 ? prefers_wave(rows, k, key_bytes, sorted, gpu) : rows.count() <= kMaxWaveRows)) {
    const Plan plan = plan_wave(rows, k, key_bytes, gpu, workspace_bytes);
    if (plan.algorithm == Algorithm::kWave && fits(plan)) return plan;
  }
  if (may(Algorithm::kShort) && sorted && rows.length <= sort::kMaxShortLength &&
      rows.inner >= sort::kLeastShortColumns && (forced >= 0 || rows.count() >= kLeastShort)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu); plan.algorithm == Algorithm::kShort) return plan;
  }
  if (forced < 0 && key_bytes == 8 && holds_wide(rows, k)) return plan_rows(rows, k, key_bytes, gpu);
  if (may(Algorithm::kCompare) && compares_in_teams(rows, k, key_bytes, sorted))
    return plan_compare(rows, key_bytes, sorted, true, gpu);
  // Where both the few and the compare kernel may be taken, few is faster for k up to 4, and compare for larger k.
  const bool columns = may(Algorithm::kRows) && holds_columns(rows, k, key_bytes);
  const bool few = may(Algorithm::kFew) && takes_few(rows, k) &&
                   (forced >= 0 || (prefers_few(rows, k, key_bytes) && !(columns && key_bytes <= 2) &&
                                    !(!sorted && rows.inner > 1 && k == rows.length && key_bytes >= 4)));
  if (few && k <= 4) return plan_few(rows, k, key_bytes, gpu);
  if (forced < 0 && columns && rows_shape(rows.count(), rows.length, k, key_bytes).network)
    return plan_rows(rows, k, key_bytes, gpu);
  if (may(Algorithm::kCompare) &&
      (forced < 0 ? compares(rows, k, key_bytes, sorted, gpu) : rows.length <= kMaxCompareLength)) {
    const Plan plan = plan_compare(rows, key_bytes, sorted, false, gpu);
    if (plan.algorithm == Algorithm::kCompare && fits(plan)) return plan;
  }
  if (few) return plan_few(rows, k, key_bytes, gpu);
  if (columns || (may(Algorithm::kRows) && holds_many(rows, k, key_bytes, gpu)))
    return plan_rows(rows, k, key_bytes, gpu);
  if (forced < 0 && sorted && sweeps_narrow(rows, k, key_bytes)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu, -1);
        plan.algorithm == Algorithm::kSweep && has_room(plan))
      return plan;
  }
  if (forced < 0 && sorted && sorts_columns_by_digits(rows, k, key_bytes, gpu)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu); plan.algorithm == Algorithm::kBlock) return plan;
  }
  if (forced < 0 && sorted && sorts_at_once(rows, k, key_bytes)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu, workspace_bytes);
        plan.algorithm == Algorithm::kSweep &&
        (plan.whole.algorithm == sort::Algorithm::kMerge || plan.whole.items > 0) && has_room(plan))
      return plan;
  }
  if (may(Algorithm::kDigits) && (forced >= 0 || prefers_digits(rows, k, key_bytes, sorted, gpu))) {
    if (const Plan plan = plan_digits(rows, k, key_bytes, sorted, gpu);
        plan.algorithm == Algorithm::kDigits && fits(plan))
      return plan;
  }
  if (forced < 0 && sorted && sorts_by_digits(rows, k, key_bytes, gpu)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu); plan.algorithm == Algorithm::kBlock) return plan;
  }
  if (may(Algorithm::kSort) && (forced < 0 ? sorts(rows, k, key_bytes, gpu) : rows.length <= kMaxSortLength)) {
    if (const Plan plan = plan_sort(rows, k, key_bytes, sorted, gpu); fits(plan)) return plan;
  }
  const bool held = rows.inner == 1 && k <= kMaxHeldK && key_bytes <= 4 &&
                    rows.length <= longest_held(rows, key_bytes) && rows.length >= kLeastHeld * k &&
                    has_clusters(gpu) && may(Algorithm::kHeld);
  const Plan in_registers = held ? plan_held(rows, key_bytes, gpu) : Plan{};
  const bool can_hold = in_registers.algorithm == Algorithm::kHeld && fits(in_registers);
  if (may(Algorithm::kRows) && rows.inner == 1 && k <= kMaxRowsK && (key_bytes <= 4 || forced >= 0) &&
      rows.length <= max_rows_length(key_bytes))
    return plan_rows(rows, k, key_bytes, gpu);
  if (can_hold) return in_registers;
  if (may(Algorithm::kColumns) && rows.inner > 1 && k <= kMaxColumnsK && key_bytes <= 4 &&
      rows.length * key_bytes <= kMaxColumnBytes) {
    const Plan plan = plan_columns(rows, k, key_bytes, sorted, gpu);
    const bool streams = forced < 0 && plan.threads != kStreamedThreads && streams_columns(rows, key_bytes, gpu);
    if (fits(plan) && !streams) return plan;
    if (streams && (key_bytes == 1 || (key_bytes == 2 && rows.count() > gpu.multiprocessors))) {
      if (const Plan digits = plan_digits(rows, k, key_bytes, sorted, gpu);
          digits.algorithm == Algorithm::kDigits && fits(digits))
        return digits;
    }
  }
  if (may(Algorithm::kSieve) && rows.inner == 1 && k <= kMaxSieveK && (key_bytes == 2 || key_bytes == 4)) {
    const Plan plan = plan_sieve(rows, k, key_bytes, sorted, gpu, workspace_bytes);
    const bool fast = forced >= 0 || k >= kMinSieveK || sieves_short(rows, k, key_bytes, gpu);
    if (plan.algorithm == Algorithm::kSieve && fits(plan) && fast) return plan;
  }
  if (forced < 0 && sorted && sorts_narrow(rows, k, key_bytes, gpu)) {
    if (const Plan plan = plan_whole(rows, k, key_bytes, gpu); plan.algorithm == Algorithm::kBlock) return plan;
  }
  const bool divides = takes_buckets(rows, k, key_bytes, sorted, gpu);
  const bool whole = sorted && sorts_whole(rows, k, key_bytes, divides);
  if (forced < 0 && sorted && selects_first(rows, k, key_bytes)) {
    if (const Plan plan = plan_any(rows, k, key_bytes, sorted, gpu); has_room(plan)) return plan;
  }
  const bool prefers = prefers_buckets(rows, k, key_bytes, gpu) && (k <= kMaxStreamK || !whole);
  if (divides && (forced < 0 ? prefers : may(Algorithm::kBuckets))) {
    const Plan plan = plan_buckets(rows, k, key_bytes, sorted, gpu, workspace_bytes);
    if (plan.algorithm == Algorithm::kBuckets && fits(plan)) return plan;
  }
  // Where buckets cannot take a few rows, it is better to read them several times than to leave the device idle.
  const Plan radix = plan_any(rows, k, key_bytes, sorted, gpu);
  const bool idle = forced < 0 && 2 * idle_blocks(rows, k, key_bytes, gpu) > kStreamBlocks && has_room(radix);
  if (may(Algorithm::kStream) && !idle &&
      !(forced < 0 && has_room(radix) && gathers_wide(rows, k, key_bytes, sorted)) &&
      (k <= kMaxStreamK || rows.length <= whole_row_elements(key_bytes, gpu.shared_bytes))) {
    const Plan plan = plan_stream(rows, k, key_bytes, gpu);
    if (fits(plan)) return plan;
  }
  if (sorted && (may(Algorithm::kBlock) || may(Algorithm::kSweep)) && (forced >= 0 || whole)) {
    for (const int64_t bytes : {workspace_bytes, int64_t{0}}) {  // 0: in one block
      const Plan plan = plan_whole(rows, k, key_bytes, gpu, bytes);
      if (plan.algorithm != Algorithm::kEmpty && has_room(plan) && may(plan.algorithm)) return plan;
    }
  }
  if (divides && may(Algorithm::kBuckets)) {
    const Plan plan = plan_buckets(rows, k, key_bytes, sorted, gpu, workspace_bytes);
    if (plan.algorithm == Algorithm::kBuckets && fits(plan)) return plan;
  }
  return may(Algorithm::kRadix) ? radix : Plan{};
}

}  // namespace

Plan plan_topk(Rows rows, int64_t k, int key_bits, bool sorted, const Gpu& gpu, int64_t workspace_bytes, int forced) {
  const auto has_room = [&](const Plan& plan) {
    return workspace_bytes < 0 || plan.workspace_bytes <= workspace_bytes;
  };
  const Plan plan = plan_in_place(rows, k, key_bits, sorted, gpu, workspace_bytes, forced);
  if (forced >= 0 || rows.inner == 1 || plan.algorithm == Algorithm::kEmpty) return plan;
  // A part of a batch of columns that are transposed has the workspace for that.
  const Plan turned = plan_turned(rows, k, key_bits, sorted, gpu, workspace_bytes, forced);
  if (turned.algorithm == Algorithm::kEmpty || !has_room(turned)) return plan;
  return has_room(plan) && !turns_columns(rows, k, key_bits / 8, sorted, plan.algorithm, turned.algorithm) ? plan
                                                                                                           : turned;
}

}  // namespace jaxgpuops::topk
