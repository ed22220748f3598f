// For long.cu: a block's slice of a row, how the keys of the slice are counted, and which of them the block keeps.
#pragma once

#include "common/cuda/bulk_copy.cuh"
#include "select/cuda/blocks.cuh"

namespace jaxgpuops::select {
namespace {

// A slice of a row: some of the aligned vectors of 16 bytes that have elements of the row. The first and the last
// vector of the row may have other elements, too. These are replaced by copies of the row's first and last element,
// whose number the kernel takes off its counts.
template <class T>
struct Slice {
  using Word = typename Found<T>::Word;
  // A thread reads 16 elements at a time (8 of 64 bits).
  static constexpr int kPack = 16 / sizeof(T), kPacks = sizeof(T) < 4 ? sizeof(T) : 4, kElements = kPacks * kPack;
  static constexpr int kStep = kPacks * kThreads;
  struct alignas(16) Pack {
    T element[kPack];
  };
  using Packs = Pack[kPacks];
  using Keys = Word[kPacks][kPack];

  const T* x;  // the row
  uint32_t length;
  const Pack* from;  // the first vector
  uint32_t packs;    // how many there are, of which those from `whole` to `end_whole` have elements of the row only
  uint32_t whole, end_whole;
  uint32_t start;          // the number of the first element, modulo 2^32
  uint32_t past;           // where the row begins in its first vector
  uint32_t before, after;  // how many copies the slice has
  Pack* edges;             // the first and the last vector, in shared memory

  __device__ Slice(const T* row, int64_t elements, int64_t slice, int64_t slice_packs, Pack* edges)
      : x(row), length(static_cast<uint32_t>(elements)), edges(edges) {
    past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    const int64_t all = (past + elements + kPack - 1) / kPack, begin = slice * slice_packs;
    const int64_t end = min(begin + slice_packs, all);
    from = reinterpret_cast<const Pack*>(row - past) + begin;
    packs = static_cast<uint32_t>(max(end - begin, int64_t{0}));
    before = begin == 0 ? past : 0;
    after = packs > 0 && end == all ? static_cast<uint32_t>(all * kPack - past - elements) : 0;
    whole = before > 0, end_whole = packs - (after > 0);
    start = static_cast<uint32_t>(begin * kPack) - past;
    if (before + after > 0 && threadIdx.x < 2 * kPack) {
      // Numbers of elements in front of the row are negative, modulo 2^32.
      const uint32_t e = threadIdx.x % kPack, p = threadIdx.x < kPack ? 0 : packs - 1, index = start + p * kPack + e;
      edges[threadIdx.x / kPack].element[e] = row[index + kPack < kPack ? 0 : min(index, length - 1)];
    }
  }
  __device__ int steps() const { return static_cast<int>((packs + kStep - 1) / kStep); }

  // Vector i of a thread in a step, and the number in the row of element e of it, if it is of the row.
  __device__ __forceinline__ uint32_t pack_of(int step, int i) const {
    return step * kStep + i * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ uint32_t at(int step, int i, int e) const { return start + pack_of(step, i) * kPack + e; }

  // Fetches some vectors, of those that have elements of the row only, to the L2 cache. One thread calls this.
  __device__ __forceinline__ void fetch(uint32_t first, uint32_t count) const {
    first = max(first, whole);
    if (first < end_whole) prefetch_bulk(from + first, min(count, end_whole - first) * 16);
  }

  // Loads the elements of a step, and returns how many of the thread's vectors are of the slice: others have zeros.
  __device__ __forceinline__ int load(int step, Packs& pack) const {
    int count = kPacks;
    if (pack_of(step, 0) >= whole && pack_of(step, kPacks - 1) < end_whole) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) pack[i] = from[pack_of(step, i)];
    } else {
      count = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const uint32_t p = pack_of(step, i);
        count += p < packs;
        pack[i] = {};
        if (p < packs) pack[i] = *(p < whole ? edges : p < end_whole ? from + p : edges + 1);
      }
    }
    return count;
  }
  static __device__ __forceinline__ void make_keys(const SortOrder& order, const Packs& pack, Keys& key) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      Pack its = pack[i];
      select::make_keys(its.element, order);
#pragma unroll
      for (int e = 0; e < kPack; ++e) key[i][e] = its.element[e];
    }
  }
};

// Floats of 16 and 32 bits are compared as numbers, which takes half as many instructions as making keys of them,
// unless an interval has NaNs.
enum class Numbers { kNone, kBfloat16, kFloat16, kFloat32 };

template <class T>
constexpr bool kHasNumbers = sizeof(T) == 2 || sizeof(T) == 4;

template <class T>
__device__ __forceinline__ Numbers numbers_of(const SortOrder& order) {
  const ArgOrder& rules = order.ascending;
  if (!kHasNumbers<T> || rules.sign == 0 || order.invert) return Numbers::kNone;
  if (sizeof(T) == 4) return Numbers::kFloat32;
  return rules.nan_above == 0x7f80 ? Numbers::kBfloat16 : Numbers::kFloat16;
}

