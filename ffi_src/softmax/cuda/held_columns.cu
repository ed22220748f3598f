// Few columns side by side (inner > 1) along an axis of middle length, of softmax, log_softmax and logsumexp: a block
// holds an outer index in registers. Element e of it belongs to chain e % `chains`, which is a multiple of inner, so a
// chain stays with one column; a thread has a chain, and a team of 2^team_bits lanes merges the chains of a column. So
// the order of additions follows from the length and inner. One read and one write, of single elements, wherever they
// begin. Works on any GPU.
#include "softmax/cuda/single.h"

#include "common/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {
namespace {

constexpr int kMostThreads = 1024, kMostColumns = 128;

template <class P>
struct HeldParameters {
  const void* x;
  void* out;  // kLogSumExp: where the result goes; null if its two summands are asked for
  uint32_t size, inner, chains;
  int team_bits;
  typename P::Acc factor;
  typename P::Acc *maximum, *log_sum;
};

template <class E, Op kOp, int kEach>
__global__ void __launch_bounds__(kMostThreads)
    held_columns_kernel(const __grid_constant__ HeldParameters<Softmax<E, false>> p) {
  using P = Softmax<E, false>;
  using Acc = typename E::Acc;
  using Bits = typename E::Bits;
  // Results are multiples of what is added up, but for those of float32, which need more accurate exponentials.
  constexpr bool kKept = kOp == Op::kSoftmax && sizeof(Bits) != 4;
  typename P::Args args = {};
  args.op = kOp;
  args.scale.factor = p.factor;
  if constexpr (kOp == Op::kLogSumExp) {
    args.lse = static_cast<Bits*>(p.out);
    args.maximum = p.maximum;
    args.log_sum = p.log_sum;
  }
  __shared__ Acc of_chains[kMostThreads], peaks[kMostColumns];
  __shared__ typename P::Final finals[kMostColumns];
  const uint32_t size = once(p.size), chains = once(p.chains), inner = once(p.inner), chain = threadIdx.x;
  const uint32_t column = chain % inner, end = chain < chains ? size : 0;
  const Bits* const from = static_cast<const Bits*>(p.x) + uint64_t{blockIdx.x} * size + chain;
  Bits raw[kEach];
#pragma unroll
  for (uint32_t k = 0; k < kEach; ++k) raw[k] = chain + k * chains < end ? from[k * chains] : P::pad(args, 0);
  Acc value[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) value[k] = P::value(args, E::load(raw[k]));

  // Calls f(column, merged) with one lane for each column, where merge(a, b) has merged the numbers of its chains.
  const uint32_t team = 1u << p.team_bits, mine = threadIdx.x >> p.team_bits, lane = threadIdx.x & (team - 1);
  const auto merged = [&](Acc of_chain, Acc none, auto merge, auto f) {
    of_chains[chain] = of_chain;
    __syncthreads();
    Acc all = none;
    if (mine < inner) {
#pragma unroll 4
      for (uint32_t at = mine + lane * inner; at < chains; at += inner << p.team_bits) all = merge(all, of_chains[at]);
    }
#pragma unroll 1
    for (uint32_t d = 1; d < team; d *= 2) all = merge(all, shuffle_xor(all, d));
    if (mine < inner && lane == 0) f(mine, all);
    __syncthreads();
  };
  Acc peak = value[0];
#pragma unroll
  for (int k = 1; k < kEach; ++k) peak = P::larger(peak, value[k]);
  merged(peak, P::lowest(), [](Acc a, Acc b) { return P::larger(a, b); }, [&](uint32_t c, Acc all) { peaks[c] = all; });
  const auto shift = P::guard(peaks[column]);
  Acc sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const Acc summand = P::add(args, 0, Acc(0), value[k], Acc(0), shift);
    sum = k == 0 ? summand : sum + summand;
    if constexpr (kKept) value[k] = summand;
  }
  merged(
      sum, Acc(0), [](Acc a, Acc b) { return a + b; },
      [&](uint32_t c, Acc all) {
        const auto final = P::finish(args, {}, Stat<P>{peaks[c], all});
        if constexpr (kOp == Op::kLogSumExp) {
          P::write_row(args, uint64_t{blockIdx.x} * inner + c, {}, final);
        } else {
          finals[c] = final;
        }
      });
  if constexpr (kOp != Op::kLogSumExp) {
    const auto final = finals[column];
    Bits* const to = static_cast<Bits*>(p.out) + uint64_t{blockIdx.x} * size + chain;
    P::with_args(args, [&](const auto& known) {
#pragma unroll
      for (uint32_t k = 0; k < kEach; ++k) {
        const Acc result = kKept ? rounded_product(value[k], final.sum) : P::output(known, {}, final, value[k], Acc(0));
        if (chain + k * chains < end) to[k * chains] = E::store(result);
      }
    });
  }
}

template <class E, Op kOp>
cudaError_t launch_op(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  using P = Softmax<E, false>;
  const Rows& rows = problem.rows;
  HeldParameters<P> p = {};
  p.x = buffers.x;
  p.out = kOp == Op::kLogSumExp ? buffers.lse : buffers.out;
  p.size = static_cast<uint32_t>(rows.length * rows.inner);
  p.inner = static_cast<uint32_t>(rows.inner);
  p.chains = static_cast<uint32_t>(plan.part_length);
  p.team_bits = plan.lane_bits;
  p.factor = static_cast<typename P::Acc>(problem.factor);
  p.maximum = static_cast<typename P::Acc*>(buffers.maximum);
  p.log_sum = static_cast<typename P::Acc*>(buffers.log_sum);
  const auto kernel = plan.each == 8 ? held_columns_kernel<E, kOp, 8> : held_columns_kernel<E, kOp, 16>;
  if (rows.outer > INT32_MAX || plan.each * plan.part_length < p.size || plan.each > 16)
    return cudaErrorInvalidConfiguration;
  return launch(stream, {dim3(static_cast<unsigned>(rows.outer)), dim3(plan.threads())}, kernel, p);
}

}  // namespace

cudaError_t launch_held_columns(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    return with_op(problem.op, [&](auto op) {
      return launch_op<decltype(element), decltype(op)::value>(stream, plan, problem, buffers);
    });
  });
}

}  // namespace jaxgpuops::softmax
