// Gradients of softmax and log_softmax from x and the cotangent, as in gradient.cu, along axes of up to 24 positions
// that are not the last (16 of float64): a lane has one column (two of 16 bits, 32 apart) in registers. Both arrays are
// read once, all loads of a lane together, and the gradient is written once. Positions need not be aligned.
//
// If there are few columns, each position has a lane (common/cuda/small.cuh says why), and lanes read those of others.
//
// Along longer axes, several warps share 32 columns: warp w of `warps` has the positions w, w + warps, .. of them in
// registers, and warps exchange statistics by shared memory.
//
// The forward result is rounded as it would be in memory. A lane adds up its positions from the first to the last; then
// the sums of warps are added up, in their order.
#include "softmax/cuda/gradient_columns.h"

#include "common/cuda/small.cuh"
#include "softmax/cuda/dispatch.cuh"
#include "softmax/cuda/gradient_args.cuh"
#include "softmax/plan.h"

namespace jaxgpuops::softmax {
namespace {

struct ColumnParameters {
  const void *x, *cotangent;
  void* out;
  int64_t columns, inner;
  int length;
};

template <class P, class Q, Op op, int kMost>
__global__ void __launch_bounds__(32 * kPartWarps) columns_gradient_kernel(const __grid_constant__ ColumnParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kColumns = columns_of_lane(sizeof(Bits), kMost);
  const int64_t warp = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  int64_t at[kColumns];
  bool exists[kColumns];
  Bits x[kMost][kColumns], cotangent[kMost][kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int64_t column = (warp * kColumns + c) * 32 + threadIdx.x % 32;
    exists[c] = column < p.columns;
    const int64_t own = exists[c] ? column : p.columns - 1;
    const int64_t outer =
        p.columns <= UINT32_MAX ? static_cast<uint32_t>(own) / static_cast<uint32_t>(p.inner) : own / p.inner;
    at[c] = outer * p.length * p.inner + (own - outer * p.inner);
  }
#pragma unroll
  for (int j = 0; j < kMost; ++j)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (j >= p.length) continue;
      x[j][c] = static_cast<const Bits*>(p.x)[at[c] + j * p.inner];
      cotangent[j][c] = static_cast<const Bits*>(p.cotangent)[at[c] + j * p.inner];
    }

  const auto args = forward_args<P>(op);
  const typename P::Row plain = {1};
  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Stat<P> stat = Stat<P>::none();
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < p.length) stat.of[0] = P::larger(stat.peak(), P::value(args, Element::load(x[j][c])));
      const auto shift = P::guard(stat.peak());
      stat.sum(0) = Acc(0);
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < p.length)
          stat.sum(0) = P::add(args, 0, stat.sum(0), P::value(args, Element::load(x[j][c])), Acc(0), shift);
      const auto final = P::finish(args, plain, stat);
      Stat<Q> sums;
#pragma unroll
      for (int k = 0; k < Q::kSums; ++k) sums.sum(k) = Acc(0);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (j >= p.length) continue;
        x[j][c] = Element::store(P::output(args, plain, final, P::value(args, Element::load(x[j][c])), Acc(0)));
#pragma unroll
        for (int k = 0; k < Q::kSums; ++k)
          sums.sum(k) = Q::add(known, k, sums.sum(k), Element::load(cotangent[j][c]), Element::load(x[j][c]), Acc(0));
      }
      const auto total = Q::finish(known, unscaled, sums);
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < p.length && exists[c])
          static_cast<Bits*>(p.out)[at[c] + j * p.inner] =
              Element::store(Q::output(known, unscaled, total, Element::load(cotangent[j][c]), Element::load(x[j][c])));
    }
  });
}

struct SharedColumnParameters {
  const void *x, *cotangent;
  void* out;
  int64_t columns, inner;
  int length, warps, strip_bits;  // warps that share a strip of 32 columns; 2^strip_bits strips of a block
};

