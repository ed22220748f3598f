// Cumulative sums, products, maxima, minima and logsumexps on the CPU.
#include <limits>

#include "common/ordered_key.h"
#include "common/cpu/transpose.h"
#include "scan/cpu/run.h"
#include "scan/cpu/operands.h"
#include "scan/cpu/cut.h"

namespace jaxgpuops::scan::cpu {
namespace {

// A Form converts operands to elements, and folds to results. It converts in place, in plane 0.
template <class T>
struct Plain {
  bool moves() const { return true; }
  T flip() const { return T(0); }
  JAXGPUOPS_INLINE T key(T element) const { return element; }
  JAXGPUOPS_INLINE T value(T element) const { return element; }
  JAXGPUOPS_INLINE void make(const T*, T*, int64_t) const {}
  JAXGPUOPS_INLINE void result(const T* fold, T* out, int64_t i) const { out[i] = fold[i]; }
};

template <class T>
struct Logarithms {
  JAXGPUOPS_INLINE void make(const T*, T* e, int64_t i) const { e[i + kPlane] = 1; }
  JAXGPUOPS_INLINE void result(const T* fold, T* out, int64_t i) const {
    out[i] = fold[i] + log_above_one(fold[i + kPlane]);
  }
};

// The form of maxima and minima. Results are bits of operands, so elements are keys that give the operand back. NaN
// comes first in their order.
template <class T>
struct Keys {
  ArgOrder arg;
  bool moves() const { return arg.order.magnitude == 0; }
  T flip() const { return static_cast<T>(arg.order.flip); }
  JAXGPUOPS_INLINE T key(T bits) const {
    using Signed = std::make_signed_t<T>;  // SSE and AVX2 compare signed integers only; magnitudes are positive
    const bool nan = static_cast<Signed>(bits & static_cast<T>(~arg.sign)) > static_cast<Signed>(arg.nan_above);
    return static_cast<T>(encode(bits, arg.order) | (nan ? static_cast<T>(~T{0}) : T{0}));
  }
  JAXGPUOPS_INLINE T value(T key) const { return decode(key, arg.order); }
  JAXGPUOPS_INLINE void make(const T* x, T* e, int64_t i) const { e[i] = key(x[i]); }
  JAXGPUOPS_INLINE void result(const T* fold, T* out, int64_t i) const { out[i] = value(fold[i]); }
};

template <class T, class Form>
JAXGPUOPS_SIMD void make_all(Form form, const T* x, T* e, int64_t n) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) form.make(x, e, i);
}

template <class T, class Form>
JAXGPUOPS_SIMD void write_all(Form form, const T* fold, int64_t n, T* out) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) form.result(fold, out, i);
}

template <class T>
JAXGPUOPS_SIMD void replace(const T* where, T by, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = where[i] != T(0) ? by : out[i];
}

template <class M, class Form, bool kSegmented>
class Cumulative {
 public:
  using Monoid = std::conditional_t<kSegmented, Segmented<M>, M>;
  using C = typename M::C;
  static constexpr int kPlanes = Monoid::kPlanes + 2;

  Cumulative(const Problem& problem, const Buffers& buffers, const Form& form, typename M::Value identity, C least)
      : operands_(problem, buffers, problem.reverse), form_(form), identity_(identity), least_(least) {}

  void bind(const Lanes& lanes) {
    operands_.bind(lanes);
    if (operands_.h0.data) load(operands_.h0, first_step(lanes), 0, 1, 0, h0_);
  }

  typename Monoid::Value initial(int64_t lane) const {
    typename M::Value before = identity_;
    if (operands_.h0.data) {
      if constexpr (M::kPlanes == 2) before = {h0_[lane], C(1)};
      if constexpr (M::kPlanes == 1) before = {form_.key(h0_[lane])};
    }
    if constexpr (kSegmented) return {before, C(0)};
    if constexpr (!kSegmented) return before;
  }

  void build(const Tile& tile, C* planes) {
    load(operands_.x, tile, 0, tile.steps, 0, planes);
    if constexpr (!std::is_same_v<Form, Plain<C>>) make_all(form_, planes, planes, tile.steps * tile.lanes);
    if (kSegmented) operands_.load_cuts(tile, tile.steps, C(0), C(0), planes + M::kPlanes * kPlane);
  }

