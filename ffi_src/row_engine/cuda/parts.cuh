// The parts that all kernels of the row engine (engine.cuh) share: parameters, the elements that a lane holds, and the
// merging of statistics.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/broadcast.h"
#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/pairs.cuh"
#include "row_engine/cuda/launch.h"
#include "row_engine/plan.h"

namespace jaxgpuops::row_engine {

// Operands that only some calls have.
struct Extras {
  const void* bias = nullptr;
  const uint8_t* where = nullptr;
  Broadcast bias_at, where_at;
  int64_t queries = 0, query_stride = 1;  // `queries` is not 0 for causal masks: see softmax/softmax.h

  __host__ __device__ bool masks() const { return where || queries; }
  // The first masked position of the row; all later ones are masked, too.
  __device__ int64_t limit(int64_t outer, int64_t length) const {
    return queries ? min(length, outer / query_stride % queries + 1) : length;
  }
};

template <class P>
struct Parameters : RowParameters {
  typename P::Args args;
  Extras extras;
};

template <class P>
struct Stat {
  static constexpr int kCount = P::kSums + (P::kPeak ? 1 : 0);
  using Acc = typename P::Element::Acc;
  Acc of[kCount];

  static __device__ Stat none() {
    Stat stat = {};
    if constexpr (P::kPeak) stat.of[0] = P::lowest();
    return stat;
  }
  __device__ Acc peak() const { return of[0]; }
  __device__ Acc& sum(int k) { return of[k + (P::kPeak ? 1 : 0)]; }
  __device__ Acc sum(int k) const { return of[k + (P::kPeak ? 1 : 0)]; }
};

// Loads 16 bytes, without advice to the caches: with load_once and store_once, rows now and then took up to 10 %
// longer, probably after kernels that had filled the L2 cache.
__device__ __forceinline__ Pack load_pack(const Pack* from) {
  return bits_as<Pack>(*reinterpret_cast<const uint4*>(from));
}
__device__ __forceinline__ void store_pack(Pack* to, Pack pack) {
  *reinterpret_cast<uint4*>(to) = bits_as<uint4>(pack);
}
// Stores 16 bytes by one instruction, for places where nvcc would store four words.
__device__ __forceinline__ void store_whole(Pack* to, Pack pack) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// ---- What a lane holds ----------------------------------------------------------------------------------------------

// The last units of a lane often have no elements, and then nothing is computed of them. True where kernels ask for
// that before unit j. (Of softmax, it took as long to ask whether there is a second half as to compute it.)
template <class P, int kCount>
constexpr bool may_end(int j) {
  return P::kHole && (kCount == 8 ? j >= 2 && (j % 2 == 0 || j > 4) : j > 0 && j == kCount - 1);
}

// The elements that a lane holds: kCount units, each a pack of 16 bytes or, without kPacks, one element. In kernels of
// rows all units belong to one row; in kernels of columns a unit is one position of kWidth columns.
template <class P, int kCount, bool kPacks>
struct Held {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Unit = std::conditional_t<kPacks, Pack, Bits>;
  static constexpr int kUnits = kCount, kWidth = kPacks ? 16 / sizeof(Bits) : 1;
  static constexpr int kElements = kCount * kWidth, kOfWord = 4 / sizeof(Bits);  // kOfWord: elements of a word

  Unit raw[P::kOperands][kCount];
  Acc z[P::kDecoded ? kCount : 1][P::kDecoded ? kWidth : 1];
  uint32_t masks[P::kMasked ? (kElements + 31) / 32 : 1];
  int used = kCount;  // units that have elements

  __device__ bool ends_before(int j) const { return may_end<P, kCount>(j) && j >= used; }

  __device__ Bits bits(int operand, int j, int i) const {
    if constexpr (kPacks) {
      return get<Bits>(raw[operand][j], i);
    } else {
      return raw[operand][j];
    }
  }
  __device__ void set_bits(int operand, int j, int i, Bits to) {
    if constexpr (kPacks) {
      set<Bits>(raw[operand][j], i, to);
    } else {
      raw[operand][j] = to;
    }
  }
  template <class Args>
  __device__ Acc x(const Args& args, int j, int i) const {
    if constexpr (P::kDecoded) {
      return z[j][i];
    } else {
      return P::value(args, Element::load(bits(0, j, i)));
    }
  }
  __device__ Acc y(int j, int i) const {
    if constexpr (P::kOperands == 2) {
      return Element::load(bits(1, j, i));
    } else {
      return Acc(0);
    }
  }
  __device__ void mask(int j, int i) { masks[(j * kWidth + i) / 32] |= 1u << (j * kWidth + i) % 32; }
  __device__ bool masked(int j, int i) const { return masks[(j * kWidth + i) / 32] >> (j * kWidth + i) % 32 & 1; }

