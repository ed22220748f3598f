// select for rows that no block holds, by the steps of select.cuh.
//
// Few rows: several blocks share a row, a slice for each. Each block takes a sample of the row and finds the first
// intervals (sample.cuh). Of many elements, or for many ranks, a kernel before this one does that, with a block
// for each row. Meanwhile blocks fetch the beginning of their slices to the L2 cache. Then:
// - Each block reads its slice. It counts the keys below each interval, and keeps the keys in an interval, a few of a
//   hundred, in shared memory (slice.cuh).
// - In each step, the blocks count the keys that they keep in the parts of the intervals, and add these counts to the
//   row's tables in the workspace. When all have done so, each finds the next intervals for itself: to be told takes
//   longer. The steps end when few elements, or only equal ones, are left for each rank.
// - The blocks list the elements that are left. If they are equal and many, a block says only how many its slice has.
// - For each rank, one block finds the wanted element, in the list or in the slice that has it (list.cuh).
// Of quantiles, one block of the row finds the elements of all ranks and writes the quantiles. Where all these ranks
// have intervals of a single key, as of numbers of few bits, that tells the elements, and there are no lists. Otherwise
// lists have keys only, unless some of these may be zeros: both zeros have one key.
// - For a partition, another kernel moves the elements (partition.cuh).
// Many rows: each row has one block, which also takes the sample and shares nothing.
//
// Keys of 8 bits need no sample. One step counts how many elements have each of them, and the blocks keep these counts
// of their slices instead of keys.
//
// A row of longer keys is usually read once. If the interval of a rank is a single key, as where most elements are
// equal, the elements with this key are counted but not kept. Two kinds of blocks read their slices again in each step
// and for the lists, from the L2 cache where possible: blocks without room for the keys in the intervals, as where a
// row is sorted; and all blocks of a row in which a wanted element is outside its first interval.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "select/cuda/launch.h"
#include "select/cuda/blocks.cuh"
#include "select/cuda/counts.cuh"
#include "select/cuda/firsts.cuh"
#include "select/cuda/list.cuh"
#include "select/cuda/partition.cuh"
#include "select/cuda/quantile.cuh"
#include "select/cuda/sample.cuh"
#include "select/cuda/slice.cuh"