  void finish(const Tile& tile, C* planes) {
    const bool exclusive = operands_.problem.exclusive;
    const int64_t n = tile.steps * tile.lanes;
    const C* fold = exclusive ? planes - tile.lanes : planes;
    C* out = planes + Monoid::kPlanes * kPlane;
    if constexpr (std::is_same_v<Form, Plain<C>>) {
      if (!kSegmented || !exclusive) return store(operands_.out, tile, fold);
    }
    write_all(form_, fold, n, out);
    if (kSegmented && exclusive) {
      C* cuts = out + kPlane;
      operands_.load_cuts(tile, tile.steps, C(0), C(0), cuts);
      replace(cuts, least_, n, out);
    }
    store(operands_.out, tile, out);
  }

 private:
  Operands operands_;
  Form form_;
  typename M::Value identity_;  // the identity of the operator
  C least_;                     // the result of which identity_ is the element
  C h0_[kMaxLanes];
};

// ---- Short rows -----------------------------------------------------------------------------------------------------
// Tiles do not pay for short rows. Squares of a few rows and steps are loaded into registers, transposed, scanned,
// transposed back and stored.

#ifdef JAXGPUOPS_SQUARES
template <class M, class T>
struct Rebind;
template <template <class> class M, class From, class T>
struct Rebind<M<From>, T> {
  using type = M<T>;
};

// Maxima and minima flip bits to make keys. Floats need more than that, and make_all() has done it before.
template <class M, class V, class C>
JAXGPUOPS_INLINE V flipped(const V& value, C flip) {
  if constexpr (std::is_same_v<M, Maximum<C>>) return static_cast<V>(value ^ flip);
  return value;
}
template <class M, class C = typename M::C>
struct Flips {
  C flip;
  JAXGPUOPS_INLINE C key(C x) const { return flipped<M>(x, flip); }
  JAXGPUOPS_INLINE C value(C key) const { return flipped<M>(key, flip); }
};

// Scans rows, whose number must be a multiple of the side of a square. The last square of a row reaches into the next
// row, so that up to one side of elements after the last row are read and overwritten. The first square of each row is
// stored last, which repairs what the row before has overwritten.
template <class M, bool kBackward, bool kExclusive, class C = typename M::C>
JAXGPUOPS_SIMD void scan_rows(const C* x, int64_t length, int64_t rows, C identity, C flip, C* y) {
  using V = Vector<C>;
  using VectorMonoid = typename Rebind<M, V>::type;
  for (int64_t row = 0; row < rows; row += kSide<C>, x += kSide<C> * length, y += kSide<C> * length) {
    V fold = V{} + identity, square[kSide<C>], first[kSide<C>] = {};
    const int64_t squares = (length + kSide<C> - 1) / kSide<C>;
    for (int64_t k = 0; k < squares; ++k) {
      const int64_t s = (kBackward ? squares - 1 - k : k) * kSide<C>;
      for (int64_t i = 0; i < kSide<C>; ++i) std::memcpy(&square[i], x + i * length + s, sizeof(V));
      transpose_square<kSide<C>>(square);
      for (int64_t i = 0; i < kSide<C>; ++i) {
        const int64_t step = kBackward ? kSide<C> - 1 - i : i;
        if (kBackward && s + step >= length) continue;  // this element belongs to the next row
        const V before = fold;
        fold = VectorMonoid::combine({before}, {flipped<M>(square[step], flip)}).v;
        square[step] = flipped<M>(kExclusive ? before : fold, flip);
      }
      transpose_square<kSide<C>>(square);
      for (int64_t i = 0; i < kSide<C>; ++i) {
        if (s == 0) {
          first[i] = square[i];
        } else {
          std::memcpy(y + i * length + s, &square[i], sizeof(V));
        }
      }
    }
    for (int64_t i = 0; i < kSide<C>; ++i) std::memcpy(y + i * length, &first[i], sizeof(V));
  }
}

