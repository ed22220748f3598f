// Few short rows (inner == 1) of softmax, log_softmax and logsumexp: one read and one write, in the order of additions
// of rows_kernel, so that all bits are the same.
//
// Such a call takes about as long as one row does: a kernel waits for its parameters, for its code, for one load, and
// for shuffles that follow each other. So the parameters fill one line of 64 bytes, the operation is known to the
// compiler, a lane has few vectors of 16 bytes, and what is added up within a lane of rows_kernel is here added up by
// shuffles that are in flight together.
//
//   team   Lanes of a warp share a row. Nothing goes through shared memory.
//   block  A block has a row, up to 32 KiB. The sums of vectors go through shared memory.
#include "common/rounding.h"
#include "row_engine/cuda/spread.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {
namespace {

using row_engine::add_stat;
using row_engine::factor_of;
using row_engine::Held;
using row_engine::load_pack;
using row_engine::merged_sum;
using row_engine::peak_of_warp;
using row_engine::result_of;
using row_engine::store_pack;
using row_engine::sum_and_keep;

// In rows_kernel, 2^lane_bits lanes share a row (or a span of it), and each has 2^vector_bits vectors.
template <class Acc>
struct ShortParameters {
  const void* x;
  void* out;  // kLogSumExp: where the result goes; null if its two summands are asked for
  int64_t rows;
  int length, lane_bits, vector_bits, spans;
  Acc factor;
  Acc *maximum, *log_sum;
};

template <class P, Op kOp>
__device__ __forceinline__ typename P::Args args_of(const ShortParameters<typename P::Acc>& p) {
  typename P::Args args = {};
  args.op = kOp;
  args.scale.factor = p.factor;
  if constexpr (kOp == Op::kLogSumExp) {
    args.lse = static_cast<typename P::Bits*>(p.out);
    args.maximum = p.maximum;
    args.log_sum = p.log_sum;
  }
  return args;
}

// Loads the first `left` elements of 16 bytes; the others become padding.
template <class P, bool kAligned>
__device__ __forceinline__ Pack load_short(const typename P::Bits* from, int left, typename P::Bits pad) {
  using Bits = typename P::Bits;
  if constexpr (!kAligned && sizeof(Bits) < 4) return row_engine::load_part(from, left, pad);
  Pack pack;
  if (kAligned && left > 0) {
    pack = load_pack(reinterpret_cast<const Pack*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Bits)); ++i)
      set<Bits>(pack, i, !kAligned && i < left ? from[i] : pad);
  }
  return pack;
}

// Computes and stores the results of the vectors of a lane, which are `apart` elements from each other.
template <class P, bool kAligned, int kEach>
__device__ __forceinline__ void store_short(const typename P::Args& args, const typename P::Final& final,
                                            typename P::Acc peak, const Held<P, 1, true> (&unit)[kEach],
                                            typename P::Bits* to, int left, int apart) {
  using Bits = typename P::Bits;
  constexpr int kWidth = Held<P, 1, true>::kWidth;
  const auto factor = factor_of<P>(final, peak);
  P::with_args(args, [&](const auto& known) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (left <= j * apart) break;
      typename P::Acc values[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = result_of<P>(known, {}, final, factor, unit[j], 0, i);
      const Pack pack = row_engine::packed<typename P::Element>(values);
      if constexpr (kAligned) {
        store_pack(reinterpret_cast<Pack*>(to + j * apart), pack);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (j * apart + i < left) to[j * apart + i] = get<Bits>(pack, i);
      }
    }
  });
}

