// select for rows of up to 1024 elements. Each is read once, and no block is needed for a row.
//
// thread: rows of up to 64 elements of up to 32 bits, along any axis. A block loads the keys of its rows to shared
// memory, and each thread sorts one row in its registers by a network. Keys of up to 16 bits carry their indices. For
// others the thread looks for the key that has the rank among those of the row.
//
// warp: longer rows, or few rows. A warp compares all elements of a short row with each other, which finds all ranks,
// or sorts the row in its registers. Else it keeps the keys in shared memory and goes by the steps of select.cuh, but
// with one interval for all ranks first, from a sample of 32 elements. Ranks whose part of it has more elements than
// the warp has lanes take further steps, each for itself. (Bisection: bisect.cu.)
#include <cuda_runtime.h>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.cuh"
#include "select/cuda/short.cuh"

namespace jaxgpuops::select {
namespace {

// ---- A thread for each row ------------------------------------------------------------------------------------------

// Loads the elements of a block's rows to shared memory, and stores their keys as words of the thread, those of up to
// 16 bits with their indices. `first`, `step`: where the thread's elements begin, and from one to the next.
template <class T>
__device__ __forceinline__ void load_words(const Args& a, const Place& place, uint32_t rows, uint32_t first,
                                           uint32_t step, uint32_t* words) {
  constexpr uint32_t kInWord = 4 / sizeof(T);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  T* const tile = reinterpret_cast<T*>(dynamic_shared_memory());
  const T* const x = static_cast<const T*>(a.x);
  uint32_t at = 0;
  if (step == 1) {
    copy_tile_async<kThreads>(tile, x + int64_t{blockIdx.x} * kThreads * length, rows * length);
    // Rows of some threads begin in the same bank of shared memory. These threads start at different elements.
    if (length % kInWord == 0) {
      const uint32_t stride = length / kInWord | 32, meet = stride & (0u - stride);
      at = (threadIdx.x & 31) * meet / 32 * kInWord;
    }
  } else {
    const T* from = x + place.x;
#pragma unroll 16
    for (uint32_t i = 0; i < length; ++i, from += a.problem.rows.inner) tile[first + i * step] = *from;
  }
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();
#pragma unroll 4
  for (uint32_t i = 0; i < length; ++i) {
    const uint32_t key = sort_key(tile[first + at * step], a.problem.order);
    words[at] = sizeof(T) <= 2 ? key << 16 | at : key;
    at = at + 1 < length ? at + 1 : 0;
  }
}

template <int kRoom>
__global__ void __launch_bounds__(kThreads) select_thread_kernel(const __grid_constant__ Args a) {
  const auto all_rows = static_cast<uint32_t>(a.problem.rows.count()),
             rows = min(all_rows - blockIdx.x * kThreads, kThreads);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const bool has = threadIdx.x < rows;
  const Place place(a.problem, blockIdx.x * kThreads + (has ? threadIdx.x : 0));
  const uint32_t step = a.problem.rows.inner == 1 ? 1 : kThreads,
                 first = step == 1 ? threadIdx.x * length : threadIdx.x;
  uint32_t* sorted = reinterpret_cast<uint32_t*>(dynamic_shared_memory()) + threadIdx.x * a.pitch;
  uint32_t* const words = sorted + a.words_at;
  const int bits = a.problem.bits;
  if (bits == 8) load_words<uint8_t>(a, place, rows, first, step, words);
  if (bits == 16) load_words<uint16_t>(a, place, rows, first, step, words);
  if (bits == 32) load_words<uint32_t>(a, place, rows, first, step, words);
  uint32_t v[kRoom];
#pragma unroll
  for (int i = 0; i < kRoom; ++i) v[i] = i < length ? words[i] : ~0u;
  a.network.sort(v);
  if (bits == 32) {
    __syncthreads();  // the sorted words replace the elements
  } else {
    sorted = words;
  }
#pragma unroll
  for (int i = 0; i < kRoom; ++i)
    if (i < length) sorted[i] = v[i];
  if (!has) return;
  // Returns the number of the element of rank number j.
  const auto find = [&](int j) {
    const uint32_t rank = rank_at(a, place, j), found = sorted[rank];
    uint32_t at = found & 0xffff;
    if (bits < 32) return at;
    if (rank > 0 && sorted[rank - 1] == found) {
      uint32_t before = 0;  // how many equal elements come before it
#pragma unroll 4
      for (uint32_t i = 0; i < rank; ++i) before += sorted[i] == found;
#pragma unroll 4
      for (uint32_t i = 0; i < length; ++i) {
        const bool is_equal = words[i] == found;
        at = is_equal && before == 0 ? i : at;
        before -= is_equal;
      }
    } else {
#pragma unroll 4
      for (uint32_t i = length; i-- > 0;) at = words[i] == found ? i : at;
    }
    return at;
  };
  const auto element = [&](uint32_t at) {
    const unsigned char* const tile = dynamic_shared_memory();
    if (bits == 8) return uint32_t{reinterpret_cast<const uint8_t*>(tile)[first + at * step]};
    if (bits == 16) return uint32_t{reinterpret_cast<const uint16_t*>(tile)[first + at * step]};
    return static_cast<const uint32_t*>(a.x)[place.x + at * a.problem.rows.inner];
  };
  if (a.problem.quantiles) {
    const uint32_t last = element(find(static_cast<int>(a.problem.count) - 1));
#pragma unroll 1
    for (int j = 0; j < a.problem.quantiles; ++j) {
      Quantile<uint32_t> quantile;
      quantile.load(a.problem, a.results.shares, a.ranks + place.ranks, place.outer, place.column, j);
      const uint32_t low = element(find(j));
      const uint32_t high = quantile.is_between ? element(find(static_cast<int>(a.problem.upper(j)))) : low;
      write_element(a, quantile_at(place.row, j, a.problem.quantiles, a.results.beside),
                    quantile.of(a.problem, low, high, last));
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < a.problem.count; ++j) {
    const uint32_t at = find(j);
    const int64_t to = place.to + j * a.problem.rows.inner;
    write_element(a, to, element(at));
    a.results.indices[to] = static_cast<int32_t>(at);
  }
}

// ---- A warp for each row --------------------------------------------------------------------------------------------

constexpr int64_t kMostSortedSelect = 256;
constexpr int kBinBits = kSelectBinBits, kBins = 1 << kBinBits;
constexpr int kStep = 128;  // elements that a warp takes at a time
static_assert(kBins == kChunk);

// `Word`: of 32 or 64 bits. Smaller keys are words, too.
template <class Word>
struct WarpRow {
  static constexpr Word kAll = ~Word{0};

  // A part of an interval, with keys from `first` to `first + last`: the wanted element is number `left` of the `size`
  // elements in it.
  struct Part {
    Word first, last;
    uint32_t size, left;
  };

  // The keys of the row, and behind it, up to a whole step, the largest words: these rank after all elements.
  Word* keys;
  uint32_t* counts;
  uint32_t* list;
  uint32_t length;

  // Calls `visit(key, at)` for the keys that a lane has.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll 1
    for (uint32_t start = 0; start < length; start += kStep) {
      Word key[kStep / 32];
#pragma unroll
      for (int i = 0; i < kStep / 32; ++i) key[i] = keys[start + i * 32 + lane];
#pragma unroll
      for (int i = 0; i < kStep / 32; ++i) visit(key[i], start + i * 32 + lane);
    }
    __syncwarp();
  }

  // Loads the keys of the row, and returns the lane's largest. `sampled`: the word of the lane's element of a sample.
  template <class T>
  __device__ __forceinline__ Word load(const void* all_x, int64_t at, uint32_t stride, const SortOrder& order,
                                       uint32_t& sampled) const {
    const T* const x = static_cast<const T*>(all_x) + at;
    const uint32_t lane = threadIdx.x & 31;
    sampled = Scale<T>::whole().word(sort_key(x[sampled_place(5, length, lane) * stride], order));
    Word highest = 0;
#pragma unroll 1
    for (uint32_t start = 0; start < length; start += 2 * kStep) {
      constexpr int kAhead = 2 * kStep / 32;
      T element[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) element[i] = x[min(start + i * 32 + lane, length - 1) * stride];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i == kAhead / 2 && start + kStep >= length) break;
        const uint32_t at = start + i * 32 + lane;
        const Word key = sort_key(element[i], order);
        highest = max(highest, key);
        keys[at] = at < length ? key : kAll;
      }
    }
    __syncwarp();
    return highest;
  }

