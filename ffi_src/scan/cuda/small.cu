// Arrays of few elements in all, along short axes: a lane has one position. Operands are read once, results written
// once. A tangent's y may be missing: then the kernel first folds x, as the forward call would have.
//
// Each lane steps over all positions of its column, as a lane of kShort does (spans.cuh), and keeps the result of its
// own position; so the bits are the same. See also common/cuda/small.cuh.
#include <cstdint>
#include <type_traits>

#include "common/cuda/small.cuh"
#include "common/rounding.h"
#include "scan/cuda/cumulative.h"
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/few.cuh"
#include "scan/cuda/pieces.cuh"
#include "scan/cuda/recurrences.h"
#include "scan/cuda/tangents.h"

namespace jaxgpuops::scan {
namespace {

struct SmallParameters {
  const void* operands[3];
  void* results[2];
  const void* h0;
  SmallColumns columns;
  uint32_t a_outer, a_axis, a_inner;  // strides of the operand a
  bool wide_h0, backward, neighbour_before;
  Options options;
};

// A column, and the operands of its positions. A lane without a column reads the last column and stores nothing.
template <class Policy>
struct SmallColumn {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  const SmallParameters& p;
  uint32_t column, first, by;  // first: where position 0, in the direction of the scan, is; by: from one to the next
  uint32_t a_first, a_by;      // the same of the operand a
  bool own;

  // `number`: that of the lane's column, which may be beyond the last one.
  __device__ SmallColumn(const SmallParameters& p, uint32_t number) : p(p) {
    const SmallColumns& c = p.columns;
    column = once(min(number, c.columns - 1));
    own = number == column;
    const uint32_t outer = once(c.outer_of(column)), last = once(c.length - 1);
    by = once(p.backward ? 0 - c.inner : c.inner);
    first = once((outer * last + (p.backward ? last : 0)) * c.inner + column);
    if constexpr (Policy::kBroadcast) {
      a_by = once(p.backward ? 0 - p.a_axis : p.a_axis);
      a_first = once(outer * p.a_outer + (column - outer * c.inner) * p.a_inner + (p.backward ? last * p.a_axis : 0));
    }
  }

  // The operands of position k, in the direction of the scan, which exists. kFromX: y and the neighbour are left to the
  // caller.
  template <bool kFromX = false>
  __device__ In<Acc> read(uint32_t k) const {
    const SmallColumns& c = p.columns;
    const uint32_t i = first + k * by;
    In<Acc> in = {};
    in.x = load(0, i);
    if constexpr (Policy::kBroadcast) {
      in.a = load(1, a_first + k * a_by);
    } else if constexpr (Policy::kOperands > 1) {
      in.a = load(1, i);
    }
    if constexpr (Policy::kOperands > 2 && !kFromX) in.y = load(2, i);
    if constexpr (Policy::kNeighbour && !kFromX) {
      if (k == (p.neighbour_before ? 0 : c.length - 1)) {
        in.neighbour = p.h0 ? load_h0() : Policy::edge(p.options);
      } else {
        in.neighbour = load(Policy::kOperands - 1, p.backward == p.neighbour_before ? i + c.inner : i - c.inner);
      }
    }
    return in;
  }

  // The state before the first position.
  __device__ typename Policy::State initial() const {
    if constexpr (Policy::kInitial) {
      if (p.h0) {
        Acc h0;
        if constexpr (is_float(Element::kDType) && sizeof(Bits) < sizeof(float)) {
          h0 = p.wide_h0 ? static_cast<const float*>(p.h0)[column] : load_h0();
        } else {
          h0 = load_h0();
        }
        return Policy::initial(h0, p.options);
      }
    }
    return Policy::identity(p.options);
  }

  __device__ void store(uint32_t k, const Out<Acc>& out) const {
    if (!own) return;
    static_cast<Bits*>(p.results[0])[first + k * by] = Element::store(out.first);
    if constexpr (Policy::kResults == 2) static_cast<Bits*>(p.results[1])[first + k * by] = Element::store(out.second);
  }

