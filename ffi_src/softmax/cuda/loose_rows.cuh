// Rows (inner == 1) of 16 and 32 bits that are not whole vectors: threads of a warp read and write neighbouring words
// of 4 bytes, so that no lane has to put vectors together, and hold them in registers. (With vectors, elements were
// moved to their lanes by shuffles and shifts, and back again: softmax of 12001 x 4099 bfloat16 took 89 us.) One read
// and one write. Works on any GPU.
//
// A span of 128 kUnits words belongs to a warp, word 32 i + lane of it to that lane. A lane adds up four words of a
// span, a unit; then its units of a span, then its spans; then lanes are added up in pairs. So the order of additions
// follows from the length. If rows are few, a warp has one unit of a span instead of all.
#pragma once

#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

constexpr int kUnitWords = 4;
constexpr int kLooseTeamThreads = 128,
              kLooseThreads = 512;  // the most of a block whose warps have a row each; of others
// Blocks per multiprocessor, at least, if a warp has a row. (Without this limit, the compiler gives 80 registers to a
// thread, not 72, so that only six blocks fit.)
constexpr int kLooseResidentTeams = 7;

// What a lane has of a row: kWords words of kOfWord elements. With kAlone, a warp has a row, which is one span.
// Otherwise a block has a row, and a warp kUnits units of it.
template <class P, int kUnits, bool kAlone>
struct LooseRow {
  using E = typename P::Element;
  using Bits = typename E::Bits;
  static constexpr int kOfWord = 4 / sizeof(Bits), kWords = kUnits * kUnitWords;
  static constexpr int kMostThreads = kAlone ? kLooseTeamThreads : kLooseThreads;
  using Words = uint32_t[kWords];
  struct Shared {
    float peaks[kAlone ? 1 : kMostThreads / 32], sums[kAlone ? 1 : kMostThreads];
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t index = kAlone ? int64_t{blockIdx.x} * warps + warp : int64_t{blockIdx.x};
  const int first = ((kAlone ? 0 : warp * (32 * kWords)) + lane) * kOfWord;  // the lane's first element
  const int64_t at;                                                          // where the row begins in an array
  int length;
  const int groups;  // groups of warps that share a span

  __device__ __forceinline__ LooseRow(int length, int groups) : at(index * length), length(length), groups(groups) {}

