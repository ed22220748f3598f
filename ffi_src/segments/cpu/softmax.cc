// Softmax and log-sum-exp of segments on the CPU. segments.cc finds the largest number and the sum of the exponentials
// of each segment, so sums are added up in its order. The exponentials are written to memory between these steps.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd_math.h"
#include "common/rounding.h"
#include "segments/cpu/loops.h"

namespace jaxgpuops::segments {
namespace {

constexpr int64_t kTaskElements = 1 << 14;

// kInner: 1 if rows have one column, else 0.

// Rows of differences from the largest number of their segment. Rows whose id is out of range are infinitely below.
template <int kInner, class Real>
JAXGPUOPS_SIMD void subtract_largest(const Real* x, const int32_t* ids, int64_t rows, int64_t inner, int64_t segments,
                                     const Real* largest, Real* to) {
  if (kInner > 0) inner = kInner;
  for (int64_t j = 0; j < rows; ++j, x += inner, to += inner) {
    if (static_cast<uint64_t>(ids[j]) >= static_cast<uint64_t>(segments)) {
      std::fill_n(to, inner, -std::numeric_limits<Real>::infinity());
      continue;
    }
    const Real* most = largest + ids[j] * inner;
    for (int64_t i = 0; i < inner; ++i) to[i] = x[i] - most[i];
  }
}

template <class Real>
JAXGPUOPS_SIMD_FMA void exponentials(Real* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_negative(x[i]);
}

// Divides the exponentials of rows by the sums of their segments. Beside an infinity, all other numbers have a share of
// 0, but its own is NaN, and so is the sum.
template <int kInner, class Real>
JAXGPUOPS_SIMD void divide_by_sums(const int32_t* ids, int64_t rows, int64_t inner, int64_t segments,
                                   const Real* largest, const Real* sums, Real* exps) {
  if (kInner > 0) inner = kInner;
  for (int64_t j = 0; j < rows; ++j, exps += inner) {
    if (static_cast<uint64_t>(ids[j]) >= static_cast<uint64_t>(segments)) continue;
    const Real *most = largest + ids[j] * inner, *sum = sums + ids[j] * inner;
    for (int64_t i = 0; i < inner; ++i) {
      const bool none = most[i] == std::numeric_limits<Real>::infinity() && exps[i] == 0;
      exps[i] = none ? 0 : exps[i] / sum[i];
    }
  }
}

template <class Real>
void softmax_of(const Segments& problem, const Real* data, const int32_t* ids, Real* out, bool logs,
                const Workers& workers) {
  const Rows& rows = problem.rows;
  const int64_t inner = rows.inner, segments = problem.segments, cells = segments * inner, row = rows.length * inner;
  const std::unique_ptr<Real[]> largest(new Real[rows.outer * cells]);
  const std::unique_ptr<Real[]> own_sums(logs ? nullptr : new Real[rows.outer * cells]);
  const std::unique_ptr<Real[]> own_exps(logs ? new Real[rows.outer * row] : nullptr);
  Real* const sums = logs ? out : own_sums.get();
  Real* const exps = logs ? own_exps.get() : out;

  Segments part = problem;
  part.op = Op::kMax;
  reduce_segments(part, data, ids, largest.get(), workers);

  // Calls body(o, begin, end) for some rows of each outer index.
  const int64_t some = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, inner));
  const int64_t parts = ceil_div(rows.length, some);
  const auto for_rows = [&](const auto& body) {
    parallel_for(workers, rows.outer * parts, [&](int64_t task) {
      const int64_t begin = task % parts * some;
      body(task / parts, begin, std::min(rows.length, begin + some) - begin);
    });
  };
  for_rows([&](int64_t o, int64_t begin, int64_t count) {
    Real* const to = exps + o * row + begin * inner;
    const auto subtract = inner == 1 ? subtract_largest<1, Real> : subtract_largest<0, Real>;
    subtract(data + problem.data(o) + begin * inner, ids + problem.ids(o) + begin, count, inner, segments,
             largest.get() + o * cells, to);
    exponentials(to, count * inner);
  });

  part.op = Op::kSum;
  part.data = {1, {rows.outer}, {row}};
  reduce_segments(part, exps, ids, sums, workers);
  if (logs) {
    for (int64_t cell = 0; cell < rows.outer * cells; ++cell)
      out[cell] = std::isfinite(largest[cell]) ? std::log(sums[cell]) + largest[cell] : largest[cell];
    return;
  }
  for_rows([&](int64_t o, int64_t begin, int64_t count) {
    const auto divide = inner == 1 ? divide_by_sums<1, Real> : divide_by_sums<0, Real>;
    divide(ids + problem.ids(o) + begin, count, inner, segments, largest.get() + o * cells, sums + o * cells,
           exps + o * row + begin * inner);
  });
}

}  // namespace

void segment_softmax(const Segments& problem, const void* data, const int32_t* ids, void* out, bool logs,
                     const Workers& workers) {
  with_format(problem.dtype, [&](auto format) {
    using Format = decltype(format);
    using Bits = typename Format::Bits;
    using Real = decltype(Format::decode(Bits{}));
    const auto* const from = static_cast<const Bits*>(data);
    auto* const to = static_cast<Bits*>(out);
    if constexpr (std::is_same_v<Bits, Real>) {
      softmax_of(problem, from, ids, to, logs, workers);
    } else {  // computed in float32, and rounded in the end
      const Rows& rows = problem.rows;
      const int64_t results = rows.outer * (logs ? problem.segments : rows.length) * rows.inner;
      int64_t count = rows.outer > 0 ? rows.length * rows.inner : 0;  // numbers of the data, which batches may share
      for (int g = 0; count > 0 && g < problem.data.groups; ++g)
        count += (problem.data.size[g] - 1) * problem.data.stride[g];
      const std::unique_ptr<Real[]> wide(new Real[count]), wide_out(new Real[results]);
      const auto convert = [&](int64_t elements, const auto& body) {
        parallel_for(workers, ceil_div(elements, kTaskElements), [&](int64_t task) {
          const int64_t begin = task * kTaskElements, end = std::min(elements, begin + kTaskElements);
          for (int64_t i = begin; i < end; ++i) body(i);
        });
      };
      convert(count, [&](int64_t i) { wide[i] = Format::decode(from[i]); });
      Segments as_wide = problem;
      as_wide.dtype = DType::kFloat32;
      softmax_of(as_wide, wide.get(), ids, wide_out.get(), logs, workers);
      convert(results, [&](int64_t i) { to[i] = Format::encode(wide_out[i]); });
    }
  });
}

}  // namespace jaxgpuops::segments
