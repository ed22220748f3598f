// Gradients of softmax and log_softmax from x and the cotangent, as in gradient.cu, of rows that are not whole vectors:
// in words, as loose_rows.cuh makes the results. Both arrays are read once, and the gradient is written once.
//
// The forward result has the bits of loose_rows_kernel, and is rounded as it would be in memory.
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/cuda/loose_rows.cuh"
#include "softmax/cuda/single.h"

namespace jaxgpuops::softmax {
namespace {

struct LooseGradientParameters {
  const void *x, *cotangent;
  void* out;
  int64_t rows;
  int length, groups;  // groups of warps that share a span
};

template <class P, class Q, Op op, int kUnits, bool kAlone>
__global__ void __launch_bounds__(LooseRow<P, kUnits, kAlone>::kMostThreads)
    loose_gradient_kernel(const __grid_constant__ LooseGradientParameters p) {
  using E = typename P::Element;
  using Bits = typename E::Bits;
  using Row = LooseRow<P, kUnits, kAlone>;
  constexpr bool kKept = op == Op::kSoftmax && sizeof(Bits) == 2;  // as in GivenOp
  __shared__ typename Row::Shared shared[1 + Q::kSums];
  const Row row(p.length, p.groups);
  if (kAlone && row.index >= p.rows) return;
  const auto args = forward_args<P>(op);
  typename Row::Words x, cotangent, y;
  row.load(static_cast<const Bits*>(p.x), P::pad(args, 0), x);
  row.load(static_cast<const Bits*>(p.cotangent), Bits{}, cotangent);

  float value[Row::kWords][Row::kOfWord];
  row.for_each([&](int i, int e) { value[i][e] = P::value(args, row.get(x, i, e)); });
  Stat<P> stat;
  stat.of[0] = row.peak(shared[0], value);
  const auto shift = P::guard(stat.peak());
  stat.sum(0) = row.sum(shared[0], [&](int i, int e) {
    const float summand = P::add(args, 0, 0.0f, value[i][e], 0.0f, shift);
    if constexpr (kKept) value[i][e] = summand;
    return summand;
  });
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, stat);
  const auto result = [&](int i, int e) {
    if constexpr (kKept) return rounded_product(value[i][e], final.sum);
    return P::output(args, plain, final, value[i][e], 0.0f);
  };
#pragma unroll
  for (int i = 0; i < Row::kWords; ++i) y[i] = Row::word_of([&](int e) { return result(i, e); });

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
    Stat<Q> sums;
#pragma unroll
    for (int k = 0; k < Q::kSums; ++k)
      sums.sum(k) = row.sum(shared[1 + k], [&](int i, int e) {
        return Q::add(known, k, 0.0f, row.get(cotangent, i, e), row.get(y, i, e), 0.0f);
      });
    const auto total = Q::finish(known, unscaled, sums);
    row.store(static_cast<Bits*>(p.out), [&](int i) {
      return Row::word_of(
          [&](int e) { return Q::output(known, unscaled, total, row.get(cotangent, i, e), row.get(y, i, e)); });
    });
  });
}

}  // namespace

cudaError_t launch_loose_gradient(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) -> cudaError_t {
    using E = decltype(element);
    using P = Softmax<E, false>;
    if constexpr (sizeof(typename P::Bits) > 4) {
      return cudaErrorInvalidValue;
    } else {
      const LooseGradientParameters p = {
          buffers.y, buffers.x, buffers.out, problem.rows.outer, static_cast<int>(problem.rows.length), plan.wide};
      return launch_loose_kernel(stream, plan, problem, p, [&](auto units, auto alone) {
        constexpr int kUnits = decltype(units)::value;
        constexpr bool kAlone = decltype(alone)::value;
        return problem.op == Op::kSoftmaxJvp
                   ? loose_gradient_kernel<P, SoftmaxTangent<E>, Op::kSoftmax, kUnits, kAlone>
                   : loose_gradient_kernel<P, LogSoftmaxTangent<E, false>, Op::kLogSoftmax, kUnits, kAlone>;
      });
    }
  });
}

}  // namespace jaxgpuops::softmax
