// select for rows that no block holds, and for long ones that are few: the blocks of a cluster hold a row together,
// each a part of it in its shared memory. All go by the steps of select.cuh:
// - Each block takes the same sample, while its part of the row arrives, and finds the same first intervals. Keys of up
//   to 16 bits of long rows need none: two steps of 8 bits each end with single keys.
// - In each step a block counts the keys of its part. For each rank, one block adds up these counts, and tells the
//   others in which part of its interval the rank falls.
// - The elements that are left for a rank are listed in one block, which compares them with each other. If many equal
//   elements are left, the block chooses that has the wanted one in its part.
// Bytes moved: the row is read once.
#include <cuda_runtime.h>

#include "common/cuda/cluster.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "select/cuda/held.cuh"
#include "select/cuda/quantile.cuh"

namespace jaxgpuops::select {
namespace {

#if __CUDA_ARCH__ >= 900
// A sample has 2^kSmallBits elements in each lane, or twice as many for rows of more than kSmallSampled elements,
// since elements may otherwise be left that are too many for a list.
constexpr int kSmallBits = 3;
constexpr uint32_t kSmallSampled = 1 << 17;
constexpr uint32_t kLeastWhole = 1 << 15;  // the shortest rows of 16 bits that need no sample
constexpr unsigned kMostBlocks = 16;
constexpr int kMostGroups = kMostClusterThreads / kBins;

// A list has kFew elements at most, whose indices and keys fit in the memory of a table.
template <class T>
constexpr int kFew = sizeof(T) == 8 ? 128 : 256;

// Adds 1 to the word at the address `to` in the shared memory of block `rank` of the cluster, and returns what it was.
__device__ __forceinline__ uint32_t count_in_cluster(uint32_t* to, unsigned rank) {
  uint32_t before;
  asm volatile(
      "{.reg.u32 address; mapa.shared::cluster.u32 address, %1, %2; atom.shared::cluster.add.u32 %0, [address], 1;}"
      : "=r"(before)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "r"(rank)
      : "memory");
  return before;
}

__device__ __forceinline__ void wait_for_cluster() {
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
}

// Returns the sum of the words at `from` in the first blocks of the cluster. A warp calls this.
__device__ __forceinline__ uint32_t sum_of_blocks(const uint32_t* from, unsigned blocks) {
  const unsigned lane = threadIdx.x & 31;
  return sum_of_warp(lane < blocks ? load_in_cluster(from, lane) : 0);
}
#endif

template <class T>
__global__ void __launch_bounds__(kMostClusterThreads)
    select_cluster_kernel(const __grid_constant__ Select problem, const T* __restrict__ x,
                          const int32_t* __restrict__ ranks, const SelectResults results, uint32_t table_at,
                          uint32_t blocks, int part_packs) {
#if __CUDA_ARCH__ >= 900
  using Word = typename Found<T>::Word;
  constexpr int kPack = Pack<T>::kElements;
  __shared__ uint32_t sample[64 << kSmallBits];
  __shared__ __align__(16) uint32_t sums[kMostGroups][kBins];  // the counts of all blocks in a table
  __shared__ Found<T> found;
  __shared__ uint64_t copied;               // the barrier at which the block's part of the row arrives
  __shared__ Word largest;                  // the largest key of the part
  __shared__ Word largest_of[kMostBlocks];  // and those of all blocks
  // For each rank: how many elements its list has, and how many equal elements are left in the part.
  __shared__ uint32_t listed[kMostRanks], equal[kMostRanks];
  __shared__ uint32_t last_of_largest, chosen, all_before;
  __shared__ Word chosen_key;
  __shared__ Quantiles<Word> quantiles;  // of the first block
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const auto wanted = static_cast<int>(problem.count);
  const uint32_t row = blockIdx.x / blocks, block = blockIdx.x - row * blocks;
  const auto inner = static_cast<uint32_t>(problem.rows.inner);
  const uint32_t outer = row / inner, column = row - outer * inner;
  x += int64_t{row} * length;

  // The part is some packs of the row, which lie in shared memory as elements do in global memory, at the same distance
  // from a multiple of 16 bytes. Places before and after the row hold copies of its first element, and the counts are
  // corrected for them.
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const int row_packs = static_cast<int>((past + length + kPack - 1) / kPack), first_pack = block * part_packs;
  const int packs = max(min(row_packs - first_pack, part_packs), 0), start = first_pack * kPack - past;
  // The number of the part's first element, and how many elements the part has.
  const auto first = static_cast<uint32_t>(max(start, 0));
  const uint32_t own = packs > 0 ? min(static_cast<uint32_t>(start + packs * kPack), length) - first : 0;
  const uint32_t copies = packs * kPack - own;
  auto* const held = reinterpret_cast<Pack<T>*>(dynamic_shared_memory());
  const T* const keys = reinterpret_cast<const T*>(held) + (static_cast<int>(first) - start);
  auto* const tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + table_at);

