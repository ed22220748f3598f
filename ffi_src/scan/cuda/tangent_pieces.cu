// Gradients of cumulative products, extremes and logsumexps of few elements along longer columns: a block has some
// whole columns, as in pieces.cuh. Without y, it makes the forward result of x first, which stays in shared memory.
// Operands are read once, results written once.
//
// Both scans fold in the order of the kernels for more elements (pieces.cuh), so the bits are those of two kernels.
#include <cstdint>

#include "common/cuda/dispatch.cuh"
#include "common/cuda/small.cuh"
#include "common/rounding.h"
#include "scan/cuda/algorithms.cuh"
#include "scan/cuda/folds.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {
namespace {

// The order in which a scan folds columns (PieceParameters).
struct PieceOrder {
  uint32_t run, runs, slots, groups, of_tile, tiles;
  Quotient of_runs, tile_of;
};

struct TangentPieces {
  const void *t, *x, *y;  // no y: it is made of x
  void* out;
  uint32_t columns, length, inner;
  int column_bits;
  uint32_t stride, pad_shift;  // as in PieceParameters
  bool backward;               // of the forward scan
  Quotient of_inner;
  PieceOrder forward, gradient;
  Options options;
};

// Calls fold(column, first position, count), which returns the fold of a run, and then step(column, first position,
// count, state) with the fold of what comes before the run.
template <class Policy, class Fold, class Step>
__device__ __forceinline__ void scan_runs(const PieceOrder& q, uint32_t length, int column_bits,
                                          unsigned char* exchange, const Options& o, Fold fold, Step step) {
  using State = typename Policy::State;
  const State none = Policy::identity(o);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 1u << column_bits;
  State* const totals = reinterpret_cast<State*>(exchange);  // of groups
  State* const sums = totals + width * q.groups;             // of all tiles up to and including one
  const uint32_t part = q.of_runs(lane), r = lane - part * q.runs, slot = warp * q.slots + part;
  const uint32_t g = once(slot >> column_bits), c = once(slot & (width - 1));
  const bool active = part < q.slots && g < q.groups;
  const uint32_t first = (g * q.runs + r) * q.run;
  const int count = active ? static_cast<int>(min(q.run, max(length, first) - first)) : 0;
  State inclusive = none;
  if (count > 0) inclusive = fold(c, first, count);
#pragma unroll 1
  for (uint32_t d = 1; d < q.runs; d *= 2) {
    const State left = shuffle_up(inclusive, d);
    if (r >= d) inclusive = Policy::combine(left, inclusive, o);
  }
  State before = shuffle_up(inclusive, 1);
  if (r == 0) before = none;
  if (active && r == q.runs - 1) totals[c * q.groups + g] = inclusive;
  __syncthreads();
  if (q.tiles > 1) {
#pragma unroll 1
    for (uint32_t c = warp; c < width; c += blockDim.x / 32) {
      State sum = none;
#pragma unroll 1
      for (uint32_t g = lane * q.of_tile; g < min((lane + 1) * q.of_tile, q.groups); ++g)
        sum = Policy::combine(sum, totals[c * q.groups + g], o);
      sum = scan_group<Policy>(o, sum);
      if (lane < q.tiles) sums[c * q.tiles + lane] = sum;
    }
    __syncthreads();
  }
  if (count > 0) {
    State state = none;
    uint32_t w = 0;
    if (q.tiles > 1) {
      const uint32_t t = q.tile_of(g);
      w = t * q.of_tile;
      if (t > 0) state = Policy::combine(state, Policy::combine(sums[c * q.tiles + t - 1], none, o), o);
    }
    State earlier = none;  // groups of the tile
#pragma unroll 1
    for (; w < g; ++w) earlier = Policy::combine(earlier, totals[c * q.groups + w], o);
    step(c, first, count, Policy::combine(state, Policy::combine(earlier, before, o), o));
  }
  __syncthreads();
}

template <class E, Options::Operator kOp, class Forward>
__global__ void __launch_bounds__(kPieceThreads) scan_tangent_pieces(const __grid_constant__ TangentPieces p) {
  using Gradient = Tangent<AnyWeights<E>>;
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  constexpr uint32_t kMoves = 4;
  // Positions that are taken together: of logsumexps those of the kernels for more elements (spans.cuh). Others fold
  // one after the other anyway, and take few, since most of the time would go into fetching longer code.
  constexpr int kTogether = kOp == Options::kLogSumExp && sizeof(Bits) == 2 ? 8 : 4;
  constexpr int kForward = kByParts<Forward> ? 8 : 4;
  Options o = {};
  o.op = kOp;
  o.sign = p.options.sign;
  o.smaller = p.options.smaller;
  o.transpose = true;
  const uint32_t width = once(1u << p.column_bits), block = blockIdx.x << p.column_bits;  // the first column
  Bits* const ts = reinterpret_cast<Bits*>(dynamic_shared_memory());
  Bits *const xs = ts + width * p.stride, *const ys = xs + width * p.stride;
  unsigned char* const exchange = dynamic_shared_memory() + (3 * width * p.stride * sizeof(Bits) + 15) / 16 * 16;
  const auto placed = [&](uint32_t k) { return k + (k >> p.pad_shift); };

  // A thread moves elements `first`, `first + step`, .. of one column between memory and shared memory, kMoves at a
  // time. Beyond the end of the column it moves the last element again. Shared memory has them in the order of the
  // forward scan.
  const uint32_t step = once(blockDim.x >> p.column_bits), first = threadIdx.x >> p.column_bits;
  const uint32_t moved = threadIdx.x & (width - 1), own = once(min(block + moved, p.columns - 1));
  const uint32_t last = once(p.length - 1), moved_at = once(moved * p.stride);
  const uint32_t stride = once(p.backward ? 0 - p.inner : p.inner);
  const uint32_t at = once((p.of_inner(own) * last + (p.backward ? last : 0)) * p.inner + own);
  const auto each_moved = [&](auto body) {
#pragma unroll 1
    for (uint32_t k = first; k < p.length; k += kMoves * step) {
      uint32_t ks[kMoves];
#pragma unroll
      for (uint32_t i = 0; i < kMoves; ++i) ks[i] = min(k + i * step, last);
      body(ks);
    }
  };
  each_moved([&](const uint32_t (&k)[kMoves]) {
    Bits t[kMoves], x[kMoves], y[kMoves];
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i) {
      t[i] = static_cast<const Bits*>(p.t)[at + k[i] * stride];
      x[i] = static_cast<const Bits*>(p.x)[at + k[i] * stride];
      if (p.y) y[i] = static_cast<const Bits*>(p.y)[at + k[i] * stride];
    }
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i) {
      ts[moved_at + placed(k[i])] = t[i];
      xs[moved_at + placed(k[i])] = x[i];
      if (p.y) ys[moved_at + placed(k[i])] = y[i];
    }
  });
  __syncthreads();

  if (!p.y) {
    const auto fold = [&](uint32_t c, uint32_t first, int count) {
      const auto in = [&](int i) { return In<Acc>{E::load(xs[c * p.stride + placed(first + i)])}; };
      typename Forward::State state = Forward::first(in(0), o);
      int i = 1;
#pragma unroll 1
      for (; i + kForward <= count; i += kForward) {
        In<Acc> some[kForward];
#pragma unroll
        for (int j = 0; j < kForward; ++j) some[j] = in(i + j);
        fold_on<Forward, kForward, true>(state, [&](int j) { return some[j]; }, o);
      }
#pragma unroll 1
      for (; i < count; ++i) Forward::step(state, in(i), o);
      return state;
    };
    const auto over = [&](uint32_t c, uint32_t first, int count, typename Forward::State state) {
      const auto in = [&](int i) { return In<Acc>{E::load(xs[c * p.stride + placed(first + i)])}; };
      const auto put = [&](int i, const Out<Acc>& out) { ys[c * p.stride + placed(first + i)] = E::store(out.first); };
      int i = 0;
#pragma unroll 1
      for (; i + kForward <= count; i += kForward) {
        In<Acc> some[kForward];
        Acc results[kForward];
#pragma unroll
        for (int j = 0; j < kForward; ++j) some[j] = in(i + j);
        step_run<Forward, kForward, true>(
            state, [&](int j) { return some[j]; }, o, [&](int j, const Out<Acc>& out) { results[j] = out.first; });
#pragma unroll
        for (int j = 0; j < kForward; ++j) put(i + j, {results[j], {}});
      }
#pragma unroll 1
      for (; i < count; ++i) put(i, Forward::step(state, in(i), o));
    };
    scan_runs<Forward>(p.forward, p.length, p.column_bits, exchange, o, fold, over);
  }

  // Position q of the gradient's scan is position last - q of the forward scan.
  const auto in = [&](uint32_t c, uint32_t q) {
    const uint32_t k = last - q;
    In<Acc> in = {};
    in.x = E::load(ts[c * p.stride + placed(k)]);
    in.a = E::load(xs[c * p.stride + placed(k)]);
    in.y = E::load(ys[c * p.stride + placed(k)]);
    in.neighbour = k > 0 ? E::load(ys[c * p.stride + placed(k - 1)]) : Gradient::edge(o);
    return in;
  };
  const auto fold = [&](uint32_t c, uint32_t first, int count) {
    typename Gradient::State state;
    int i = 1;
    const auto some_of = [&](auto n, auto body) {
      In<Acc> some[decltype(n)::value];
#pragma unroll
      for (int j = 0; j < decltype(n)::value; ++j) some[j] = in(c, first + i + j);
      body([&](int j) { return some[j]; });
    };
    state = Gradient::first(in(c, first), o);
#pragma unroll 1
    for (; i + kTogether <= count; i += kTogether)
      some_of(std::integral_constant<int, kTogether>(),
              [&](auto at) { fold_on<Gradient, kTogether, true>(state, at, o); });
#pragma unroll 1
    for (; i < count; ++i) Gradient::step(state, in(c, first + i), o);
    return state;
  };
  const auto over = [&](uint32_t c, uint32_t first, int count, typename Gradient::State state) {
    int i = 0;
#pragma unroll 1
    for (; i + kTogether <= count; i += kTogether) {
      In<Acc> some[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) some[j] = in(c, first + i + j);
      step_run<Gradient, kTogether, true>(
          state, [&](int j) { return some[j]; }, o,
          [&](int j, const Out<Acc>& out) { ts[c * p.stride + placed(last - first - i - j)] = E::store(out.first); });
    }
#pragma unroll 1
    for (; i < count; ++i)
      ts[c * p.stride + placed(last - first - i)] = E::store(Gradient::step(state, in(c, first + i), o).first);
  };
  scan_runs<Gradient>(p.gradient, p.length, p.column_bits, exchange, o, fold, over);

  each_moved([&](const uint32_t (&k)[kMoves]) {
#pragma unroll
    for (uint32_t i = 0; i < kMoves; ++i) static_cast<Bits*>(p.out)[at + k[i] * stride] = ts[moved_at + placed(k[i])];
  });
}

