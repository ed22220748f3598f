// How a block of the first kernel of kBuckets reads its part of a row, or of columns, and lists the candidates.
#pragma once

#include <cooperative_groups.h>

#include "topk/cuda/buckets_block.cuh"
#include "topk/cuda/meet.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::filter() {
  const Filter<Key> filter(packing.key(threshold), a.order);
  constexpr Word kOne = Word{1} << (Filter<Key>::kWordBits - Filter<Key>::kBits);
  const uint32_t last = packing.index(threshold);  // the last of the elements that tie with the threshold
  if (tid == 0) s.count = 0, s.full = ~0u;
  __syncthreads();
  if (warp == 0 && rank == 0) {
    const uint32_t i = all.loose_index(lane);
    const bool hit = lane < all.loose() && at(i) >= threshold;
    const uint32_t hits = __ballot_sync(kEveryLane, hit);
    uint32_t place = 0;
    if (lane == 0 && hits) place = atomicAdd(&s.count, __popc(hits));
    place = __shfl_sync(kEveryLane, place, 0) + __popc(hits & ((1u << lane) - 1));
    if (hit) buffer[place] = at(i);
  }
  constexpr uint32_t kChunk = 32 * kLoads;  // vectors that a warp reads in a step
  const uint32_t step = a.slices * kBucketsWarps * kChunk;
#pragma unroll 1
  for (uint32_t start = (warp * a.slices + rank) * kChunk; start < all.vectors; start += step) {
    const uint32_t first = start + lane;
    alignas(16) Word words[kLoads][kWords];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u)
      *reinterpret_cast<uint4*>(words[u]) = __ldcs(all.body() + min(first + u * 32, all.vectors - 1));
    Word most = 0;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) most = filter.most(most, words[u][w]);
    // Beyond the last tie, elements must exceed the threshold's key.
    const bool late = all.index(first) > last;
    Filter<Key> own = filter;
    if (late) own.floor += kOne;
    const bool none = late && own.floor == 0;
    if (!__any_sync(kEveryLane, !none && own.reaches(most))) continue;
    uint32_t hits = 0;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      uint32_t of_vector = 0;
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) of_vector |= own.passes(words[u][w]) << (w * Filter<Key>::kPerWord);
      if (first + u * 32 < all.vectors) hits |= of_vector << (u * kVector);
    }
    if (none) hits = 0;
    const auto index = [&](uint32_t j) { return all.index(first + j / kVector * 32) + j % kVector; };
    const auto loaded = [&](uint32_t j) {
      const Word word = words[j / kVector][j % kVector / Filter<Key>::kPerWord];
      return static_cast<Key>(word >> (j % Filter<Key>::kPerWord * Filter<Key>::kBits));
    };
    if (!late && index(kLoads * kVector - 1) > last) {
#pragma unroll
      for (uint32_t j = 0; j < kLoads * kVector; ++j)
        if (index(j) > last && encode(loaded(j), a.order) == packing.key(threshold)) hits &= ~(1u << j);
    }
    const uint32_t mine = __popc(hits), upto = sum_up_to_lane(mine), sum = __shfl_sync(kEveryLane, upto, 31);
    if (!sum) continue;
    C* to = buffer;
    uint32_t place = 0;
    if (lane == 0) place = atomicAdd(&s.count, sum);
    place = __shfl_sync(kEveryLane, place, 0);
    if (place + sum > kStaged<C>) {  // there is no room, now or later
      if (lane == 0) atomicMin(&s.full, place);
      to = exchange.list;
      place = reserve(sum);
      if (place + upto > a.room) hits = 0;
    }
    place += upto - mine;
#pragma unroll
    for (uint32_t j = 0; j < kLoads * kVector; ++j) {
      if (hits >> j & 1) to[place++] = packing.pack(encode(loaded(j), a.order), index(j));
    }
  }
  __syncthreads();
}

template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::append() {
  const uint32_t staged = min(s.count, s.full);
  if (tid == 0) s.above = atomicAdd(exchange.found, staged);
  __syncthreads();
#pragma unroll 2
  for (uint32_t i = tid; i < staged; i += kBucketsThreads)
    if (s.above + i < a.room) exchange.list[s.above + i] = buffer[i];
  meet(exchange.arrivals, a.slices, target);
}