  start_row_copy(held, x, start, length, packs, &copied);
  const auto clear_tables = [&](int first_thread) {
#pragma unroll 1
    for (int b = threadIdx.x - first_thread; b < wanted * kBins / 4; b += threads - first_thread)
      reinterpret_cast<uint4*>(tables)[b] = uint4{0, 0, 0, 0};
  };
  const int32_t* const own_ranks = problem.kth >= 0 ? nullptr : ranks + ranks_at(problem.ranks, outer, column);
  if (block == 0 && threadIdx.x < problem.quantiles)
    quantiles.own[threadIdx.x].load(problem, results.shares, own_ranks, outer, column, threadIdx.x);
  if (warp == 0) {
    if (lane < kMostRanks) listed[lane] = 0;
    if (lane == 0) largest = 0, last_of_largest = 0;
    uint32_t rank;
    const bool has = own_rank(problem, length, own_ranks, rank);
    if (sizeof(T) == 1 || (kIsNarrow<T> && length >= kLeastWhole)) {
      set_whole_table(kBinBits, wanted, has, rank, found);
    } else {
      const bool is_small = length <= kSmallSampled;
      const auto scale = is_small ? sample_in_warp<kSmallBits>(problem.order, x, length, sample)
                                  : sample_in_warp<kSmallBits + 1>(problem.order, x, length, sample);
      set_first_tables((is_small ? 32 : 64) << kSmallBits, kBinBits, 3, wanted, length, has, rank, sample, scale,
                       found);
    }
  } else {
    clear_tables(32);
  }
  wait_for_cluster();
  wait_for_copies(&copied, 0);

  const SortOrder order = one_flip<T>(problem.order);
  const auto for_keys = [&](bool raw, auto visit) { select::for_keys(held, packs, order, raw, visit); };
  const uint32_t ends = found.ends;
  uint32_t to_do = ((1u << wanted) - 1) & ~ends;  // a bit for each rank that needs a step
  Word highest = 0;                               // the thread's largest key
#pragma unroll 1
  for (bool raw = true;; raw = false) {
    const uint32_t used = found.used;
    if (copies && (used >> lane & 1) && warp == 0)
      atomicAdd(tables + lane * kBins + found.parts[lane](Word{sort_key(x[0], problem.order)}), 0u - copies);
    const Word own_highest = count_all<T>(tables, found, used, raw, ends != 0, for_keys);
    if (raw && ends) {
      highest = own_highest;
      const Word of_warp = largest_of_lanes(highest);
      if (lane == 0) atomicMax(&largest, of_warp);
      __syncthreads();
      if (threadIdx.x < blocks) store_in_cluster(largest_of + block, threadIdx.x, largest);
    }
    wait_for_cluster();
    // Of kBins threads, which are a group, each adds up the counts of one part.
    const int groups = threads / kBins, group = threadIdx.x / kBins, bin = threadIdx.x % kBins;
#pragma unroll 1
    for (int ahead = block; ahead < wanted; ahead += blocks * groups) {
      const int r = ahead + group * blocks;
      const bool does = r < wanted && (to_do >> r & 1);
      if (does) {
        const uint32_t* const from = tables + found.table[r] * kBins + bin;
        uint32_t sum = 0;
#pragma unroll 8
        for (uint32_t b = 0; b < blocks; ++b) sum += load_in_cluster(from, b);
        sums[group][bin] = sum;
      }
      __syncthreads();
      if (does && bin < 32) {
        const PartOfRank at = find_rank(sums[group], sum_counts(sums[group]), found.rank[r]);
        Word part_first, part_last;
        found.parts[found.table[r]].template bounds<T>(at.part, part_first, part_last);
        if (lane < blocks) {
          store_in_cluster(&found.first[r], lane, part_first);
          store_in_cluster(&found.last[r], lane, part_last);
          store_in_cluster(&found.size[r], lane, at.size);
          store_in_cluster(&found.left[r], lane, at.left);
        }
      }
      __syncthreads();
    }
    wait_for_cluster();
    to_do = __ballot_sync(kEveryLane,
                          (to_do >> lane & 1) && lane < wanted && found.size[lane] > kFew<T> && found.last[lane] != 0);
    if (to_do == 0) break;
    if (warp == 0) {
      if (lane == 0) found.more = to_do;
      __syncwarp();
      choose_tables(found);
      if (found.used >> lane & 1)
        found.parts[lane] =
            Parts<Word>::template between<T>(kBinBits, found.first[lane], found.first[lane] + found.last[lane]);
    }
    clear_tables(0);
    __syncthreads();
  }

