// select for rows that no block holds, by the steps of select.cuh.
//
// Few rows: several blocks share a row, a slice for each. First a kernel of one block for each row takes a sample of it
// and finds the first intervals (select_sample.cuh). Meanwhile the blocks of the second kernel start and fetch the
// beginning of their slices to the L2 cache. Then, in the second kernel:
// - Each block reads its slice. It counts the keys below each interval, and keeps the keys in an interval, a few of a
//   hundred, in shared memory (select_slice.cuh).
// - In each step, the blocks count the keys that they keep in the parts of the intervals, and add these counts to the
//   row's tables in the workspace. The last block to finish finds the next intervals and tells the others
//   (select_blocks.cuh). The steps end when few elements, or only equal ones, are left for each rank.
// - The blocks list the elements that are left. If they are equal and many, a block says only how many its slice has.
// - For each rank, one block finds the wanted element, in the list or in the slice that has it (select_list.cuh).
// Many rows: each row has one block, which also takes the sample and shares nothing.
//
// Keys of 8 bits need no sample. One step counts how many elements have each of them, and the blocks keep these counts
// of their slices instead of keys. The first kernel only clears the counts of rows.
//
// A row of longer keys is usually read once. If the interval of a rank is a single key, as where most elements are
// equal, the elements with this key are counted but not kept. Two kinds of blocks read their slices again in each step
// and for the lists, from the L2 cache where possible: blocks without room for the keys in the intervals, as where a
// row is sorted; and all blocks of a row in which a wanted element is outside its first interval.
#include <cuda_runtime.h>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "count/cuda/select_blocks.cuh"
#include "count/cuda/select_list.cuh"
#include "count/cuda/select_sample.cuh"
#include "count/cuda/select_slice.cuh"

