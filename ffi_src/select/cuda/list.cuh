// For long.cu: the last step, which finds the wanted element of a rank among those that are left. A block, or a
// warp if few elements are left, chooses from a list of indices. If equal elements are left, a block may find the
// wanted one in the row itself.
#pragma once

#include "select/cuda/blocks.cuh"

namespace jaxgpuops::select {
namespace {

// What a block needs in shared memory to choose from a list.
template <class Word>
struct Choice {
  uint32_t listed;
  uint32_t list[kSelectFew];
  Word keys[kSelectFew];
};

// Finds number `left` of the `size` elements of a list, whose keys are from `low` to `low + span`, and calls `found`
// with its index and its key, in one thread. The whole block calls this. Each thread has some entries in registers.
// `counts`: room for as many words as the block has threads.
template <class Word, class T, class Visit>
__device__ __forceinline__ void choose_in_block(const T* keys, const uint32_t* indices, uint32_t size, Word low,
                                                Word span, uint32_t left, uint32_t* counts, Choice<Word>& choice,
                                                Visit found) {
  using Full = std::conditional_t<sizeof(Word) == 8, uint64_t, uint32_t>;
  static_assert(kThreads == kChunk && kLongBinBits == 9);
  constexpr int kOwn = kLongFew / kThreads;
  T own[kOwn];
  uint32_t at[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t place = min(i * kThreads + threadIdx.x, size - 1);
    own[i] = __ldcg(keys + place), at[i] = __ldcg(indices + place);
  }
  uint32_t count = size;  // how many are left
  bool by_index = false;  // only equal keys are left
  Word key = 0;
  const auto number_of = [&](int i) { return by_index ? Word{at[i]} : Word{own[i]}; };
  const auto is_in = [&](int i) {
    return i * kThreads + threadIdx.x < size && number_of(i) - low <= span && (!by_index || own[i] == key);
  };
  if (threadIdx.x == 0) choice.listed = 0;
#pragma unroll 1
  while (count > kSelectFew) {
    if (span == 0) by_index = true, key = low, low = 0, span = 0xffffffff;
    const auto parts = Parts<Word>::template between<Full>(kLongBinBits, low, low + span);
    __syncthreads();  // no thread reads the counts any more
    counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (is_in(i)) atomicAdd(counts + parts.between_ends(number_of(i)), 1u);
    __syncthreads();
    const PartOfRank part = find_rank(counts, sum_counts(counts), left);
    Word first, last;
    parts.template bounds<Full>(part.part, first, last);
    const Word begin = max(first, low);
    span = min(first + last, low + span) - begin, low = begin;
    count = part.size, left = part.left;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (!is_in(i)) continue;
    const uint32_t to = atomicAdd(&choice.listed, 1u);
    choice.list[to] = at[i], choice.keys[to] = own[i];
  }
  __syncthreads();
  if (threadIdx.x < count) {
    const uint32_t index = choice.list[threadIdx.x];
    const Word its_key = choice.keys[threadIdx.x];
    uint32_t before = 0;
#pragma unroll 8
    for (uint32_t j = 0; j < count; ++j)
      before += choice.keys[j] < its_key || (choice.keys[j] == its_key && choice.list[j] < index);
    if (before == left) found(index, its_key);
  }
}

// The same for a list of up to kSelectFew elements. A warp calls this.
template <class T, class Visit>
__device__ __forceinline__ void choose_in_warp(const T* keys, const uint32_t* indices, uint32_t size, uint32_t left,
                                               Visit found) {
  constexpr int kOwn = kSelectFew / 32;
  const uint32_t lane = threadIdx.x & 31;
  typename Found<T>::Word key[kOwn];
  uint32_t at[kOwn], before[kOwn] = {};
  // Places behind the list get its last element.
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t place = min(i * 32 + lane, size - 1);
    at[i] = __ldcg(indices + place), key[i] = __ldcg(keys + place);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
    for (uint32_t j = i * 32; j < min(size, i * 32 + 32u); ++j) {
      const auto its = shuffle_from(key[i], j % 32);
      const uint32_t its_at = shuffle_from(at[i], j % 32);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) before[own] += its < key[own] || (its == key[own] && its_at < at[own]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (before[i] == left && i * 32 + lane < size) found(at[i], key[i]);
  }
}

// Returns the key that is number `left` of the `size` keys of a list, which are from `low` to `low + span`. A warp
// calls this. `counts`: room for 2^kLongBinBits words, at a multiple of 16 bytes.
template <class T, class Word>
__device__ __forceinline__ Word choose_key_in_warp(const T* list, uint32_t size, Word low, Word span, uint32_t left,
                                                   uint32_t* counts) {
  constexpr uint32_t kAhead = 16;
  const uint32_t lane = threadIdx.x & 31;
  // Calls visit(key, whether it is left) for the keys.
  const auto each = [&](auto visit) {
#pragma unroll 1
    for (uint32_t start = lane; start - lane < size; start += 32 * kAhead) {
      T key[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) key[i] = __ldcg(list + min(start + 32 * i, size - 1));
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) visit(Word{key[i]}, start + 32 * i < size && key[i] - low <= span);
    }
    __syncwarp();
  };
#pragma unroll 1
  for (uint32_t count = size; count > 32 && span > 0;) {
    const auto parts = Parts<Word>::template between<T>(kLongBinBits, low, low + span);
#pragma unroll
    for (int b = 0; b < 1 << kLongBinBits; b += 128) *reinterpret_cast<uint4*>(counts + b + 4 * lane) = uint4{};
    __syncwarp();
    each([&](Word key, bool is_left) {
      if (is_left) atomicAdd(counts + parts.between_ends(key), 1u);
    });
    const PartOfRank part = find_rank(counts, sum_counts(counts), left);
    __syncwarp();
    Word first, last;
    parts.template bounds<T>(part.part, first, last);
    const Word begin = max(first, low);
    span = min(first + last, low + span) - begin, low = begin;
    count = part.size, left = part.left;
  }
  if (span == 0) return low;
  // Each lane gets one of the keys that are left.
  auto* const few = reinterpret_cast<Word*>(counts);
  uint32_t listed = 0;
  each([&](Word key, bool is_left) {
    const unsigned lanes = __ballot_sync(kEveryLane, is_left);
    if (is_left) few[listed + __popc(lanes & ((1u << lane) - 1))] = key;
    listed += __popc(lanes);
  });
  const Word own = few[min(lane, listed - 1)];
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t j = 0; j < listed; ++j) {
    const Word its = shuffle_from(own, j);
    before += its < own || (its == own && j < lane);
  }
  const unsigned wanted = __ballot_sync(kEveryLane, lane < listed && before == left);
  return shuffle_from(own, __ffs(static_cast<int>(wanted)) - 1);
}