  // Counts keys in parts of an interval. Returns what
  // sum_counts() does.
  __device__ __forceinline__ uint32_t count(const Parts<Word>& parts) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int b = 0; b < kBins; b += 128) *reinterpret_cast<uint4*>(counts + b + 4 * lane) = uint4{0, 0, 0, 0};
    __syncwarp();
    const uint32_t to = shared_address(counts) - 4 * static_cast<uint32_t>(parts.base);
    each([&](Word key, uint32_t) { increment(counter_of(parts, to, key)); });
    return sum_counts(counts);
  }

  // Finds the part that a rank falls in. `up_to`: what count() returned.
  __device__ __forceinline__ Part find(const Parts<Word>& parts, uint32_t up_to, uint32_t rank) const {
    const PartOfRank at = find_rank(counts, up_to, rank);
    Part part;
    part.size = at.size, part.left = at.left;
    parts.template bounds<Word>(at.part, part.first, part.last);
    __syncwarp();  // all lanes have read the counts
    return part;
  }

  static __device__ __forceinline__ Word largest_key(Word key) {
    return largest_of_warp(static_cast<std::conditional_t<sizeof(Word) == 8, uint64_t, uint32_t>>(key));
  }

  // Narrows a part of an interval until the elements in it are as few as lanes, or all equal.
  __device__ __forceinline__ void narrow(Part& part, uint32_t rank) const {
    while (part.size > 32 && part.last != 0) {
      Word least = kAll, most = 0;
      each([&](Word key, uint32_t) {
        if (key - part.first > part.last) return;
        least = min(least, key);
        most = max(most, key);
      });
      least = kAll - largest_key(kAll - least), most = largest_key(most);
      if (least == most) {
        part.first = least, part.last = 0;
        return;
      }
      const auto parts = Parts<Word>::template between<Word>(kBinBits, least, most);
      const uint32_t up_to = count(parts);
      part = find(parts, up_to, rank);
    }
  }

  // Returns the index of the wanted element, if all in the part are equal: they stand in order of appearance.
  __device__ __forceinline__ uint32_t choose_equal(const Part& part) const {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t left = part.left, found = 0;
    each([&](Word key, uint32_t at) {
      const unsigned equal = __ballot_sync(kEveryLane, key == part.first);
      if ((equal >> lane & 1) && __popc(equal & ((1u << lane) - 1)) == left) found = at;
      left -= __popc(equal);
    });
    return largest_of_warp(found);
  }

  // Lists the elements of a part, at most one for each lane. A lane gets the index of its element (`at`), and how many
  // elements of the part come before it (`before`). A lane without an element gets the number of lanes as `before`.
  __device__ __forceinline__ void rank_few(const Part& part, uint32_t& at, uint32_t& before) const {
    const uint32_t lane = threadIdx.x & 31;
    uint64_t mine = 0;  // a bit for each key that is in the part
    each([&](Word key, uint32_t at) { mine |= static_cast<uint64_t>(key - part.first <= part.last) << at / 32; });
    uint32_t size = 0;
#pragma unroll 1
    while (const unsigned lanes = __ballot_sync(kEveryLane, mine != 0)) {
      if (mine)
        list[size + __popc(lanes & ((1u << lane) - 1))] = (__ffsll(static_cast<long long>(mine)) - 1) * 32 + lane;
      mine &= mine - 1;
      size += __popc(lanes);
    }
    __syncwarp();
    at = list[lane < size ? lane : 0];
    __syncwarp();
    const Word own = keys[at];
    before = lane < size ? 0 : 32;
#pragma unroll 1
    for (uint32_t j = 0; j < size; ++j) {
      const Word its = shuffle_from(own, j);
      const uint32_t its_at = shuffle_from(at, j);
      before += its < own || (its == own && its_at < at);
    }
  }
};

