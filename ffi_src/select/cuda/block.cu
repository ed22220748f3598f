// select: a block keeps the keys of a row in shared memory, and finds all ranks together, by the steps of select.cuh. A
// warp sorts the sample while the others read the row. In the end the block lists the few elements that are left for a
// rank and compares them with each other. If many equal elements are left, it counts them in order of appearance up to
// the wanted one.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "select/cuda/held.cuh"
#include "select/cuda/quantile.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::select {
namespace {

static_assert(kSelectFew <= kBins);
// A sample of a row, for up to three ranks and rows of up to kFewSampled: 2^kLaneSampleBits elements in each lane.
constexpr int kLaneSampleBits = 2;
constexpr uint32_t kFewSampled = 8192;

// Finds the least and the largest key that each table's interval still holds, for all tables in use.
template <class T, class ForKeys>
__device__ __forceinline__ void find_bounds(const Found<T>& found, ForKeys for_keys, typename Found<T>::Word* least,
                                            typename Found<T>::Word* most) {
  using Word = typename Found<T>::Word;
  constexpr Word kAll = static_cast<T>(~T{0});
  for_keys(false, [&](auto& key, auto& has, int) {
    for_bits(found.used, [&](int t) {
      const Word first = found.first[t], last = found.last[t];
      Word lowest = kAll, highest = 0;
#pragma unroll
      for (int i = 0; i < kPacks<T>; ++i) {
#pragma unroll
        for (int e = 0; e < Pack<T>::kElements; ++e) {
          if (!has[i] || key[i][e] - first > last) continue;
          lowest = min(lowest, key[i][e]);
          highest = max(highest, key[i][e]);
        }
      }
      if (lowest > highest) return;
      atomicMin(least + t, lowest);
      atomicMax(most + t, highest);
    });
  });
}

// Writes the element of rank r: the one that is number `left` among the listed ones. A warp compares all of these with
// each other.
template <class T, class Write>
__device__ __forceinline__ void choose_of_list(const uint32_t* list, uint32_t size, uint32_t left, const T* keys, int r,
                                               Write write) {
  for (uint32_t i = threadIdx.x & 31; i < size; i += 32) {
    const uint32_t at = list[i];
    const T key = keys[at];
    uint32_t before = 0;
#pragma unroll 2
    for (uint32_t j = 0; j < size; ++j) {
      const uint32_t other = list[j];
      const T its = keys[other];
      before += its < key || (its == key && other < at);
    }
    if (before == left) write(r, static_cast<int>(at));
  }
}

// Lists the elements that are left for each rank, if they are few, in the memory of the rank's table. For ranks that
// are the last of the row, finds the last one of the largest elements; `has_largest` says whether the thread has any of
// these. `past`: where the row begins in the first pack.
template <class T, class ForKeys>
__device__ __forceinline__ void list_left(const Found<T>& found, uint32_t ends, bool has_largest, int wanted,
                                          uint32_t length, int past, uint32_t* tables, uint32_t* listed,
                                          uint32_t* last_of_largest, ForKeys for_keys) {
  constexpr int kPack = Pack<T>::kElements;
  const int threads = blockDim.x, lane = threadIdx.x & 31, first_end = __ffs(ends) - 1;
  uint32_t last = 0;
  for_keys(false, [&](auto& key, auto& has, int start) {
    const auto at = [&](int place) {
      return static_cast<uint32_t>((start + place / kPack * threads + lane) * kPack + place % kPack - past);
    };
#pragma unroll 1
    for (int r = 0; r < wanted; ++r) {
      const bool is_end = ends >> r & 1;
      if (is_end ? r != first_end || !has_largest : found.size[r] > kSelectFew || found.table[r] != r) continue;
      uint32_t is_left = keys_between(key, has, found.first[r], found.last[r]);
      if (is_end) {
        last = max(last, last_in_row(is_left, length, at));
        continue;
      }
      for (; is_left; is_left &= is_left - 1) {
        const uint32_t index = at(__ffs(is_left) - 1);
        if (index < length) tables[r * kBins + atomicAdd(listed + r, 1u)] = index;
      }
    }
  });
  if (last) atomicMax(last_of_largest, last);
}

template <class T>
__global__ void __maxnreg__(48)
    select_kernel(const __grid_constant__ Select problem, const T* __restrict__ x, const int32_t* __restrict__ ranks,
                  const SelectResults results, uint32_t table_at) {
  using Word = typename Found<T>::Word;
  constexpr bool kIsByte = sizeof(T) == 1;  // a step from the interval of all keys ends with single keys
  constexpr int kPack = Pack<T>::kElements;
  constexpr Word kAll = static_cast<T>(~T{0});
  __shared__ uint32_t sample[32 << kLaneSampleBits];
  __shared__ Found<T> found;
  __shared__ uint64_t copied;  // the barrier at which the row arrives
  // For each rank: the least and the largest key that the next interval must hold.
  __shared__ Word least[kMostRanks], most[kMostRanks];
  __shared__ uint32_t listed[kMostRanks], chosen, last_of_largest;
  __shared__ Quantiles<Word> quantiles;
  const int threads = blockDim.x, warps = threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const auto wanted = static_cast<int>(problem.count);
  const uint32_t row = blockIdx.x, inner = static_cast<uint32_t>(problem.rows.inner);  // blocks are less than 2^31
  const uint32_t outer = row / inner, column = row - outer * inner;
  x += int64_t{row} * length;

  // Keys lie in shared memory as elements do in global memory, at the same distance from a multiple of 16 bytes. The
  // first and the last pack have places before and after the row: these hold copies of the row's first element, and the
  // counts are corrected for them.
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  auto* const held = reinterpret_cast<Pack<T>*>(dynamic_shared_memory());
  T* const keys = reinterpret_cast<T*>(held) + past;
  auto* const tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + table_at);
  const int packs = static_cast<int>((past + length + kPack - 1) / kPack);
  const uint32_t copies = packs * kPack - length;

