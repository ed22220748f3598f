// How a team finds the k best elements of its row, in order.
//
// The k-th largest of the lanes' maxima (two a lane, or four) is a threshold that at least k elements reach, and not
// many more: k of G maxima leave about G ln(G / (G - k)). The elements that reach it are found with float comparisons.
// Only these get exact keys, with the index in the low bits, so that no two are equal; the rank of each is the number
// of larger keys. If too many elements reach the threshold, mostly because they equal it, only the first ones that do
// are taken. If even these are too many, or NaNs have made the threshold wrong, k rounds search for the next largest
// element.
#pragma once

#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk_softmax/cuda/selection.cuh"
#include "topk_softmax/cuda/weigh.cuh"

namespace jaxgpuops::topk_softmax {

// What a team shares. A candidate is the exact key above the mirrored index.
template <int kTeam>
struct alignas(16) Board {
  static constexpr uint32_t kCapacity = 8 * kTeam;
  uint64_t candidates[kCapacity + 4];
  uint64_t best[2 * kTeam];
};

// count += a < b, in three instructions: by the carry of b + ~a.
__device__ __forceinline__ void count_less(uint32_t& count, uint64_t a, uint64_t b) {
  const uint64_t flipped = ~a;
  asm("{\n.reg .u32 t;\nadd.cc.u32 t, %1, %3;\naddc.cc.u32 t, %2, %4;\naddc.u32 %0, %0, 0;\n}"
      : "+r"(count)
      : "r"(static_cast<uint32_t>(flipped)), "r"(static_cast<uint32_t>(flipped >> 32)), "r"(static_cast<uint32_t>(b)),
        "r"(static_cast<uint32_t>(b >> 32)));
}

// The rare path: each round takes the largest element that is left.
template <int kTeam, int kElements, class S, class B>
__device__ __noinline__ void search(const Args& a, S selection, B& board, uint32_t t, bool wanted) {
  uint32_t keys[kElements], left = 0;
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) {
    const uint32_t index = j * kTeam + t;
    const bool there = wanted && index < a.length && selection.allows(index);
    keys[j] = there ? selection.key(index) : 0;
    if (there) left |= 1u << j;
  }
#pragma unroll 1
  for (uint32_t round = 0; round < a.k; ++round) {
    uint32_t key = 0, chosen = 0;
#pragma unroll
    for (int j = kElements - 1; j >= 0; --j)  // backwards, so that of equal elements the first one stays
      if (left >> j & 1 && keys[j] >= key) key = keys[j], chosen = j;
    const uint64_t mine = left ? static_cast<uint64_t>(key) << 32 | ~(chosen * kTeam + t) : 0;
    const uint64_t best = largest_of_lanes<kTeam>(mine);
    if (mine == best) left &= ~(1u << chosen);
    if (wanted && t == 0) board.best[round] = best;
  }
}

// Returns a bit for each element above the key `least`, and for the first ones that equal it, as many as k needs. Of
// the elements that several lanes load at once, those of the lower lanes are the first ones.
template <class Element, int kTeam, int kElements, class S>
__device__ __noinline__ uint32_t above_or_first(const Args& a, S selection, uint32_t lane, uint32_t t, uint32_t present,
                                                uint32_t least) {
  constexpr uint32_t kVector = 16 / sizeof(typename Element::Bits);
  uint32_t keys[kElements], top = 0;
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) {
    keys[j] = present >> j & 1 ? selection.key(index_of<Element, kTeam>(j, t)) : 0;
    top = max(top, keys[j]);
  }
  uint32_t above, equal, more;
#pragma unroll 1
  for (bool again = false;; again = true) {
    above = equal = 0;
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      above |= static_cast<uint32_t>(keys[j] > least) << j;
      equal |= static_cast<uint32_t>(keys[j] == least) << j;
    }
    equal &= present;
    more = sum_of_lanes<kTeam>(__popc(above));
    const bool raises = !again && more > Board<kTeam>::kCapacity;
    if (!__any_sync(kEveryLane, raises)) break;
    top = largest_of_lanes<kTeam>(top);
    if (raises) least = top;  // many NaNs, or others, may equal the largest key
  }
  uint32_t need = a.k - min(more, a.k), first = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < kElements && __any_sync(kEveryLane, need); at += kVector) {
    uint32_t ties = equal & ((1u << kVector) - 1) << at;
    const uint32_t mine = __popc(ties), up_to = sum_up_to_lane<kTeam>(mine), before = up_to - mine;
    const uint32_t taken = need - min(need, before);
#pragma unroll 1
    for (uint32_t excess = mine - min(mine, taken); excess; --excess) ties ^= 1u << (31 - __clz(ties));
    first |= ties;
    need -= min(need, __shfl_sync(kEveryLane, up_to, lane | (kTeam - 1)));
  }
  return above | first;
}