// Loads the row that begins at `x`, of any width; see WarpRow::load().
template <class Word>
__device__ __forceinline__ Word load_row(WarpRow<Word>& r, const Args& a, int64_t x, uint32_t& sample) {
  const int bits = a.problem.bits;
  const SortOrder& order = a.problem.order;
  Word highest = 0;
  if constexpr (sizeof(Word) == 8) {
    highest = r.template load<uint64_t>(a.x, x, a.stride, order, sample);
  } else {
    if (bits == 8) highest = r.template load<uint8_t>(a.x, x, a.stride, order, sample);
    if (bits == 16) highest = r.template load<uint16_t>(a.x, x, a.stride, order, sample);
    if (bits == 32) highest = r.template load<uint32_t>(a.x, x, a.stride, one_flip<uint32_t>(order), sample);
  }
  return highest;
}

// Loads the keys of the columns of a block's warps, and behind them what WarpRow needs.
template <class Word>
__device__ __forceinline__ void load_columns(const Args& a, Word* keys) {
  const SortOrder order = one_flip<std::conditional_t<sizeof(Word) == 8, uint64_t, uint32_t>>(a.problem.order);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const auto load = [&](auto width, const SortOrder& order) {
    using T = decltype(width);
    for_columns<T>(a, [&](uint32_t of, uint32_t i, T element) { keys[of * a.pitch + i] = sort_key(element, order); });
  };
  if constexpr (sizeof(Word) == 8) {
    load(uint64_t{}, a.problem.order);
  } else {
    if (a.problem.bits == 8) load(uint8_t{}, a.problem.order);
    if (a.problem.bits == 16) load(uint16_t{}, a.problem.order);
    if (a.problem.bits == 32) load(uint32_t{}, order);
  }
  for (uint32_t i = length + threadIdx.x % 32; i < a.pitch; i += 32) keys[threadIdx.x / 32 * a.pitch + i] = ~Word{0};
  __syncthreads();
}