// `list` has, for each slice of a row, the number of elements that are left in it. Returns the slice that has number
// `left` of all these elements, and makes `left` its number within the slice. The whole block calls this. `result`:
// room for two words; `sums`: room for kWarps words.
__device__ __forceinline__ int64_t find_slice(const uint32_t* list, int64_t slices, uint32_t& left, uint32_t* result,
                                              uint32_t* sums) {
  __syncthreads();  // no thread reads the words there any more
  int64_t slice = 0;
#pragma unroll 1
  for (int64_t start = 0; start < slices; start += kThreads) {
    const int64_t s = start + threadIdx.x;
    uint32_t total = 0;
    const uint32_t own = s < slices ? __ldcg(list + s) : 0, before = sum_before(own, sums, kWarps, total);
    if (left >= before && left - before < own) result[0] = static_cast<uint32_t>(s), result[1] = left - before;
    __syncthreads();
    if (left < total) {
      slice = result[0], left = result[1];
      break;
    }
    left -= total;
  }
  return slice;
}

// Returns the index of number `left` of the elements from `begin` to `end` that have a key. The whole block calls this;
// there is room for kWarps + 1 words at `sums`.
template <class T>
__device__ __forceinline__ uint32_t find_equal(const T* __restrict__ x, const SortOrder& order, T key, int64_t begin,
                                               int64_t end, uint32_t left, uint32_t* sums) {
  constexpr int kAhead = sizeof(T) == 8 ? 8 : 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  // Each warp counts in its own part; then all warps share the part that has the element.
  for (;;) {
    const int64_t part = (end - begin + kThreads - 1) / kThreads * 32, from = begin + warp * part;
    const int64_t to = min(from + part, end);
    uint32_t own = 0;
#pragma unroll kAhead
    for (int64_t at = from + lane; at < to; at += 32) own += sort_key(x[at], order) == key;
    own = sum_of_warp(own);
    __syncthreads();  // all threads are past their last use of `sums`
    if (lane == 0) sums[warp] = own;
    __syncthreads();
    const uint32_t up_to = sum_up_to_lane(lane < kWarps ? sums[lane] : 0);
    const int of = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > left))) - 1;
    if (of > 0) left -= shuffle_from(up_to, of - 1);
    begin += of * part;
    end = min(begin + part, end);
    if (part > 32) continue;
    if (warp == 0) {
      const bool is_equal = begin + lane < end && sort_key(x[begin + lane], order) == key;
      const unsigned lanes = __ballot_sync(kEveryLane, is_equal);
      if (is_equal && __popc(lanes & ((1u << lane) - 1)) == left) sums[kWarps] = static_cast<uint32_t>(begin) + lane;
    }
    __syncthreads();
    return sums[kWarps];
  }
}

}  // namespace
}  // namespace jaxgpuops::select
