// Rows (inner == 1) of softmax and log_softmax of 16 and 32 bits that are not whole vectors: threads of a
// warp read and write neighbouring words of 4 bytes, so that no lane has to put vectors together, and hold them in
// registers. (With vectors, elements were moved to their lanes by shuffles and shifts, and back again: 12001 x 4099
// bfloat16 took 89 us.) One read and one write. Works on any GPU.
//
// A span of 128 kUnits words belongs to a warp, word 32 i + lane of it to that lane. A lane adds up four words of a
// span, a unit; then its units of a span, then its spans; then lanes are added up in pairs. So the order of additions
// follows from the length. If rows are few, a warp has one unit of a span instead of all.
#include "softmax/cuda/single.h"

#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {
namespace {

constexpr int kUnitWords = 4;

template <class Acc>
struct LooseParameters {
  const void* x;
  void* out;
  int64_t rows;
  int length, groups;  // groups of warps that share a span
  Acc factor;
};

// With kAlone, a warp has a row, which is one span. Otherwise a block has a row, and a warp kUnits units of it.
template <class E, Op kOp, int kUnits, bool kAlone>
__global__ void __launch_bounds__(kAlone ? 32 * 4 : 1024)
    loose_rows_kernel(const __grid_constant__ LooseParameters<typename E::Acc> p) {
  using P = Softmax<E, false>;
  using Bits = typename E::Bits;
  constexpr int kOfWord = 4 / sizeof(Bits), kWords = kUnits * kUnitWords;
  // Results of 16 bits are multiples of what is added up. Those of float32 need more accurate exponentials.
  constexpr bool kKept = kOp == Op::kSoftmax && sizeof(Bits) == 2;
  typename P::Args args = {};
  args.op = kOp;
  args.scale.factor = p.factor;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = kAlone ? int64_t{blockIdx.x} * (blockDim.x / 32) + warp : int64_t{blockIdx.x};
  if (kAlone && row >= p.rows) return;
  const Bits* const from = static_cast<const Bits*>(p.x) + row * p.length;
  Bits* const to = static_cast<Bits*>(p.out) + row * p.length;
  const int first = ((kAlone ? 0 : warp * (32 * kWords)) + lane) * kOfWord;  // the lane's first element
  // The elements of the lane's word i are first + 32 kOfWord i and, of 16 bits, the one after it.
  const auto element = [&](int i) { return first + 32 * kOfWord * i; };

  float value[kWords][kOfWord];
  const auto load = [&](auto shifted) {  // `shifted`: the row begins inside a word
    constexpr bool kShifted = decltype(shifted)::value;
    const auto* const words = reinterpret_cast<const uint32_t*>(from + first - (kShifted ? 1 : 0));
    const uint32_t pad = static_cast<uint32_t>(P::pad(args, 0)) * (kOfWord == 2 ? 0x10001u : 1u);
    uint32_t low[kWords], high[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      low[i] = element(i) < p.length ? words[32 * i] : pad;
      if constexpr (kShifted) high[i] = element(i) + 1 < p.length ? words[32 * i + 1] : pad;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = kShifted ? funnel_right(low[i], high[i], 16) : low[i];
      if (kOfWord == 2 && !kShifted && element(i) + 1 == p.length) word = (word & 0xffffu) | (pad & 0xffff0000u);
#pragma unroll
      for (int e = 0; e < kOfWord; ++e) value[i][e] = P::value(args, E::load(static_cast<Bits>(word >> (16 * e))));
    }
  };
  const auto is_inside = [](const Bits* at) { return kOfWord == 2 && reinterpret_cast<uintptr_t>(at) % 4 != 0; };
  if (is_inside(from)) {
    load(std::true_type());
  } else {
    load(std::false_type());
  }

  __shared__ float peaks[kAlone ? 1 : kMaxBlockWarps], sums[kAlone ? 1 : kMaxBlockWarps * 32];
  const int warps = blockDim.x / 32;
  float peak = value[0][0];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
#pragma unroll
    for (int e = 0; e < kOfWord; ++e) peak = P::larger(peak, value[i][e]);
  peak = row_engine::peak_of_warp<P>(peak);
  if constexpr (!kAlone) {
    if (lane == 0) peaks[warp] = peak;
    __syncthreads();
    peak = row_engine::peak_of_warp<P>(peaks[min(lane, warps - 1)]);
  }
  const auto shift = P::guard(peak);
  float sum = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float of_word[kUnitWords];
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      float (&of)[kOfWord] = value[u * kUnitWords + w];
      float summand[kOfWord];
#pragma unroll
      for (int e = 0; e < kOfWord; ++e) {
        summand[e] = P::add(args, 0, 0.0f, of[e], 0.0f, shift);
        if constexpr (kKept) of[e] = summand[e];
      }
      of_word[w] = kOfWord == 2 ? summand[0] + summand[kOfWord - 1] : summand[0];
    }
    const float of_unit = (of_word[0] + of_word[1]) + (of_word[2] + of_word[3]);
    sum = u == 0 ? of_unit : sum + of_unit;
  }
  if constexpr (!kAlone) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll 1
    for (int w = 0; w < warps; w += p.groups) {
      float span = sums[w * 32 + lane];
      for (int g = 1; g < p.groups; ++g) span = span + sums[(w + g) * 32 + lane];
      sum = sum + span;
    }
  }
  const auto final = P::finish(args, {}, Stat<P>{peak, row_engine::merged_sum(sum, 0, 5)});
  const auto result = [&](int i, int e) {
    if constexpr (kKept) return rounded_product(value[i][e], final.sum);
    float result = 0;
    P::with_args(args, [&](const auto& known) { result = P::output(known, {}, final, value[i][e], 0.0f); });
    return result;
  };

  if constexpr (kOfWord == 1) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (element(i) < p.length) to[element(i)] = E::store(result(i, 0));
  } else if (!is_inside(to)) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = pair_of<E>(result(i, 0), result(i, 1));
      if (element(i) + 1 < p.length) {
        *reinterpret_cast<uint32_t*>(to + element(i)) = word;
      } else if (element(i) < p.length) {
        to[element(i)] = static_cast<Bits>(word);
      }
    }
  } else {
    // A word of memory has the second result of the lane before and the first one of this lane.
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = pair_of<E>(result(i, 0), result(i, 1));
      const uint32_t other = shuffle_from(word, (lane + 31) % 32), last = lane == 0 ? before : other;
      before = other;  // lane 0: of lane 31
      Bits* const at = to + element(i);
      const bool has_last = i > 0 || lane > 0;
      if (has_last && element(i) < p.length) {
        *reinterpret_cast<uint32_t*>(at - 1) = funnel_right(last, word, 16);
      } else if (element(i) < p.length) {
        at[0] = static_cast<Bits>(word);
      } else if (has_last && element(i) == p.length) {
        at[-1] = static_cast<Bits>(last >> 16);
      }
      if (i == kWords - 1 && lane == 31 && element(i) + 1 < p.length) at[1] = static_cast<Bits>(word >> 16);
    }
  }
}