template <class Word>
__global__ void __launch_bounds__(kThreads) select_warp_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) uint32_t counts[kWarps][kBins];
  __shared__ uint32_t lists[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, wanted = static_cast<int>(a.problem.count);
  const uint32_t row = blockIdx.x * kWarps + warp;
  WarpRow<Word> r;
  r.length = static_cast<uint32_t>(a.problem.rows.length);
  auto* const keys = reinterpret_cast<Word*>(dynamic_shared_memory());
  r.keys = keys + warp * a.pitch;
  const bool together = a.stride > 1 && a.pitch % kStep != 0;  // see plan_warp_select()
  if (together) load_columns(a, keys);
  if (row >= a.problem.rows.count()) return;
  const Place place(a.problem, row);
  __shared__ Quantiles<Word> quantiles[kWarps];
  begin_row(a, place, quantiles[warp]);
  r.counts = counts[warp];
  r.list = lists[warp];
  // A lane has a rank, and an element of a sample.
  const uint32_t last = r.length - 1, own_rank = lane < wanted ? rank_at(a, place, lane) : last;
  const bool has = lane < wanted;
  const int64_t x = a.stride == 1 ? int64_t{row} * r.length : place.x;  // rows, or columns that have been turned
  uint32_t sample[1];
  Word highest = 0;
  if (!together) {
    highest = load_row(r, a, x, sample[0]);
  } else {
    sample[0] = Scale<Word>::whole().word(r.keys[sampled_place(5, r.length, lane)]);
    r.each([&](Word key, uint32_t at) { highest = at < r.length ? max(highest, key) : highest; });
  }

  uint32_t end = 0;  // index of the element of the last rank: the last one that has the largest key
  if (__any_sync(kEveryLane, has && own_rank == last)) {
    highest = r.largest_key(highest);
    r.each([&](Word key, uint32_t at) { end = key == highest && at <= last ? at : end; });
    end = largest_of_warp(end);
  }
  const uint32_t least = ~largest_of_warp(own_rank != last ? ~own_rank : 0u);
  const uint32_t most = largest_of_warp(own_rank != last ? own_rank : 0u);
  Parts<Word> parts;
  uint32_t up_to = 0;
  bool counted = false;  // whether the counts are those of the interval of all ranks
  if (least != ~0u) {
    Word low = 0, high = 0xff;  // bytes have a part for each key
    if (a.problem.bits > 8) {
      sort_in_warp(sample);
      find_interval<Word>(32, least, most, r.length, 3, [&](int i) { return shuffle_from(sample[0], i); }, low, high);
    }
    parts = Parts<Word>::template between<Word>(kBinBits, low, high);
  }
  typename WarpRow<Word>::Part part = {};
  uint32_t begin = last, at = end, in_part = 0, before = 0;  // the first rank of the part, and what rank_few() returned
#pragma unroll 1
  for (int j = 0; j < wanted; ++j) {
    const uint32_t rank = shuffle_from(own_rank, j);
    if (rank == last) {
      at = end;
    } else {
      if (rank < begin || rank - begin >= part.size) {
        if (!counted) up_to = r.count(parts);
        part = r.find(parts, up_to, rank);
        counted = part.size <= 32;
        r.narrow(part, rank);
        begin = rank - part.left;
        if (part.size <= 32) r.rank_few(part, in_part, before);
      }
      part.left = rank - begin;
      at = part.size > 32
               ? r.choose_equal(part)
               : shuffle_from(in_part, __ffs(static_cast<int>(__ballot_sync(kEveryLane, before == part.left))) - 1);
    }
    if (lane == 0) put_element(a, place, quantiles[warp], j, element_at<Word>(a, x, at), at);
  }
  end_row(a, place, quantiles[warp]);
}