// Scans rows of two elements, which would fill only a part of a square.
template <class M, bool kBackward, bool kExclusive, class Form, class C = typename M::C>
JAXGPUOPS_SIMD void scan_pairs(Form form, const C* x, int64_t rows, C identity, C* y) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < 2 * rows; i += 2) {
    const auto first = M::combine({identity}, {form.key(x[i + kBackward])});
    const auto both = M::combine(first, {form.key(x[i + !kBackward])});
    y[i + kBackward] = form.value(kExclusive ? identity : first.v);
    y[i + !kBackward] = form.value(kExclusive ? first.v : both.v);
  }
}

// Calls body(reverse, exclusive) with compile-time constants.
template <class Body>
void with_direction(const Problem& problem, const Body& body) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (problem.reverse) return problem.exclusive ? body(Yes(), Yes()) : body(Yes(), No());
  return problem.exclusive ? body(No(), Yes()) : body(No(), No());
}

template <class M, class C = typename M::C>
void scan_rows(const C* x, const Problem& problem, int64_t length, int64_t rows, C identity, C flip, C* y) {
  if constexpr (std::is_same_v<M, Maximum<C>> && std::is_unsigned_v<C>) {
    using Signed = std::make_signed_t<C>;  // signed integers are faster to compare
    constexpr Signed kSign = std::numeric_limits<Signed>::min();
    return scan_rows<Maximum<Signed>>(reinterpret_cast<const Signed*>(x), problem, length, rows,
                                      static_cast<Signed>(static_cast<Signed>(identity) ^ kSign),
                                      static_cast<Signed>(static_cast<Signed>(flip) ^ kSign),
                                      reinterpret_cast<Signed*>(y));
  } else {
    with_direction(problem, [&](auto backward, auto exclusive) {
      constexpr bool kBackward = decltype(backward)::value, kExclusive = decltype(exclusive)::value;
      if (length == 2) return scan_pairs<M, kBackward, kExclusive>(Flips<M>{flip}, x, rows, identity, y);
      scan_rows<M, kBackward, kExclusive>(x, length, rows, identity, flip, y);
    });
  }
}

template <class C>
constexpr int64_t kShortRow = kTileElements / kSide<C>;  // the longest row for which a tile has room for squares

// Binds the operands to n neighbouring elements from index `at` on, and returns a tile that has them as its only step.
Tile turn_to_elements(Operands& operands, int64_t at, int64_t n) {
  Lanes lanes;
  lanes.count = lanes.run = n;
  lanes.inner = at;
  for (Operand* operand : {&operands.x, &operands.out})
    operand->bind(lanes, Rows{1, 1, operands.problem.rows.elements()}, false);
  return first_step(lanes);
}

template <class M, class Form>
void run_short(const Problem& problem, const Buffers& buffers, const Workers& workers, const Form& form,
               typename M::Value identity) {
  using C = typename M::C;
  const bool converts = sizeof(C) != bytes_of(problem.dtype);
  const int64_t length = problem.rows.length, elements = problem.rows.elements();
  const int64_t chunk = kTileElements / (kSide<C> * length) * kSide<C> * length;
  const int64_t task_elements = kTaskElements / chunk * chunk;

  parallel_for(workers, ceil_div(elements, task_elements), [&](int64_t task) {
    C in[kTileElements + kSide<C>] = {}, folds[kTileElements + kSide<C>];
    Operands operands(problem, buffers, false);
    const int64_t last = std::min(elements, (task + 1) * task_elements);
    for (int64_t at = task * task_elements; at < last; at += chunk) {
      const int64_t n = std::min(chunk, last - at);
      const int64_t rows = ceil_div(n / length, kSide<C>) * kSide<C>;
      const C* x = static_cast<const C*>(buffers.x) + at;
      C* out = static_cast<C*>(buffers.out) + at;
      if (!form.moves()) {
        if constexpr (std::is_same_v<Form, Keys<C>>) {
          if (length == 2) {
            with_direction(problem, [&](auto backward, auto exclusive) {
              scan_pairs<M, decltype(backward)::value, decltype(exclusive)::value>(form, x, n / 2, identity.v, out);
            });
            continue;
          }
        }
        make_all(form, x, in, n);
        scan_rows<M>(in, problem, length, rows, identity.v, C(0), folds);
        write_all(form, folds, n, out);
      } else if (!converts && at + n + kSide<C> <= last && rows * length == n) {
        scan_rows<M>(x, problem, length, rows, identity.v, form.flip(), out);
      } else {
        const Tile tile = turn_to_elements(operands, at, n);
        load(operands.x, tile, 0, 1, 0, in);
        scan_rows<M>(in, problem, length, rows, identity.v, form.flip(), folds);
        store(operands.out, tile, folds);
      }
    }
  });
}