  // The elements of the lane's word i are element(i) and, of 16 bits, the one after it.
  __device__ __forceinline__ int element(int i) const { return first + 32 * kOfWord * i; }
  __device__ __forceinline__ static float get(const Words& words, int i, int e) {
    return E::load(static_cast<Bits>(words[i] >> (16 * e)));
  }
  template <class F>
  __device__ __forceinline__ static uint32_t word_of(F result) {
    if constexpr (kOfWord == 2) {
      return pair_of<E>(result(0), result(1));
    } else {
      return bits_as<uint32_t>(E::store(result(0)));
    }
  }
  template <class F>
  __device__ __forceinline__ static void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int e = 0; e < kOfWord; ++e) f(i, e);
  }
  __device__ __forceinline__ static bool is_inside(const Bits* at) {  // of a word
    return kOfWord == 2 && reinterpret_cast<uintptr_t>(at) % 4 != 0;
  }

  // Loads the words of a row of an array. Elements that do not exist are padding.
  __device__ __forceinline__ void load(const Bits* array, Bits padding, Words& word) const {
    const Bits* const from = array + at + first;
    const uint32_t pad = static_cast<uint32_t>(padding) * (kOfWord == 2 ? 0x10001u : 1u);
    if (is_inside(from)) {
      const auto* const words = reinterpret_cast<const uint32_t*>(from - 1);
      uint32_t high[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        word[i] = element(i) < length ? words[32 * i] : pad;
        high[i] = element(i) + 1 < length ? words[32 * i + 1] : pad;
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = funnel_right(word[i], high[i], 16);
    } else {
      const auto* const words = reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = element(i) < length ? words[32 * i] : pad;
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (kOfWord == 2 && element(i) + 1 == length) word[i] = (word[i] & 0xffffu) | (pad & 0xffff0000u);
    }
  }

  __device__ __forceinline__ float peak(Shared& shared, const float (&value)[kWords][kOfWord]) const {
    float peak = value[0][0];
    for_each([&](int i, int e) { peak = P::larger(peak, value[i][e]); });
    peak = row_engine::peak_of_warp<P>(peak);
    if constexpr (!kAlone) {
      if (lane == 0) shared.peaks[warp] = peak;
      __syncthreads();
      peak = row_engine::peak_of_warp<P>(shared.peaks[min(lane, warps - 1)]);
    }
    return peak;
  }

  // Adds up term(i, e) of all elements.
  template <class F>
  __device__ __forceinline__ float sum(Shared& shared, F term) const {
    float sum = 0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float of_word[kUnitWords];
#pragma unroll
      for (int w = 0; w < kUnitWords; ++w) {
        const int i = u * kUnitWords + w;
        of_word[w] = term(i, 0);
        if constexpr (kOfWord == 2) of_word[w] = of_word[w] + term(i, 1);
      }
      const float of_unit = (of_word[0] + of_word[1]) + (of_word[2] + of_word[3]);
      sum = u == 0 ? of_unit : sum + of_unit;
    }
    if constexpr (!kAlone) {
      shared.sums[threadIdx.x] = sum;
      __syncthreads();
      sum = 0;
#pragma unroll 1
      for (int w = 0; w < warps; w += groups) {
        float span = shared.sums[w * 32 + lane];
        for (int g = 1; g < groups; ++g) span = span + shared.sums[(w + g) * 32 + lane];
        sum = sum + span;
      }
    }
    return row_engine::merged_sum(sum, 0, 5);
  }

  // Writes word(i) of all words of the row.
  template <class F>
  __device__ __forceinline__ void store(Bits* array, F word) const {
    Bits* const to = array + at;
    if (!is_inside(to)) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t results = word(i);
        if (element(i) + kOfWord <= length) {
          *reinterpret_cast<uint32_t*>(to + element(i)) = results;
        } else if (element(i) < length) {
          to[element(i)] = static_cast<Bits>(results);
        }
      }
      return;
    }
    // A word of memory has the second result of the lane before and the first one of this lane.
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t results = word(i);
      const uint32_t other = shuffle_from(results, (lane + 31) % 32), last = lane == 0 ? before : other;
      before = other;  // lane 0: of lane 31
      Bits* const own = to + element(i);
      const bool has_last = i > 0 || lane > 0;
      if (has_last && element(i) < length) {
        *reinterpret_cast<uint32_t*>(own - 1) = funnel_right(last, results, 16);
      } else if (element(i) < length) {
        own[0] = static_cast<Bits>(results);
      } else if (has_last && element(i) == length) {
        own[-1] = static_cast<Bits>(last >> 16);
      }
      if (i == kWords - 1 && lane == 31 && element(i) + 1 < length) own[1] = static_cast<Bits>(results >> 16);
    }
  }
};

// What e^(z - peak) is multiplied by in a result. (Where the peak is that of the row, the weight of the peak is 1; to
// compute it all the same took 16 registers.)
template <class P>
__device__ __forceinline__ float kept_factor(const typename P::Final& final, float peak) {
  if constexpr (P::kHole) {
    return P::factor_of_kept(final, peak);
  } else {
    return final.sum;
  }
}

// Given becomes P::Args. Given::kKept: results are made of what is added up, not of the logits.
template <class Given>
struct LooseParameters {
  const void* x;
  void* out;
  int64_t rows;
  int length, groups;
  Given given;
};

