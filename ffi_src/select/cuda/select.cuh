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
#include "select/cuda/launch.h"

namespace jaxgpuops::select {
namespace {

// ---- Ranks ----------------------------------------------------------------------------------------------------------

// What IndexMap does, for indices of less than 2^32: divisions of 64 bits take many more instructions.
__device__ __forceinline__ int64_t offset_of(const IndexMap& map, uint32_t index) {
  int64_t offset = 0;
#pragma unroll 1
  for (int g = 0; g < map.groups; ++g) {
    uint32_t next = 0;
    if (g + 1 < map.groups) next = index / static_cast<uint32_t>(map.size[g]);
    offset += (index - next * static_cast<uint32_t>(map.size[g])) * map.stride[g];
    index = next;
  }
  return offset;
}

// Where the ranks of a row begin.
__device__ __forceinline__ int64_t ranks_at(const Broadcast& ranks, uint32_t outer, uint32_t inner) {
  return offset_of(ranks.outer, outer) + offset_of(ranks.inner, inner);
}

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

// How keys of a sample become words of 32 bits that order them. Those of 64 bits from `least` on have the words from 1
// on, one for each 2^shift keys; keys below have the word 0. The largest word may stand for more keys.
template <class T, bool kWide = sizeof(T) == 8>
struct Scale {
  __device__ __forceinline__ uint32_t word(T key) const { return key; }
  // The first and the last key that have a word.
  __device__ __forceinline__ uint32_t first(uint32_t word) const { return word; }
  __device__ __forceinline__ uint32_t last(uint32_t word) const { return word; }
  static __device__ __forceinline__ Scale whole() { return {}; }
  template <int kOwn>
  static __device__ __forceinline__ Scale of_warp(const T (&)[kOwn]) {
    return {};
  }
};
template <class T>
struct Scale<T, true> {
  using Word = unsigned long long;
  Word least;
  uint32_t shift;

  // That of all keys.
  static __device__ __forceinline__ Scale whole() { return {0, 32}; }
  __device__ __forceinline__ uint32_t word(Word key) const {
    const Word above = min((key - least) >> shift, Word{0xfffffffe});
    return key < least ? 0 : static_cast<uint32_t>(above) + 1;
  }
  __device__ __forceinline__ Word first(uint32_t word) const { return least + (Word{max(word, 1u) - 1} << shift); }
  __device__ __forceinline__ Word last(uint32_t word) const {
    const Word from = first(word);
    return from + min((Word{1} << shift) - 1, ~from);
  }
  // That of the keys of all lanes of a warp.
  template <int kOwn>
  static __device__ __forceinline__ Scale of_warp(const T (&key)[kOwn]) {
    uint64_t most = 0, below = 0;  // `below`: the largest complement, which is that of the least key
#pragma unroll
    for (int i = 0; i < kOwn; ++i) most = max(most, key[i]), below = max(below, ~key[i]);
    most = largest_of_warp(most), below = largest_of_warp(below);
    const int bits = 64 - __clzll(static_cast<long long>(most - ~below));
    return {~below, static_cast<uint32_t>(max(bits - 32, 0))};
  }
};

// Turns elements into keys, as sort_key() does: those of 16 bits two at a time, by a sixth of the instructions.
template <class T, int kCount>
__device__ __forceinline__ void make_keys(T (&element)[kCount], const SortOrder& order) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2) {
    const ArgOrder& rules = order.ascending;
    const bool is_float = rules.sign != 0, is_half = rules.nan_above == 0x7c00;
    const auto magnitude = static_cast<uint32_t>(rules.order.magnitude) * 0x10001;
    const auto flip = static_cast<uint32_t>((rules.order.flip ^ order.invert) & 0xffff) * 0x10001;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // A sum with 0 turns -0 into 0, and any NaN into the one whose key is the largest.
      const uint32_t pair = element[i] | uint32_t{element[i + 1]} << 16;
      uint32_t half, bfloat;
      asm("add.f16x2 %0, %1, %2;" : "=r"(half) : "r"(pair), "r"(0));
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bfloat) : "r"(pair), "r"(0x3f803f80), "r"(0));
      const uint32_t number = is_half ? half : is_float ? bfloat : pair;
      uint32_t negative;  // all ones in halves that have a sign
      asm("prmt.b32 %0, %1, %2, 0xbb99;" : "=r"(negative) : "r"(number), "r"(0));
      const uint32_t key = number ^ (negative & magnitude) ^ flip;
      element[i] = static_cast<T>(key), element[i + 1] = static_cast<T>(key >> 16);
    }
    return;
  }