// ---- Long rows ------------------------------------------------------------------------------------------------------
// A tile of one row is divided into parts, which are scanned as short rows; then the fold of all earlier parts is
// prepended to each part.

template <class M, class Form, class C>
JAXGPUOPS_SIMD void prepend_fold(Form form, C before, int64_t n, C* folds) {
  JAXGPUOPS_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) folds[i] = form.value(M::combine({before}, {folds[i]}).v);
}

// The counterpart of Worker in cut.h for strips that are single rows.
template <class Monoid, class Form>
class RowWorker {
 public:
  using M = Monoid;
  using C = typename M::C;
  using Value = typename M::Value;

  RowWorker(const Cut& cut, const Problem& problem, const Buffers& buffers, const Form& form, Value identity)
      : cut_(cut), operands_(problem, buffers, false), form_(form), identity_(identity) {}

  void turn_to(int64_t row) { row_ = row; }
  int64_t rows() const { return 1; }
  void scan(int64_t block, const Value* carry, Value* total) { run<true>(block, carry, total); }
  void fold(int64_t block, Value* total) { run<false>(block, nullptr, total); }

 private:
  static constexpr int64_t kTileParts = std::max<int64_t>(8, kSide<C>);

  template <bool kScan>
  void run(int64_t block, const Value* carry, Value* total) {
    const Problem& problem = operands_.problem;
    const int64_t length = cut_.rows.length, first = block * cut_.block, last = std::min(length, first + cut_.block);
    const bool reverse = problem.reverse;
    const auto* h0 = static_cast<const C*>(operands_.h0.data);
    Value sum = h0 && block == 0 ? Value{form_.key(h0[row_])} : identity_;
    bool none = block > 0;  // no fold yet
    for (int64_t at = first; at < last; at += cut_.tile_steps) {
      const int64_t n = std::min(cut_.tile_steps, last - at), begin = reverse ? length - at - n : at;
      const int64_t steps = ceil_div(n, kTileParts * kSide<C>) * kSide<C>, pad = steps * kTileParts - n;
      const Tile tile = turn_to_elements(operands_, row_ * length + begin, n);

      C x[kTileElements], folds[kTileElements];
      const int64_t offset = reverse ? pad : 0;  // the padding comes last in the direction of the scan
      load(operands_.x, tile, 0, 1, 0, x + offset);
      if constexpr (!std::is_same_v<Form, Plain<C>>) make_all(form_, x + offset, x + offset, n);
      std::fill_n(x + (reverse ? 0 : n), pad, identity_.v);
      scan_rows<M>(x, problem, steps, kTileParts, identity_.v, C(0), folds);
      for (int64_t k = 0; k < kTileParts; ++k) {
        const int64_t of_part = (reverse ? kTileParts - 1 - k : k) * steps, end = of_part + (reverse ? 0 : steps - 1);
        const Value all = {folds[end]}, part = problem.exclusive ? M::combine(all, {x[end]}) : all;
        const Value before = !carry ? sum : none ? *carry : M::combine(*carry, sum);
        if (kScan) prepend_fold<M>(form_, before.v, steps, folds + of_part);
        sum = none ? part : M::combine(sum, part);
        none = false;
      }
      if (kScan) store(operands_.out, tile, folds + offset);
    }
    *total = sum;
  }

  const Cut& cut_;
  Operands operands_;
  Form form_;
  Value identity_;
  int64_t row_ = 0;
};
#endif

template <class M, class Form>
void run_monoid(const Problem& problem, const Buffers& buffers, const Workers& workers, const Form& form,
                typename M::Value identity, typename M::C least) {
#ifdef JAXGPUOPS_SQUARES
  if constexpr (M::kPlanes == 1 && std::is_arithmetic_v<typename M::C>) {
    const Rows& rows = problem.rows;
    if (rows.elements() > 0 && rows.inner == 1 && !problem.segmented) {
      if (rows.length <= kShortRow<typename M::C> && !problem.initial)
        return run_short<M>(problem, buffers, workers, form, identity);
      const Cut cut(rows, kTileElements);
      return run_cut(cut, workers, [&] { return RowWorker<M, Form>(cut, problem, buffers, form, identity); });
    }
  }
#endif
  if (problem.segmented) {
    run(problem.rows, Cumulative<M, Form, true>(problem, buffers, form, identity, least), workers);
  } else {
    run(problem.rows, Cumulative<M, Form, false>(problem, buffers, form, identity, least), workers);
  }
}