  // Adds biases and masks elements; called after the masks are set. bias(j, i) is called only if the call has a bias.
  template <class Bias>
  __device__ void decode(const typename P::Args& args, const typename P::Row& row, bool biased, Bias bias) {
    if constexpr (P::kDecoded) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i) z[j][i] = P::decode(args, row, Element::load(bits(0, j, i)));
      if (biased) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int i = 0; i < kWidth; ++i) z[j][i] = rounded_sum(z[j][i], bias(j, i));
      }
    }
  }
  __device__ void leave_out(const typename P::Args& args, int j, int i) {
    if constexpr (P::kDecoded) {
      z[j][i] = P::lowest();
    } else {
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o) set_bits(o, j, i, P::pad(args, o));
    }
  }

  // The same for element j * kWidth + i of a variable number. Whole words are compared, and not elements.
  __device__ __forceinline__ void leave_out_one(const typename P::Args& args, int element) {
    if constexpr (kPacks && !P::kDecoded && sizeof(Bits) < 4 && kCount > 1) {
      const int bits = 8 * sizeof(Bits), shift = element % kOfWord * bits;
      const uint32_t mask = ((1u << bits) - 1) << shift;
#pragma unroll
      for (int o = 0; o < P::kOperands; ++o) {
        const uint32_t pad = static_cast<uint32_t>(P::pad(args, o)) << shift;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (ends_before(j)) break;
#pragma unroll
          for (int w = 0; w < 4; ++w)
            if (j * 4 + w == element / kOfWord) raw[o][j].word[w] = (raw[o][j].word[w] & ~mask) | pad;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (j * kWidth + i == element) leave_out(args, j, i);
    }
  }

  // Makes the compiler recompute what it derived from the packs: keeping it would take too many registers.
  __device__ void forget() {
    if constexpr (kPacks && !P::kDecoded) {
#pragma unroll
      for (auto& units : raw)
#pragma unroll
        for (auto& unit : units)
#pragma unroll
          for (auto& word : unit.word) asm volatile("" : "+r"(word));
    }
  }

  // One element of a word that P::ordered_pair() or P::larger_pair() has made.
  static __device__ Acc ordered(const typename P::Args& args, uint32_t word, int i) {
    return P::ordered_value(args, Element::load(static_cast<Bits>(word >> 8 * sizeof(Bits) * i)));
  }

  // The peak of every column.
  __device__ void peaks(const typename P::Args& args, Acc (&peak)[kWidth]) const {
    if constexpr (P::kPackedPeak && kPacks) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pair = P::ordered_pair(args, raw[0][0].word[w]);
#pragma unroll
        for (int j = 1; j < kCount; ++j) pair = P::larger_pair(pair, P::ordered_pair(args, raw[0][j].word[w]));
#pragma unroll
        for (int i = 0; i < kOfWord; ++i) peak[kOfWord * w + i] = P::larger(P::lowest(), ordered(args, pair, i));
      }
    } else {
      const auto of = [&](int j, int i) {
        if constexpr (P::kStoredPeak) {
          return Element::load(bits(0, j, i));
        } else {
          return x(args, j, i);
        }
      };
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        peak[i] = P::lowest();
#pragma unroll
        for (int j = 0; j < kCount; ++j) peak[i] = P::larger(peak[i], of(j, i));
        if constexpr (P::kStoredPeak) peak[i] = P::value(args, peak[i]);
      }
    }
  }
  // The peak of all elements that the lane holds.
  __device__ Acc peak(const typename P::Args& args) const {
    if constexpr (P::kPackedPeak && kPacks) {  // compares whole words first, so that few words are split into elements
      uint32_t pair = P::ordered_pair(args, raw[0][0].word[0]);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (ends_before(j)) break;
#pragma unroll
        for (int w = j == 0 ? 1 : 0; w < 4; ++w) pair = P::larger_pair(pair, P::ordered_pair(args, raw[0][j].word[w]));
      }
      Acc peak = P::lowest();
#pragma unroll
      for (int i = 0; i < kOfWord; ++i) peak = P::larger(peak, ordered(args, pair, i));
      return peak;
    }
    Acc of_columns[kWidth];
    peaks(args, of_columns);
    Acc peak = of_columns[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) peak = P::larger(peak, of_columns[i]);
    return peak;
  }
  // The sum of the elements of the columns in [from, to).
  template <class Args, class Shift>
  __device__ Acc sum(const Args& args, int k, const Shift& shift, int from, int to) const {
    Acc sum = Acc(0);
    if constexpr (P::kPackedSum && kPacks) {
      if (from == 0 && to == kWidth) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int w = 0; w < 4; ++w) sum = P::add_word(sum, raw[0][j].word[w]);
        return sum;
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (ends_before(j)) break;
      // Sums begin with -0 where they may: x + -0 is x for every x, so the compiler drops the first addition.
      Acc of_unit = P::kPeak ? -Acc(0) : Acc(0);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if constexpr (P::kSums > 0)
          if (i >= from && i < to) of_unit = P::add(args, k, of_unit, x(args, j, i), y(j, i), shift);
      sum = j == 0 ? of_unit : sum + of_unit;
    }
    return sum;
  }
};