 private:
  __device__ Acc load(int operand, uint32_t i) const {
    return Element::load(static_cast<const Bits*>(p.operands[operand])[i]);
  }
  __device__ Acc load_h0() const { return Element::load(static_cast<const Bits*>(p.h0)[column]); }
};

// A position of a column, which may be beyond its end.
template <class Policy, bool kFromX = false>
struct SmallPosition : SmallColumn<Policy> {
  using Column = SmallColumn<Policy>;
  using typename Column::Acc;
  uint32_t k;  // the position, counted in the direction of the scan
  bool exists;
  In<Acc> in = {};

  __device__ SmallPosition(const SmallParameters& p, uint32_t number, uint32_t k)
      : Column(p, number), k(k), exists(k < p.columns.length) {
    if (exists) in = this->template read<kFromX>(k);
  }
  __device__ void store(const Out<Acc>& out) const {
    if (exists) Column::store(k, out);
  }
};

// Makes y of x, and the neighbour, in the lanes of a column, whose positions are `beside` lanes apart from lane `first`
// on. Forward is the policy of the forward call.
template <class Forward, class Policy>
__device__ __forceinline__ void make_y(SmallPosition<Policy, true>& mine, uint32_t first, uint32_t beside) {
  using Element = typename Policy::Element;
  using Acc = typename Element::Acc;
  const SmallParameters& p = mine.p;
  const uint32_t last = p.columns.length - 1, k = mine.k;
  auto fold = Forward::identity(p.options);
#pragma unroll 1
  for (uint32_t step = 0; step <= last; step += kSmallStep) {
    Acc x[kSmallStep];
#pragma unroll
    for (uint32_t j = 0; j < kSmallStep; ++j) {
      const uint32_t from = min(step + j, last);
      x[j] = shuffle_from(mine.in.a, first + (p.options.transpose ? last - from : from) * beside);
    }
#pragma unroll
    for (uint32_t j = 0; j < kSmallStep; ++j) {
      if (step + j > last) break;
      const uint32_t at = p.options.transpose ? last - (step + j) : step + j;
      const Acc y = Element::load(Element::store(Forward::step(fold, {x[j]}, p.options).first));
      if (at == k) mine.in.y = y;
      if (Policy::kNeighbour && (p.neighbour_before ? at + 1 == k : at == k + 1)) mine.in.neighbour = y;
    }
  }
  if (Policy::kNeighbour && k == (p.neighbour_before ? 0 : last)) mine.in.neighbour = Policy::edge(p.options);
}

// The kernel for axes of at most 32 positions. Forward: void if there is nothing to make of x.
template <class Policy, class Forward = void>
__global__ void __launch_bounds__(32 * kSmallWarps) scan_small(const __grid_constant__ SmallParameters p) {
  using Acc = typename Policy::Element::Acc;
  constexpr bool kFromX = !std::is_void_v<Forward>;
  const SmallColumns& c = p.columns;
  const uint32_t lane = threadIdx.x % 32, beside = once(1u << c.column_bits), first = lane & (beside - 1);
  const uint32_t group = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  SmallPosition<Policy, kFromX> mine(p, (group << c.column_bits) + first, once(lane >> c.column_bits));
  if constexpr (kFromX) make_y<Forward>(mine, first, beside);
  auto state = mine.initial();
  Out<Acc> out = {};
#pragma unroll 1
  for (uint32_t r = 0; r < c.length; r += kSmallStep) {
#pragma unroll
    for (uint32_t j = 0; j < kSmallStep; ++j) {
      const int from = first + (r + j) * beside;
      In<Acc> its = mine.in;
      its.x = shuffle_from(its.x, from);
      if constexpr (Policy::kOperands > 1) its.a = shuffle_from(its.a, from);
      if constexpr (Policy::kOperands > 2) its.y = shuffle_from(its.y, from);
      if constexpr (Policy::kNeighbour) its.neighbour = shuffle_from(its.neighbour, from);
      its.start = false;
      const Out<Acc> of_step = Policy::step(state, its, p.options);
      if (r + j == mine.k) out = of_step;
    }
  }
  mine.store(out);
}

// kLanes, for more elements: a lane has a column. It loads kLanesStep positions at once.
template <class Policy>
__global__ void __launch_bounds__(kLanesThreads) scan_lanes(const __grid_constant__ SmallParameters p) {
  using Acc = typename Policy::Element::Acc;
  const SmallColumn<Policy> mine(p, blockIdx.x * kLanesThreads + threadIdx.x);
  const uint32_t length = once(p.columns.length);
  with_call<Policy>(p.options, [&](const Options& o) {
    auto state = mine.initial();
#pragma unroll 1
    for (uint32_t k = 0; k < length; k += kLanesStep) {
      In<Acc> in[kLanesStep];
#pragma unroll
      for (uint32_t j = 0; j < kLanesStep; ++j)
        if (k + j < length) in[j] = mine.read(k + j);
#pragma unroll
      for (uint32_t j = 0; j < kLanesStep; ++j)
        if (k + j < length) mine.store(k + j, Policy::step(state, in[j], o));
    }
  });
}

// Returns the fold of the states of all threads of a column before this one: twice as many in each round. Columns are
// `beside` lanes apart; or, if `shared`, a block has one column.
template <class Policy, class State>
__device__ __forceinline__ State before_thread(State state, uint32_t beside, bool shared, const Options& options) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const State identity = Policy::identity(options);
#pragma unroll 1
  for (uint32_t d = beside; d < 32; d *= 2) {
    const State left = shuffle_up(state, d);
    if (lane >= d) state = Policy::combine(left, state, options);
  }
  State before = shuffle_up(state, beside);
  if (lane < beside) before = identity;
  if (!shared) return before;
  __shared__ State warps[32];
  if (lane == 31) warps[warp] = state;
  __syncthreads();
  State earlier = lane < warp ? warps[lane] : identity;
#pragma unroll 1
  for (uint32_t d = 16; d; d /= 2) earlier = Policy::combine(earlier, shuffle_xor(earlier, d), options);
  return Policy::combine(earlier, before, options);
}

// The kernel for operations whose states do not depend on the order of folding. If a column has more than 32 positions,
// a block has one column.
template <class Policy>
__global__ void __launch_bounds__(kMostSmallLength) scan_small_exact(const __grid_constant__ SmallParameters p) {
  using State = typename Policy::State;
  const SmallColumns& c = p.columns;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, beside = once(1u << c.column_bits);
  const bool shared = c.length > 32;
  const uint32_t own =
      shared ? blockIdx.x : ((blockIdx.x * (blockDim.x / 32) + warp) << c.column_bits) + (lane & (beside - 1));
  const SmallPosition<Policy> mine(p, own, shared ? threadIdx.x : lane >> c.column_bits);
  State state = mine.k < c.length ? Policy::first(mine.in, p.options) : Policy::identity(p.options);
  state = before_thread<Policy>(state, beside, shared, p.options);
  state = Policy::combine(mine.initial(), state, p.options);
  mine.store(Policy::step(state, mine.in, p.options));
}

SmallParameters small_parameters_of(const Plan& plan, const Parameters& p) {
  SmallParameters s{};
  for (int o = 0; o < 3; ++o) s.operands[o] = p.operands[o];
  for (int o = 0; o < 2; ++o) s.results[o] = p.results[o];
  s.h0 = p.h0;
  s.columns = SmallColumns({p.columns / p.inner, p.length, p.inner}, bits_for(plan.columns), 0);
  s.a_outer = p.a.outer.groups ? static_cast<uint32_t>(p.a.outer.stride[0]) : 0;
  s.a_axis = static_cast<uint32_t>(p.a.axis_stride);
  s.a_inner = p.a.inner.groups ? static_cast<uint32_t>(p.a.inner.stride[0]) : 0;
  s.wide_h0 = p.wide_h0;
  s.backward = p.backward;
  s.neighbour_before = p.neighbour_before;
  s.options = p.options;
  return s;
}

template <class Policy>
cudaError_t launch_pieces(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  PieceParameters s{};
  s.x = p.operands[0];
  s.a = p.operands[1];
  s.a_outer = p.a.outer.groups ? static_cast<uint32_t>(p.a.outer.stride[0]) : 0;
  s.a_axis = static_cast<uint32_t>(p.a.axis_stride);
  s.a_inner = p.a.inner.groups ? static_cast<uint32_t>(p.a.inner.stride[0]) : 0;
  s.out = p.results[0];
  s.h0 = p.h0;
  s.columns = static_cast<uint32_t>(p.columns);
  s.length = static_cast<uint32_t>(p.length);
  s.inner = static_cast<uint32_t>(p.inner);
  s.column_bits = bits_for(plan.columns);
  s.run = static_cast<uint32_t>(plan.per_lane);
  s.runs = static_cast<uint32_t>(plan.runs);
  s.slots = 32 / s.runs;
  s.groups = (s.length + s.run * s.runs - 1) / (s.run * s.runs);
  s.of_tile = static_cast<uint32_t>(plan.axis_warps);
  s.tiles = (s.groups + s.of_tile - 1) / s.of_tile;
  s.pad_shift = s.run % 2 == 0 ? 5 : 31;  // runs of an odd number of elements begin in different banks
  const uint32_t positions = s.groups * s.runs * s.run;
  s.stride = (positions + (positions >> s.pad_shift)) | 1;
  s.of_inner = Quotient(p.inner);
  s.of_runs = Quotient(s.runs);
  s.tile_of = Quotient(s.of_tile);
  s.wide_h0 = p.wide_h0;
  s.backward = p.backward;
  s.options = p.options;
  const size_t states = (s.groups + s.tiles) * sizeof(typename Policy::State);
  const size_t bytes = plan.columns * (Policy::kOperands * s.stride * sizeof(typename Policy::Acc) + states);
  return launch(stream, {dim3(p.strips), dim3(plan.threads()), bytes}, scan_pieces<Policy>, s);
}

template <class Policy>
cudaError_t launch_few(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  FewParameters s{};
  s.x = p.operands[0];
  s.a = p.operands[1];
  s.out = p.results[0];
  s.h0 = p.h0;
  s.columns = static_cast<uint32_t>(p.columns);
  s.length = static_cast<uint32_t>(p.length);
  s.inner = static_cast<uint32_t>(p.inner);
  s.a_outer = p.a.outer.groups ? p.a.outer.stride[0] : 0;
  s.a_axis = static_cast<uint32_t>(p.a.axis_stride);
  s.a_inner = p.a.inner.groups ? static_cast<uint32_t>(p.a.inner.stride[0]) : 0;
  s.lane_bits = plan.run_bits;
  s.warps = plan.axis_warps;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  s.dense = s.inner == 1 && aligned(s.x) && aligned(s.a) && aligned(s.out) &&
            (Policy::kOperands == 1 || (s.a_axis == 1 && (s.columns == 1 || s.a_outer == p.length)));
  s.odd = p.length % (16 / sizeof(typename Policy::Element::Bits)) != 0;
  s.wide_h0 = p.wide_h0;
  s.backward = p.backward;
  s.options = p.options;
  return launch(stream, {dim3(p.strips), dim3(plan.threads())}, scan_few<Policy>, s);
}

// Forward: the policy of the forward call that a tangent may begin with, if from_x.
template <class Policy, class Forward = void>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Parameters& p, bool from_x = false) {
  constexpr bool kPair = Policy::kKind == Kind::kLinear && is_float(Policy::Element::kDType);
  if constexpr (Policy::kKind == Kind::kCumulative || kPair)
    if (plan.algorithm == Algorithm::kPieces) return launch_pieces<Policy>(stream, plan, p);
  if constexpr ((Policy::kKind == Kind::kCumulative || kPair) && !Policy::kCut &&
                sizeof(typename Policy::Element::Bits) > 1 && sizeof(typename Policy::Element::Bits) <= 8)
    if (plan.algorithm == Algorithm::kFew) return launch_few<Policy>(stream, plan, p);
  const SmallParameters s = small_parameters_of(plan, p);
  const Launch shape{dim3(p.strips), dim3(plan.threads())};
  if constexpr (Policy::kKind == Kind::kCumulative || Policy::kKind == Kind::kLinear)
    if (plan.algorithm == Algorithm::kLanes) return launch(stream, shape, scan_lanes<Policy>, s);
  if constexpr (!std::is_void_v<Forward>) {
    if (from_x) return launch(stream, shape, scan_small<Policy, Forward>, s);
  }
  if constexpr (kExact<Policy>) {
    return launch(stream, shape, scan_small_exact<Policy>, s);
  } else {
    return launch(stream, shape, scan_small<Policy>, s);
  }
}

}  // namespace

