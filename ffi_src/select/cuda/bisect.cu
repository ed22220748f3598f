// select, warp: rows of up to kMostWarpSelect elements, each in the registers of a warp. A row is read once.
//
// For each rank the warp keeps an interval of keys that has the wanted one, and how many keys are below it and up to
// its end. It counts the keys up to the middle of the interval and goes on with one half, until the wanted key is the
// first or the last one that is left, which the lanes then look for. Every kTurns turns the interval shrinks to the
// keys in it, so that few different keys take few turns. A rank that falls among the equal elements of the rank before
// needs no turn, and the rank behind them none either.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "select/cuda/short.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kTurns = 8;

__device__ __forceinline__ uint32_t most_of_warp(uint32_t key) { return largest_of_warp(key); }
__device__ __forceinline__ unsigned long long most_of_warp(unsigned long long key) {
  return largest_of_warp(static_cast<uint64_t>(key));
}

// The keys of a row: each lane has kOwn of them, every 32nd. Behind the row there are keys of all ones.
template <class Word, int kOwn>
struct Keys {
  static constexpr Word kAll = ~Word{0};
  Word key[kOwn];

  // The least key from `low` on, and the largest one up to `high`. The row has such a key.
  __device__ __forceinline__ Word first_from(Word low) const {
    Word first = kAll;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) first = key[i] >= low ? min(first, key[i]) : first;
    return kAll - most_of_warp(kAll - first);
  }
  __device__ __forceinline__ Word last_up_to(Word high) const {
    Word last = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) last = key[i] <= high ? max(last, key[i]) : last;
    return most_of_warp(last);
  }
  // How many keys are at most `high`, which is less than all ones.
  __device__ __forceinline__ uint32_t count_up_to(Word high) const {
    uint32_t above = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) add_counting(key[i], ~high, above);
    return 32 * kOwn - sum_of_warp(above);
  }
};

template <class T, int kOwn>
__global__ void __launch_bounds__(kThreads) select_bisect_kernel(const __grid_constant__ Args a) {
  using Word = typename Found<T>::Word;
  const int warp = threadIdx.x / 32, wanted = static_cast<int>(a.problem.count);
  const uint32_t row = blockIdx.x * kWarps + warp, lane = threadIdx.x & 31;
  if (row >= a.problem.rows.count()) return;
  const Place place(a.problem, row);
  __shared__ Quantiles<Word> quantiles[kWarps];
  begin_row(a, place, quantiles[warp]);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const uint32_t own_rank = static_cast<int>(lane) < wanted ? rank_at(a, place, static_cast<int>(lane)) : 0;
  const int64_t x = a.stride == 1 ? int64_t{row} * length : place.x;  // rows, or columns that have been turned
  const T* const from = static_cast<const T*>(a.x) + x;
  const SortOrder order = one_flip<T>(a.problem.order);
  T element[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) element[i] = from[int64_t{min(i * 32 + lane, length - 1)} * a.stride];
  Keys<Word, kOwn> keys;
  Word least = keys.kAll, most = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const Word key = sort_key(element[i], order);  // those behind the row are copies of its last element
    least = min(least, key), most = max(most, key);
    keys.key[i] = i * 32 + lane < length ? key : keys.kAll;
  }
  least = keys.kAll - most_of_warp(keys.kAll - least), most = most_of_warp(most);

  // `size` elements have the key that was found last, and `begin` elements come before them. `set` has a bit for each
  // of the lane's elements that is one of them.
  Word found = 0;
  uint32_t begin = 0, size = 0, set = 0;
#pragma unroll 1
  for (int j = 0; j < wanted; ++j) {
    const uint32_t rank = shuffle_from(own_rank, j);
    if (rank - begin >= size) {
      const bool is_behind = rank > begin && size > 0;
      // `below` keys are less than `low`, and `up_to` keys are `high` at most.
      Word low = is_behind ? found + 1 : least, high = most;
      uint32_t below = is_behind ? begin + size : 0, up_to = length;
#pragma unroll 1
      for (int turn = 1;; ++turn) {
        if (rank == below) {
          found = keys.first_from(low);
          break;
        }
        if (rank + 1 == up_to) {
          found = keys.last_up_to(high);
          break;
        }
        if (low == high) {
          found = low;
          break;
        }
        if (turn % kTurns == 0) {
          low = keys.first_from(low), high = keys.last_up_to(high);
          continue;
        }
        const Word middle = low + (high - low) / 2;
        const uint32_t count = keys.count_up_to(middle);
        if (count > rank)
          high = middle, up_to = count;
        else
          low = middle + 1, below = count;
      }
      set = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) set |= keys.key[i] == found && i * 32 + lane < length ? 1u << i : 0;
      size = sum_of_warp(__popc(set));
      begin = rank == below || found == low ? below : up_to - size;
    }
    // The wanted element is number `left` of the equal ones.
    uint32_t left = rank - begin;
    bool is_own = set != 0;
    int i = __ffs(static_cast<int>(set)) - 1;
    if (size > 1) {
#pragma unroll 1
      for (i = 0;; ++i) {
        const unsigned equal = __ballot_sync(kEveryLane, set >> i & 1);
        const auto count = static_cast<uint32_t>(__popc(equal));
        if (left < count) {
          is_own = (set >> i & 1) && __popc(equal & ((1u << lane) - 1)) == left;
          break;
        }
        left -= count;
      }
    }
    if (is_own) {
      const auto key = static_cast<T>(found);
      const T element =
          tells_element(a.problem, key) ? element_of_key(a.problem, key) : from[(i * 32 + lane) * int64_t{a.stride}];
      put_element(a, place, quantiles[warp], j, Word{element}, i * 32 + lane);
    }
  }
  end_row(a, place, quantiles[warp]);
}

template <int kOwn>
cudaError_t launch_own(cudaStream_t stream, const Launch& config, const Args& args) {
  return dispatch_key(args.problem.bits, [&](auto width) {
    return launch(stream, config, select_bisect_kernel<decltype(width), kOwn>, args);
  });
}

}  // namespace

cudaError_t launch_select_bisect(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                 const int32_t* ranks, const SelectResults& results) {
  const Args args = args_of(plan, problem, x, ranks, results);
  Launch config;
  config.grid = dim3(static_cast<unsigned>((problem.rows.count() + kWarps - 1) / kWarps));
  config.block = dim3(kThreads);
  const int64_t length = problem.rows.length;
  return length <= 32    ? launch_own<1>(stream, config, args)
         : length <= 64  ? launch_own<2>(stream, config, args)
         : length <= 128 ? launch_own<4>(stream, config, args)
         : length <= 256 ? launch_own<8>(stream, config, args)
         : length <= 512 ? launch_own<16>(stream, config, args)
                         : launch_own<32>(stream, config, args);
}

}  // namespace jaxgpuops::select
