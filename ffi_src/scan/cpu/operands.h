// The part that all kinds of scan share: the operands, as the lanes of a strip read them.
#pragma once

#include "scan/cpu/tile.h"

namespace jaxgpuops::scan::cpu {

// Calls body with a zero of the type in which elements are computed.
template <class Body>
void with_inexact(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64: return body(double{});
    case DType::kComplex64: return body(Complex<float>{});
    case DType::kComplex128: return body(Complex<double>{});
    default: return body(float{});
  }
}

template <class Body>
void with_arithmetic(DType dtype, const Body& body) {
  if (is_float(dtype) || is_complex(dtype)) return with_inexact(dtype, body);
  switch (bytes_of(dtype)) {  // integers wrap, so signed and unsigned integers are treated alike
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    case 8: return body(uint64_t{});
  }
}

class Operands {
 public:
  // `backward` is the direction of this scan, which may differ from that of the forward call.
  Operands(const Problem& problem, const Buffers& buffers, bool backward) : problem(problem), backward(backward) {
    const auto set = [&](Operand& operand, const void* data, DType dtype) {
      operand.data = const_cast<void*>(data);
      operand.dtype = dtype;
    };
    set(x, buffers.x, problem.dtype);
    set(a, buffers.a, problem.dtype);
    set(y, buffers.y, problem.dtype);
    set(h0, buffers.h0, h0_dtype(problem));
    set(starts, buffers.starts, DType::kBool);
    set(out, buffers.out, problem.dtype);
    set(out2, buffers.out2, problem.dtype);
  }

  void bind(const Lanes& lanes) {
    const Rows& rows = problem.rows;
    for (Operand* operand : {&x, &y, &out, &out2})
      if (operand->data) operand->bind(lanes, rows, backward);
    if (a.data && problem.kind == Kind::kLinear) a.bind(lanes, rows, backward, problem.a);
    if (a.data && problem.kind != Kind::kLinear) a.bind(lanes, rows, backward);
    if (h0.data) h0.bind(lanes, Rows{rows.outer, 1, rows.inner}, false);
    if (starts.data) starts.bind(lanes, rows, backward, problem.starts);
  }

  // Fills the steps [0, end) of a plane with 1 where nothing passes to a step from the step before it, and 0 elsewhere.
  // The first position gets `first`, and the position after the last one gets `last`.
  template <class C>
  void load_cuts(const Tile& tile, int64_t end, C first, C last, C* plane) const {
    if (problem.segmented) {
      // A start separates its position in the array from the position before it, also if the scan runs backward.
      load_flags(starts, tile, 0, end, backward ? -1 : 0, plane);
    } else {
      std::fill_n(plane, end * tile.lanes, C(0));
    }
    set_at(tile, 0, end, 0, plane, [&](int64_t) { return first; });
    set_at(tile, 0, end, tile.length, plane, [&](int64_t) { return last; });
  }

  const Problem problem;
  const bool backward;
  Operand x, a, y, h0, starts, out, out2;
};

}  // namespace jaxgpuops::scan::cpu