// ---- Results made of what has been added up -------------------------------------------------------------------------

// Computes the sum of all elements of a lane, whose span has this peak. If P::keeps(args), the summands take the place
// of the elements.
template <class P, class Args, class Lane, class Acc>
__device__ __forceinline__ Acc sum_and_keep(const Args& args, int k, Lane& lane, const Acc& peak) {
  const auto shift = P::guard(peak);
  if constexpr (P::kKeeps) {
    const bool keeps = P::keeps(args);
    Acc sum = Acc(0);
#pragma unroll
    for (int j = 0; j < Lane::kUnits; ++j) {
      Acc of_unit = Acc(0);
#pragma unroll
      for (int i = 0; i < Lane::kWidth; ++i) {
        const Acc summand = P::add(args, k, Acc(0), lane.x(args, j, i), lane.y(j, i), shift);
        if (keeps) lane.set_bits(0, j, i, P::Element::store(summand));
        of_unit = i == 0 ? summand : of_unit + summand;
      }
      sum = j == 0 ? of_unit : sum + of_unit;
    }
    return sum;
  } else {
    return lane.sum(args, k, shift, 0, Lane::kWidth);
  }
}

// The factor that makes results of the summands of a span.
template <class P>
__device__ __forceinline__ typename P::Element::Acc factor_of(const typename P::Final& final,
                                                              typename P::Element::Acc peak) {
  if constexpr (P::kKeeps) {
    return P::factor_of_kept(final, peak);
  } else {
    return 0;
  }
}
// The result of element i of unit j.
template <class P, class Args, class Lane>
__device__ __forceinline__ typename P::Element::Acc result_of(const Args& args, const typename P::Row& row,
                                                              const typename P::Final& final,
                                                              typename P::Element::Acc factor, const Lane& lane, int j,
                                                              int i) {
  if constexpr (P::kKeeps)
    if (P::keeps(args)) return rounded_product(P::Element::load(lane.bits(0, j, i)), factor);
  return P::output(args, row, final, lane.x(args, j, i), lane.y(j, i));
}

// Rounds values to elements and packs them into 16 bytes.
template <class Element>
__device__ __forceinline__ Pack packed(const typename Element::Acc (&value)[16 / sizeof(typename Element::Bits)]) {
  using Bits = typename Element::Bits;
  Pack pack;
  if constexpr (sizeof(Bits) == 2 && std::is_floating_point_v<typename Element::Acc>) {
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = pair_of<Element>(value[2 * w], value[2 * w + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Bits)); ++i) set<Bits>(pack, i, Element::store(value[i]));
  }
  return pack;
}

// ---- Merging --------------------------------------------------------------------------------------------------------

// Merges statistics over the lanes whose numbers differ only in the bits [from, to). All of these lanes get the same
// bits.
template <class P, class Acc>
__device__ __forceinline__ Acc merged_peak(Acc peak, int from, int to) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit >= from && bit < to) peak = P::larger(peak, shuffle_xor(peak, 1 << bit));
  return peak;
}
// Merges the statistics of all lanes of a warp.
template <class P, class Acc>
__device__ __forceinline__ Acc peak_of_warp(Acc peak) {
  if constexpr (P::kNumericPeak && sizeof(Acc) == 4) {
    return largest_of_warp(peak);
  } else {
    return merged_peak<P>(peak, 0, 5);
  }
}
template <class Acc>
__device__ __forceinline__ Acc merged_sum(Acc sum, int from, int to) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit >= from && bit < to) sum = sum + shuffle_xor(sum, 1 << bit);
  return sum;
}

