// Few rows of up to 8 KB, and short columns of recurrences, for cumulative calls and recurrences without segments, but
// no logsumexps: a lane has 16 bytes of a column. So runs are short, and as many lanes as possible work; few lanes, or
// up to 16 warps of a block, share a column. Lanes load and store their elements themselves, those of a row as a
// pack: if rows are no whole packs, a pack comes from two vectors, and a vector gets what two lanes have. Operands are
// read once, results written once.
//
// Rows are folded in the order of rows.cuh, where a lane has four packs: so four lanes here, a quad, are one lane
// there, and four warps, a team, are one warp. There is little code, as in the other kernels for few elements
// (common/cuda/small.cuh).
#pragma once

#include <cstdint>

#include "common/cuda/between.cuh"
#include "common/cuda/small.cuh"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {

constexpr int kFewWarps = 16;  // the most warps of a block

struct FewParameters {
  const void *x, *a;
  void* out;
  const void* h0;
  uint32_t columns, length, inner;
  int64_t a_outer;  // strides of the operand a
  uint32_t a_axis, a_inner;
  int lane_bits, warps;  // 2^lane_bits lanes of a warp share a column; if they are 32, `warps` warps
  bool dense;            // rows of all operands follow each other in memory, from an aligned address on
  bool odd;              // they are no whole packs
  bool wide_h0, backward;
  Options options;
};