// A lane has kEach of the kVectors vectors of a lane of rows_kernel.
template <class E, Op kOp, int kVectors, int kEach, bool kAligned>
__global__ void __launch_bounds__(32 * kSpreadWarps)
    team_rows_kernel(const __grid_constant__ ShortParameters<typename E::Acc> p) {
  using P = Softmax<E, false>;
  using Acc = typename E::Acc;
  using Bits = typename E::Bits;
  constexpr int kWidth = Held<P, 1, true>::kWidth, kBeside = kVectors / kEach;
  const auto args = args_of<P, kOp>(p);
  constexpr int kBesideBits = kBeside == 8 ? 3 : kBeside == 4 ? 2 : kBeside - 1;
  const int bits = p.lane_bits + kBesideBits, lanes = 1 << bits;
  const int u = threadIdx.x & (lanes - 1), apart = lanes * kWidth;
  const int64_t outer = int64_t{blockIdx.x} * (blockDim.x >> bits) + (threadIdx.x >> bits);
  const int left = outer < p.rows ? p.length - u * kWidth : 0;
  const int64_t at = outer * p.length + u * kWidth;
  Held<P, 1, true> unit[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    unit[j].raw[0][0] =
        load_short<P, kAligned>(static_cast<const Bits*>(p.x) + at + j * apart, left - j * apart, P::pad(args, 0));

  Acc peak = unit[0].peak(args), part[kEach];
#pragma unroll
  for (int j = 1; j < kEach; ++j) peak = P::larger(peak, unit[j].peak(args));
  peak = bits == 5 ? peak_of_warp<P>(peak) : row_engine::merged_peak<P>(peak, 0, bits);
#pragma unroll
  for (int j = 0; j < kEach; ++j) part[j] = sum_and_keep<P>(args, 0, unit[j], peak);
  Acc sum = part[0];
  if constexpr (kBeside == 1) {
#pragma unroll
    for (int j = 1; j < kEach; ++j) sum = sum + part[j];
  } else {
    const int slot = threadIdx.x & ((31 & -lanes) | ((1 << p.lane_bits) - 1));
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      Acc next[kBeside];
#pragma unroll
      for (int v = 0; v < kBeside; ++v) next[v] = shuffle_from(part[j], slot + (v << p.lane_bits));
#pragma unroll
      for (int v = 0; v < kBeside; ++v) sum = j + v == 0 ? next[0] : sum + next[v];
    }
  }
  const Stat<P> stat = {peak, merged_sum(sum, 0, p.lane_bits)};
  if (left <= 0) return;
  const auto final = P::finish(args, {}, stat);
  if constexpr (kOp == Op::kLogSumExp) {
    if (u == 0) P::write_row(args, outer, {}, final);
  } else {
    store_short<P, kAligned>(args, final, peak, unit, static_cast<Bits*>(p.out) + at, left, apart);
  }
}

// Shared memory of a block of `warps` warps; then the sums of all vectors, then, if rows are not aligned, vectors.
template <class P>
struct BlockShared {
  typename P::Acc peaks[kMaxBlockWarps], of_spans[kMaxBlockWarps];
  Stat<P> stats[kMaxBlockWarps];
};
template <class P>
__host__ __device__ constexpr int64_t stage_at(int warps, int each) {
  return (sizeof(BlockShared<P>) + int64_t{32} * warps * each * sizeof(typename P::Acc) + 15) / 16 * 16;
}
// Whether lanes store rows that are not aligned one element after the other: a warp first puts its vectors side by side
// in shared memory, so that its stores cover whole sectors.
template <class P, bool kAligned, int kEach>
constexpr bool kStagesShort =
    !kAligned && (sizeof(typename P::Bits) == 2 || (sizeof(typename P::Bits) == 4 && kEach == 2));