PieceOrder order_of(const Order& order, int64_t length) {
  PieceOrder q = {};
  q.run = static_cast<uint32_t>(order.run);
  q.runs = static_cast<uint32_t>(order.runs);
  q.slots = 32 / q.runs;
  q.groups = static_cast<uint32_t>(ceil_div(length, q.run * q.runs));
  q.of_tile = static_cast<uint32_t>(order.of_tile);
  q.tiles = (q.groups + q.of_tile - 1) / q.of_tile;
  q.of_runs = Quotient(q.runs);
  q.tile_of = Quotient(q.of_tile);
  return q;
}

template <class E, Options::Operator kOp, class Forward>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto [outer, length, inner] = problem.rows;
  TangentPieces p = {};
  p.t = buffers.x;
  p.x = buffers.a;
  p.y = buffers.y;
  p.out = buffers.out;
  p.columns = static_cast<uint32_t>(outer * inner);
  p.length = static_cast<uint32_t>(length);
  p.inner = static_cast<uint32_t>(inner);
  p.column_bits = bits_for(plan.columns);
  p.backward = problem.reverse;
  p.of_inner = Quotient(inner);
  p.options = parameters_of(plan, problem, buffers, nullptr).options;
  p.gradient = order_of({plan.per_lane, plan.runs, plan.axis_warps}, length);
  p.pad_shift = p.gradient.run % 2 == 0 ? 5 : 31;  // runs of an odd number of elements begin in different banks
  p.stride = (p.length + (p.length >> p.pad_shift)) | 1;
  int warps = plan.warps;
  size_t states = (p.gradient.groups + p.gradient.tiles) * sizeof(typename Tangent<AnyWeights<E>>::State);
  if (!p.y) {
    p.forward = order_of(forward_order(problem, plan), length);
    warps = std::max(warps, static_cast<int>(ceil_div(plan.columns * int64_t{p.forward.groups}, p.forward.slots)));
    states = std::max(states, (p.forward.groups + p.forward.tiles) * sizeof(typename Forward::State));
  }
  const size_t bytes = (3 * plan.columns * p.stride * sizeof(typename E::Bits) + 15) / 16 * 16 + plan.columns * states;
  return launch(stream, {dim3(plan.strips), dim3(32 * warps), bytes}, scan_tangent_pieces<E, kOp, Forward>, p);
}

}  // namespace

cudaError_t launch_tangent_pieces(cudaStream_t stream, const Plan& plan, const Problem& problem,
                                  const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto e) {
    using E = decltype(e);
    switch (problem.op) {
      case Op::kProd: return run<E, Options::kProduct, Cumulative<Product<E>, false>>(stream, plan, problem, buffers);
      case Op::kMax:
      case Op::kMin: return run<E, Options::kExtreme, Cumulative<Extreme<E>, false>>(stream, plan, problem, buffers);
      case Op::kLogSumExp:
        if constexpr (sizeof(typename E::Bits) <= 4)
          return run<E, Options::kLogSumExp, Cumulative<LogSumExp<E>, false>>(stream, plan, problem, buffers);
        break;
      case Op::kSum: break;
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace jaxgpuops::scan