namespace jaxgpuops::count {
namespace {

// How many bytes a block fetches, at most, to the L2 cache while the sample is taken.
constexpr uint32_t kMostAhead = 96 << 10;
static_assert(kLongBinBits == 9 && kMostKeptSteps <= 32);

// Finds the part of its interval that each rank in `to_do` falls in, which is the interval of the next step. The whole
// block calls this. `counts`: the tables, with the counts of the whole row. `first`: whether this is the first step.
template <class T>
__device__ __forceinline__ void narrow_intervals(const uint32_t* counts, uint32_t to_do, int wanted, bool first,
                                                 Found<T>& found) {
  using Word = typename Found<T>::Word;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int r = warp; r < wanted; r += kWarps) {
    if (!(to_do >> r & 1)) continue;
    find_part<kIsByte<T> ? 0 : kLongFew>(kLongBinBits, counts, nullptr, found, r);
    __syncwarp();
    if (lane > 0) continue;
    found.rank[r] = found.left[r];  // later steps count only what is in the interval
    const uint32_t t = found.table[r];
    const Word low = found.low[t], span = found.span[t];
    if (first) {
      if (found.first[r] - low > span) found.missed = 1;
    } else {
      const Word begin = max(found.first[r], low), end = min(found.first[r] + found.last[r], low + span);
      found.first[r] = begin, found.last[r] = end - begin;
    }
  }
  __syncthreads();
  if (warp > 0) return;
  choose_tables(found);
  if (found.used >> lane & 1) {
    const Word low = found.first[lane], span = found.last[lane];
    found.parts[lane] = Parts<Word>::template between<T>(kLongBinBits, low, low + span);
    found.low[lane] = low, found.span[lane] = span;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) select_long_kernel(const __grid_constant__ Args<T> a) {
  using Word = typename Found<T>::Word;
  using Own = Slice<T>;
  __shared__ Found<T> found;
  __shared__ uint32_t left_of[kMostRanks];                      // how many elements of the slice are left for each list
  __shared__ uint32_t sums[kWarps + 1], last_of_largest, lost;  // `lost`: whether a warp has no room for its keys
  __shared__ uint32_t sum_of[kMostRanks], place_of[kMostRanks];  // of a table's counts; of the next element in a list
  __shared__ uint32_t single_count[kMostRanks];  // how many elements of the slice have the only key of an interval
  __shared__ Word single_key[kMostRanks];
  __shared__ uint32_t steps_of[kMostRanks][kWarps];  // the steps in which a warp has elements of a list
  __shared__ Choice<Word> choice;
  __shared__ Sample sample;
  // Tables of counts, and what warps keep; in the end, the keys of a list and their indices.
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto slices = static_cast<uint32_t>(a.plan.slices), in_launch = blockIdx.x / slices;
  const int64_t row = a.first_row + in_launch, slice = blockIdx.x - in_launch * slices;
  const auto inner = static_cast<uint32_t>(a.problem.rows.inner), outer = static_cast<uint32_t>(row) / inner;
  const uint32_t column = static_cast<uint32_t>(row) - outer * inner;
  const auto wanted = static_cast<int>(a.problem.count);
  __shared__ typename Own::Pack edges[2];
  const Own own(a.x + row * a.problem.rows.length, a.problem.rows.length, slice, a.plan.slice_packs, edges);
  const T* const x = own.x;
  const SortOrder order = one_flip<T>(a.problem.order);
  const int all_bins = wanted << kLongBinBits;
  Head<T>& head = a.head(row);
  uint32_t* const tables = a.tables(row);
  // The kernel that takes the sample reads little, so memory is nearly idle until it ends.
  if (!kIsByte<T> && threadIdx.x == 0 && own.whole < own.end_whole)
    prefetch_bulk(own.from + own.whole, min((own.end_whole - own.whole) * 16, kMostAhead));
  Kept<T> kept;
  kept.room = a.plan.kept, kept.steps = a.plan.kept_steps, kept.size = 0, kept.lost = kIsByte<T>;
  T* const all_keys = reinterpret_cast<T*>(counts + all_bins);
  kept.keys = all_keys + warp * kept.room;
  kept.sets = reinterpret_cast<uint16_t*>(all_keys + kWarps * kept.room) + warp * kept.steps * 32;
  if (threadIdx.x < kMostRanks) left_of[threadIdx.x] = 0;
  if (threadIdx.x == 0) last_of_largest = 0, lost = kIsByte<T>;
  const auto clear_counts = [&] {
#pragma unroll 1
    for (int b = threadIdx.x; b < all_bins; b += kThreads) counts[b] = 0;
  };
  clear_counts();
  if (a.alone()) {
    if (threadIdx.x < kMostRanks) head.listed[threadIdx.x] = 0;
    if (threadIdx.x == 0) head.last_of_largest = 0;
  }
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, column);
  if constexpr (kIsByte<T>) {
    if (warp == 0) set_byte_table(a.problem, own.length, ranks, found);
    __syncthreads();
  } else if (a.alone()) {
    find_first_tables<kThreads, kSmallSampleBits>(a.problem, x, ranks, sample, counts, found);
    __syncthreads();
    clear_counts();
    __syncthreads();
  } else {
    wait_for_predecessor();
    load_found(head, found);
  }
  const uint32_t ends = found.ends;
  uint32_t to_do = ((1u << wanted) - 1) & ~ends;  // a bit for each rank that needs a step
  Word highest = 0;                               // the thread's largest key
  int highest_step = -1;                          // the last step that has this key
  // A bit for each table whose first interval is a single key, as where most elements are equal. The elements that
  // have this key are counted when they are read, and not kept.
  const uint32_t singles = __ballot_sync(kEveryLane, (found.used >> lane & 1) && found.span[lane] == 0);
  if (warp == 0 && (singles >> lane & 1)) single_key[lane] = found.low[lane];
  bool has_all = !kIsByte<T>;                      // whether the block keeps all keys that it will need
  uint32_t* const own_counts = counts + all_bins;  // for bytes: the block's own counts
#pragma unroll 1
  for (uint32_t step = 1; step == 1 || to_do; ++step) {
    const bool first = step == 1;
    const uint32_t used = found.used, ranges = first ? used & ~singles : used;
    // The loops below also count the copies at the ends of a row, so their number is subtracted here.
    if (warp == 0 && (used >> lane & 1)) {
      const auto uncount = [&](uint32_t copied, uint32_t copies) {
        if (copies == 0) return;
        const Word key = sort_key(x[copied], order), low = found.low[lane];
        if (key - low <= found.span[lane] || (first && key < low))
          atomicAdd(counts + (lane << kLongBinBits) + found.parts[lane](key), 0u - copies);
      };
      uncount(0, own.before);
      uncount(own.length - 1, own.after);
    }
    const Word of_zero = sort_key(T{0}, order);
#pragma unroll 1
    for (int at = 0; (first || !has_all) && at < own.steps(); ++at) {
      typename Own::Keys key;
      const int count = own.load(order, at, key);
      // Whether the first and the last part of an interval also count the keys outside it. In later steps these counts
      // do not matter. But if an element of a rank was outside its first interval, the parts of the next interval may
      // begin below that interval; then only the keys in the interval are counted.
      const bool counts_all = first ? kept.lost : !found.missed;
      if (first && ends) {
        Word most = 0;
#pragma unroll
        for (int i = 0; i < Own::kPacks; ++i) {
          if (i >= count) continue;
#pragma unroll
          for (int e = 0; e < Own::kPack; ++e) most = max(most, key[i][e]);
        }
        if (count > 0 && most >= highest) highest = most, highest_step = at;
      }
      if (kIsByte<T> && first) {
        if (used) count_bytes<T>(shared_address(counts + ((__ffs(used) - 1) << kLongBinBits) + 1), key, count);
        continue;
      }
      if (first) {
        const uint32_t set = count_outside(counts, found, kept.lost ? singles : used, key, count, of_zero);
        if (!kept.lost && kept.keep(key, set, at)) continue;
      }
      count_vectors(counts, found, ranges, key, count, counts_all);
    }
    if (first) {
      if (kept.lost && lane == 0) lost = 1;
      if (ends) {
        const Word of_warp = largest_of_lanes(highest);
        if (lane == 0) atomicMax(&found.largest, of_warp);
      }
    }
    if (has_all) kept.count(counts, found, ranges);
    __syncthreads();
    if (first && threadIdx.x < kMostRanks && (singles >> threadIdx.x & 1))
      single_count[threadIdx.x] = counts[(threadIdx.x << kLongBinBits) + 1];
    if (kIsByte<T>) {
      if (first && !a.alone()) wait_for_predecessor();
      for_bits(used, [&](int t) {
        const int b = (t << kLongBinBits) + threadIdx.x;
        own_counts[b] = counts[b];
      });
    }
    for_bits(a.alone() ? 0 : used, [&](int t) {
#pragma unroll 1
      for (int b = (t << kLongBinBits) + 2 * threadIdx.x; b < (t + 1) << kLongBinBits; b += 2 * kThreads) {
        const uint64_t both = counts[b] | uint64_t{counts[b + 1]} << 32;
        if (both) atomicAdd(reinterpret_cast<unsigned long long*>(tables + b), both);
      }
    });
    if (first && ends && threadIdx.x == 0 && !a.alone()) atomicMax(&head.found.largest, found.largest);
    if (is_last(a, head)) {
      static_assert(kThreads == 512);
      if (threadIdx.x < kMostRanks) sum_of[threadIdx.x] = 0;
      __syncthreads();
      for_bits(used, [&](int t) {
        const int b = (t << kLongBinBits) + threadIdx.x;
        uint32_t count = a.alone() ? counts[b] : __ldcg(tables + b);
        if (!a.alone()) tables[b] = 0;
        if (!first && threadIdx.x == 0) count = 0;  // what is below the interval was counted before
        counts[b] = count;
        const uint32_t sum = sum_of_warp(count);
        if (lane == 0) atomicAdd(sum_of + t, sum);
      });
      if (threadIdx.x == 0) {
        found.more = 0;
        if (!a.alone()) found.largest = __ldcg(&head.found.largest);
      }
      __syncthreads();
      if (first && warp == 0 && (used >> lane & 1)) {
        // All keys that were not counted are above the interval.
        counts[(lane << kLongBinBits) + found.parts[lane].last_part()] += own.length - sum_of[lane];
      }
      __syncthreads();
      narrow_intervals(counts, to_do, wanted, first, found);
      tell_found(a, head, found, step);
    } else {
      wait_for_found(head, found, step);
    }
    has_all = !kIsByte<T> && !lost && !found.missed;
    to_do = found.more;
    if (to_do) clear_counts();
    __syncthreads();
  }