#endif
#pragma unroll
  for (T& its : element) its = sort_key(its, order);
}

// A sample has 2^sample_bits elements of a row. The row is cut into as many parts, and one element is taken from a
// pseudorandom place in each. Returns the place in a part.
__device__ __forceinline__ uint32_t sampled_place(int sample_bits, uint32_t length, uint32_t part) {
  const uint32_t share = part * 40503u & 0xffff;
  return static_cast<uint32_t>((part * uint64_t{length} + (share * uint64_t{length} >> 16)) >> sample_bits);
}

// Returns the key of the element there.
template <class T>
__device__ __forceinline__ T sampled_key(int sample_bits, const SortOrder& order, const T* x, uint32_t length,
                                         uint32_t part) {
  return sort_key(x[sampled_place(sample_bits, length, part)], order);
}

// Stores the words of a sorted sample, of which each lane of the warp that calls this takes 2^kOwnBits elements.
template <int kOwnBits, class T>
__device__ __forceinline__ Scale<T> sample_in_warp(const SortOrder& order, const T* x, uint32_t length,
                                                   uint32_t* sample) {
  const int lane = threadIdx.x & 31;
  constexpr int kOwn = 1 << kOwnBits;
  T key[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) key[i] = sampled_key(5 + kOwnBits, order, x, length, i * 32 + lane);
  const auto scale = Scale<T>::of_warp(key);
  uint32_t own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = scale.word(key[i]);
  sort_in_warp(own);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sample[lane * kOwn + i] = own[i];
  __syncwarp();
  return scale;
}

// ---- Intervals ------------------------------------------------------------------------------------------------------

// An interval of keys that is cut into parts. The first part has the keys up to `least`, the last one those from `most`
// on. The parts between have 2^shift keys each, and a key between `least` and `most` is in part (key >> shift) - base.
template <class Word>
struct Parts {
  Word least, most, base;
  uint32_t shift;

  // Returns 2^bin_bits parts that hold the keys from `low` to `high`.
  template <class T>
  static __device__ __forceinline__ Parts between(int bin_bits, Word low, Word high) {
    constexpr Word kAll = static_cast<T>(~T{0});
    const Word width = high - low, inner = (Word{1} << bin_bits) - 2;
    const int bits =
        sizeof(Word) == 8 ? 64 - __clzll(static_cast<long long>(width)) : 32 - __clz(static_cast<int>(width));
    int shift = max(bits - bin_bits, 0);
    if ((width >> shift) + 2 > inner) ++shift;
    const Word first = low >> shift << shift;
    Parts parts;
    parts.least = first == 0 ? 0 : first - 1;
    parts.most = (kAll - first) >> shift < inner ? kAll : first + (inner << shift);
    parts.shift = shift;
    parts.base = (first >> shift) - 1;
    return parts;
  }
  // Moves the start of the last part to the end of the part that has `high`, a key between `least` and `most`.
  template <class T>
  __device__ __forceinline__ void end_after(Word high) {
    constexpr Word kAll = static_cast<T>(~T{0});
    const Word after = high >> shift;
    if (after < kAll >> shift) most = (after + 1) << shift;
  }

  __device__ __forceinline__ uint32_t last_part() const { return static_cast<uint32_t>((most >> shift) - base); }
  // The parts between the first and the last one have the keys from first() to first() + span().
  __device__ __forceinline__ Word first() const { return (base + 1) << shift; }
  template <class T>
  __device__ __forceinline__ Word span() const {
    constexpr Word kAll = static_cast<T>(~T{0});
    return most - (most < kAll) - first();
  }
  // Returns the part of a key from first() to first() + span().
  __device__ __forceinline__ uint32_t between_ends(Word key) const {
    return static_cast<uint32_t>((key >> shift) - base);
  }

  // The part that a key is in.
  __device__ __forceinline__ uint32_t operator()(Word key) const {
    return static_cast<uint32_t>(min(max(key, least), most) >> shift) - static_cast<uint32_t>(base);
  }

  // The keys of a part are from `first` to `first + last`.
  template <class T>
  __device__ __forceinline__ void bounds(uint32_t part, Word& first, Word& last) const {
    constexpr Word kAll = static_cast<T>(~T{0});
    first = part == 0 ? 0 : (base + part) << shift;
    const Word most_last = part == 0 ? least : part == last_part() ? kAll : (Word{1} << shift) - 1;
    last = min(most_last, kAll - first);
  }
};

template <class T>
struct Found {
  using Word = std::conditional_t<sizeof(T) == 8, unsigned long long, uint32_t>;