template <class E, Op kOp>
cudaError_t launch_op(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  using Acc = typename E::Acc;
  if constexpr (sizeof(typename E::Bits) > 4) {
    return cudaErrorInvalidValue;
  } else {
    const bool alone = plan.wide == 0;
    const int units = alone ? plan.each : plan.each / plan.wide;
    const LooseParameters<Acc> p = {buffers.x,          buffers.out,
                                    problem.rows.outer, static_cast<int>(problem.rows.length),
                                    plan.wide,          static_cast<Acc>(problem.factor)};
    const auto pick = [&](auto alone) {
      constexpr bool kAlone = decltype(alone)::value;
      return units == 1   ? loose_rows_kernel<E, kOp, 1, kAlone>
             : units == 2 ? loose_rows_kernel<E, kOp, 2, kAlone>
             : units == 3 ? loose_rows_kernel<E, kOp, 3, kAlone>
                          : loose_rows_kernel<E, kOp, 4, kAlone>;
    };
    const int64_t blocks = alone ? (p.rows + plan.block_warps - 1) / plan.block_warps : p.rows;
    if (blocks > INT32_MAX || units > 4) return cudaErrorInvalidConfiguration;
    Launch launched;
    launched.grid = dim3(static_cast<unsigned>(blocks));
    launched.block = dim3(plan.threads());
    return launch(stream, launched, alone ? pick(std::true_type()) : pick(std::false_type()), p);
  }
}

}  // namespace

cudaError_t launch_loose(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using E = decltype(element);
    return problem.op == Op::kSoftmax ? launch_op<E, Op::kSoftmax>(stream, plan, problem, buffers)
                                      : launch_op<E, Op::kLogSoftmax>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::softmax