  if (kIsByte<T> && threadIdx.x < wanted && !(ends >> threadIdx.x & 1)) {
    const int r = static_cast<int>(threadIdx.x), t = static_cast<int>(found.table[r]);
    left_of[r] = own_counts[(t << kLongBinBits) + found.parts[t](found.first[r])];
  }
  __syncthreads();
  if (warp == 0) {
    const int r = lane;
    if (r < wanted && (ends >> r & 1)) found.first[r] = found.largest, found.last[r] = 0, found.size[r] = 0;
    __syncwarp();
    choose_lists(found, wanted);
  }
  __syncthreads();
  const bool has_list = lane < wanted && !(ends >> lane & 1) && found.table[lane] == lane;
  const uint32_t lists = __ballot_sync(kEveryLane, has_list);
  // Two sets of lists. `open`: the elements of the list still have to be found in the slice. `by_slice`: the list only
  // says how many elements each slice has, since its elements are equal, and either many or counted by the first step.
  // Of bytes, the step has counted each.
  bool is_counted = kIsByte<T> && has_list;
  for_bits(!kIsByte<T> && has_list && found.last[lane] == 0 ? singles : 0, [&](int t) {
    if (found.first[lane] != single_key[t]) return;
    is_counted = true;
    if (warp == 0) left_of[lane] = single_count[t];
  });
  const uint32_t open = kIsByte<T> ? 0 : lists & ~__ballot_sync(kEveryLane, is_counted);
  const uint32_t by_slice = lists & __ballot_sync(kEveryLane, is_counted || (has_list && found.size[lane] > kLongFew));
  if (threadIdx.x < kMostRanks && (open >> threadIdx.x & 1)) {
    const Word first = found.first[threadIdx.x], last = found.last[threadIdx.x];
    if (own.before && sort_key(x[0], order) - first <= last) atomicAdd(left_of + threadIdx.x, 0u - own.before);
    if (own.after && sort_key(x[own.length - 1], order) - first <= last)
      atomicAdd(left_of + threadIdx.x, 0u - own.after);
  }
  if (has_all) {
    uint32_t with_any = 0;  // a bit for each list that gets any elements of the warp
    for_bits(open, [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      uint32_t of_steps;
      const uint32_t left = kept.count_between(own, first, last, of_steps);
      if (left == 0) return;
      with_any |= 1u << r;
      if (lane == 0) atomicAdd(left_of + r, left), steps_of[r][warp] = of_steps;
    });
    __syncthreads();
    if (threadIdx.x < kMostRanks && ((lists & ~by_slice) >> threadIdx.x & 1) && left_of[threadIdx.x] > 0)
      place_of[threadIdx.x] = atomicAdd(head.listed + threadIdx.x, left_of[threadIdx.x]);
    __syncthreads();
    for_bits(with_any & ~by_slice, [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      kept.each(own, steps_of[r][warp], [&](Word key, uint32_t at) {
        if (key - first <= last && at < own.length) a.list(row, r)[atomicAdd(place_of + r, 1u)] = at;
      });
    });
  }
  // Steps are read in descending order, since the L2 cache still has what was read last. A block that keeps all
  // elements that it needs reads only one more step: the last one that has a largest key, to find the last of these
  // keys.
  const bool reads = !has_all && open;
  const bool has_largest = ends && highest == found.largest && highest_step >= 0;
#pragma unroll 1
  for (int step = reads ? own.steps() - 1 : highest_step; (reads || has_largest) && step >= 0; --step) {
    typename Own::Keys key;
    const int count = own.load(order, step, key);
    bool has[Own::kPacks];
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) has[i] = i < count;
    // Bit kMostRanks stands for the search for the last of the largest keys.
    for_bits((has_largest && step == highest_step ? 1u << kMostRanks : 0) | (reads ? open : 0), [&](int r) {
      const bool is_end = r == kMostRanks;
      const Word first = is_end ? highest : found.first[r], last = is_end ? 0 : found.last[r];
      uint32_t is_left = keys_between(key, has, first, last);
      if (!is_end && (by_slice >> r & 1)) {
        if (is_left) atomicAdd(left_of + r, __popc(is_left));
        return;
      }
      for (; is_left; is_left &= is_left - 1) {
        const int place = __ffs(static_cast<int>(is_left)) - 1;
        const uint32_t at = own.at(step, place / Own::kPack, place % Own::kPack);
        if (at >= own.length) continue;
        if (is_end)
          atomicMax(&last_of_largest, at);
        else
          a.list(row, r)[atomicAdd(head.listed + r, 1u)] = at;
      }
    });
    if (!reads) break;
  }
  __syncthreads();
  if (ends && threadIdx.x == 0) atomicMax(&head.last_of_largest, last_of_largest);
  if (threadIdx.x < wanted && (by_slice >> threadIdx.x & 1)) a.list(row, threadIdx.x)[slice] = left_of[threadIdx.x];
  // For each rank, one block chooses the element.
  wait_for_all(a, head, slice < wanted);
  if (slice >= wanted) return;