// kMost: the most positions of a lane.
template <class P, class Q, Op op, int kMost>
__global__ void __launch_bounds__(32 * kMaxBlockWarps)
    shared_columns_gradient_kernel(const __grid_constant__ SharedColumnParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  // Results are multiples of what is added up, but for those of float32, which need more accurate exponentials.
  constexpr bool kKept = op == Op::kSoftmax && sizeof(Bits) == 8;
  const int beside = 32 << p.strip_bits, first = threadIdx.x >> (5 + p.strip_bits), lane = threadIdx.x & (beside - 1);
  const int64_t column = int64_t{blockIdx.x} * beside + lane, own = min(column, p.columns - 1);
  const int64_t outer =
      p.columns <= UINT32_MAX ? static_cast<uint32_t>(own) / static_cast<uint32_t>(p.inner) : own / p.inner;
  const int64_t at = (outer * p.length + first) * p.inner + (own - outer * p.inner), apart = p.warps * p.inner;
  const int mine = (p.length - first + p.warps - 1) / p.warps;  // positions of this warp
  Bits x[kMost], cotangent[kMost];
  const Bits *from = static_cast<const Bits*>(p.x) + at, *from_cotangent = static_cast<const Bits*>(p.cotangent) + at;
#pragma unroll
  for (int j = 0; j < kMost; ++j)
    if (j < mine) {
      x[j] = *from;
      cotangent[j] = *from_cotangent;
      from += apart;
      from_cotangent += apart;
    }

  // Merges what the warps of a column have. `slot` tells calls apart, so that no warp waits before it writes.
  auto* const of_warps = reinterpret_cast<Acc*>(dynamic_shared_memory());
  const auto put = [&](int slot, Acc value) { of_warps[slot * blockDim.x + threadIdx.x] = value; };
  const auto merged = [&](int slot, auto merge) {
    const Acc* const of_column = &of_warps[slot * blockDim.x + lane];
    Acc all = of_column[0];
#pragma unroll 4
    for (int w = 1; w < p.warps; ++w) all = merge(all, of_column[w * beside]);
    return all;
  };
  const auto add = [](Acc a, Acc b) { return a + b; };

  const auto args = forward_args<P>(op);
  const typename P::Row plain = {1};
  const auto value = [&](int j) { return P::value(args, Element::load(x[j])); };
  Stat<P> stat = Stat<P>::none();
#pragma unroll
  for (int j = 0; j < kMost; ++j)
    if (j < mine) stat.of[0] = P::larger(stat.peak(), value(j));
  put(0, stat.peak());
  __syncthreads();
  stat.of[0] = merged(0, [](Acc a, Acc b) { return P::larger(a, b); });
  const auto shift = P::guard(stat.peak());
  stat.sum(0) = Acc(0);
#pragma unroll
  for (int j = 0; j < kMost; ++j)
    if (j < mine) {
      if constexpr (kKept) {
        const Acc summand = P::add(args, 0, Acc(0), value(j), Acc(0), shift);
        x[j] = Element::store(summand);
        stat.sum(0) += summand;
      } else {
        stat.sum(0) = P::add(args, 0, stat.sum(0), value(j), Acc(0), shift);
      }
    }
  put(1, stat.sum(0));
  __syncthreads();
  stat.sum(0) = merged(1, add);
  const auto final = P::finish(args, plain, stat);

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
    Stat<Q> sums = {};
    const auto add_up = [&](int k, auto term) {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < mine) sums.sum(k) = term(sums.sum(k), Element::load(cotangent[j]), Element::load(x[j]));
      put(2 + k, sums.sum(k));
    };
#pragma unroll
    for (int j = 0; j < kMost; ++j)
      if (j < mine)
        x[j] = Element::store(kKept ? rounded_product(Element::load(x[j]), final.sum)
                                    : P::output(args, plain, final, value(j), Acc(0)));
    // Only columns with a likely element (see Tangent) need the sums after the first. -0.3 is below log(0.75).
    bool likely = false;
    if constexpr (Q::kTails) {
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (j < mine) likely |= Element::load(x[j]) > (op == Op::kSoftmax ? Acc(0.75) : Acc(-0.3));
    }
    add_up(0, [&](Acc sum, Acc t, Acc y) {
      if (op == Op::kLogSoftmax) return sum + t;
      return y == 0 ? sum : fused_multiply_add(y, t, sum);
    });
    if (__syncthreads_or(likely)) {
#pragma unroll
      for (int k = 0; k < Q::kSums; ++k) {
        sums.sum(k) = Acc(0);
        add_up(k, [&](Acc sum, Acc t, Acc y) { return Q::add(known, k, sum, t, y, Acc(0)); });
      }
      __syncthreads();
#pragma unroll
      for (int k = 1; k < Q::kSums; ++k) sums.sum(k) = merged(2 + k, add);
    }
    sums.sum(0) = merged(2, add);
    const auto total = Q::finish(known, unscaled, sums);
    Bits* to = static_cast<Bits*>(p.out) + at;
#pragma unroll
    for (int j = 0; j < kMost; ++j)
      if (j < mine) {
        const Acc result = Q::output(known, unscaled, total, Element::load(cotangent[j]), Element::load(x[j]));
        if (column < p.columns) *to = Element::store(result);
        to += apart;
      }
  });
}

struct SmallColumnParameters {
  const void *x, *cotangent;
  void* out;
  SmallColumns columns;
};

