// What the kernels of select share. For each rank there is an interval of keys that has the key of the wanted element.
// Each step narrows the interval, until few elements, or only equal ones, are left in it.
//
// The first interval comes from a sample of the row, which a warp sorts: two elements of the sample bound it, and only
// in a few rows of a thousand is the wanted element not between them. A step then counts the keys in each of many equal
// parts of the interval, the keys below the interval, and those above it; so the rank falls in one of these parts even
// if the interval was wrong. A warp finds the part that the rank falls in.
//
// After: Floyd and Rivest, "Expected time bounds for selection" (1975).
#pragma once

#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

// ---- The sample -----------------------------------------------------------------------------------------------------

// Sorts upwards the words that a warp has, kOwn in each lane.
template <int kOwn>
__device__ __forceinline__ void sort_in_warp(uint32_t (&v)[kOwn]) {
  const auto exchange = [&](int i, int j) {
    const uint32_t least = min(v[i], v[j]);
    v[j] = max(v[i], v[j]);
    v[i] = least;
  };
#pragma unroll
  for (int size = 2; size <= kOwn; size *= 2) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i % size < size / 2) exchange(i, i ^ (size - 1));
#pragma unroll
    for (int step = size / 4; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (i % (2 * step) < step) exchange(i, i + step);
  }
  const int lane = threadIdx.x & 31;
#pragma unroll 1  // unrolled code that runs once would mostly wait for its instructions to be loaded
  for (int lanes = 2; lanes <= 32; lanes *= 2) {
    uint32_t mirrored[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) mirrored[i] = __shfl_xor_sync(kEveryLane, v[kOwn - 1 - i], lanes - 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] = (lane & lanes / 2) == 0 ? min(v[i], mirrored[i]) : max(v[i], mirrored[i]);
#pragma unroll 1
    for (int step = lanes / 4; step > 0; step /= 2) {
      const bool lower = (lane & step) == 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t other = __shfl_xor_sync(kEveryLane, v[i], step);
        v[i] = lower ? min(v[i], other) : max(v[i], other);
      }
    }
#pragma unroll
    for (int step = kOwn / 2; step > 0; step /= 2)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (i % (2 * step) < step) exchange(i, i + step);
  }
}

// A word of 32 bits that orders keys: of a key of 64 bits, its high half.
template <class T>
__device__ __forceinline__ uint32_t word_of(T key) {
  return static_cast<uint32_t>(sizeof(T) == 8 ? static_cast<uint64_t>(key) >> 32 : key);
}

// ---- Intervals ------------------------------------------------------------------------------------------------------

template <class T>
struct Found {
  using Word = std::conditional_t<sizeof(T) == 8, unsigned long long, uint32_t>;

  // For each table: its first part has the keys up to `least`, its last part those from `most` on. The parts between
  // have 2^shift keys each, and a key between `least` and `most` is in part (key >> shift) - base.
  Word least[kMostRanks], most[kMostRanks], base[kMostRanks];
  uint32_t shift[kMostRanks];
  // For each rank: the rank itself, and its table, which is that of a lower rank if both have the same interval.
  uint32_t rank[kMostRanks], table[kMostRanks];
  uint32_t used, more;  // a bit for each table in use; a bit for each rank that needs another step
  // The wanted element is number `left` of the `size` elements whose keys are from `first` to `first + last`.
  Word first[kMostRanks], last[kMostRanks];
  uint32_t size[kMostRanks], left[kMostRanks];
  // A bit for each rank that is the last of the row, which needs no interval: it is the last of the largest keys.
  uint32_t ends;
  Word largest;
};

// Sets the parts of a table, so that they hold the keys from `low` to `high`.
template <int kBins, class T, class Word>
__device__ __forceinline__ void set_table(Found<T>& found, int t, Word low, Word high) {
  constexpr Word kAll = static_cast<T>(~T{0}), kInner = kBins - 2;
  const Word width = high - low;
  constexpr int kBits = kBins == 512 ? 9 : 12;
  static_assert(kBins == 1 << kBits);
  const int bits =
      sizeof(Word) == 8 ? 64 - __clzll(static_cast<long long>(width)) : 32 - __clz(static_cast<int>(width));
  int shift = max(bits - kBits, 0);
  if ((width >> shift) + 2 > kInner) ++shift;
  const Word first = low >> shift << shift;
  found.least[t] = first == 0 ? 0 : first - 1;
  found.most[t] = (kAll - first) >> shift < kInner ? kAll : first + (kInner << shift);
  found.shift[t] = shift;
  found.base[t] = (first >> shift) - 1;
}