  Parts<Word> parts[kMostRanks];  // of each table
  // For each rank: the rank itself, and its table, which is that of a lower rank if both have the same interval.
  uint32_t rank[kMostRanks], table[kMostRanks];
  uint32_t used, more;  // a bit for each table in use; a bit for each rank that needs another step
  // The wanted element is number `left` of the `size` elements whose keys are from `first` to `first + last`.
  Word first[kMostRanks], last[kMostRanks];
  uint32_t size[kMostRanks], left[kMostRanks];
  // A bit for each rank that is the last of the row, which needs no interval: it is the last of the largest keys.
  uint32_t ends;
  Word largest;
  // For long.cu. `missed`: whether the element of a rank was outside its first interval. `low`, `span`: for each
  // table, the keys from `low` to `low + span` are those that all parts but the first and the last one count.
  uint32_t missed;
  Word low[kMostRanks], span[kMostRanks];
};

// Returns the place in a sorted sample of `samples` elements where an interval begins (`sign` is -1) or ends (`sign` is
// 1) that most likely has the element of a rank. The place may be outside the sample. `deviations`: how far the
// interval goes to each side, in standard deviations of the number of sampled elements before the rank; a little is
// added.
__device__ __forceinline__ int place_in_sample(int samples, uint32_t rank, uint32_t length, float deviations,
                                               int sign) {
  const float share = (rank + 0.5f) / length;
  return static_cast<int>(share * samples) +
         sign * (static_cast<int>(deviations * sqrtf(samples * share * fmaxf(1 - share, 0.f))) + 2);
}

// Widens an interval, from the element at place `from` of a sorted sample to that at `to`, or between the sample's
// ends. If the wanted element may lie beyond an end of the sample, the interval goes on there by four times its width.
template <class T, class Word>
__device__ __forceinline__ void widen_interval(int samples, int from, int to, Word& low, Word& high) {
  constexpr Word kAll = static_cast<T>(~T{0});
  const Word distance = high - low, beyond = distance < kAll / 4 ? 4 * distance : kAll;
  if (from < 0) low -= min(beyond, low);
  if (to >= samples) high += min(beyond, kAll - high);
}

// Finds an interval that most likely has the elements of all ranks from `least` to `most` of a row. `sampled`: returns
// the word of an element of the row's sorted sample of `samples` elements. `deviations`: see place_in_sample().
template <class T, class Sampled, class Word>
__device__ __forceinline__ void find_interval(int samples, uint32_t least, uint32_t most, uint32_t length,
                                              float deviations, Sampled sampled, Word& low, Word& high,
                                              const Scale<T>& scale = Scale<T>::whole()) {
  const int from = place_in_sample(samples, least, length, deviations, -1);
  const int to = place_in_sample(samples, most, length, deviations, 1);
  low = scale.first(sampled(max(from, 0))), high = scale.last(sampled(min(to, samples - 1)));
  widen_interval<T>(samples, from, to, low, high);
}

// Returns whether a lane of a warp has a rank that needs an interval, and sets this rank. Each lane has one of the
// row's ranks; the last rank of a row needs no interval.
__device__ __forceinline__ bool own_rank(const Select& problem, uint32_t length, const int32_t* ranks, uint32_t& rank) {
  const int lane = threadIdx.x & 31;
  rank = 0;
  if (lane < problem.count)
    rank = static_cast<uint32_t>(problem.kth >= 0 ? problem.kth
                                                  : problem.rank_of(ranks[lane * problem.ranks.axis_stride]));
  return lane < problem.count && rank < length - 1;
}

// Sets up tables for the ranks that lanes have (`has`), for intervals from `low` to `high`; one warp calls this. Ranks
// whose places in the sample are neighbours share a table. kTight: whether the last parts begin right behind the
// intervals.
template <bool kTight = false, class T, class Word>
__device__ __forceinline__ void set_tables(int samples, int bin_bits, int wanted, uint32_t length, bool has,
                                           uint32_t rank, Word low, Word high, Found<T>& found) {
  const int lane = threadIdx.x & 31;
  int middle = 0;
  if (has) {
    middle = static_cast<int>((rank + 0.5f) / length * samples);
    auto parts = Parts<Word>::template between<T>(bin_bits, low, high);
    if (kTight) {
      parts.template end_after<T>(high);
      found.low[lane] = parts.first(), found.span[lane] = parts.template span<T>();
    }
    found.parts[lane] = parts;
    found.rank[lane] = rank;
  }
  const uint32_t with_table = __ballot_sync(kEveryLane, has);
  uint32_t table = lane;
#pragma unroll 1
  for (int q = wanted - 1; q >= 0; --q)
    if (abs(__shfl_sync(kEveryLane, middle, q) - middle) <= 1 && q < lane && (with_table >> q & 1)) table = q;
  const uint32_t used = fold_lanes(has ? 1u << table : 0u, [](uint32_t a, uint32_t b) { return a | b; });
  if (has) found.table[lane] = table;
  if (lane == 0) {
    found.used = used, found.more = found.missed = 0, found.largest = 0;
    found.ends = ((1u << wanted) - 1) & ~with_table;
  }
}