  start_row_copy(held, x, -past, length, packs, &copied);
  const auto clear_tables = [&](int first) {
#pragma unroll 1
    for (int b = threadIdx.x - first; b < wanted * kBins / 4; b += threads - first)
      reinterpret_cast<uint4*>(tables)[b] = uint4{0, 0, 0, 0};
  };
  const int32_t* const own_ranks = problem.kth >= 0 ? nullptr : ranks + ranks_at(problem.ranks, outer, column);
  if (threadIdx.x < problem.quantiles)
    quantiles.own[threadIdx.x].load(problem, results.shares, own_ranks, outer, column, threadIdx.x);
  if (warp == 0) {
    uint32_t rank;
    const bool has = own_rank(problem, length, own_ranks, rank);
    // In shorter rows, a small sample is enough: its interval may hold most of the row, and yet each part of it has few
    // elements. With more ranks the lists would be too many.
    if constexpr (kIsByte) {
      set_whole_table(kBinBits, wanted, has, rank, found);
    } else if (length <= kFewSampled && wanted <= 3) {
      const auto scale = sample_in_warp<0>(problem.order, x, length, sample);
      set_first_tables(32, kBinBits, 3, wanted, length, has, rank, sample, scale, found);
    } else {
      const auto scale = sample_in_warp<kLaneSampleBits>(problem.order, x, length, sample);
      set_first_tables(32 << kLaneSampleBits, kBinBits, 3, wanted, length, has, rank, sample, scale, found);
    }
  } else {
    clear_tables(32);
  }
#if __CUDA_ARCH__ < 900
  wait_for_async_copies<0>();
#endif
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  wait_for_copies(&copied, 0);
#endif

  const SortOrder order = one_flip<T>(problem.order);
  const auto for_keys = [&](bool raw, auto visit) { select::for_keys(held, packs, order, raw, visit); };
  const uint32_t ends = found.ends;
  uint32_t to_do = 0;  // a bit for each rank that needs more than one step
  Word highest = 0;    // the thread's largest key
#pragma unroll 1
  for (bool raw = true;; raw = false) {
    const uint32_t used = found.used;
    if (copies && (used >> lane & 1) && warp == 0)
      atomicAdd(tables + lane * kBins + found.parts[lane](Word{sort_key(x[0], problem.order)}), 0u - copies);
    const Word own = count_all<T>(tables, found, used, raw, ends != 0, for_keys);
    if (raw && ends) {
      highest = own;
      const Word of_warp = largest_of_lanes(highest);
      if (lane == 0) atomicMax(&found.largest, of_warp);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < wanted; r += warps)
      if ((raw ? ~ends : to_do) >> r & 1) find_part<kSelectFew>(kBinBits, tables, nullptr, found, r);
    __syncthreads();
    to_do = found.more;
    if (to_do == 0) break;

    // The next interval of a rank goes from the least to the largest key that is left for it.
    if (warp == 0) choose_tables(found);
    if (threadIdx.x < wanted) least[threadIdx.x] = kAll, most[threadIdx.x] = 0;
    clear_tables(0);
    __syncthreads();
    if (threadIdx.x == 0) found.more = 0;
    find_bounds<T>(found, for_keys, least, most);
    __syncthreads();
    if (warp == 0 && (found.used >> lane & 1))
      found.parts[lane] = Parts<Word>::template between<T>(kBinBits, least[lane], most[lane]);
    __syncthreads();
  }

  const auto write = [&](int r, int at) {
    if (problem.kth >= 0) {
      chosen = at;
      return;
    }
    const T key = keys[at], element = tells_element(problem, key) ? element_of_key(problem, key) : x[at];
    if (problem.quantiles) {
      quantiles.taken[r] = element;
      return;
    }
    const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
    static_cast<T*>(results.values)[to] = element;
    results.indices[to] = at;
  };
  if (warp == 0) {
    if (lane < wanted) {
      listed[lane] = 0;
      if (ends >> lane & 1) found.first[lane] = found.largest, found.last[lane] = 0;
    }
    if (lane == 0) last_of_largest = 0;
    __syncwarp();
    choose_lists(found, wanted);
  }
  __syncthreads();
  list_left<T>(found, ends, highest == found.largest, wanted, length, past, tables, listed, &last_of_largest, for_keys);
  __syncthreads();
#pragma unroll 1
  for (int r = warp; r < wanted; r += warps) {
    if (ends >> r & 1) {
      if (lane == 0) write(r, static_cast<int>(last_of_largest));
      continue;
    }
    const uint32_t size = found.size[r], left = found.left[r];
    if (size > kSelectFew) continue;
    choose_of_list(tables + found.table[r] * kBins, size, left, keys, r, write);
  }