template <class T>
void run_arithmetic(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.op == Op::kSum) return run_monoid<Sum<T>>(problem, buffers, workers, Plain<T>{}, {T(0)}, T(0));
  run_monoid<Product<T>>(problem, buffers, workers, Plain<T>{}, {T(1)}, T(1));
}

template <class T>
void run_logsumexp(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  constexpr T kLeast = -std::numeric_limits<T>::infinity();
  run_monoid<LogSumExp<T>>(problem, buffers, workers, Logarithms<T>{}, {kLeast, T(0)}, kLeast);
}

struct Range {
  KeyKind kind;
  uint64_t nan_above;        // as ArgOrder defines it
  uint64_t lowest, highest;  // bits of the identities of the maximum and of the minimum
};

Range range_of(DType dtype) {
  constexpr uint64_t kAll = ~uint64_t{0};
  const int bits = 8 * bytes_of(dtype);
  const uint64_t sign = uint64_t{1} << (bits - 1);
  const auto floats = [&](uint64_t top) { return Range{KeyKind::kFloat, top, top | sign, top}; };
  switch (dtype) {
    case DType::kFloat8E4M3FN: return floats(0x7e);
    case DType::kFloat8E5M2: return floats(0x7c);
    case DType::kFloat16: return floats(0x7c00);
    case DType::kBFloat16: return floats(0x7f80);
    case DType::kFloat32: return floats(0x7f800000);
    case DType::kFloat64: return floats(0x7ff0000000000000);
    case DType::kBool: return {KeyKind::kUnsigned, kAll, 0, 1};
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64: return {KeyKind::kSigned, kAll, sign, sign - 1};
    default: return {KeyKind::kUnsigned, kAll, 0, kAll};
  }
}

template <class T>
void run_extremum(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  const bool largest = problem.op == Op::kMax;
  const Range range = range_of(problem.dtype);
  const int bits = 8 * static_cast<int>(sizeof(T));
  Keys<T> keys;
  keys.arg.order = key_order(range.kind, bits, largest);
  keys.arg.sign = uint64_t{1} << (bits - 1);
  keys.arg.nan_above = std::min(range.nan_above, keys.arg.sign - 1);
  const T least = static_cast<T>(largest ? range.lowest : range.highest);
  run_monoid<Maximum<T>>(problem, buffers, workers, keys, {keys.key(least)}, least);
}

}  // namespace

void run_cumulative(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.rows.length == 1 && !problem.exclusive && !problem.initial) {
    const int64_t bytes = problem.rows.elements() * bytes_of(problem.dtype), task_bytes = 1 << 18;
    return parallel_for(workers, ceil_div(bytes, task_bytes), [&](int64_t task) {
      const int64_t at = task * task_bytes;
      std::memcpy(static_cast<char*>(buffers.out) + at, static_cast<const char*>(buffers.x) + at,
                  std::min(task_bytes, bytes - at));
    });
  }
  if (problem.op == Op::kMax || problem.op == Op::kMin) {
    switch (bytes_of(problem.dtype)) {
      case 1: return run_extremum<uint8_t>(problem, buffers, workers);
      case 2: return run_extremum<uint16_t>(problem, buffers, workers);
      case 4: return run_extremum<uint32_t>(problem, buffers, workers);
      default: return run_extremum<uint64_t>(problem, buffers, workers);
    }
  }
  if (problem.op == Op::kLogSumExp) {
    if (problem.dtype == DType::kFloat64) return run_logsumexp<double>(problem, buffers, workers);
    return run_logsumexp<float>(problem, buffers, workers);
  }
  with_arithmetic(problem.dtype, [&](auto zero) { run_arithmetic<decltype(zero)>(problem, buffers, workers); });
}

}  // namespace jaxgpuops::scan::cpu