// Finds the first intervals of all ranks; one warp calls this. A lane takes kOwn elements of the sample; `sample` has
// room for all of them.
template <int kBins, int kOwn, class T>
__device__ __forceinline__ void set_first_tables(const Select& problem, const T* x, uint32_t length,
                                                 const int32_t* ranks, int64_t outer, int64_t inner, uint32_t* sample,
                                                 Found<T>& found) {
  using Word = typename Found<T>::Word;
  constexpr Word kAll = static_cast<T>(~T{0});
  constexpr int kSample = 32 * kOwn;
  const int lane = threadIdx.x & 31, wanted = static_cast<int>(problem.count);
  uint32_t own[kOwn], rank = 0;
  if (lane < wanted)
    rank = static_cast<uint32_t>(problem.kth >= 0 ? problem.kth
                                                  : problem.rank_of(ranks[problem.ranks(outer, lane, inner)]));
  // The row is cut into kSample parts, and one element is taken from a pseudorandom place in each.
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t part = i * 32 + lane, share = part * 40503u & 0xffff;
    own[i] =
        word_of(sort_key(x[(part * uint64_t{length} + (share * uint64_t{length} >> 16)) / kSample], problem.order));
  }
  sort_in_warp(own);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sample[lane * kOwn + i] = own[i];
  __syncwarp();
  const bool has = lane < wanted && rank < length - 1;
  int middle = 0;
  if (has) {
    const float share = (rank + 0.5f) / length;
    middle = static_cast<int>(share * kSample);
    // three standard deviations of the number of sample elements that come before the rank, and a little more
    const int to_side = static_cast<int>(3.f * sqrtf(kSample * share * fmaxf(1 - share, 0.f))) + 2;
    const int from = middle - to_side, to = middle + to_side;
    const uint32_t lowest = sample[max(from, 0)], highest = sample[min(to, kSample - 1)];
    const uint32_t most = sizeof(T) == 8 ? ~0u : static_cast<uint32_t>(kAll), distance = highest - lowest;
    // If the wanted element may lie outside the sample, the interval goes on at that end by four times its width.
    const uint32_t beyond = distance < most / 4 ? 4 * distance : most;
    Word low = from < 0 ? lowest - min(beyond, lowest) : lowest;
    Word high = to >= kSample ? highest + min(beyond, most - highest) : highest;
    if (sizeof(T) == 8) low <<= sizeof(T) * 4, high = high << sizeof(T) * 4 | 0xffffffff;
    set_table<kBins>(found, lane, low, high);
    found.rank[lane] = rank;
  }
  const uint32_t with_table = __ballot_sync(kEveryLane, has);
  uint32_t table = lane;
  for (int q = wanted - 1; q >= 0; --q)
    if (abs(__shfl_sync(kEveryLane, middle, q) - middle) <= 1 && q < lane && (with_table >> q & 1)) table = q;
  const uint32_t used = fold_lanes(has ? 1u << table : 0u, [](uint32_t a, uint32_t b) { return a | b; });
  if (has) found.table[lane] = table;
  if (lane == 0) {
    found.used = used, found.more = 0, found.largest = 0;
    found.ends = ((1u << wanted) - 1) & ~with_table;
  }
}

// Calls `visit` with the number of each bit of a set.
template <class Visit>
__device__ __forceinline__ void for_bits(uint32_t set, Visit visit) {
#pragma unroll 1
  for (; set; set &= set - 1) visit(__ffs(set) - 1);
}

// Chooses the tables of the ranks that need more: ranks with the same interval left share the table of the least of
// them. One warp calls this.
template <class T>
__device__ __forceinline__ void choose_tables(Found<T>& found) {
  const int r = threadIdx.x & 31;
  const uint32_t more = found.more, is_one = more >> r & 1;
  uint32_t table = r;
  if (is_one) {
    for_bits(more, [&](int q) {
      if (q < static_cast<int>(table) && found.first[q] == found.first[r] && found.last[q] == found.last[r]) table = q;
    });
  }
  const uint32_t used = __ballot_sync(kEveryLane, is_one && table == r);
  if (is_one) found.table[r] = table;
  if (r == 0) found.used = used;
  __syncwarp();  // all lanes read the tables next
}

// The part of a table that a key is in.
template <class T, class Word>
__device__ __forceinline__ uint32_t part_of(const Found<T>& found, int t, Word key) {
  return static_cast<uint32_t>(min(max(key, found.least[t]), found.most[t]) >> found.shift[t]) -
         static_cast<uint32_t>(found.base[t]);
}