// A lane has kEach vectors, side by side in the order of the warps.
template <class E, Op kOp, int kEach, bool kAligned>
__global__ void __launch_bounds__(32 * kMaxBlockWarps)
    block_rows_kernel(const __grid_constant__ ShortParameters<typename E::Acc> p) {
  using P = Softmax<E, false>;
  using Acc = typename E::Acc;
  using Bits = typename E::Bits;
  constexpr int kWidth = Held<P, 1, true>::kWidth, kApart = 32 * kWidth, kMostVectors = 8;
  const auto args = args_of<P, kOp>(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, vectors = blockDim.x * kEach;
  const int first = (warp * 32 * kEach + lane) * kWidth, left = p.length - first;
  const int64_t at = int64_t{blockIdx.x} * p.length + first;
  Held<P, 1, true> unit[kEach];
  const int64_t of_warp = at - lane * kWidth;
  const int left_of_warp = max(left + lane * kWidth, 0);
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    unit[j].raw[0][0] =
        load_short<P, kAligned>(static_cast<const Bits*>(p.x) + at + j * kApart, left - j * kApart, P::pad(args, 0));

  auto& shared = *reinterpret_cast<BlockShared<P>*>(dynamic_shared_memory());
  auto* const sums = reinterpret_cast<Acc*>(dynamic_shared_memory() + sizeof(BlockShared<P>));
  Acc peak = unit[0].peak(args);
  if constexpr (kEach == 2) peak = P::larger(peak, unit[1].peak(args));
  peak = peak_of_warp<P>(peak);
  if (lane == 0) shared.peaks[warp] = peak;
  __syncthreads();
  // The peak of the span, which 2^span_bits warps have.
  const int span_bits = p.vector_bits - (kEach - 1), span = warp >> span_bits, begin = span << span_bits;
  peak = peak_of_warp<P>(shared.peaks[min(begin + (lane & ((1 << span_bits) - 1)), warps - 1)]);
  if (lane == 0 && begin == warp) shared.of_spans[span] = peak;
#pragma unroll
  for (int j = 0; j < kEach; ++j) sums[(warp * kEach + j) * 32 + lane] = sum_and_keep<P>(args, 0, unit[j], peak);
  __syncthreads();

  const int lanes = 1 << p.lane_bits;
  const auto sum_of = [&](int span) {
    const int begin = (span << p.vector_bits) * 32 + (lane & (lanes - 1));
    Acc next[kMostVectors];
#pragma unroll
    for (int v = 0; v < kMostVectors; ++v) {
      const bool exists = v < 1 << p.vector_bits && begin + v * lanes < vectors;
      next[v] = exists ? sums[begin + v * lanes] : Acc(0);
    }
    Acc sum = next[0];
#pragma unroll
    for (int v = 1; v < kMostVectors; ++v) sum = sum + next[v];
    return merged_sum(merged_sum(sum, 0, 3), 3, p.lane_bits);  // rows of a block take at least eight lanes
  };
  Stat<P> stat;
  if (p.spans == 1) {
    stat = {peak, sum_of(0)};
  } else {
    if (warp < p.spans) {
      const Acc sum = sum_of(warp);
      if (lane == 0) shared.stats[warp] = {shared.of_spans[warp], sum};
    }
    __syncthreads();
    // Merges in the order of merge_by_warp().
    const Stat<P> of_span = lane < p.spans ? shared.stats[lane] : Stat<P>::none();
    Stat<P> mine = {of_span.peak(), Acc(0)};
    add_stat<P>(mine, of_span, P::guard(mine.peak()));
    stat = row_engine::merge_lanes<P>(mine);
  }
  const auto final = P::finish(args, {}, stat);
  if constexpr (kOp == Op::kLogSumExp) {
    if (threadIdx.x == 0) P::write_row(args, blockIdx.x, {}, final);
  } else if constexpr (kStagesShort<P, kAligned, kEach>) {
    auto* const stage =
        reinterpret_cast<Pack*>(dynamic_shared_memory() + stage_at<P>(warps, kEach)) + warp * 32 * kEach;
    store_short<P, true>(args, final, peak, unit, reinterpret_cast<Bits*>(stage + lane), left, kApart);
    __syncwarp();
    const int end = min(left_of_warp, kEach * kApart);
    Bits* const to = static_cast<Bits*>(p.out) + of_warp;
#pragma unroll 8
    for (int e = lane; e < end; e += 32) to[e] = reinterpret_cast<const Bits*>(stage)[e];
  } else {
    store_short<P, kAligned>(args, final, peak, unit, static_cast<Bits*>(p.out) + at, left, kApart);
  }
}

template <class E, Op kOp>
cudaError_t launch_op(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  using P = Softmax<E, false>;
  using Acc = typename E::Acc;
  using Kernel = void (*)(ShortParameters<Acc>);
  ShortParameters<Acc> p = {};
  p.x = buffers.x;
  p.out = kOp == Op::kLogSumExp ? buffers.lse : buffers.out;
  p.rows = problem.rows.outer;
  p.length = static_cast<int>(problem.rows.length);
  p.lane_bits = plan.lane_bits;
  p.vector_bits = bits_for(plan.vectors);
  p.spans = static_cast<int>(plan.spans);
  p.factor = static_cast<Acc>(problem.factor);
  p.maximum = static_cast<Acc*>(buffers.maximum);
  p.log_sum = static_cast<Acc*>(buffers.log_sum);
  const auto past_vector = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  const bool aligned = past_vector(p.x) == 0 && (kOp == Op::kLogSumExp || past_vector(p.out) == 0) &&
                       problem.rows.length * sizeof(typename P::Bits) % 16 == 0;
  const auto pick = [&](Kernel whole, Kernel loose) { return aligned ? whole : loose; };
  Launch launched;
  launched.block = dim3(plan.threads());
  int64_t blocks = p.rows;
  Kernel kernel = nullptr;
  if (plan.wide) {
    const auto bytes = [&](int each) {
      return stage_at<P>(plan.block_warps, each) + (kStagesShort<P, false, 2> ? plan.threads() * each * 16 : 0);
    };
    launched.shared_bytes = bytes(plan.wide);
    kernel = plan.wide == 1 ? pick(block_rows_kernel<E, kOp, 1, true>, block_rows_kernel<E, kOp, 1, false>)
                            : pick(block_rows_kernel<E, kOp, 2, true>, block_rows_kernel<E, kOp, 2, false>);
  } else {
    const int64_t teams = plan.threads() >> (p.lane_bits + bits_for(plan.vectors / plan.each));
    blocks = (p.rows + teams - 1) / teams;
    const auto team = [&](auto vectors, auto each) {
      constexpr int kVectors = decltype(vectors)::value, kEach = decltype(each)::value;
      if (plan.vectors == kVectors && plan.each == kEach)
        kernel =
            pick(team_rows_kernel<E, kOp, kVectors, kEach, true>, team_rows_kernel<E, kOp, kVectors, kEach, false>);
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, 4> four;
    team(one, one);
    team(four, one);
    team(four, two);
    team(four, four);
    if constexpr (kOp == Op::kLogSumExp) team(std::integral_constant<int, 8>(), two);
  }
  if (!kernel || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  return launch(stream, launched, kernel, p);
}

}  // namespace

cudaError_t launch_short(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    return with_op(problem.op, [&](auto op) {
      return launch_op<decltype(element), decltype(op)::value>(stream, plan, problem, buffers);
    });
  });
}

}  // namespace jaxgpuops::softmax