  if (ends && warp == 0) {
    const Word of_row = largest_of_lanes(lane < blocks ? largest_of[lane] : Word{0});
    if (lane == 0) found.largest = of_row;
  }
  __syncthreads();
  // Ranks of quantiles whose elements are told by their keys.
  const auto key_of = [&](int r) { return static_cast<T>(ends >> r & 1 ? found.largest : found.first[r]); };
  const bool is_told =
      lane < wanted && ((ends >> lane & 1) || found.last[lane] == 0) && is_told_by_key(problem, key_of(lane));
  const uint32_t told = __ballot_sync(kEveryLane, is_told);
  if (block == 0 && warp == 0 && is_told) quantiles.taken[lane] = element_of_key(problem, key_of(lane));
  const auto write_quantiles = [&] {
    const uint32_t j = threadIdx.x;
    if (block == 0 && j < problem.quantiles)
      static_cast<T*>(results.values)[quantile_at(row, j, problem.quantiles, results.beside)] =
          static_cast<T>(quantiles(problem, j));
  };
  if (told == (1u << wanted) - 1) {
    arrive_at_cluster_barrier();
    __syncthreads();
    write_quantiles();
    wait_at_cluster_barrier();
    return;
  }
  if (warp == 0) choose_lists(found, wanted);
  __syncthreads();
  const auto write = [&](int r, uint32_t at, Word key) {
    if (problem.kth >= 0) {
#pragma unroll 1
      for (uint32_t b = 0; b < blocks; ++b) store_in_cluster(&chosen, b, at), store_in_cluster(&chosen_key, b, key);
      return;
    }
    const auto narrow = static_cast<T>(key);
    const T element = tells_element(problem, narrow) ? element_of_key(problem, narrow) : x[at];
    if (problem.quantiles) {
      store_in_cluster(quantiles.taken + r, 0, Word{element});
      return;
    }
    const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
    static_cast<T*>(results.values)[to] = element;
    results.indices[to] = static_cast<int32_t>(at);
  };
  // The list of a table is in this block.
  const auto home = [&](uint32_t table) { return table % blocks; };
  const auto is_many = [&](int r) { return !((ends | told) >> r & 1) && found.size[r] > kFew<T>; };
  const uint32_t many = __ballot_sync(kEveryLane, lane < wanted && is_many(lane));
  const uint32_t lists =
      __ballot_sync(kEveryLane, lane < wanted && !((ends | many | told) >> lane & 1) && found.table[lane] == lane);
  const bool has_largest = (ends & ~told) && packs > 0 && highest == found.largest;
  uint32_t last = 0;
  for_keys(false, [&](auto& key, auto& has, int begin) {
    const auto at = [&](int place) {
      return static_cast<uint32_t>(start + (begin + place / kPack * threads + lane) * kPack + place % kPack);
    };
    if (has_largest) last = max(last, last_in_row(keys_between(key, has, highest, Word{0}), length, at));
    for_bits(lists, [&](int r) {
      uint32_t is_left = keys_between(key, has, found.first[r], found.last[r]);
      for (; is_left; is_left &= is_left - 1) {
        const uint32_t index = at(__ffs(static_cast<int>(is_left)) - 1);
        if (index >= length) continue;
        const uint32_t to = home(r), i = count_in_cluster(listed + r, to);
        uint32_t* const list = tables + r * kBins;
        store_in_cluster(list + i, to, index);
        store_in_cluster(reinterpret_cast<Word*>(list + kFew<T>) + i, to, Word{keys[index - first]});
      }
    });
  });
  if (last) atomicMax(&last_of_largest, last);

  // Each warp counts in its share of the part, kAhead elements of a lane at a time.
  constexpr uint32_t kAhead = 4;
  const uint32_t share = (own + threads - 1) / threads * 32, begin = warp * share, end = min(begin + share, own);
  const auto chosen_at = [&](uint32_t i, auto choose) {
    return __ballot_sync(kEveryLane, i < end && choose(min(i, own - 1)));
  };
  // Returns how many elements of the warps before are chosen, and sets the number of those of the warp and of the part.
  // The whole block calls this; the words at `counts` are in shared memory.
  const auto count_before = [&](uint32_t* counts, auto choose, uint32_t& of_warp, uint32_t& of_part) {
    of_warp = 0;
#pragma unroll kAhead
    for (uint32_t i = begin + lane; i < end; i += 32) of_warp += choose(i);
    of_warp = sum_of_warp(of_warp);
    if (lane == 0) counts[warp] = of_warp;
    __syncthreads();
    const uint32_t up_to = sum_up_to_lane(lane < warps ? counts[lane] : 0);
    of_part = shuffle_from(up_to, 31);
    return shuffle_from(up_to, warp) - of_warp;
  };
  for_bits(many & __ballot_sync(kEveryLane, lane < wanted && found.table[lane] == lane), [&](int r) {
    uint32_t of_warp, of_part;
    count_before(
        tables + r * kBins, [&, key = found.first[r]](uint32_t i) { return keys[i] == key; }, of_warp, of_part);
    if (threadIdx.x == 0) equal[r] = of_part;
  });
  wait_for_cluster();