// All columns have equally many blocks, so that a step of these blocks together reads whole rows of columns, and a
// thread meets the same columns in each step.
template <class Key, bool kColumns>
__device__ __forceinline__ void Block<Key, kColumns>::filter_columns() {
  constexpr uint32_t kPerWord = Filter<Key>::kPerWord, kBits = 8 * sizeof(Key);
  // The block stages candidates in shared memory. A candidate's tag holds its column and its number within the
  // column.
  constexpr uint32_t kAll = (kBucketsStagedBytes - kMostBeside * (sizeof(C) + 4)) / (sizeof(C) + 4);
  C* const thresholds = buffer + kAll;
  uint32_t* const counts = reinterpret_cast<uint32_t*>(thresholds + kMostBeside);
  uint32_t* const tags = counts + kMostBeside;
  const auto of_column = [&](uint32_t c) { return Exchange<C>(a, row - column + c); };
  if (tid < beside) thresholds[tid] = load_published(of_column(tid).threshold), counts[tid] = 0;
  if (tid == 0) s.count = 0;
  __syncthreads();
  // Appends an element if it reaches the threshold of its column.
  const auto take = [&](uint32_t element) {
    const uint32_t i = element / beside, of = element - i * beside;
    const C c = packing.pack(encode(__ldg(all.x + element), a.order), i);
    if (c < thresholds[of]) return;
    const uint32_t place = atomicAdd(&s.count, 1u);
    if (place < kAll) {
      buffer[place] = c;
      tags[place] = atomicAdd(&counts[of], 1u) * kMostBeside + of;
    } else {
      const Exchange<C> to = of_column(of);
      const uint32_t at = atomicAdd(to.found, 1u);
      if (at < a.room) to.list[at] = c;
    }
  };
  constexpr uint32_t kChunk = 32 * kLoads;  // vectors that a warp reads in a step
  const uint32_t step = beside * a.slices * kBucketsWarps * kChunk, of_all = column * a.slices + rank;
  const uint32_t own = (of_all * kBucketsWarps + warp) * kChunk + lane;
  if (of_all == 0 && tid < all.loose()) take(all.loose_index(tid));
  // The keys of the thresholds, one for each element of the thread. If a word has several elements, each of these
  // keys is less by one: then a maximum shows whether any is exceeded. `always`: a key is 0, so it cannot be less.
  Word floors[kLoads][kWords];
  bool always = false;
  uint32_t c = all.index(own) % beside;
#pragma unroll
  for (uint32_t u = 0; u < kLoads; ++u) {
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      floors[u][w] = 0;
#pragma unroll
      for (uint32_t e = 0; e < kPerWord; ++e) {
        const Key key = packing.key(thresholds[c]), below = static_cast<Key>(kPerWord > 1 && key ? key - 1 : key);
        floors[u][w] |= static_cast<Word>(below) << (e * kBits);
        always |= kPerWord > 1 && key == 0;
        c = c + 1 == beside ? 0 : c + 1;
      }
    }
    c = (c + 31 * kVector) % beside;
  }
  // From this vector on, beyond the last element that ties with any threshold, elements must exceed the keys. (Not if
  // no key exceeds one of them, or if one is 0.)
  uint32_t late = 0;
  for (uint32_t i = lane; i < beside; i += 32) {
    const bool may = packing.key(thresholds[i]) != static_cast<Key>(kPerWord > 1 ? Key{0} : ~Key{0});
    late = max(late, may ? packing.index(thresholds[i]) + 1 : ~0u);
  }
  late = largest_of_warp(late);
  if (late != ~0u) late = late * beside / kVector + 1;
  const auto keys = [&](Word word) {
    if constexpr (kPerWord == 1) {
      return encode(word, a.order);
    } else {
      constexpr uint32_t kOnes = ~0u / ((1u << kBits) - 1);  // 1 in each element
      const uint32_t magnitude = static_cast<Key>(a.order.magnitude), flip = static_cast<Key>(a.order.flip);
      return word ^ ((word >> (kBits - 1) & kOnes) * magnitude) ^ (flip * kOnes);
    }
  };
#pragma unroll 1
  for (uint32_t first = own; first - lane < all.vectors; first += step) {
    alignas(16) Word words[kLoads][kWords];
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u)
      *reinterpret_cast<uint4*>(words[u]) = __ldcs(all.body() + min(first + u * 32, all.vectors - 1));
    if (first >= late) {
      constexpr Word kOnes = kPerWord > 1 ? ~0u / ((1u << (kBits & 31)) - 1) : 1;  // 1 in each element
#pragma unroll
      for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
        for (uint32_t w = 0; w < kWords; ++w) floors[u][w] += kOnes;
      late = ~0u;
    }
    bool any = always;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u)
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        words[u][w] = keys(words[u][w]);
        if constexpr (kPerWord == 1) {
          any |= words[u][w] >= floors[u][w];
        } else {
          any |= (kPerWord == 2 ? __vmaxu2(words[u][w], floors[u][w]) : __vmaxu4(words[u][w], floors[u][w])) !=
                 floors[u][w];
        }
      }
    if (!any) continue;
    uint32_t hits = 0;
#pragma unroll
    for (uint32_t u = 0; u < kLoads; ++u) {
      if (first + u * 32 >= all.vectors) break;
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) {
        const Key key = static_cast<Key>(words[u][e / kPerWord] >> (e % kPerWord * kBits));
        const Key floor = static_cast<Key>(floors[u][e / kPerWord] >> (e % kPerWord * kBits));
        hits |= static_cast<uint32_t>(kPerWord == 1 ? key >= floor : always || key > floor) << (u * kVector + e);
      }
    }
    for (; hits; hits &= hits - 1) {
      const uint32_t j = __ffs(hits) - 1;
      take(all.index(first + j / kVector * 32) + j % kVector);
    }
  }
  __syncthreads();
  if (tid < beside) counts[tid] = atomicAdd(of_column(tid).found, counts[tid]);
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = tid; i < min(s.count, kAll); i += kBucketsThreads) {
    const uint32_t of = tags[i] % kMostBeside, at = counts[of] + tags[i] / kMostBeside;
    if (at < a.room) of_column(of).list[at] = buffer[i];
  }
  cooperative_groups::this_grid().sync();
}

}  // namespace

}  // namespace jaxgpuops::topk