// Finds the first intervals of the ranks that lanes have; one warp calls this. `sample`: the words of `samples` sorted
// elements of the row. `deviations`: see place_in_sample().
template <class T>
__device__ __forceinline__ void set_first_tables(int samples, int bin_bits, float deviations, int wanted,
                                                 uint32_t length, bool has, uint32_t rank, const uint32_t* sample,
                                                 const Scale<T>& scale, Found<T>& found) {
  typename Found<T>::Word low = 0, high = 0;
  const auto sampled = [&](int i) { return sample[i]; };
  if (has) find_interval<T>(samples, rank, rank, length, deviations, sampled, low, high, scale);
  set_tables(samples, bin_bits, wanted, length, has, rank, low, high, found);
}

// Keys of up to 16 bits can do without a sample: a step from the interval of all keys leaves parts of 256 keys at most,
// and the next one single keys.
template <class T>
constexpr bool kIsNarrow = sizeof(T) <= 2;

// Sets up one table for the ranks that lanes have, for the interval of all keys; one warp calls this.
template <class T>
__device__ __forceinline__ void set_whole_table(int bin_bits, int wanted, bool has, uint32_t rank, Found<T>& found) {
  using Word = typename Found<T>::Word;
  const int lane = threadIdx.x & 31;
  const uint32_t with_table = __ballot_sync(kEveryLane, has);
  const int table = __ffs(static_cast<int>(with_table)) - 1;
  if (has) found.rank[lane] = rank, found.table[lane] = table;
  if (lane == table) found.parts[lane] = Parts<Word>::template between<T>(bin_bits, 0, Word{static_cast<T>(~T{0})});
  if (lane == 0) {
    found.used = with_table & (0u - with_table), found.more = found.missed = 0, found.largest = 0;
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

// Returns 4 * x + y, by one instruction: the compiler would add before it multiplies.
__device__ __forceinline__ uint32_t scaled(uint32_t x, uint32_t y) {
  asm("mad.lo.u32 %0, %0, 4, %1;" : "+r"(x) : "r"(y));
  return x;
}

// Returns the address in shared memory of the counter of a key. `counts`: the address of the parts' counts, less four
// times their base.
template <class Word>
__device__ __forceinline__ uint32_t counter_of(const Parts<Word>& parts, uint32_t counts, Word key) {
  return scaled(static_cast<uint32_t>(min(max(key, parts.least), parts.most) >> parts.shift), counts);
}

__device__ __forceinline__ void increment(uint32_t counter) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}

// Ranks with the same interval left share a list, which becomes the `table` of each: that of the least of them. One
// warp calls this.
template <class T>
__device__ __forceinline__ void choose_lists(Found<T>& found, int wanted) {
  const int r = threadIdx.x & 31;
  if (r >= wanted) return;
  uint32_t table = r;
#pragma unroll 1
  for (int q = r - 1; q >= 0; --q)
    if (!(found.ends >> q & 1) && found.first[q] == found.first[r] && found.last[q] == found.last[r]) table = q;
  found.table[r] = table;
}

// Counts vectors of keys in the parts of table `t`. The tables are in shared memory.
template <class T, class Word, int kPacks, int kPack>
__device__ __forceinline__ void count_keys(int bin_bits, uint32_t* tables, const Found<T>& found, int t,
                                           const Word (&key)[kPacks][kPack], const bool (&has)[kPacks]) {
  const Parts<Word> parts = found.parts[t];
  const uint32_t counts = shared_address(tables) + 4 * ((t << bin_bits) - static_cast<uint32_t>(parts.base));
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (!has[i]) continue;
    uint32_t at[kPack];
#pragma unroll
    for (int e = 0; e < kPack; ++e) at[e] = counter_of(parts, counts, key[i][e]);
#pragma unroll
    for (int e = 0; e < kPack; ++e) increment(at[e]);
  }
}

// Returns the larger number, or NaN if one is NaN.
__device__ __forceinline__ float largest_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x > y || x != x ? x : y;
#endif
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

