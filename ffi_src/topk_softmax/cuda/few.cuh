// The gate of few rows, which takes about as long as one row does: a warp has a row, so each lane has few logits, and
// the code, which has to be loaded, is short. Neighbouring logits are in one lane, which sorts them. The largest of the
// lanes' first ones is taken k times; of equal ones that of the lowest lane comes first. If a lane's logits are of one
// group of experts, the warp chooses groups before that, by shuffles.
//
// Bytes moved: as by the other kernel, whose results have the same bits: sums over the k chosen are added in one order
// there, however many lanes a team has.
#pragma once

#include <algorithm>

#include "common/cuda/element.h"
#include "common/cuda/warp.cuh"
#include "topk_softmax/cuda/selection.cuh"
#include "topk_softmax/cuda/weigh.cuh"
#include "topk_softmax/plan.h"

namespace jaxgpuops::topk_softmax {

// The elements of a lane, from `first` on; those that do not exist are 0.
template <class Bits, uint32_t kElements>
__device__ __forceinline__ void load_neighbours(const Args& a, const Bits* row, uint32_t first,
                                                Bits (&bits)[kElements]) {
  constexpr uint32_t kTogether = std::min<uint32_t>(16 / sizeof(Bits), kElements);
  struct alignas(kTogether * sizeof(Bits)) Piece {
    Bits bits[kTogether];
  };
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) bits[j] = 0;
  if (a.vectors) {
#pragma unroll
    for (uint32_t j = 0; j < kElements; j += kTogether) {
      if (first + j >= a.length) continue;
      const Piece piece = *reinterpret_cast<const Piece*>(row + first + j);
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i) bits[j + i] = piece.bits[i];
    }
  } else {
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j)
      if (first + j < a.length) bits[j] = __ldg(row + (first + j) * a.inner);
  }
}

// Whether the group of a lane is among the best ones. `left`: a bit for each element that exists.
template <uint32_t kElements>
__device__ __forceinline__ bool in_chosen_group(const Args& a, const uint32_t (&keys)[kElements], uint32_t left,
                                                uint32_t lane) {
  uint32_t best = 0, second = 0;
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) {
    const uint32_t key = left >> j & 1 ? keys[j] : 0;
    second = max(second, min(best, key));
    best = max(best, key);
  }
  const uint32_t lanes = a.group_size / kElements, group = lane / lanes;
  uint32_t first = 0, next = 0;  // the best two of the group
#pragma unroll 4
  for (uint32_t i = 0; i < lanes; ++i) {
    const uint32_t other = __shfl_sync(kEveryLane, best, group * lanes + i);
    next = max(max(next, __shfl_sync(kEveryLane, second, group * lanes + i)), min(first, other));
    first = max(first, other);
  }
  const uint32_t own =
      a.bias && a.group_size > 1 ? key_of(canonical(__fadd_rn(value_of(first), value_of(next)))) : first;
  uint32_t rank = 0;
#pragma unroll 4
  for (uint32_t h = 0; h < a.groups; ++h) {
    const uint32_t other = __shfl_sync(kEveryLane, own, h * lanes);
    rank += other > own || (other == own && h < group);
  }
  return rank < a.topk_groups;
}

template <class Element, uint32_t kElements>
__global__ void __launch_bounds__(kBlock) gate_few_kernel(const __grid_constant__ Args a) {
  using Bits = typename Element::Bits;
  const uint32_t lane = threadIdx.x % 32, first = lane * kElements;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kBlock / 32) + threadIdx.x / 32;
  if (r >= a.rows) return;
  const RowAt at = row_at(a, r);
  const Bits* const row = static_cast<const Bits*>(a.logits) + at.logits;
  Bits bits[kElements];
  load_neighbours(a, row, first, bits);
  uint32_t keys[kElements], left = 0;  // a bit for each element that can still be chosen
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) {
    keys[j] = key_of(bits[j]);
    left |= static_cast<uint32_t>(first + j < a.length) << j;
  }
  Selection<Element, true, false> selection{row, a.inner, nullptr, 0, 0, 1, a.score, 0, 0};
  if (a.bias) {
    selection.bias = a.bias + a.bias_at.outer(at.outer) + a.bias_at.inner(at.inner);
    selection.bias_stride = a.bias_at.axis_stride;
    constexpr uint32_t kCount = 4;
#pragma unroll
    for (uint32_t j = 0; j < kElements; j += kCount) {
      Scores<kCount> scores;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) scores.of[i] = Element::load(bits[j + i]);
      scores = scores_of(scores, 0, 1, a.score);
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i)
        if (left >> (j + i) & 1) keys[j + i] = key_of(selection.biased(scores.of[i], first + j + i));
    }
  }
  uint32_t remaining = __popc(left);
  if (a.groups > 1 && !in_chosen_group(a, keys, left, lane)) remaining = 0;

  // Sorts a lane's elements, the largest first and equal ones in their order. Those that do not exist come last.
  uint32_t places[kElements];
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) {
    places[j] = first + j;
    if (!(left >> j & 1)) keys[j] = 0;
  }
#pragma unroll
  for (uint32_t turn = 0; turn < kElements; ++turn)
#pragma unroll
    for (uint32_t j = turn % 2; j + 1 < kElements; j += 2) {
      const bool swap = keys[j + 1] > keys[j];
      const uint32_t key = keys[j], place = places[j];
      keys[j] = swap ? keys[j + 1] : key;
      places[j] = swap ? places[j + 1] : place;
      keys[j + 1] = swap ? key : keys[j + 1];
      places[j + 1] = swap ? place : places[j + 1];
    }

  Chosen<> chosen;
  chosen.has[0] = true;
  chosen.has[1] = false;
  uint32_t key = 0;
#pragma unroll 1
  for (uint32_t round = 0; round < a.k; ++round) {
    const uint32_t top = largest_of_warp(remaining ? keys[0] : 0);
    const uint32_t winner = __ffs(__ballot_sync(kEveryLane, remaining && keys[0] == top)) - 1;
    const uint32_t index = __shfl_sync(kEveryLane, places[0], winner);
    if (lane == winner) {
#pragma unroll
      for (uint32_t j = 0; j + 1 < kElements; ++j) keys[j] = keys[j + 1], places[j] = places[j + 1];
      --remaining;
    }
    if (lane == round) key = top, chosen.index[0] = index;
  }
  if (a.bias) {
    if (lane < a.k) chosen.z[0] = Element::load(__ldg(row + chosen.index[0] * a.inner));
    weigh<32, true>(a, selection, lane, lane, chosen);
  } else {
    if (lane < a.k) chosen.z[0] = logit_of<Element>(key);
    weigh<32, false>(a, selection, lane, lane, chosen);
  }
  if (lane >= a.k) return;
  static_cast<Bits*>(a.weights)[at.results + lane * a.inner] = Element::store(chosen.w[0] * a.scale);
  a.indices[at.results + lane * a.inner] = static_cast<int32_t>(chosen.index[0]);
}

}  // namespace jaxgpuops::topk_softmax