// A key that at least k of the team's elements reach. fmaxf drops NaNs.
template <int kTeam, int kElements>
__device__ __forceinline__ uint32_t threshold(const float (&v)[kElements], uint32_t k, uint32_t lane, uint32_t t) {
  if (k <= kTeam) {
    float most[2] = {v[0], v[1]};
#pragma unroll
    for (uint32_t j = 2; j < kElements; ++j) most[j % 2] = fmaxf(most[j % 2], v[j]);
    return topk::kth_of_pairs<kTeam>(key_of(most[0]), key_of(most[1]), k);
  }
  float most[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
  for (uint32_t j = 4; j < kElements; ++j) most[j % 4] = fmaxf(most[j % 4], v[j]);
  const uint32_t keys[4] = {key_of(most[0]), key_of(most[1]), key_of(most[2]), key_of(most[3])};
  const uint32_t mates = kTeam == 32 ? kEveryLane : ((1u << (kTeam & 31)) - 1) << (lane - t);
  const uint32_t floor = topk::kth_of_group<kTeam>(keys, k, mates);
  __syncwarp();
  return floor;
}

// A bit for each element that reaches `least`, or is NaN.
template <int kElements>
__device__ __forceinline__ uint32_t reaching(const float (&v)[kElements], float least) {
  uint32_t hits = 0;
#pragma unroll
  for (int j = kElements - 1; j >= 0; --j) {
#if defined(__CUDA_ARCH__)
    // Shifts in the sign of v[j] - least, which is 0 for a hit. The subtraction and the shift run in different
    // execution units, so they overlap. A NaN that the subtraction makes has the sign 0, too.
    hits = __funnelshift_l(__float_as_uint(v[j] - least), hits, 1);
#else
    hits = hits << 1 | (v[j] < least);
#endif
  }
  return ~hits;
}

// Lists the team's hits on the board, and the k best of them, by rank, as the board's best. Returns the number of hits,
// or 0 if there are too many. If there are, `fewer()` is called once by all lanes, and gives those teams other hits.
template <class Element, int kTeam, class S, class B, class Fewer>
__device__ __forceinline__ uint32_t rank_hits(uint32_t hits, uint32_t k, const S& selection, B& board, uint32_t lane,
                                              uint32_t t, Fewer fewer) {
  uint32_t mine, inclusive, total;
  const auto count = [&] {
    mine = __popc(hits), inclusive = sum_up_to_lane<kTeam>(mine);
    total = __shfl_sync(kEveryLane, inclusive, lane | (kTeam - 1));
  };
  count();
  if (__any_sync(kEveryLane, total > board.kCapacity)) {
    const uint32_t others = fewer();
    if (total > board.kCapacity) hits = others;
    count();
  }
  const uint32_t candidates = total <= board.kCapacity ? total : 0;
  if (candidates) {
    // Lists the indices first, and makes the keys of all hits together afterwards. A register cannot be indexed, so
    // logits are read again.
    auto* const words = reinterpret_cast<uint32_t*>(board.candidates);
    for (uint32_t at = inclusive - mine; hits; hits &= hits - 1)
      words[2 * at++] = ~index_of<Element, kTeam>(__ffs(hits) - 1, t);
    // Clears four more places, since candidates are read four at a time.
    if (t < 4) board.candidates[candidates + t] = 0;
  }
  __syncwarp();
  for (uint32_t i = t; i < candidates; i += 2 * kTeam) {  // a lane ranks two candidates at once
    auto* const words = reinterpret_cast<uint32_t*>(board.candidates + i);
    const bool more = i + kTeam < candidates;
    const uint32_t key = selection.key(~words[0]), next = more ? selection.key(~words[2 * kTeam]) : 0;
    words[1] = key;
    if (more) words[2 * kTeam + 1] = next;
  }
  __syncwarp();
  for (uint32_t i = t; i < candidates; i += 2 * kTeam) {
    const uint64_t own[2] = {board.candidates[i], i + kTeam < candidates ? board.candidates[i + kTeam] : 0};
    uint32_t rank[2] = {};
#pragma unroll 1
    for (uint32_t j = 0; j < candidates; j += 4) {
      const auto* const pairs = reinterpret_cast<const ulonglong2*>(board.candidates + j);
      const ulonglong2 low = pairs[0], high = pairs[1];
#pragma unroll
      for (uint32_t o = 0; o < 2; ++o) {
        count_less(rank[o], own[o], low.x);
        count_less(rank[o], own[o], low.y);
        count_less(rank[o], own[o], high.x);
        count_less(rank[o], own[o], high.y);
      }
    }
#pragma unroll
    for (uint32_t o = 0; o < 2; ++o)
      if (i + o * kTeam < candidates && rank[o] < k) board.best[rank[o]] = own[o];
  }
  __syncwarp();
  return candidates;
}

// The best k in order, of the elements whose bits are set in `present`.
template <class Element, int kTeam, int kElements, bool kBiased, class S, class B>
__device__ __forceinline__ void choose(const Args& a, const float (&v)[kElements], uint32_t present, bool live,
                                       const S& selection, B& board, uint32_t lane, uint32_t t, Chosen<>& chosen) {
  const uint32_t floor = threshold<kTeam>(v, a.k, lane, t);
  const uint32_t hits = reaching(v, value_of(floor)) & present;
  // Candidates have keys of raw elements, the threshold that of a float32.
  const uint32_t least = kBiased ? floor : key_of(Element::store(value_of(floor)));
  const uint32_t candidates = rank_hits<Element, kTeam>(hits, a.k, selection, board, lane, t, [&] {
    return above_or_first<Element, kTeam, kElements>(a, selection, lane, t, present, least);
  });
  const bool found = candidates >= a.k && static_cast<uint32_t>(board.best[a.k - 1] >> 32) >= least;
  if (__any_sync(kEveryLane, live && !found)) {
    __syncwarp();  // all lanes have read what is overwritten now
    search<kTeam, kElements>(a, selection, board, t, live && !found);
    __syncwarp();
  }
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    const uint32_t rank = t + s * kTeam;
    if (!chosen.has[s] || !live || rank >= a.k) continue;
    const uint64_t best = board.best[rank];
    chosen.index[s] = ~static_cast<uint32_t>(best);
    if constexpr (kBiased) {
      chosen.z[s] = Element::load(__ldg(selection.row + chosen.index[s] * a.inner));
    } else {
      chosen.z[s] = logit_of<Element>(static_cast<uint32_t>(best >> 32));
    }
  }
}

}  // namespace jaxgpuops::topk_softmax
