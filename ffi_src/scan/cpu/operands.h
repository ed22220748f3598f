// What the kinds have in common: the operands as a strip sees them.
#pragma once

#include "scan/cpu/tile.h"

namespace jaxgpuops::scan::cpu {

// Calls body with a zero of the type that elements are computed in.
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
  switch (bytes_of(dtype)) {  // integers wrap, so signs do not matter
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    case 8: return body(uint64_t{});
  }
}

class Operands {
 public:
  // `backward`: the direction of the scan, which is not always that of the forward call.
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

  // Planes of 1 where nothing passes to a step from the one before it, and 0 elsewhere; of steps [0, end). The first
  // position is as `first` says, and so is the one after the last, `last`.
  template <class C>
  void load_cuts(const Tile& tile, int64_t end, C first, C last, C* plane) const {
    if (problem.segmented) {
      // A start lies between its position of the array and the one before.
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