template <class P, class Shift>
__device__ __forceinline__ void add_stat(Stat<P>& to, const Stat<P>& from, const Shift& shift) {
  typename Stat<P>::Acc weight = 1;
  if constexpr (P::kPeak && P::kSums > 0) weight = P::weight(from.peak(), shift);
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) to.sum(k) = to.sum(k) + P::scaled(k, from.sum(k), weight);
}

// Merges more elements into a statistic; their peak is given, and their sums relative to a shift.
template <class P, class Sum>
__device__ __forceinline__ void take_in(Stat<P>& stat, typename Stat<P>::Acc peak, Sum sum) {
  if constexpr (P::kPeak) {
    const auto larger = P::larger(stat.peak(), peak);
    // A larger peak is rare, and scaling costs as much work as an element.
    if (P::kSums > 0 && !(larger == stat.peak())) {
      Stat<P> scaled = Stat<P>::none();
      add_stat<P>(scaled, stat, P::guard(larger));
      stat = scaled;
    }
    stat.of[0] = larger;
  }
  const auto shift = P::guard(stat.peak());  // not used if the operation has no peak
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) stat.sum(k) = stat.sum(k) + sum(k, shift);
}

// Merges stat(begin), stat(begin + step), .. below count. It reads several at a time, to hide latency.
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_serially(Get stat, int begin, int step, int count) {
  constexpr int kTogether = 4;
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak) {
#pragma unroll 1
    for (int u = begin; u < count; u += kTogether * step) {
      typename Stat<P>::Acc peak[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) peak[t] = u + t * step < count ? stat(u + t * step).peak() : P::lowest();
#pragma unroll
      for (int t = 0; t < kTogether; ++t) all.of[0] = P::larger(all.of[0], peak[t]);
    }
  }
  const auto shift = P::guard(all.peak());  // not used if the operation has no peak
#pragma unroll 1
  for (int u = begin; u < count; u += kTogether * step) {
    Stat<P> part[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) part[t] = u + t * step < count ? stat(u + t * step) : Stat<P>::none();
#pragma unroll
    for (int t = 0; t < kTogether; ++t) add_stat<P>(all, part[t], shift);  // a statistic that is none() adds nothing
  }
  return all;
}

// A warp merges `count` statistics; all its lanes get the result.
template <class P>
__device__ __forceinline__ Stat<P> merge_lanes(Stat<P> mine) {
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak) all.of[0] = peak_of_warp<P>(mine.peak());
  add_stat<P>(all, mine, P::guard(all.peak()));
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) all.sum(k) = merged_sum(all.sum(k), 0, 5);
  return all;
}
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_by_warp(Get stat, int count) {
  return merge_lanes<P>(merge_serially<P>(stat, threadIdx.x % 32, 32, count));
}
// The same for at most 32 statistics. It takes fewer steps for fewer of them; the ones left out add nothing.
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_by_team(Get stat, int count) {
  int lanes = 1;
  while (lanes < count) lanes *= 2;
  const int u = threadIdx.x & (lanes - 1);
  const Stat<P> mine = u < count ? stat(u) : Stat<P>::none();
  Stat<P> all = Stat<P>::none();
  if constexpr (P::kPeak) {
    all.of[0] = mine.peak();
#pragma unroll 1
    for (int step = 1; step < lanes; step *= 2) all.of[0] = P::larger(all.peak(), shuffle_xor(all.peak(), step));
  }
  add_stat<P>(all, mine, P::guard(all.peak()));
#pragma unroll 1
  for (int step = 1; step < lanes; step *= 2)
#pragma unroll
    for (int k = 0; k < P::kSums; ++k) all.sum(k) = all.sum(k) + shuffle_xor(all.sum(k), step);
  return all;
}
// A warp merges at most kEach * 32 statistics in the order of merge_by_warp(), but holds all of them in registers, so
// it reads each only once, and all together.
template <class P, int kEach = 4, class Get>
__device__ __forceinline__ Stat<P> merge_few_by_warp(Get stat, int count) {
  Stat<P> all = Stat<P>::none(), part[kEach];
#pragma unroll
  for (int t = 0; t < kEach; ++t) {
    const int u = t * 32 + threadIdx.x % 32;
    part[t] = u < count ? stat(u) : Stat<P>::none();
    if constexpr (P::kPeak) all.of[0] = P::larger(all.peak(), part[t].peak());
  }
  const auto shift = P::guard(all.peak());
#pragma unroll
  for (int t = 0; t < kEach; ++t) add_stat<P>(all, part[t], shift);
  return merge_lanes<P>(all);
}