  auto* const key_of = reinterpret_cast<T*>(counts);
  auto* const at_of = reinterpret_cast<uint32_t*>(key_of + kLongFew);
  int of_list = -1;
  const auto write = [&](int r, uint32_t at) {
    const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
    a.values[to] = x[at];
    a.indices[to] = static_cast<int32_t>(at);
  };
  // A warp chooses for a rank of which few elements are left.
  const auto is_few = [&](int r) {
    return !kIsByte<T> && !((ends | by_slice) >> r & 1) && found.size[r] <= kSelectFew;
  };
#pragma unroll 1
  for (int r = warp; !kIsByte<T> && r < wanted; r += kWarps) {
    const auto table = found.table[r];
    if (r % slices != slice || (ends >> r & 1) || !is_few(table)) continue;
    const uint32_t at = choose_in_warp(x, order, a.list(row, table), found.size[r], found.left[r]);
    if (lane == 0) write(r, at);
  }
#pragma unroll 1
  for (int turn = 0; turn < wanted * wanted; ++turn) {
    // Ranks with the same list come one after the other.
    const int table = turn / wanted, r = turn - table * wanted;
    const bool is_end = ends >> r & 1;
    if (r % slices != slice || static_cast<int>(is_end ? r : found.table[r]) != table || is_few(table)) continue;
    const uint32_t* const list = a.list(row, table);
    const uint32_t size = found.size[r];
    uint32_t left = found.left[r], at = 0;
    if (is_end) {
      at = __ldcg(&head.last_of_largest);
    } else if (!kIsByte<T> && !(by_slice >> table & 1)) {
      if (of_list != table) {
        __syncthreads();  // no thread reads the list before any more
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
          at_of[i] = __ldcg(list + i);
          key_of[i] = sort_key(x[at_of[i]], order);
        }
        __syncthreads();
        of_list = table;
      }
      at = choose_in_block<Word>(key_of, at_of, size, found.first[r], found.last[r], left, at_of + kLongFew, choice);
    } else {
      of_list = -1;
      const int64_t slice_of = find_slice(list, a.plan.slices, left, counts, at_of);
      constexpr int kPack = Own::kPack;
      const int64_t begin = max(slice_of * a.plan.slice_packs * kPack - own.past, int64_t{0});
      const int64_t end = min((slice_of + 1) * a.plan.slice_packs * kPack - own.past, int64_t{own.length});
      at = find_equal(x, order, static_cast<T>(found.first[r]), begin, end, left, sums);
    }
    if (threadIdx.x == 0) write(r, at);
  }
}

}  // namespace

cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, void* values, int32_t* indices, void* workspace) {
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    static_assert(sizeof(Head<T>) <= kLongHeadBytes);
    const int64_t rows = problem.rows.count();
    Args<T> a{problem, static_cast<const T*>(x),      ranks, static_cast<T*>(values),
              indices, static_cast<char*>(workspace), plan,  0};
    const auto kernel = select_long_kernel<T>;
    Launch config;
    config.block = dim3(kThreads);
    config.shared_bytes = plan.shared_bytes;
    cudaError_t error = cudaSuccess;
    int64_t together = rows;  // rows of a launch
    if (plan.slices > 1) {
      const bool large = problem.rows.length >= kLargeSampled && plan.slice_packs * (128 / problem.bits) > kLargePart;
      error = launch(stream, {dim3(static_cast<unsigned>(rows)), dim3(kSampleThreads)},
                     large ? select_sample_kernel<T, kLargeBits<T>> : select_sample_kernel<T, kSmallSampleBits>, a);
      if (error != cudaSuccess) return error;
      config.overlap = plan.overlap;
      static Residents residents;
      int fitting = 0;
      error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
      if (error != cudaSuccess) return error;
      // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
      a.plan.slices = std::min<int64_t>(plan.slices, fitting);
      a.plan.slice_packs = (plan.slice_packs * plan.slices + a.plan.slices - 1) / a.plan.slices;
      together = fitting / a.plan.slices;
      config.together = true;
    }
    for (; a.first_row < rows && error == cudaSuccess; a.first_row += together) {
      config.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.plan.slices));
      error = launch(stream, config, kernel, a);
    }
    return error;
  });
}

}  // namespace jaxgpuops::count
