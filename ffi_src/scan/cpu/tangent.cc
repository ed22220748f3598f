// Tangents of cumulative products, extrema and logsumexps on the CPU, and their transposes.
//
// Each is a recurrence h with factors a and terms b (logsumexp: a scaled sum w with exponents v). In the table, J is
// the tangent and J' its transpose, t the operand in which the map is linear, f whether a position takes the extreme, j
// the position before k and l the one after it. Directions are those of this scan: J' runs opposite to the forward
// call.
//   product    J   a = x_k, b = y_j t_k (exclusive: y_k t_k)           out = h_k (exclusive: h_j)
//              J'  a = x_j (exclusive: x_k), b = t_k                   out = y_l h_k (exclusive: y_k h_j)
//   extremum   J   a = not f_k, b = f_k t_k                            out = h_k (exclusive: h_j)
//              J'  a = not f_j (exclusive: not f_k), b = t_k           out = f_k h_k (exclusive: f_k h_j)
//   logsumexp  J   v = y_k (exclusive: y_l), w = e^(x_k - v) t_k       out = w of k (exclusive: of j)
//              J'  v = y_k, w = t_k                                    out = e^(x_k - v) w of k (exclusive: of j)
#include <limits>

#include "scan/cpu/run.h"
#include "scan/cpu/operands.h"
#include "scan/cpu/cut.h"

namespace jaxgpuops::scan::cpu {
namespace {

// ---- Products -------------------------------------------------------------------------------------------------------

template <class T>
struct ProductTangent {
  using Monoid = Affine<T>;

  // From which step x and y are read, counted from that of the element (-1: the step before). Of a transpose, y is read
  // where the result is made, not where the element is.
  static constexpr int64_t x_shift(bool transpose, bool exclusive) { return transpose && !exclusive ? -1 : 0; }
  static constexpr int64_t y_shift(bool transpose, bool exclusive) { return exclusive ? 0 : transpose ? 1 : -1; }

  // An inclusive product before the first step, or before a cut, is 1.
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE void make(T* e, T t, T x, T y, bool cut, int64_t i) const {
    const T before = !kExclusive && cut ? T(1) : y;
    e[i] = cut ? T(0) : x;
    e[i + kPlane] = kTranspose ? t : static_cast<T>(before * t);
  }
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE T result(const T* fold, T, T y, bool cut, int64_t i) const {
    const T h = fold[i + kPlane];
    if (!kTranspose) return h;
    const T before = !kExclusive && cut ? T(1) : y;
    return before == T(0) ? T(0) : before * h;
  }
};

// ---- Extrema --------------------------------------------------------------------------------------------------------

template <class T>
struct ExtremumTangent {
  using Monoid = Affine<T>;
  bool largest;

  static constexpr int64_t x_shift(bool transpose, bool exclusive) { return transpose && !exclusive ? -1 : 0; }
  static constexpr int64_t y_shift(bool transpose, bool exclusive) { return x_shift(transpose, exclusive); }

  template <bool kExclusive>
  JAXGPUOPS_INLINE bool takes(T x, T y) const {
    return x == y || x != x || (kExclusive && (largest ? x > y : x < y));
  }
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE void make(T* e, T t, T x, T y, bool cut, int64_t i) const {
    const bool f = takes<kExclusive>(x, y);
    e[i] = cut || f ? T(0) : T(1);
    e[i + kPlane] = kTranspose || f ? t : T(0);
  }
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE T result(const T* fold, T x, T y, bool, int64_t i) const {
    return !kTranspose || takes<kExclusive>(x, y) ? fold[i + kPlane] : T(0);
  }
};

// ---- Logsumexp ------------------------------------------------------------------------------------------------------

template <class T>
struct LogSumExpTangent {
  using Monoid = Segmented<ScaledSum<T>>;

  static constexpr int64_t x_shift(bool, bool) { return 0; }
  static constexpr int64_t y_shift(bool transpose, bool exclusive) { return exclusive && !transpose ? 1 : 0; }

  // e^(x - y) w for x <= y, without NaN for equal infinities.
  static JAXGPUOPS_INLINE T weigh(T x, T y, T w) {
    const T distance = x == y ? T(0) : x - y;
    const T weight = exp_negative(distance > 0 ? T(0) : distance);
    return x == -std::numeric_limits<T>::infinity() ? T(0) : weight * w;
  }
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE void make(T* e, T t, T x, T y, bool cut, int64_t i) const {
    e[i] = y;
    e[i + kPlane] = kTranspose ? t : weigh(x, y, t);
    e[i + 2 * kPlane] = cut ? T(1) : T(0);
  }
  template <bool kTranspose, bool kExclusive>
  JAXGPUOPS_INLINE T result(const T* fold, T x, T, bool, int64_t i) const {
    return kTranspose ? weigh(x, fold[i], fold[i + kPlane]) : fold[i + kPlane];
  }
};

// ---- All of them ----------------------------------------------------------------------------------------------------

template <bool kTranspose, bool kExclusive, class Form, class T>
JAXGPUOPS_SIMD void make_all(Form form, const T* t, const T* x, const T* y, const T* cuts, int64_t n, T* e) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) form.template make<kTranspose, kExclusive>(e, t[i], x[i], y[i], cuts[i] != T(0), i);
}