// For rows of up to kMostCompared elements: a warp for each row. A lane compares its elements with all of the row, so
// it has the ranks of its elements.
constexpr int kMostCompared = 64, kCompareRoom = 256;  // WarpRow::load() stores whole steps

template <class Word>
__global__ void __launch_bounds__(kThreads) select_compare_kernel(const __grid_constant__ Args a) {
  constexpr int kOwn = kMostCompared / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, wanted = static_cast<int>(a.problem.count);
  const uint32_t row = blockIdx.x * kWarps + warp;
  if (row >= a.problem.rows.count()) return;
  const Place place(a.problem, row);
  __shared__ Quantiles<Word> quantiles[kWarps];
  begin_row(a, place, quantiles[warp]);
  WarpRow<Word> r;
  r.length = static_cast<uint32_t>(a.problem.rows.length);
  __shared__ Word keys[kWarps][kCompareRoom];
  r.keys = keys[warp];
  const uint32_t own_rank = lane < wanted ? rank_at(a, place, lane) : 0;
  const int64_t x = a.stride == 1 ? int64_t{row} * r.length : place.x;
  uint32_t sampled;
  load_row(r, a, x, sampled);
  Word own[kOwn];
  uint32_t before[kOwn] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = r.keys[i * 32 + lane];
#pragma unroll 4
  for (uint32_t j = 0; j < r.length; ++j) {
    const Word its = r.keys[j];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) before[i] += its < own[i] || (its == own[i] && j < i * 32 + lane);
  }
#pragma unroll 1
  for (int j = 0; j < wanted; ++j) {
    const uint32_t rank = shuffle_from(own_rank, j);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = i * 32 + lane;
      if (before[i] != rank || at >= r.length) continue;
      put_element(a, place, quantiles[warp], j, element_at<Word>(a, x, at), at);
    }
  }
  end_row(a, place, quantiles[warp]);
}