__device__ __forceinline__ float number_of(Numbers kind, uint32_t element) {
  if (kind == Numbers::kFloat16) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(static_cast<uint16_t>(element)));
    return number;
  }
  return __uint_as_float(kind == Numbers::kBfloat16 ? element << 16 : element);
}
__device__ __forceinline__ uint32_t element_of(Numbers kind, float number) {
  if (kind == Numbers::kFloat16) {
    uint16_t element;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element) : "f"(number));
    return element;
  }
  return __float_as_uint(number) >> (kind == Numbers::kBfloat16 ? 16 : 0);
}

// Makes numbers of the ends of an interval of keys, or returns false if it has NaNs.
template <class T, class Word>
__device__ __forceinline__ bool as_numbers(Numbers kind, const SortOrder& order, Word low, Word high, float& least,
                                           float& most) {
  const ArgOrder& rules = order.ascending;
  const auto key_of = [&](uint64_t element) { return Word{sort_key(static_cast<T>(element), order)}; };
  const Word infinite = key_of(rules.nan_above);
  if (low > infinite || high == static_cast<T>(~T{0})) return false;
  const auto number_at = [&](Word key) { return number_of(kind, decode(static_cast<T>(key), rules.order)); };
  least = number_at(max(low, key_of(rules.nan_above | rules.sign))), most = number_at(min(high, infinite));
  return true;
}

// Counts the keys of a step in some tables (a bit of `used` for each): `all` keys, or only those from `low` to
// `low + span`. `count`: how many of the thread's vectors are of the slice.
template <class T>
__device__ __forceinline__ void count_vectors(uint32_t* tables, const Found<T>& found, uint32_t used,
                                              const typename Slice<T>::Keys& key, int count, bool all) {
  using Word = typename Found<T>::Word;
  for_bits(used, [&](int t) {
    const Parts<Word> parts = found.parts[t];
    const Word low = all ? 0 : found.low[t], span = all ? ~Word{0} : found.span[t];
    const uint32_t counts = shared_address(tables) + 4 * ((t << kLongBinBits) - static_cast<uint32_t>(parts.base));
#pragma unroll
    for (int i = 0; i < Slice<T>::kPacks; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < Slice<T>::kPack; ++e)
        if (key[i][e] - low <= span) increment(counter_of(parts, counts, key[i][e]));
    }
  });
}

// Counts each key of a step, of 8 bits. `counts`: the address of the counters in shared memory. `count`: how many of
// the thread's vectors are of the slice.
template <class T>
__device__ __forceinline__ void count_bytes(uint32_t counts, const typename Slice<T>::Keys& key, int count) {
#pragma unroll
  for (int i = 0; i < Slice<T>::kPacks; ++i) {
    if (i >= count) continue;
#pragma unroll
    for (int e = 0; e < Slice<T>::kPack; ++e) increment(scaled(static_cast<uint32_t>(key[i][e]), counts));
  }
}

// Counts, in some tables, the keys of a step that are below the interval and, if the interval is a single key, those
// that equal it. Returns the set of keys that are in an interval of more than one key; the highest bit stands for the
// first key. `count`: how many of the thread's vectors belong to the slice; the keys of its other vectors are all
// `of_zero`. The whole warp calls this.
template <class T>
__device__ __forceinline__ uint32_t count_outside(uint32_t* counts, const Found<T>& found, uint32_t tables,
                                                  const typename Slice<T>::Keys& key, int count,
                                                  typename Found<T>::Word of_zero) {
  using Word = typename Found<T>::Word;
  using Own = Slice<T>;
  const int lane = threadIdx.x & 31;
  uint32_t set = 0;
  const int others = Own::kElements - count * Own::kPack;
  const uint32_t all = ((1u << Own::kElements) - 1) & ~((1u << others) - 1);
  for_bits(tables, [&](int t) {
    const Word least = found.low[t], span = found.span[t];
    uint32_t from_least = 0, outside = 0;
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i)
#pragma unroll
      for (int e = 0; e < Own::kPack; ++e)
        append_carry(add_counting(key[i][e], Word{0} - least, from_least), ~span, outside);
    if (span) set |= ~outside & all;
    // How many keys are below the interval (low 16 bits), and how many equal its only key (high 16 bits).
    uint32_t sums = least ? Own::kElements - from_least - (of_zero < least ? others : 0) : 0;
    if (span == 0) sums += __popc(~outside & all) << 16;
    sums = sum_of_warp(sums);
    if (lane > 0) return;
    if (sums & 0xffff) atomicAdd(counts + (t << kLongBinBits), sums & 0xffff);
    if (sums >> 16) atomicAdd(counts + (t << kLongBinBits) + 1, sums >> 16);
  });
  return set;
}