  // Many equal elements are left for a rank. Each warp counts them in its part of the row, kAhead elements of a lane at
  // a time.
  constexpr uint32_t kAhead = 4;
  const uint32_t part = (length + threads - 1) / threads * 32, begin = warp * part, end = min(begin + part, length);
  const auto chosen_at = [&](uint32_t at, auto choose) {
    return __ballot_sync(kEveryLane, at < end && choose(min(at, length - 1)));
  };
  // Returns how many elements before the warp's part are chosen; `own` gets how many in it. The whole block calls this;
  // the words at `counts` are in shared memory.
  const auto count_before = [&](uint32_t* counts, auto choose, uint32_t& own) {
    own = 0;
#pragma unroll kAhead
    for (uint32_t at = begin + lane; at < end; at += 32) own += choose(at);
    own = sum_of_warp(own);
    if (lane == 0) counts[warp] = own;
    __syncthreads();
    return shuffle_from(sum_up_to_lane(lane < warps ? counts[lane] : 0), warp) - own;
  };
  for (int r = 0; r < wanted; ++r) {
    if ((ends >> r & 1) || found.size[r] <= kSelectFew) continue;
    if (is_told_by_key(problem, static_cast<T>(found.first[r]))) {
      if (threadIdx.x == 0) quantiles.taken[r] = element_of_key(problem, static_cast<T>(found.first[r]));
      continue;
    }
    const auto is_equal = [&, key = found.first[r]](uint32_t at) { return keys[at] == key; };
    const auto table = static_cast<int>(found.table[r]);
    uint32_t* const counts = tables + table * kBins;
    uint32_t own = 0, left = found.left[r];
    if (table == r) {
      left -= count_before(counts, is_equal, own);
    } else {  // another rank had the same key
      own = counts[warp];
      left -= shuffle_from(sum_up_to_lane(lane < warps ? counts[lane] : 0), warp) - own;
    }
    if (left >= own) continue;
#pragma unroll 1
    for (uint32_t start = begin + lane; start - lane < end; start += 32) {
      const unsigned lanes = chosen_at(start, is_equal);
      if ((lanes >> lane & 1) && __popc(lanes & ((1u << lane) - 1)) == left) write(r, static_cast<int>(start));
      left -= __popc(lanes);
    }
  }
  if (problem.quantiles) {
    __syncthreads();
    const uint32_t j = threadIdx.x;
    if (j < problem.quantiles)
      static_cast<T*>(results.values)[quantile_at(row, j, problem.quantiles, results.beside)] =
          static_cast<T>(quantiles(problem, j));
  }
  if (problem.kth < 0) return;

  __syncthreads();
  const uint32_t middle = chosen, kth = static_cast<uint32_t>(problem.kth);
  const IsBefore<T> is_before{keys[middle], middle};
  uint32_t own;
  const uint32_t before = count_before(sample, [&](uint32_t at) { return is_before(keys[at], at); }, own);
  const int64_t to = int64_t{row} * length;
  auto* const values = static_cast<T*>(results.values);
  write_around<kAhead>(keys, is_before, kth, x, 0, begin, end, before, values ? values + to : values,
                       results.indices ? results.indices + to : results.indices);
}

}  // namespace

cudaError_t launch_select(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const int32_t* ranks, const SelectResults& results, void* workspace) {
  if (plan.algorithm == Selecting::kEmpty) return cudaSuccess;
  auto* rest = static_cast<char*>(workspace);
  if (plan.turns) {
    const auto [outer, length, inner] = problem.rows;
    const cudaError_t error = sort::launch_turn(stream, x, workspace, outer, length, inner, problem.bits);
    if (error != cudaSuccess) return error;
    x = workspace;
    rest += outer * plan.turned_bytes;
  }
  if (plan.algorithm == Selecting::kThread || plan.algorithm == Selecting::kWarp)
    return launch_select_short(stream, plan, problem, x, ranks, results);
  if (plan.algorithm == Selecting::kTeams) return launch_select_teams(stream, plan, problem, x, ranks, results);
  if (plan.algorithm == Selecting::kRegisters) return launch_select_registers(stream, plan, problem, x, ranks, results);
  if (plan.algorithm == Selecting::kCluster) return launch_select_cluster(stream, plan, problem, x, ranks, results);
  if (plan.algorithm == Selecting::kLong) return launch_select_long(stream, plan, problem, x, ranks, results, rest);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    return launch(stream, config, select_kernel<T>, problem, static_cast<const T*>(x), ranks, results,
                  static_cast<uint32_t>(plan.table_at));
  });
}

}  // namespace jaxgpuops::select