// A warp has 2^column_bits columns beside each other; the other bits of a lane are the position.
template <class P, class Q, Op op>
__global__ void __launch_bounds__(32 * kGradientWarps)
    small_columns_gradient_kernel(const __grid_constant__ SmallColumnParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  const SmallColumns& c = p.columns;
  const uint32_t lane = threadIdx.x % 32, beside = once(1u << c.column_bits), first = once(lane & (beside - 1));
  const uint32_t own = ((blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) << c.column_bits) + first;
  const uint32_t column = once(min(own, c.columns - 1)), position = lane >> c.column_bits;
  const uint32_t at = once((c.outer_of(column) * (c.length - 1) + position) * c.inner + column);
  const uint32_t end = once((c.length << c.column_bits) + first);  // lanes of the column are first, first + beside, ..
  const bool there = position < c.length;
  const auto args = forward_args<P>(op);
  const Acc x = P::value(args, Element::load(there ? static_cast<const Bits*>(p.x)[at] : P::pad(args, 0)));
  const Acc cotangent = Element::load(there ? static_cast<const Bits*>(p.cotangent)[at] : Bits{});
  const auto each = [&](auto add) {
    Acc sum = Acc(0);
#pragma unroll 4
    for (uint32_t from = first; from < end; from += beside) sum = add(sum, from);
    return sum;
  };

  Stat<P> stat = Stat<P>::none();
  stat.of[0] = x;
#pragma unroll 1
  for (uint32_t d = beside; d < 32; d *= 2) stat.of[0] = P::larger(stat.peak(), shuffle_xor(stat.peak(), d));
  const Acc summand = P::add(args, 0, Acc(0), x, Acc(0), P::guard(stat.peak()));
  stat.sum(0) = each([&](Acc sum, uint32_t from) { return sum + shuffle_from(summand, from); });
  const typename P::Row plain = {1};
  const Acc y = Element::load(Element::store(P::output(args, plain, P::finish(args, plain, stat), x, Acc(0))));

  const auto of_result = backward_args<Q>();
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
    Stat<Q> sums;
#pragma unroll
    for (int k = 0; k < Q::kSums; ++k) {
      if constexpr (op == Op::kSoftmax) {  // a product is not rounded before it is added
        sums.sum(k) = each([&](Acc sum, uint32_t from) {
          return Q::add(known, k, sum, shuffle_from(cotangent, from), shuffle_from(y, from), Acc(0));
        });
      } else {
        const Acc mine = Q::add(known, k, Acc(0), cotangent, y, Acc(0));
        sums.sum(k) = each([&](Acc sum, uint32_t from) { return sum + shuffle_from(mine, from); });
      }
    }
    if (there && own == column)
      static_cast<Bits*>(p.out)[at] =
          Element::store(Q::output(known, unscaled, Q::finish(known, unscaled, sums), cotangent, y));
  });
}

template <class P, class Q, Op op>
cudaError_t launch_kernel(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.algorithm == RowAlgorithm::kSmall) {
    const SmallColumnParameters p = {buffers.y, buffers.x, buffers.out,
                                     SmallColumns(problem.rows, plan.column_lane_bits, 0)};
    const int64_t of_block = int64_t{plan.block_warps} << plan.column_lane_bits;
    Launch launched;
    launched.grid = dim3(static_cast<unsigned>((problem.rows.count() + of_block - 1) / of_block));
    launched.block = dim3(plan.threads());
    return launch(stream, launched, small_columns_gradient_kernel<P, Q, op>, p);
  }
  if (plan.axis_warps > 1) {
    using Acc = typename P::Acc;
    constexpr int kMost = shared_positions(sizeof(typename P::Bits));
    const int64_t of_block = int64_t{32} << plan.column_warp_bits;
    const int64_t blocks = (problem.rows.count() + of_block - 1) / of_block;
    if (blocks > INT32_MAX || problem.rows.length > kMost * plan.axis_warps) return cudaErrorInvalidConfiguration;
    const SharedColumnParameters p = {buffers.y,          buffers.x,
                                      buffers.out,        problem.rows.count(),
                                      problem.rows.inner, static_cast<int>(problem.rows.length),
                                      plan.axis_warps,    plan.column_warp_bits};
    Launch launched;
    launched.grid = dim3(static_cast<unsigned>(blocks));
    launched.block = dim3(plan.threads());
    launched.shared_bytes = plan.threads() * static_cast<int64_t>(sizeof(Acc)) * (2 + Q::kSums);
    return launch(stream, launched, shared_columns_gradient_kernel<P, Q, op, kMost>, p);
  }
  const int64_t of_block = int64_t{plan.threads()} * columns_of_lane(plan.traits.item_bytes, problem.rows.length);
  const int64_t columns = problem.rows.count(), blocks = (columns + of_block - 1) / of_block;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const ColumnParameters p = {buffers.y, buffers.x,          buffers.out,
                              columns,   problem.rows.inner, static_cast<int>(problem.rows.length)};
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  launched.block = dim3(plan.threads());
  if (p.length <= 4) return launch(stream, launched, columns_gradient_kernel<P, Q, op, 4>, p);
  if (p.length <= 8) return launch(stream, launched, columns_gradient_kernel<P, Q, op, 8>, p);
  if (p.length <= 16) return launch(stream, launched, columns_gradient_kernel<P, Q, op, 16>, p);
  if constexpr (sizeof(typename P::Element::Bits) < 8) {
    if (p.length <= 24) return launch(stream, launched, columns_gradient_kernel<P, Q, op, 24>, p);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_gradient_of_columns(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                       const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using E = decltype(element);
    using P = Softmax<E, false>;
    if (problem.op == Op::kSoftmaxJvp)
      return launch_kernel<P, SoftmaxTangent<E>, Op::kSoftmax>(stream, plan, problem, buffers);
    return launch_kernel<P, LogSoftmaxTangent<E, false>, Op::kLogSoftmax>(stream, plan, problem, buffers);
  });
}

}  // namespace jaxgpuops::softmax