// Half a warp merges at most kMaxColumnWarps statistics; all its lanes get the result.
template <class P, class Get>
__device__ __forceinline__ Stat<P> merge_by_half_warp(Get stat, int count) {
  static_assert(kMaxColumnWarps == 16);
  const int lane = threadIdx.x % 16;
  Stat<P> mine = Stat<P>::none(), all = mine;
  if (lane < count) mine = stat(lane);
  if constexpr (P::kPeak) all.of[0] = merged_peak<P>(mine.peak(), 0, 4);
  add_stat<P>(all, mine, P::guard(all.peak()));
#pragma unroll
  for (int k = 0; k < P::kSums; ++k) all.sum(k) = merged_sum(all.sum(k), 0, 4);
  return all;
}

// The workspace of an outer index holds units * inner statistics, then inner finals.
template <class P>
__device__ __forceinline__ Stat<P>* stat_at(const Parameters<P>& p, int64_t outer, int64_t unit, int64_t i) {
  return reinterpret_cast<Stat<P>*>(p.workspace + outer * p.workspace_stride) + unit * p.inner + i;
}
template <class P>
__device__ __forceinline__ typename P::Final* final_at(const Parameters<P>& p, int64_t outer, int64_t i) {
  return reinterpret_cast<typename P::Final*>(p.workspace + outer * p.workspace_stride + p.finals_at) + i;
}

// ---- Exponentials ---------------------------------------------------------------------------------------------------

// e^x, or 0 if that would be denormal. (The library's exp() has branches, so a thread could not overlap several of
// them.) On [-log(2) / 2, log(2) / 2], the polynomial is off by at most 2^-58 of e^x.
__device__ __forceinline__ double exponential_of(double x) {
  // A number added to this is rounded to an integer, which the low word of the sum then has.
  constexpr double kRounder = 0x1.8p52;
  constexpr double kCoefficients[] = {
      1,
      1,
      0x1.000000000000ap-1,
      0x1.55555555554fap-3,
      0x1.555555555088cp-5,
      0x1.1111111127b9bp-7,
      0x1.6c16c184266cdp-10,
      0x1.a01a012a69cb7p-13,
      0x1.a0199a16e272cp-16,
      0x1.71df253a0af57p-19,
      0x1.28ad68a24880dp-22,
      0x1.ad7f7b143fa7ep-26,
  };
  const double shifted = fma(x, 1.44269504088896340736, kRounder), n = shifted - kRounder;
  const double r = fma(n, -1.90821492927058770002e-10, fma(n, -6.93147180369123816490e-01, x));
  double sum = kCoefficients[11];
#pragma unroll
  for (int i = 10; i >= 0; --i) sum = fma(sum, r, kCoefficients[i]);
  // Multiplies by 2^n: adds n to the exponent. That is wrong where the result is not a normal number. The high word of
  // x, compared as a float, says whether x is in the range of normal results.
  const double power = __hiloint2double(__double2hiint(sum) + (__double2loint(shifted) << 20), __double2loint(sum));
  const float high = __int_as_float(__double2hiint(x));
  const bool normal = high > __int_as_float(static_cast<int>(0xC086232Bu)) && high < __int_as_float(0x40862E42);
  return normal ? power : x < 0 ? 0 : x * 0x1p1023;
}

// e^x, to the precision of the element's type.
template <class Element>
__device__ __forceinline__ typename Element::Acc exponential(typename Element::Acc x) {
  if constexpr (sizeof(typename Element::Bits) == 8) {
    return exponential_of(x);
  } else if constexpr (sizeof(typename Element::Bits) == 4) {
    return expf(x);
  } else {
    return fast_exp2(rounded_product(x, 1.44269504f));
  }
}

}  // namespace jaxgpuops::row_engine