// Returns 4 * x + y, by one instruction: the compiler would add before it multiplies.
__device__ __forceinline__ uint32_t scaled(uint32_t x, uint32_t y) {
  asm("mad.lo.u32 %0, %0, 4, %1;" : "+r"(x) : "r"(y));
  return x;
}

// Counts vectors of keys in the parts of table `t`. The tables are in shared memory.
template <int kBins, class T, class Word, int kPacks, int kPack>
__device__ __forceinline__ void count_keys(uint32_t* tables, const Found<T>& found, int t,
                                           const Word (&key)[kPacks][kPack], const bool (&has)[kPacks]) {
  const Word low = found.least[t], high = found.most[t];
  const uint32_t shift = found.shift[t];
  const uint32_t counts = shared_address(tables) + 4 * (t * kBins - static_cast<uint32_t>(found.base[t]));
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (!has[i]) continue;
    uint32_t at[kPack];
#pragma unroll
    for (int e = 0; e < kPack; ++e)
      at[e] = scaled(static_cast<uint32_t>(min(max(key[i][e], low), high) >> shift), counts);
#pragma unroll
    for (int e = 0; e < kPack; ++e) asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at[e]) : "memory");
  }
}

// Returns the smaller one of key - first, modulo 2^32 or 2^64, and `least`.
__device__ __forceinline__ uint32_t least_difference(uint32_t key, uint32_t first, uint32_t least) {
  return __viaddmin_u32(key, 0u - first, least);
}
__device__ __forceinline__ unsigned long long least_difference(unsigned long long key, unsigned long long first,
                                                               unsigned long long least) {
  return min(key - first, least);
}

// Returns a bit for each key that is from `first` to `first + last`. Most often there is none.
template <class Word, int kPacks, int kPack>
__device__ __forceinline__ uint32_t keys_between(const Word (&key)[kPacks][kPack], const bool (&has)[kPacks],
                                                 Word first, Word last) {
  Word nearest = ~Word{0};
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int e = 0; e < kPack; ++e) nearest = least_difference(key[i][e], first, nearest);
  uint32_t between = 0;
  if (nearest > last) return between;
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int e = 0; e < kPack; ++e)
      if (has[i] && key[i][e] - first <= last) between |= 1u << (i * kPack + e);
  return between;
}

// The same order with one exclusive-or less for each key, where keys of all NaNs allow that.
template <class T>
__device__ __forceinline__ SortOrder one_flip(SortOrder order) {
  if (sizeof(T) == 4) order.ascending.order.flip ^= order.invert, order.invert = 0;
  return order;
}

// Finds the part that rank `r` falls in; one warp calls this. `counts`: the counts of all tables.
template <int kBins, uint32_t kFew, class T>
__device__ __forceinline__ void find_part(const uint32_t* counts, Found<T>& found, int r) {
  using Word = typename Found<T>::Word;
  constexpr int kChunk = 512, kOwn = kChunk / 32;
  constexpr Word kAll = static_cast<T>(~T{0});
  const int lane = threadIdx.x & 31;
  const uint32_t t = found.table[r], rank = found.rank[r];
  uint32_t before = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < kBins; chunk += kChunk) {
    uint32_t count[kOwn], own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(counts + t * kBins + chunk + lane * kOwn)[i / 4];
      count[i] = four.x, count[i + 1] = four.y, count[i + 2] = four.z, count[i + 3] = four.w;
      own += four.x + four.y + four.z + four.w;
    }
    const uint32_t up_to = before + sum_up_to_lane(own);
    if (rank < up_to && rank >= up_to - own) {
      uint32_t left = rank - (up_to - own), size = count[0], part = chunk + lane * kOwn;
#pragma unroll
      for (int i = 0, past = 0; i + 1 < kOwn; ++i) {
        past |= left < count[i];
        if (past) continue;
        left -= count[i];
        size = count[i + 1];
        ++part;
      }
      const int shift = found.shift[t];
      const Word first = part == 0 ? 0 : (found.base[t] + part) << shift;
      const Word most = part == 0 ? found.least[t] : part == kBins - 1 ? kAll : (Word{1} << shift) - 1;
      found.first[r] = first;
      found.last[r] = min(most, kAll - first);
      found.size[r] = size;
      found.left[r] = left;
      if (size > kFew && found.last[r] != 0) atomicOr(&found.more, 1u << r);
    }
    before = shuffle_from(up_to, 31);
    if (rank < before) return;
  }
}

}  // namespace
}  // namespace jaxgpuops::count
