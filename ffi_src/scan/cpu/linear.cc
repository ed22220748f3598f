// Linear recurrences and their derivatives on the CPU.
#include "scan/cpu/run.h"
#include "scan/cpu/operands.h"
#include "scan/cpu/cut.h"

namespace jaxgpuops::scan::cpu {
namespace {

template <class T>
JAXGPUOPS_SIMD void clear_where(const T* where, int64_t n, T* plane) {
  for (int64_t i = 0; i < n; ++i) plane[i] = where[i] != T(0) ? T(0) : plane[i];
}

// The recurrence. Plane 0 has the factors, plane 1 the terms. The factor at the first position is 0, because nothing
// comes before it, unless there is an h0.
template <class T>
class Linear {
 public:
  using Monoid = Affine<T>;
  static constexpr int kPlanes = 3;

  Linear(const Problem& problem, const Buffers& buffers) : operands_(problem, buffers, problem.reverse) {}

  void bind(const Lanes& lanes) {
    operands_.bind(lanes);
    if (operands_.h0.data) load(operands_.h0, first_step(lanes), 0, 1, 0, h0_);
  }

  typename Monoid::Value initial(int64_t lane) const { return {T(0), operands_.h0.data ? h0_[lane] : T(0)}; }

  void build(const Tile& tile, T* planes) {
    const Problem& problem = operands_.problem;
    load(operands_.a, tile, 0, tile.steps, problem.transpose ? -1 : 0, planes);
    load(operands_.x, tile, 0, tile.steps, 0, planes + kPlane);
    if (problem.segmented) {
      T* cuts = planes + 2 * kPlane;
      operands_.load_cuts(tile, tile.steps, T(0), T(0), cuts);
      clear_where(cuts, tile.steps * tile.lanes, planes);
    }
    if (!problem.initial) set_at(tile, 0, tile.steps, 0, planes, [](int64_t) { return T(0); });
  }

  void finish(const Tile& tile, T* planes) { store(operands_.out, tile, planes + kPlane); }

 private:
  Operands operands_;
  T h0_[kMaxLanes];
};

// The derivative scans the cotangent of h in the other direction. Planes 0 and 1 have the elements. Plane 2 has the h
// that precedes each step in the forward direction and so follows it here. Plane 3 is 1 where nothing passes between
// steps.
template <class T>
JAXGPUOPS_SIMD void factor_cotangents(const T* folds, const T* h_before, const T* cuts, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = cuts[i] != T(0) ? T(0) : static_cast<T>(folds[i] * h_before[i]);
}

template <class T>
class LinearVjp {
 public:
  using Monoid = Affine<T>;
  static constexpr int kPlanes = 4;

  LinearVjp(const Problem& problem, const Buffers& buffers) : operands_(problem, buffers, !problem.reverse) {}

  void bind(const Lanes& lanes) {
    operands_.bind(lanes);
    if (operands_.h0.data) load(operands_.h0, first_step(lanes), 0, 1, 0, h0_);
  }

  typename Monoid::Value initial(int64_t) const { return {T(0), T(0)}; }

  void build(const Tile& tile, T* planes) {
    T* cuts = planes + 3 * kPlane;
    load(operands_.a, tile, 0, tile.steps, -1, planes);
    load(operands_.x, tile, 0, tile.steps, 0, planes + kPlane);
    operands_.load_cuts(tile, tile.steps + 1, T(1), operands_.h0.data ? T(0) : T(1), cuts);
    clear_where(cuts, tile.steps * tile.lanes, planes);
  }

  void finish(const Tile& tile, T* planes) {
    const T* folds = planes + kPlane;
    T *h_before = planes + 2 * kPlane, *cuts = planes + 3 * kPlane;
    load(operands_.y, tile, 0, tile.steps, 1, h_before);
    if (operands_.h0.data) set_at(tile, 0, tile.steps, tile.length - 1, h_before, [&](int64_t w) { return h0_[w]; });
    factor_cotangents(folds, h_before, cuts + tile.lanes, tile.steps * tile.lanes, planes);
    store(operands_.out, tile, planes);
    store(operands_.out2, tile, folds);
  }

 private:
  Operands operands_;
  T h0_[kMaxLanes];
};

}  // namespace

void run_linear(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  with_inexact(problem.dtype, [&](auto zero) { run(problem.rows, Linear<decltype(zero)>(problem, buffers), workers); });
}

void run_linear_vjp(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  with_inexact(problem.dtype,
               [&](auto zero) { run(problem.rows, LinearVjp<decltype(zero)>(problem, buffers), workers); });
}

}  // namespace jaxgpuops::scan::cpu
