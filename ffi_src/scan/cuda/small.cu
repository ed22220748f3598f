// Few elements in all, along short axes: a lane has one position. Operands are read once, results written once.
//
// Each lane steps over all positions of its column, as the lane does that has a short axis to itself (spans.cuh), and
// keeps the result of its own: same bits. (common/cuda/small.cuh)
#include <cstdint>

#include "common/cuda/small.cuh"
#include "scan/cuda/dispatch.cuh"

namespace jaxgpuops::scan {
namespace {

struct SmallParameters {
  const void* operands[3];
  void* results[2];
  const void* h0;
  SmallColumns columns;
  uint32_t a_outer, a_axis, a_inner;  // strides
  bool wide_h0, backward, neighbour_before;
  Options options;
};

template <class Policy>
__global__ void __launch_bounds__(32 * kSmallWarps) scan_small(const __grid_constant__ SmallParameters p) {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kLast = Policy::kOperands - 1;
  const SmallColumns& c = p.columns;
  const uint32_t lane = threadIdx.x % 32, beside = once(1u << c.column_bits), first = lane & (beside - 1);
  const uint32_t own = ((blockIdx.x * blockDim.x + threadIdx.x) / 32 << c.column_bits) + first;
  const uint32_t column = once(min(own, c.columns - 1)), k = once(lane >> c.column_bits);
  const uint32_t outer = once(c.outer_of(column)), length = once(c.length);
  const uint32_t position = p.backward ? length - 1 - k : k;
  const uint32_t at = once((outer * (length - 1) + position) * c.inner + column);
  const bool there = k < length;

  const auto load = [&](int operand, uint32_t i) {
    return Element::load(static_cast<const Bits*>(p.operands[operand])[i]);
  };
  const auto load_h0 = [&] { return Element::load(static_cast<const Bits*>(p.h0)[column]); };
  In<Acc> in = {};
  if (there) {
    in.x = load(0, at);
    if constexpr (Policy::kBroadcast) {
      in.a = load(1, outer * p.a_outer + position * p.a_axis + (column - outer * c.inner) * p.a_inner);
    } else if constexpr (Policy::kOperands > 1) {
      in.a = load(1, at);
    }
    if constexpr (Policy::kOperands > 2) in.y = load(2, at);
    if constexpr (Policy::kNeighbour) {
      if (k == (p.neighbour_before ? 0 : length - 1)) {
        in.neighbour = p.h0 ? load_h0() : Policy::edge(p.options);
      } else {
        in.neighbour = load(kLast, p.backward == p.neighbour_before ? at + c.inner : at - c.inner);
      }
    }
  }
  auto state = Policy::identity(p.options);
  if constexpr (Policy::kInitial) {
    if (p.h0) {
      Acc h0;
      if constexpr (is_float(Element::kDType) && sizeof(Bits) < sizeof(float)) {
        h0 = p.wide_h0 ? static_cast<const float*>(p.h0)[column] : load_h0();
      } else {
        h0 = load_h0();
      }
      state = Policy::initial(h0, p.options);
    }
  }

  Out<Acc> mine = {};
#pragma unroll 1
  for (uint32_t r = 0; r < length; r += kSmallStep) {
#pragma unroll
    for (uint32_t j = 0; j < kSmallStep; ++j) {
      const int from = first + (r + j) * beside;
      In<Acc> its = in;
      its.x = shuffle_from(in.x, from);
      if constexpr (Policy::kOperands > 1) its.a = shuffle_from(in.a, from);
      if constexpr (Policy::kOperands > 2) its.y = shuffle_from(in.y, from);
      if constexpr (Policy::kNeighbour) its.neighbour = shuffle_from(in.neighbour, from);
      its.start = false;
      const Out<Acc> out = Policy::step(state, its, p.options);
      if (r + j == k) mine = out;
    }
  }
  if (!there || own != column) return;
  static_cast<Bits*>(p.results[0])[at] = Element::store(mine.first);
  if constexpr (Policy::kResults == 2) static_cast<Bits*>(p.results[1])[at] = Element::store(mine.second);
}

template <class Policy>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  SmallParameters s{};
  for (int o = 0; o < 3; ++o) s.operands[o] = p.operands[o];
  for (int o = 0; o < 2; ++o) s.results[o] = p.results[o];
  s.h0 = p.h0;
  int column_bits = 0;
  while (1 << column_bits < plan.columns) ++column_bits;
  s.columns = SmallColumns({p.columns / p.inner, p.length, p.inner}, column_bits, 0);
  s.a_outer = p.a.outer.groups ? static_cast<uint32_t>(p.a.outer.stride[0]) : 0;
  s.a_axis = static_cast<uint32_t>(p.a.axis_stride);
  s.a_inner = p.a.inner.groups ? static_cast<uint32_t>(p.a.inner.stride[0]) : 0;
  s.wide_h0 = p.wide_h0;
  s.backward = p.backward;
  s.neighbour_before = p.neighbour_before;
  s.options = p.options;
  return launch(stream, {dim3(p.strips), dim3(32 * kSmallWarps)}, scan_small<Policy>, s);
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
        return floats([&](auto e) { return run<Tangent<ProductWeights<decltype(e)>>>(stream, plan, p); });
      return with_float(dtype, [&](auto e) { return run<Tangent<ExtremeWeights<decltype(e)>>>(stream, plan, p); });
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
  return is_float(dtype) || is_complex(dtype) ? floats(cumulative) : with_integer(dtype, cumulative);
}

}  // namespace jaxgpuops::scan