// For rows of 65 to 32 kOwn elements of up to 32 bits: a warp sorts each in its registers. Keys of up to 16 bits carry
// their indices. For others, the lanes look for the element that has the key and as many equal ones before it.
template <int kOwn>
__global__ void __launch_bounds__(kThreads) select_sorted_kernel(const __grid_constant__ Args a) {
  const int warp = threadIdx.x / 32, wanted = static_cast<int>(a.problem.count), bits = a.problem.bits;
  const uint32_t row = blockIdx.x * kWarps + warp, lane = threadIdx.x & 31;
  if (row >= a.problem.rows.count()) return;
  const Place place(a.problem, row);
  __shared__ Quantiles<uint32_t> quantiles[kWarps];
  begin_row(a, place, quantiles[warp]);
  const auto length = static_cast<uint32_t>(a.problem.rows.length);
  const uint32_t own_rank = static_cast<int>(lane) < wanted ? rank_at(a, place, static_cast<int>(lane)) : 0;
  const int64_t x = a.stride == 1 ? int64_t{row} * length : place.x;
  uint32_t key[kOwn], sorted[kOwn];
  const auto load = [&](auto width, const SortOrder& order) {
    using T = decltype(width);
    const T* const from = static_cast<const T*>(a.x) + x;
    T element[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) element[i] = from[int64_t{min(i * 32 + lane, length - 1)} * a.stride];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) key[i] = sort_key(element[i], order);
  };
  if (bits == 8) load(uint8_t{}, a.problem.order);
  if (bits == 16) load(uint16_t{}, a.problem.order);
  if (bits == 32) load(uint32_t{}, one_flip<uint32_t>(a.problem.order));
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t at = i * 32 + lane;
    if (bits <= 16) key[i] = key[i] << 16 | at;
    if (at >= length) key[i] = ~0u;
    sorted[i] = key[i];
  }
  sort_in_warp(sorted);
#pragma unroll 1
  for (int j = 0; j < wanted; ++j) {
    const uint32_t rank = shuffle_from(own_rank, j);
    uint32_t its = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) its = rank % kOwn == i ? sorted[i] : its;
    its = shuffle_from(its, rank / kOwn);
    uint32_t at = lane == 0 ? its & 0xffff : ~0u;  // the lane with an index writes
    if (bits > 16) {
      uint32_t left = rank;  // the number of the wanted element among the equal ones
#pragma unroll
      for (int i = 0; i < kOwn; ++i) left -= __popc(__ballot_sync(kEveryLane, key[i] < its));
      at = ~0u;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool is_equal = key[i] == its && i * 32 + lane < length;
        const unsigned equal = __ballot_sync(kEveryLane, is_equal);
        if (is_equal && __popc(equal & ((1u << lane) - 1)) == left) at = i * 32 + lane;
        left -= __popc(equal);
      }
    }
    if (at != ~0u) put_element(a, place, quantiles[warp], j, element_at<uint32_t>(a, x, at), at);
  }
  end_row(a, place, quantiles[warp]);
}

}  // namespace

cudaError_t launch_select_short(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results) {
  const int64_t length = problem.rows.length, of_block = plan.algorithm == Selecting::kThread ? kThreads : kWarps;
  const Args args = args_of(plan, problem, x, ranks, results);
  if (plan.bisects) return launch_select_bisect(stream, plan, problem, x, ranks, results);
  Launch config;
  config.grid = dim3(static_cast<unsigned>((problem.rows.count() + of_block - 1) / of_block));
  config.block = dim3(kThreads);
  config.shared_bytes = plan.shared_bytes;
  if (plan.algorithm == Selecting::kWarp && length <= kMostCompared && plan.pitch == 0)
    return problem.bits == 64 ? launch(stream, config, select_compare_kernel<unsigned long long>, args)
                              : launch(stream, config, select_compare_kernel<uint32_t>, args);
  if (plan.algorithm == Selecting::kWarp && plan.pitch == 0)
    return length <= kMostSortedSelect / 2 ? launch(stream, config, select_sorted_kernel<kMostSortedSelect / 64>, args)
                                           : launch(stream, config, select_sorted_kernel<kMostSortedSelect / 32>, args);
  if (plan.algorithm == Selecting::kWarp)
    return problem.bits == 64 ? launch(stream, config, select_warp_kernel<unsigned long long>, args)
                              : launch(stream, config, select_warp_kernel<uint32_t>, args);
  if (length <= 8) return launch(stream, config, select_thread_kernel<8>, args);
  if (length <= 16) return launch(stream, config, select_thread_kernel<16>, args);
  return length <= 40 ? launch(stream, config, select_thread_kernel<40>, args)
                      : launch(stream, config, select_thread_kernel<64>, args);
}

}  // namespace jaxgpuops::select