template <class P, class Given, int kUnits, bool kAlone>
__global__ void __launch_bounds__(kAlone ? kLooseTeamThreads : 2 * kLooseThreads,  // limits registers
                                  kAlone && !P::kHole ? kLooseResidentTeams : 0)
    loose_rows_kernel(const __grid_constant__ LooseParameters<Given> p) {
  using Bits = typename P::Bits;
  using Row = LooseRow<P, kUnits, kAlone>;
  constexpr bool kKept = Given::kKept;
  __shared__ typename Row::Shared shared[2];
  [[maybe_unused]] __shared__ float logit_of_label;
  Row row(p.length, p.groups);
  if (kAlone && row.index >= p.rows) return;
  const typename P::Args& args = p.given;
  typename P::Row own = {};
  if constexpr (P::kHole) {
    own = P::begun(args, row.index, 0, p.length, 1);
    if (P::skip(own)) row.length = 0;  // nothing is read
  } else {
    own = P::row(args, row.index, 0, p.length, 1);
  }
  typename Row::Words x;
  row.load(static_cast<const Bits*>(p.x), P::pad(args, 0), x);
  float value[Row::kWords][Row::kOfWord];
  row.for_each([&](int i, int e) { value[i][e] = P::value(args, row.get(x, i, e)); });
  row.length = p.length;

  Stat<P> stat = Stat<P>::none();
  // The label, counted from the lane's first element. It is left out of the statistics, and its logit, which one lane
  // has, goes to all.
  int hole = -1;
  const auto is_hole = [&](int i, int e) { return P::kHole && hole == row.element(i) - row.first + e; };
  if constexpr (P::kHole) {
    own = P::checked(own, p.length);
    hole = static_cast<int>(P::hole(own)) - row.first;
    if constexpr (P::kPlainSum)
      if (P::add_plain(args))
        stat.sum(P::kSums - 1) =
            row.sum(shared[1], [&](int i, int e) { return row.element(i) + e < p.length ? value[i][e] : 0.0f; });
    float at_hole = 0;
    row.for_each([&](int i, int e) {
      if (!is_hole(i, e)) return;
      at_hole = value[i][e];
      value[i][e] = P::lowest();
      if constexpr (!kAlone) logit_of_label = at_hole;
    });
    if constexpr (kAlone)
      own = P::with_logit(own, shuffle_from(at_hole, static_cast<int>(P::hole(own)) / Row::kOfWord % 32));
  }
  stat.of[0] = row.peak(shared[0], value);
  if constexpr (P::kHole && !kAlone) own = P::with_logit(own, logit_of_label);
  const auto shift = P::guard(stat.peak());
  stat.sum(0) = row.sum(shared[0], [&](int i, int e) {
    const float summand = P::add(args, 0, 0.0f, value[i][e], 0.0f, shift);
    if constexpr (kKept) value[i][e] = summand;
    return summand;
  });
  const auto final = P::finish(args, own, stat);
  if (row.lane == 0 && (kAlone || row.warp == 0)) P::write_row(args, row.index, own, final);
  if constexpr (Given::kOutput) {
    [[maybe_unused]] float factor = 0;
    if constexpr (kKept) factor = kept_factor<P>(final, stat.peak());
    P::with_args(args, [&](const auto& known) {
      const auto result = [&](int i, int e) {
        float result;
        if constexpr (kKept) {
          result = P::output_of_kept(final, factor, value[i][e]);
        } else {
          result = P::output(known, own, final, value[i][e], 0.0f);
        }
        if constexpr (P::kHole)
          if (is_hole(i, e)) result = P::hole_output(args, own, final);
        return result;
      };
      row.store(static_cast<Bits*>(p.out), [&](int i) { return Row::word_of([&](int e) { return result(i, e); }); });
    });
  }
}

// Launches the kernel that pick(units of a lane, whether a warp has a row) returns.
template <class Parameters, class Pick>
cudaError_t launch_loose_kernel(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Parameters& p,
                                Pick pick) {
  const bool alone = plan.wide == 0;
  const int units = alone ? plan.each : plan.each / plan.wide;
  const int64_t rows = problem.rows.outer, blocks = alone ? (rows + plan.block_warps - 1) / plan.block_warps : rows;
  if (blocks > INT32_MAX || plan.threads() > (alone ? kLooseTeamThreads : kLooseThreads))
    return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  launched.block = dim3(plan.threads());
  const auto with_units = [&](auto units_of_lane) {
    return launch(stream, launched,
                  alone ? pick(units_of_lane, std::true_type()) : pick(units_of_lane, std::false_type()), p);
  };
  switch (units) {
    case 1: return with_units(std::integral_constant<int, 1>());
    case 2: return with_units(std::integral_constant<int, 2>());
    case 3: return with_units(std::integral_constant<int, 3>());
    case 4: return with_units(std::integral_constant<int, 4>());
    default: return cudaErrorInvalidConfiguration;
  }
}

template <class P, class Given>
cudaError_t launch_loose_rows(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                              const Given& given) {
  const LooseParameters<Given> p = {buffers.x, buffers.out, problem.rows.outer, static_cast<int>(problem.rows.length),
                                    plan.wide, given};
  return launch_loose_kernel(stream, plan, problem, p, [](auto units, auto alone) {
    return loose_rows_kernel<P, Given, decltype(units)::value, decltype(alone)::value>;
  });
}

}  // namespace jaxgpuops::softmax