// `cuts` says whether a segment starts at a step, and `cuts_y` whether one starts between the step and the step whose y
// it uses.
template <bool kTranspose, bool kExclusive, class Form, class T>
JAXGPUOPS_SIMD void write_all(Form form, const T* fold, const T* x, const T* y, const T* cuts, const T* cuts_y,
                              int64_t n, T* out) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const T result = form.template result<kTranspose, kExclusive>(fold, x[i], y[i], cuts_y[i] != T(0), i);
    out[i] = kExclusive && cuts[i] != T(0) ? T(0) : result;
  }
}

template <class T, class Form, bool kTranspose, bool kExclusive>
class Tangent {
 public:
  using Monoid = typename Form::Monoid;
  static constexpr int kPlanes = Monoid::kPlanes + 4;

  Tangent(const Problem& problem, const Buffers& buffers, const Form& form)
      : operands_(problem, buffers, problem.reverse != problem.transpose), form_(form) {}

  void bind(const Lanes& lanes) { operands_.bind(lanes); }

  typename Monoid::Value initial(int64_t) const { return {}; }

  void build(const Tile& tile, T* planes) {
    const Planes p = planes_at(planes);
    operands_.load_cuts(tile, tile.steps + 1, T(1), T(1), p.cuts);
    load(operands_.x, tile, 0, tile.steps, 0, p.t);
    load(operands_.a, tile, 0, tile.steps + kXLater, kXShift, p.x);
    if (kYShift <= 0 || !kTranspose) load(operands_.y, tile, 0, tile.steps + kYLater, kYShift, p.y);
    make_all<kTranspose, kExclusive>(form_, p.t, p.x, p.y, p.cuts, tile.steps * tile.lanes, planes);
  }

  void finish(const Tile& tile, T* planes) {
    const Planes p = planes_at(planes);
    constexpr int64_t kAfter = kYShift > 0 ? 1 : 0;
    if (kTranspose && kAfter) load(operands_.y, tile, 0, tile.steps, kAfter, p.y);
    write_all<kTranspose, kExclusive>(form_, kExclusive ? planes - tile.lanes : planes, p.x + kXLater * tile.lanes,
                                      p.y + kYLater * tile.lanes, p.cuts, p.cuts + kAfter * tile.lanes,
                                      tile.steps * tile.lanes, p.t);
    store(operands_.out, tile, p.t);
  }

 private:
  static constexpr int64_t kXShift = Form::x_shift(kTranspose, kExclusive),
                           kYShift = Form::y_shift(kTranspose, kExclusive);
  // Results of a transpose need the step after the one that elements need, if that is a neighbour.
  static constexpr int64_t kXLater = kTranspose && kXShift < 0 ? 1 : 0, kYLater = kTranspose && kYShift < 0 ? 1 : 0;

  struct Planes {
    T *t, *x, *y, *cuts;
  };
  static Planes planes_at(T* planes) {
    T* first = planes + Monoid::kPlanes * kPlane;
    return {first, first + kPlane, first + 2 * kPlane, first + 3 * kPlane};
  }

  Operands operands_;
  Form form_;
};

template <class T, class Form>
void run_form(const Problem& problem, const Buffers& buffers, const Workers& workers, const Form& form) {
  if (problem.transpose) {
    if (problem.exclusive) return run(problem.rows, Tangent<T, Form, true, true>(problem, buffers, form), workers);
    return run(problem.rows, Tangent<T, Form, true, false>(problem, buffers, form), workers);
  }
  if (problem.exclusive) return run(problem.rows, Tangent<T, Form, false, true>(problem, buffers, form), workers);
  return run(problem.rows, Tangent<T, Form, false, false>(problem, buffers, form), workers);
}

template <class T>
void run_real(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.op == Op::kLogSumExp) return run_form<T>(problem, buffers, workers, LogSumExpTangent<T>{});
  run_form<T>(problem, buffers, workers, ExtremumTangent<T>{problem.op == Op::kMax});
}

}  // namespace

void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.op == Op::kProd) {
    return with_inexact(problem.dtype, [&](auto zero) {
      using T = decltype(zero);
      run_form<T>(problem, buffers, workers, ProductTangent<T>{});
    });
  }
  if (problem.dtype == DType::kFloat64) return run_real<double>(problem, buffers, workers);
  run_real<float>(problem, buffers, workers);
}

}  // namespace jaxgpuops::scan::cpu