// The same for elements that are compared as numbers. `least`, `most`: the ends of the intervals, of which `singles`
// are a single key. If it `wants` that, makes `highest` the largest number, or NaN.
template <Numbers kKind, class T>
__device__ __forceinline__ uint32_t count_outside_numbers(uint32_t* counts, const float* least, const float* most,
                                                          uint32_t tables, uint32_t singles,
                                                          const typename Slice<T>::Packs& pack, int count, bool wants,
                                                          float& highest) {
  using Own = Slice<T>;
  const int lane = threadIdx.x & 31;
  float number[Own::kPacks][Own::kPack];
#pragma unroll
  for (int i = 0; i < Own::kPacks; ++i)
#pragma unroll
    for (int e = 0; e < Own::kPack; ++e) number[i][e] = number_of(kKind, pack[i].element[e]);
  if (wants) {
    highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < Own::kPack; ++e) highest = largest_or_nan(highest, number[i][e]);
    }
  }
  uint32_t set = 0;
  for_bits(tables, [&](int t) {
    const float low = least[t], high = most[t];
    uint32_t below = 0, between = 0;
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < Own::kPack; ++e) {
        const bool is_below = number[i][e] < low;
        below += is_below;
        if (!is_below && number[i][e] <= high) between |= 1u << (Own::kElements - 1 - (i * Own::kPack + e));
      }
    }
    if (singles >> t & 1)
      below += __popc(between) << 16;
    else
      set |= between;
    const uint32_t sums = sum_of_warp(below);
    if (lane > 0) return;
    if (sums & 0xffff) atomicAdd(counts + (t << kLongBinBits), sums & 0xffff);
    if (sums >> 16) atomicAdd(counts + (t << kLongBinBits) + 1, sums >> 16);
  });
  return set;
}

// What a warp keeps of its part of a slice, in shared memory: the elements that are in an interval, in the order of
// steps, lanes and elements, which become keys when all are kept; and for each step and lane a set of the elements, of
// which the first one has the highest bit.
template <class T>
struct Kept {
  using Word = typename Found<T>::Word;
  static constexpr int kElements = Slice<T>::kElements;
  static_assert(kElements <= 16);

  T* keys;
  uint16_t* sets;
  uint32_t room, size;
  int steps;  // how many steps there are sets for
  bool lost;  // whether there was no room for all

  // Keeps the elements of a step that are in a set, or returns false. The whole warp calls this.
  __device__ __forceinline__ bool keep(const typename Slice<T>::Packs& pack, uint32_t set, int step) {
    const uint32_t own = __popc(set), up_to = sum_up_to_lane(own), total = shuffle_from(up_to, 31);
    if (lost || size + total > room || step >= steps) {
      lost = true;
      return total == 0;
    }
    sets[step * 32 + (threadIdx.x & 31)] = static_cast<uint16_t>(set);
    T* to = keys + size + up_to - own;
#pragma unroll
    for (int i = 0; i < Slice<T>::kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < Slice<T>::kPack; ++e)
        if (set >> (kElements - 1 - (i * Slice<T>::kPack + e)) & 1) *to++ = pack[i].element[e];
    }
    size += total;
    return true;
  }

  // Makes keys of the kept elements. The whole warp calls this.
  __device__ __forceinline__ void make_keys(const SortOrder& order) const {
    __syncwarp();
#pragma unroll 4
    for (uint32_t i = threadIdx.x & 31; i < size; i += 32) keys[i] = sort_key(keys[i], order);
  }

  // Counts the kept keys in each table in use, if they are between the table's first and last part.
  __device__ __forceinline__ void count(uint32_t* tables, const Found<T>& found, uint32_t used) const {
    __syncwarp();
    for_bits(used, [&](int t) {
      const Parts<Word> parts = found.parts[t];
      const Word low = found.low[t], span = found.span[t];
      uint32_t* const counts = tables + (t << kLongBinBits);
#pragma unroll 4
      for (uint32_t i = threadIdx.x & 31; i < size; i += 32)
        if (keys[i] - low <= span) atomicAdd(counts + parts.between_ends(keys[i]), 1u);
    });
  }

  // Returns how many of the kept keys are from `first` to `first + last`. The whole warp calls this, only if no key is
  // lost.
  __device__ __forceinline__ uint32_t count_between(Word first, Word last) const {
    uint32_t count = 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x & 31; i < size; i += 32) count += keys[i] - first <= last;
    return sum_of_warp(count);
  }

  // Calls `visit(key, at)` for the kept elements whose keys are from `first` to `first + last`. The whole warp calls
  // this.
  template <class Visit>
  __device__ __forceinline__ void each_between(const Slice<T>& slice, Word first, Word last, Visit visit) const {
    const uint32_t lane = threadIdx.x & 31;
    const T* from = keys;
#pragma unroll 1
    for (int step = 0; step < slice.steps(); ++step) {
      uint32_t set = sets[step * 32 + lane];
      const uint32_t own = __popc(set), total = sum_of_warp(own);
      bool any = false;
#pragma unroll 1
      for (uint32_t i = lane; i < total; i += 32) any |= from[i] - first <= last;
      if (__any_sync(kEveryLane, any)) {
        const T* key = from + sum_up_to_lane(own) - own;
#pragma unroll 1
        for (; set; ++key) {
          const int element = kElements - 32 + __clz(static_cast<int>(set));
          if (*key - first <= last)
            visit(Word{*key}, slice.at(step, element / Slice<T>::kPack, element % Slice<T>::kPack));
          set ^= 1u << (kElements - 1 - element);
        }
      }
      from += total;
    }
  }
};

}  // namespace
}  // namespace jaxgpuops::select