template <class Policy>
__global__ void __launch_bounds__(32 * kFewWarps) scan_few(const __grid_constant__ FewParameters p) {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  constexpr int n = 16 / sizeof(Bits), kBytes = sizeof(Bits);
  constexpr bool kPair = Policy::kOperands == 2;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool shared = p.warps > 1;
  const uint32_t number = shared ? blockIdx.x : (blockIdx.x * blockDim.x + threadIdx.x) >> p.lane_bits;
  const uint32_t part = shared ? threadIdx.x : lane & ((1u << p.lane_bits) - 1);  // which n positions the lane has
  const uint32_t column = once(min(number, p.columns - 1)), first = part * n, last = once(p.length - 1);
  const uint32_t outer = p.inner == 1 ? column : column / p.inner, member = column - outer * p.inner;
  const bool there = number == column && first <= last;
  const int64_t base = int64_t{outer} * p.length * p.inner;
  const Bits* const x = static_cast<const Bits*>(p.x) + base;
  const Bits* const a = static_cast<const Bits*>(p.a) + outer * p.a_outer;
  Bits* const out = static_cast<Bits*>(p.out) + base;

  // In a row, in the order of memory: the lane's pack, which may begin before the row or end after it, and the aligned
  // vector that has the pack's first element.
  const int length = static_cast<int>(p.length);
  const int at = p.backward ? length - static_cast<int>(first) - n : static_cast<int>(first);
  const int past = static_cast<int>(base + at) & (n - 1), vector = at - past;
  // In a column: where the position 0, in the direction of the scan, is, and how far it is to the next.
  const uint32_t start = (p.backward ? last : 0) * p.inner + member, by = p.backward ? 0 - p.inner : p.inner;

  In<Acc> in[n] = {};
  if (p.dense) {
    const auto load = [&](const Bits* row) {
      const auto* const from = reinterpret_cast<const Pack*>(row + vector);
      Pack pack = {};
      if (there && vector + n > 0) pack = from[0];
      if (p.odd) {
        Pack high = {};
        if (there && past > 0 && vector + n < length) high = from[1];
        pack = between<kBytes, 15>(pack, high, past * kBytes);
      }
      return p.backward ? reversed<Bits>(pack) : pack;
    };
    const Pack pack = load(x);
    [[maybe_unused]] Pack factors = {};
    if constexpr (kPair) factors = load(a);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      in[i].x = Element::load(get<Bits>(pack, i));
      if constexpr (kPair) in[i].a = Element::load(get<Bits>(factors, i));
    }
  } else {  // beyond the end, a lane reads the last element again
    Bits bits[n];
    [[maybe_unused]] Bits factors[n];
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t k = min(first + i, last);
      bits[i] = x[start + k * by];
      if constexpr (kPair) factors[i] = a[(p.backward ? last - k : k) * p.a_axis + member * p.a_inner];
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      in[i].x = Element::load(bits[i]);
      if constexpr (kPair) in[i].a = Element::load(factors[i]);
    }
  }
  State state = Policy::identity(p.options);
  if constexpr (Policy::kInitial) {
    if (p.h0) {
      Acc h0;
      if constexpr (is_float(Element::kDType) && sizeof(Bits) < sizeof(float)) {
        h0 =
            p.wide_h0 ? static_cast<const float*>(p.h0)[column] : Element::load(static_cast<const Bits*>(p.h0)[column]);
      } else {
        h0 = Element::load(static_cast<const Bits*>(p.h0)[column]);
      }
      state = Policy::initial(h0, p.options);
    }
  }

  Acc results[n];
  with_call<Policy>(p.options, [&](const Options& o) {
    const auto combine = [&](const State& l, const State& r) { return Policy::combine(l, r, p.options); };
    // A round of a scan over lanes: blocks of 2^bit lanes get the fold of the block to the left.
    const auto round = [&](State& fold, int bit) {
      const State left = shuffle_from(fold, static_cast<int>(lane >> bit << bit) - 1);
      if (part >> bit & 1) fold = combine(left, fold);
    };
    State quad = Policy::first(in[0], o);
#pragma unroll
    for (int i = 1; i < n; ++i) Policy::step(quad, in[i], o);
    round(quad, 0);
    round(quad, 1);
    const State in_quad = shuffle_up(quad, 1);  // of what comes before the lane in its quad, if it is not the first
    State quads = shuffle_from(quad, static_cast<int>(lane | 3));
#pragma unroll
    for (int bit = 2; bit < 5; ++bit) round(quads, bit);
    State before = shuffle_up(quads, 4);  // of the quads before the lane's own
    bool any = (part & 31) >= 4;          // whether there are any
    if (shared) {
      __shared__ State totals[kFewWarps];
      if (lane == 31) totals[warp] = quads;
      __syncthreads();
      const auto follow = [&](const State& earlier) {
        before = any ? combine(earlier, before) : earlier;
        any = true;
      };
      if (warp & 1) follow(totals[warp - 1]);
      const uint32_t team = warp & ~3u;  // the first warp of the warp's team
      if (warp & 2) follow(combine(totals[team], totals[team + 1]));
      if (team > 0) {
        State teams = totals[min(lane, team - 1)];
#pragma unroll
        for (uint32_t step = 1; step < kFewWarps; step *= 2) {
          const State right = shuffle_from(teams, lane + step);
          if (lane + step < team) teams = combine(teams, right);
        }
        state = combine(state, shuffle_from(teams, 0));
      }
    }
    state = combine(state, any ? before : Policy::identity(p.options));
    if (lane & 3) state = combine(state, in_quad);
#pragma unroll
    for (int i = 0; i < n; ++i) results[i] = Policy::step(state, in[i], o).first;
  });

  if (!p.dense) {
    if (number != column) return;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i)
      if (first + i <= last) out[start + (first + i) * by] = Element::store(results[i]);
    return;
  }
  Pack own = pack_of<Element>(results);
  if (p.backward) own = reversed<Bits>(own);
  if (!p.odd) {
    if (there) *reinterpret_cast<Pack*>(out + at) = own;
    return;
  }
  // A lane stores the vector in which its pack begins, if that is wholly in the row, and the lane knows what is in it.
  // What is in no such vector is stored element by element.
  const int place = static_cast<int>(part & 31);
  const bool low = place > 0, high = place < (1 << p.lane_bits) - 1;  // whether the neighbours have a part of the row
  const Pack beside = shuffle_from(own, static_cast<int>(p.backward ? lane + 1 : lane - 1));
  const bool whole = there && vector >= 0 && vector + n <= length && (past == 0 || (p.backward ? high : low));
  const uint32_t wholes = __ballot_sync(kEveryLane, whole);
  if (whole) *reinterpret_cast<Pack*>(out + vector) = between<kBytes, 16>(beside, own, 16 - past * kBytes);
  const bool rest_whole = past == 0    ? whole
                          : p.backward ? low && (wholes >> (lane - 1) & 1)
                                       : high && (wholes >> (lane + 1) & 1);
  if (there && !(whole && rest_whole))
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (at + i >= 0 && at + i < length && !(i < n - past ? whole : rest_whole)) out[at + i] = get<Bits>(own, i);
}

}  // namespace jaxgpuops::scan