// The same order for keys of 32 bits with one exclusive-or less for each key: `invert` becomes part of `flip`.
template <class T>
__device__ __forceinline__ SortOrder one_flip(SortOrder order) {
  if (sizeof(T) == 4) order.ascending.order.flip ^= order.invert, order.invert = 0;
  return order;
}

// Appends a bit to a set: the carry of distance + addend.
__device__ __forceinline__ void append_carry(uint32_t distance, uint32_t addend, uint32_t& set) {
  asm("{.reg.u32 sum; add.cc.u32 sum, %1, %2; addc.u32 %0, %0, %0;}" : "+r"(set) : "r"(distance), "r"(addend));
}
__device__ __forceinline__ void append_carry(unsigned long long distance, unsigned long long addend, uint32_t& set) {
  asm("{.reg.u64 sum; add.cc.u64 sum, %1, %2; addc.u32 %0, %0, %0;}" : "+r"(set) : "l"(distance), "l"(addend));
}

// Returns key + addend (modulo 2^32 or 2^64), and adds the carry of this sum to `count`, by two instructions.
__device__ __forceinline__ uint32_t add_counting(uint32_t key, uint32_t addend, uint32_t& count) {
  uint32_t sum;
  asm("add.cc.u32 %0, %2, %3; addc.u32 %1, %1, 0;" : "=&r"(sum), "+r"(count) : "r"(key), "r"(addend));
  return sum;
}
__device__ __forceinline__ unsigned long long add_counting(unsigned long long key, unsigned long long addend,
                                                           uint32_t& count) {
  unsigned long long sum;
  asm("add.cc.u64 %0, %2, %3; addc.u32 %1, %1, 0;" : "=&l"(sum), "+r"(count) : "l"(key), "l"(addend));
  return sum;
}

// ---- Ranks among counts ---------------------------------------------------------------------------------------------

constexpr int kChunk = 512, kLaneCounts = kChunk / 32;  // counts that a warp, and a lane, looks at together

// Returns for each lane the sum of its counts of a chunk, and those of lower lanes.
__device__ __forceinline__ uint32_t sum_counts(const uint32_t* counts) {
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kLaneCounts; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(counts + (threadIdx.x & 31) * kLaneCounts + i);
    own += four.x + four.y + four.z + four.w;
  }
  return sum_up_to_lane(own);
}

// The part of an interval that a rank falls in: its number in the chunk, its count, and the rank among its elements.
struct PartOfRank {
  uint32_t part, size, left;
};

// Finds the part that a rank falls in. `up_to`: what sum_counts() returned; the rank is less than that of the last
// lane.
__device__ __forceinline__ PartOfRank find_rank(const uint32_t* counts, uint32_t up_to, uint32_t rank) {
  const int lane = threadIdx.x & 31, of = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > rank))) - 1;
  const uint32_t lower = shuffle_from(up_to, max(of - 1, 0)), own = counts[of * kLaneCounts + lane % kLaneCounts];
  const uint32_t up_to_own = (of ? lower : 0) + sum_up_to_lane(lane < kLaneCounts ? own : 0);
  const int in = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to_own > rank))) - 1;
  const uint32_t size = shuffle_from(own, in);
  return {static_cast<uint32_t>(of * kLaneCounts + in), size, rank - (shuffle_from(up_to_own, in) - size)};
}

// Finds the part that rank `r` falls in; one warp calls this. `counts`: the counts of all tables. `chunk_sums`: the
// sums of their chunks, if a table has more than one.
template <uint32_t kFew, class T>
__device__ __forceinline__ void find_part(int bin_bits, const uint32_t* counts, const uint32_t* chunk_sums,
                                          Found<T>& found, int r) {
  const uint32_t t = found.table[r];
  uint32_t rank = found.rank[r], chunk = 0;
  counts += t << bin_bits;
  if (1 << bin_bits > kChunk) {
    for (chunk_sums += (t << bin_bits) / kChunk; rank >= chunk_sums[chunk]; ++chunk) rank -= chunk_sums[chunk];
    counts += chunk * kChunk;
  }
  const PartOfRank at = find_rank(counts, sum_counts(counts), rank);
  if ((threadIdx.x & 31) > 0) return;
  found.parts[t].template bounds<T>(chunk * kChunk + at.part, found.first[r], found.last[r]);
  found.size[r] = at.size, found.left[r] = at.left;
  if (at.size > kFew && found.last[r] != 0) atomicOr(&found.more, 1u << r);
}

}  // namespace
}  // namespace jaxgpuops::select