  // The wanted element is number `left` of the listed ones. All entries of a list are compared with each other, each by
  // a warp.
  for_bits(lists, [&](int t) {
    if (home(t) != block) return;
    const uint32_t* const list = tables + t * kBins;
    const Word* const list_keys = reinterpret_cast<const Word*>(list + kFew<T>);
    const uint32_t size = found.size[t];
    // A lane keeps the entries that it compares with those of the warp.
    constexpr int kOwn = kFew<T> / 32;
    Word key[kOwn];
    uint32_t at[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t own = i * 32 + lane;
      key[i] = own < size ? list_keys[own] : ~Word{0}, at[i] = own < size ? list[own] : ~0u;
    }
    // Ranks whose element is in the list, and its number there.
    const bool is_its =
        lane < wanted && !((ends | many | told) >> lane & 1) && static_cast<int>(found.table[lane]) == t;
    const uint32_t its = __ballot_sync(kEveryLane, is_its);
#pragma unroll 1
    for (uint32_t e = warp; e < size; e += warps) {
      const Word its_key = list_keys[e];
      const uint32_t its_at = list[e];
      uint32_t before = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) before += key[i] < its_key || (key[i] == its_key && at[i] < its_at);
      before = sum_of_warp(before);
      for_bits(its, [&](int r) {
        if (lane == 0 && before == found.left[r]) write(r, its_at, its_key);
      });
    }
  });
  if ((ends & ~told) && block == 0 && warp == 0) {
    const uint32_t last =
        largest_of_warp(static_cast<unsigned>(lane) < blocks ? load_in_cluster(&last_of_largest, lane) : 0);
    if (lane < wanted && ((ends & ~told) >> lane & 1)) write(lane, last, found.largest);
  }
  for_bits(many, [&](int r) {
    const Word key = found.first[r];
    const uint32_t table = found.table[r];
    const uint32_t* const counts = tables + table * kBins;
    uint32_t left = found.left[r] - sum_of_blocks(equal + table, block);
    if (left >= equal[table]) return;
    const uint32_t of_warp = counts[warp], up_to = sum_up_to_lane(lane < warps ? counts[lane] : 0);
    left -= shuffle_from(up_to, warp) - of_warp;
    if (left >= of_warp) return;
#pragma unroll 1
    for (uint32_t i = begin + lane; i - lane < end; i += 32) {
      const unsigned lanes = chosen_at(i, [&](uint32_t at) { return keys[at] == key; });
      if ((lanes >> lane & 1) && __popc(lanes & ((1u << lane) - 1)) == left) write(r, first + i, key);
      left -= __popc(lanes);
    }
  });
  wait_for_cluster();  // no other block reads this block's memory any more, if it is not to be partitioned
  write_quantiles();
  if (problem.kth < 0) return;

  const IsBefore<T> is_before{static_cast<T>(chosen_key), chosen};
  const auto is_first = [&](uint32_t i) { return is_before(keys[i], first + i); };
  uint32_t of_warp, of_part, before = count_before(sample, is_first, of_warp, of_part);
  if (threadIdx.x == 0) all_before = of_part;
  wait_for_cluster();
  before += sum_of_blocks(&all_before, block);
  arrive_at_cluster_barrier();
  const int64_t to = int64_t{row} * length;
  auto* const values = static_cast<T*>(results.values);
  write_around<kAhead>(keys, is_before, static_cast<uint32_t>(problem.kth), x, first, begin, end, before,
                       values ? values + to : values, results.indices ? results.indices + to : results.indices);
  wait_at_cluster_barrier();
#endif
}

}  // namespace

cudaError_t launch_select_cluster(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                  const int32_t* ranks, const SelectResults& results) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count() * plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  config.cluster = static_cast<int>(plan.blocks);
  config.packed = true;
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    const auto kernel = select_cluster_kernel<T>;
    const cudaError_t error = allow_cluster(reinterpret_cast<const void*>(kernel), config.cluster);
    if (error != cudaSuccess) return error;
    return launch(stream, config, kernel, problem, static_cast<const T*>(x), ranks, results,
                  static_cast<uint32_t>(plan.table_at), static_cast<uint32_t>(plan.blocks),
                  static_cast<int>(plan.table_at / 16));
  });
}

}  // namespace jaxgpuops::select