cudaError_t launch_small(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const Parameters p = parameters_of(plan, problem, buffers, nullptr);
  const DType dtype = problem.dtype;
  const auto floats = [&](auto f) { return is_complex(dtype) ? with_complex(dtype, f) : with_float(dtype, f); };
  switch (problem.kind) {
    case Kind::kLinear: return floats([&](auto e) { return run<Linear<decltype(e)>>(stream, plan, p); });
    case Kind::kLinearVjp: return floats([&](auto e) { return run<LinearVjp<decltype(e)>>(stream, plan, p); });
    case Kind::kTangent:
      if (problem.op == Op::kProd)
        return floats([&](auto e) {
          using E = decltype(e);
          using Forward = std::conditional_t<is_complex(E::kDType), void, Cumulative<Product<E>, false>>;
          return run<Tangent<ProductWeights<E>>, Forward>(stream, plan, p, problem.from_x);
        });
      return with_float(dtype, [&](auto e) {
        using E = decltype(e);
        return run<Tangent<ExtremeWeights<E>>, Cumulative<Extreme<E>, false>>(stream, plan, p, problem.from_x);
      });
    case Kind::kCumulative: break;
  }
  if (!is_general(problem)) {
    const auto numbers = [&](auto f) { return is_float(dtype) ? with_float(dtype, f) : with_wide_integer(dtype, f); };
    const auto sum = [&](auto e) { return run<Cumulative<Sum<decltype(e)>, false>>(stream, plan, p); };
    const auto product = [&](auto e) { return run<Cumulative<Product<decltype(e)>, false>>(stream, plan, p); };
    const auto extreme = [&](auto e) { return run<Cumulative<Extreme<decltype(e)>, false>>(stream, plan, p); };
    if (problem.op == Op::kSum) return dtype == DType::kComplex64 ? sum(Complex64{}) : numbers(sum);
    if (problem.op == Op::kProd) return dtype == DType::kComplex64 ? product(Complex64{}) : with_float(dtype, product);
    return numbers(extreme);
  }
  const auto cumulative = [&](auto e) { return run<General<decltype(e)>>(stream, plan, p); };
  if (dtype == DType::kBool) return cumulative(Boolean{});
  if (is_float8(dtype)) return with_float8(dtype, cumulative);
  if (is_complex(dtype)) return cumulative(Complex128{});
  return with_integer(dtype, [&](auto e) { return run<AnyOperator<decltype(e)>>(stream, plan, p); });
}

}  // namespace jaxgpuops::scan