namespace jaxgpuops::select {
namespace {

namespace cg = cooperative_groups;

// How many vectors a block fetches, at most, to the L2 cache before it knows the first intervals.
constexpr uint32_t kAheadPacks = (96 << 10) / 16;
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
  __shared__ uint32_t sum_of[kMostRanks];                       // of a table's counts
  __shared__ uint32_t single_count[kMostRanks];  // how many elements of the slice have the only key of an interval
  __shared__ Word single_key[kMostRanks];
  __shared__ float least_number[kMostRanks], most_number[kMostRanks];  // the ends of intervals
  __shared__ Choice<Word> choice;
  __shared__ Sample<T> sample;
  __shared__ Quantiles<Word> quantiles;  // of the first slice
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
  // Taking the sample, or loading what it has told, leaves memory nearly idle.
  if (threadIdx.x == kThreads - 1) own.fetch(0, kAheadPacks);
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
  // The blocks of a row that is cleared here wait for that before they add anything to it.
  if (slice == 0 && !a.plan.apart) clear_row(a, static_cast<uint32_t>(row));
  const bool awaits = !a.plan.apart && !a.alone();
  cg::grid_group::arrival_token cleared{};
  if (awaits) cleared = cg::this_grid().barrier_arrive();
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, column);
  const bool has_quantiles = !kIsByte<T> && a.problem.quantiles > 0;
  if (has_quantiles && slice == 0 && threadIdx.x < a.problem.quantiles)
    quantiles.own[threadIdx.x].load(a.problem, a.shares, ranks, outer, column, threadIdx.x);
  if constexpr (kIsByte<T>) {
    if (warp == 0) set_byte_table(a.problem, own.length, ranks, found);
    __syncthreads();
  } else if (!a.plan.apart) {
    if (a.alone())
      find_first_tables<kThreads, kSmallSampleBits>(a.problem, x, ranks, sample, counts, found);
    else if constexpr (sizeof(T) == 8)
      find_first_tables<kThreads, kOwnSampleBits>(a.problem, x, ranks, sample, counts, found);
    else if (warp == 0)
      find_tables_in_warp(a.problem, x, ranks, counts, found);
    __syncthreads();
    clear_counts();
    __syncthreads();
  } else {
    wait_for_predecessor();
    load_found(head, found);
  }
  const uint32_t ends = found.ends;
  uint32_t to_do = ((1u << wanted) - 1) & ~ends;  // a bit for each rank that needs a step
  uint32_t step = 1;
  Word highest = 0;       // the thread's largest key
  int highest_step = -1;  // the last step that has this key
  // A bit for each table whose first interval is a single key, as where most elements are equal. The elements that
  // have this key are counted when they are read, and not kept.
  const uint32_t singles = __ballot_sync(kEveryLane, (found.used >> lane & 1) && found.span[lane] == 0);
  if (warp == 0 && (singles >> lane & 1)) single_key[lane] = found.low[lane];
  const Numbers numbers = numbers_of<T>(a.problem.order);
  bool by_number = numbers != Numbers::kNone;
  if constexpr (kHasNumbers<T>) {
    float least = 0, most = 0;
    if (by_number && (found.used >> lane & 1))
      by_number = as_numbers<T>(numbers, order, found.low[lane], found.low[lane] + found.span[lane], least, most);
    by_number = __all_sync(kEveryLane, by_number);
    if (warp == 0 && lane < kMostRanks) least_number[lane] = least, most_number[lane] = most;
    __syncthreads();
  }
  bool has_all = !kIsByte<T>;                      // whether the block keeps all keys that it will need
  uint32_t* const own_counts = counts + all_bins;  // for bytes: the block's own counts
#pragma unroll 1
  for (; step == 1 || to_do; ++step) {
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
      typename Own::Packs pack;
      const int count = own.load(at, pack);
      // Whether the first and the last part of an interval also count the keys outside it. In later steps these counts
      // do not matter. But if an element of a rank was outside its first interval, the parts of the next interval may
      // begin below that interval; then only the keys in the interval are counted.
      const bool counts_all = first ? kept.lost : !found.missed;
      if constexpr (kHasNumbers<T>) {
        if (first && by_number && !kept.lost) {
          float most = 0;
          const auto outside = [&](auto kind) {
            return count_outside_numbers<decltype(kind)::value, T>(counts, least_number, most_number, used, singles,
                                                                   pack, count, ends != 0, most);
          };
          using std::integral_constant;
          uint32_t set;
          if constexpr (sizeof(T) == 4)
            set = outside(integral_constant<Numbers, Numbers::kFloat32>{});
          else if (numbers == Numbers::kFloat16)
            set = outside(integral_constant<Numbers, Numbers::kFloat16>{});
          else
            set = outside(integral_constant<Numbers, Numbers::kBfloat16>{});
          const Word key = sort_key(static_cast<T>(element_of(numbers, most)), order);
          if (ends && count > 0 && key >= highest) highest = key, highest_step = at;
          if (kept.keep(pack, set, at)) continue;
          typename Own::Keys keys;
          Own::make_keys(order, pack, keys);
          count_vectors(counts, found, ranges, keys, count, counts_all);
          continue;
        }
      }
      typename Own::Keys key;
      Own::make_keys(order, pack, key);
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
        if (!kept.lost && kept.keep(pack, set, at)) continue;
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
    if (first && has_all) kept.make_keys(order);
    if (has_all) kept.count(counts, found, ranges);
    __syncthreads();
    if (first && threadIdx.x < kMostRanks && (singles >> threadIdx.x & 1))
      single_count[threadIdx.x] = counts[(threadIdx.x << kLongBinBits) + 1];
    if (kIsByte<T>) {
      for_bits(used, [&](int t) {
        const int b = (t << kLongBinBits) + threadIdx.x;
        own_counts[b] = counts[b];
      });
    }
    if (first && awaits) cg::this_grid().barrier_wait(std::move(cleared));
    uint32_t* const tables = a.tables(row, step);
    for_bits(a.alone() ? 0 : used, [&](int t) {
#pragma unroll 1
      for (int b = (t << kLongBinBits) + 2 * threadIdx.x; b < (t + 1) << kLongBinBits; b += 2 * kThreads) {
        const uint64_t both = counts[b] | uint64_t{counts[b + 1]} << 32;
        if (both) atomicAdd(reinterpret_cast<unsigned long long*>(tables + b), both);
      }
    });
    if (first && ends && threadIdx.x == 0 && !a.alone()) atomicMax(&head.found.largest, found.largest);
    if (slice == 0 && !a.alone()) {
#pragma unroll 1
      for (int b = threadIdx.x; b < all_bins; b += kThreads) a.tables(row, step + 1)[b] = 0;
    }
    if (threadIdx.x < kMostRanks) sum_of[threadIdx.x] = 0;
    wait_for_all(a, head, step);
    static_assert(kThreads == 1 << kLongBinBits);
    for_bits(used, [&](int t) {
      const int b = (t << kLongBinBits) + threadIdx.x;
      uint32_t count = a.alone() ? counts[b] : __ldcg(tables + b);
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
    __syncthreads();
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
  // Ranks of quantiles whose elements are told by their keys.
  const bool is_told = has_quantiles && lane < wanted && found.last[lane] == 0 &&
                       is_told_by_key(a.problem, static_cast<T>(found.first[lane]));
  const uint32_t told = __ballot_sync(kEveryLane, is_told);
  if (warp == 0 && is_told) quantiles.taken[lane] = element_of_key(a.problem, static_cast<T>(found.first[lane]));
  const auto write_quantiles = [&] {
    const uint32_t j = threadIdx.x;
    __syncthreads();
    if (slice == 0 && j < a.problem.quantiles)
      a.values[quantile_at(static_cast<uint32_t>(row), j, a.problem.quantiles, a.beside)] =
          static_cast<T>(quantiles(a.problem, j));
  };
  if (told == (1u << wanted) - 1) return write_quantiles();
  // Whether keys tell all elements, so that quantiles need no indices: if no interval that is left has zeros.
  const bool needs_index = lane < wanted && !is_told &&
                           ((ends >> lane & 1) || sort_key(T{0}, order) - found.first[lane] <= found.last[lane]);
  const bool by_key = has_quantiles && !__any_sync(kEveryLane, needs_index);
  const bool has_list = lane < wanted && !((ends | told) >> lane & 1) && found.table[lane] == lane;
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
  // The last step that has a largest key is read again, to find the last of these keys.
  const bool has_largest = (ends & ~told) && highest == found.largest && highest_step >= 0;
  typename Own::Packs of_largest;
  int largest_count = 0;
  if (has_largest) largest_count = own.load(highest_step, of_largest);
  const auto append = [&](int r, Word key, uint32_t at) {
    const uint32_t place = atomicAdd(head.listed + r, 1u);
    a.list(row, r)[place] = at;
    a.list_keys(row, r)[place] = static_cast<T>(key);
  };
  // Returns a bit for each of the thread's elements in a step that has a key from `first` to `first + last`.
  const auto between = [&](const typename Own::Packs& pack, int count, Word first, Word last) {
    typename Own::Keys key;
    Own::make_keys(order, pack, key);
    bool has[Own::kPacks];
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) has[i] = i < count;
    return keys_between(key, has, first, last);
  };
  const auto index_of = [&](int step, int place) { return own.at(step, place / Own::kPack, place % Own::kPack); };
  if (by_key && has_all && own.before + own.after == 0) {
    uint32_t of_list = 0;  // how many of the warp's keys are in the list of the lane's rank
    for_bits(open, [&](int r) {
      const uint32_t left = kept.count_between(found.first[r], found.last[r]);
      if (lane == r) of_list = left;
    });
    const uint32_t place = of_list ? atomicAdd(head.listed + lane, of_list) : 0;
    for_bits(__ballot_sync(kEveryLane, of_list > 0), [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      T* to = a.list_keys(row, r) + shuffle_from(place, r);
#pragma unroll 1
      for (uint32_t i = lane; i - lane < kept.size; i += 32) {
        const T key = kept.keys[min(i, kept.size - 1)];
        const bool is_in = i < kept.size && key - first <= last;
        const unsigned lanes = __ballot_sync(kEveryLane, is_in);
        if (is_in) to[__popc(lanes & ((1u << lane) - 1))] = key;
        to += __popc(lanes);
      }
    });
  } else if (has_all) {
    for_bits(open, [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      const uint32_t left = kept.count_between(first, last);
      if (left == 0) return;
      if (by_slice >> r & 1) {
        if (lane == 0) atomicAdd(left_of + r, left);
        return;
      }
      kept.each_between(own, first, last, [&](Word key, uint32_t at) {
        if (at < own.length) append(r, key, at);
      });
    });
  } else if (open) {
    // Steps are read in descending order, since the L2 cache still has what was read last.
#pragma unroll 1
    for (int at = own.steps() - 1; at >= 0; --at) {
      typename Own::Packs pack;
      const int count = own.load(at, pack);
      for_bits(open, [&](int r) {
        uint32_t is_left = between(pack, count, found.first[r], found.last[r]);
        if (by_slice >> r & 1) {
          if (is_left) atomicAdd(left_of + r, __popc(is_left));
          return;
        }
        for (; is_left; is_left &= is_left - 1) {
          const uint32_t index = index_of(at, __ffs(static_cast<int>(is_left)) - 1);
          if (index < own.length) append(r, sort_key(x[index], order), index);
        }
      });
    }
  }
  if (has_largest) {
    for (uint32_t set = between(of_largest, largest_count, highest, 0); set; set &= set - 1) {
      const uint32_t index = index_of(highest_step, __ffs(static_cast<int>(set)) - 1);
      if (index < own.length) atomicMax(&last_of_largest, index);
    }
  }
  __syncthreads();
  if (ends && threadIdx.x == 0 && last_of_largest > 0) atomicMax(&head.last_of_largest, last_of_largest);
  if (threadIdx.x < wanted && (by_slice >> threadIdx.x & 1)) a.list(row, threadIdx.x)[slice] = left_of[threadIdx.x];
  // For each rank, one block chooses the element; of quantiles, one block those of all ranks.
  const bool chooses = slice < (has_quantiles ? 1 : wanted);
  wait_for_all(a, head, step, chooses);
  if (!chooses) return;
  if (by_key) {
    const int r = warp;
    if (r < wanted && !(told >> r & 1)) {
      const Word key = choose_key_in_warp(a.list_keys(row, static_cast<int>(found.table[r])), found.size[r],
                                          found.first[r], found.last[r], found.left[r], counts + (r << kLongBinBits));
      if (lane == 0) quantiles.taken[r] = element_of_key(a.problem, static_cast<T>(key));
    }
    return write_quantiles();
  }
  const auto is_own = [&](int r) { return !(told >> r & 1) && (has_quantiles || r % slices == slice); };

  const auto write = [&](int r, uint32_t at, Word key) {
    if (a.problem.kth >= 0) {
      head.chosen = at;
      return;
    }
    const auto narrow = static_cast<T>(key);
    const T element = tells_element(a.problem, narrow) ? element_of_key(a.problem, narrow) : x[at];
    if (has_quantiles) {
      quantiles.taken[r] = element;
      return;
    }
    const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
    a.values[to] = element;
    a.indices[to] = static_cast<int32_t>(at);
  };
  // A warp chooses for a rank of which few elements are left.
  const auto is_few = [&](int r) {
    return !kIsByte<T> && !((ends | by_slice) >> r & 1) && found.size[r] <= kSelectFew;
  };
#pragma unroll 1
  for (int r = warp; !kIsByte<T> && r < wanted; r += kWarps) {
    const auto table = found.table[r];
    if (!is_own(r) || (ends >> r & 1) || !is_few(table)) continue;
    choose_in_warp(a.list_keys(row, table), a.list(row, table), found.size[r], found.left[r],
                   [&](uint32_t at, Word key) { write(r, at, key); });
  }
#pragma unroll 1
  for (int r = 0; r < wanted; ++r) {
    const bool is_end = ends >> r & 1;
    const auto table = static_cast<int>(is_end ? r : found.table[r]);
    if (!is_own(r) || is_few(table)) continue;
    const uint32_t* const list = a.list(row, table);
    const uint32_t size = found.size[r];
    uint32_t left = found.left[r], at = 0;
    if (is_end) {
      at = __ldcg(&head.last_of_largest);
    } else if (!kIsByte<T> && !(by_slice >> table & 1)) {
      choose_in_block<Word>(a.list_keys(row, table), list, size, found.first[r], found.last[r], left, counts, choice,
                            [&](uint32_t at, Word key) { write(r, at, key); });
      continue;
    } else {
      const int64_t slice_of = find_slice(list, a.plan.slices, left, counts, counts + kThreads);
      constexpr int kPack = Own::kPack;
      const int64_t begin = max(slice_of * a.plan.slice_packs * kPack - own.past, int64_t{0});
      const int64_t end = min((slice_of + 1) * a.plan.slice_packs * kPack - own.past, int64_t{own.length});
      at = find_equal(x, order, static_cast<T>(found.first[r]), begin, end, left, sums);
    }
    if (threadIdx.x == 0) write(r, at, found.first[r]);
  }
  if (has_quantiles) write_quantiles();
}

cudaError_t run(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x, const int32_t* ranks,
                const SelectResults& results, void* workspace, bool firsts) {
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    static_assert(sizeof(Head<T>) <= kLongHeadBytes);
    const int64_t rows = problem.rows.count();
    Args<T> a{problem,
              static_cast<const T*>(x),
              ranks,
              static_cast<T*>(results.values),
              results.indices,
              static_cast<char*>(workspace),
              plan,
              0,
              results.shares,
              results.beside};
    auto kernel = select_long_kernel<T>;
    Launch config;
    config.block = dim3(kThreads);
    config.shared_bytes = plan.shared_bytes;
    cudaError_t error = cudaSuccess;
    int64_t together = rows;  // rows of a launch
    if (plan.apart) {
      const bool large = problem.rows.length >= kLargeSampled && plan.slice_packs * (128 / problem.bits) > kLargePart;
      error = launch(stream, {dim3(static_cast<unsigned>(rows)), dim3(kSampleThreads)},
                     large ? select_sample_kernel<T, kLargeSampleBits> : select_sample_kernel<T, kSmallSampleBits>, a);
      if (error != cudaSuccess) return error;
      config.overlap = plan.overlap;
    }
    if (plan.slices > 1) {
      static Residents residents, counting;
      int fitting = 0;
      if constexpr (sizeof(T) == 2) {
        if (plan.counts) {
          Launch counts = config;
          counts.shared_bytes = kKeyCountsBytes;
          error = counting.count(reinterpret_cast<const void*>(select_counts_kernel<T>), counts, &fitting);
          if (error != cudaSuccess) return error;
          if (fitting >= plan.slices) kernel = select_counts_kernel<T>, config = counts;
        }
      }
      if (kernel == select_long_kernel<T>)
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
    if (problem.kth < 0 || error != cudaSuccess) return error;
    return firsts ? launch_gather(stream, a) : launch_partition(stream, a);
  });
}

}  // namespace

cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, const SelectResults& results, void* workspace) {
  return run(stream, plan, problem, x, ranks, results, workspace, false);
}

cudaError_t launch_firsts(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const SelectResults& results, void* workspace) {
  return run(stream, plan, problem, x, nullptr, results, workspace, true);
}

}  // namespace jaxgpuops::select
