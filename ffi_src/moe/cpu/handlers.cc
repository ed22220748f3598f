// moe_plan, dispatch and combine on the CPU.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/cpu/narrow_float.h"
#include "common/rounding.h"
#include "moe/call.h"

namespace jaxgpuops::moe {
namespace {

constexpr int64_t kTaskElements = 1 << 15;

const int32_t* ints(ffi::AnyBuffer buffer) { return static_cast<const int32_t*>(buffer.untyped_data()); }
int32_t* ints(ffi::Result<ffi::AnyBuffer> buffer) { return static_cast<int32_t*>(buffer->untyped_data()); }

// ---- plan -----------------------------------------------------------------------------------------------------------

void plan_one(const PlanProblem& p, const int32_t* experts, int32_t* assignment_of_row, int32_t* row_of_assignment,
              int32_t* sizes, int32_t* offsets) {
  const auto valid = [&](int32_t e) { return e >= 0 && e < p.experts; };
  std::fill_n(assignment_of_row, p.rows, -1);
  std::fill_n(sizes, p.experts, 0);
  for (int64_t a = 0; a < p.assignments; ++a)
    if (valid(experts[a])) ++sizes[experts[a]];
  int64_t offset = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    offsets[e] = static_cast<int32_t>(offset);
    offset += p.padded(sizes[e]);
    sizes[e] = static_cast<int32_t>(p.kept(sizes[e]));
  }
  offsets[p.experts] = static_cast<int32_t>(offset);
  std::vector<int32_t> taken(p.experts);
  for (int64_t a = 0; a < p.assignments; ++a) {
    const int32_t e = experts[a];
    const bool kept = valid(e) && taken[e] < sizes[e];
    const int64_t row = kept ? offsets[e] + taken[e]++ : -1;
    row_of_assignment[a] = static_cast<int32_t>(row);
    if (kept && row < p.rows) assignment_of_row[row] = static_cast<int32_t>(a);
  }
}

ffi::Error plan(ffi::ThreadPool pool, ffi::AnyBuffer experts, ffi::Result<ffi::AnyBuffer> assignment_of_row,
                ffi::Result<ffi::AnyBuffer> row_of_assignment, ffi::Result<ffi::AnyBuffer> sizes,
                ffi::Result<ffi::AnyBuffer> offsets, int64_t axis, int64_t capacity, int64_t align) {
  return handle("jaxgpuops.moe_plan", [&] {
    const PlanProblem p =
        plan_problem(experts, *assignment_of_row, *row_of_assignment, *sizes, *offsets, axis, capacity, align);
    parallel_for(workers_of(pool), p.outer, [&](int64_t o) {
      plan_one(p, ints(experts) + o * p.assignments, ints(assignment_of_row) + o * p.rows,
               ints(row_of_assignment) + o * p.assignments, ints(sizes) + o * p.experts,
               ints(offsets) + o * (p.experts + 1));
    });
  });
}

// ---- dispatch and combine -------------------------------------------------------------------------------------------

// Calls body(outer, line) for every line of `inner` elements, on several threads.
template <class Body>
void for_each_line(const Workers& workers, int64_t outer, int64_t lines, int64_t inner, const Body& body) {
  if (outer * lines * inner == 0) return;
  const int64_t each = std::max<int64_t>(1, kTaskElements / inner), count = outer * lines;
  parallel_for(workers, ceil_div(count, each), [&](int64_t task) {
    for (int64_t at = task * each; at < std::min(count, (task + 1) * each); ++at) body(at / lines, at % lines);
  });
}

template <class Element>
using Wide = decltype(Element::decode(typename Element::Bits{}));

// Reads the i-th weight of the assignments, or writes it.
template <class Element>
Wide<Element> weight_at(const MoveProblem& p, const void* weights, int64_t i) {
  return p.narrow ? Element::decode(static_cast<const typename Element::Bits*>(weights)[i])
                  : static_cast<const Wide<Element>*>(weights)[i];
}
template <class Element>
void put_weight(const MoveProblem& p, void* weights, int64_t i, Wide<Element> weight) {
  if (p.narrow)
    static_cast<typename Element::Bits*>(weights)[i] = Element::encode(weight);
  else
    static_cast<Wide<Element>*>(weights)[i] = weight;
}

template <class Element>
void dispatch_scaled(const MoveProblem& p, const void* x, const int32_t* index, const void* weights, void* out,
                     const Workers& workers) {
  using Bits = typename Element::Bits;
  for_each_line(workers, p.outer, p.rows, p.inner, [&](int64_t o, int64_t r) {
    const int32_t a = index[p.index(o) + r];
    Bits* to = static_cast<Bits*>(out) + (o * p.rows + r) * p.inner;
    if (a < 0) {
      std::memset(to, 0, p.inner * sizeof(Bits));
      return;
    }
    const Bits* from = static_cast<const Bits*>(x) + (o * p.tokens + a / p.choices) * p.inner;
    const Wide<Element> scale = weight_at<Element>(p, weights, p.weight(o) + a);
    for (int64_t i = 0; i < p.inner; ++i) to[i] = Element::encode(scale * Element::decode(from[i]));
  });
}

void dispatch_whole(const MoveProblem& p, const void* x, const int32_t* index, void* out, const Workers& workers) {
  const int64_t bytes = p.inner * bytes_of(p.dtype);
  for_each_line(workers, p.outer, p.rows, p.inner, [&](int64_t o, int64_t r) {
    const int32_t a = index[p.index(o) + r];
    char* to = static_cast<char*>(out) + (o * p.rows + r) * bytes;
    if (a < 0)
      std::memset(to, 0, bytes);
    else
      std::memcpy(to, static_cast<const char*>(x) + (o * p.tokens + a / p.choices) * bytes, bytes);
  });
}

constexpr int64_t kSums = 512;  // elements that are summed at a time, so that the sums stay in the cache

template <class Element>
void combine(const MoveProblem& p, const void* y, const int32_t* index, const void* weights, void* out,
             const Workers& workers) {
  using Bits = typename Element::Bits;
  using Acc = Wide<Element>;
  for_each_line(workers, p.outer, p.tokens, p.inner, [&](int64_t o, int64_t t) {
    const int32_t* rows = index + p.index(o) + t * p.choices;
    const Bits* from = static_cast<const Bits*>(y) + o * p.rows * p.inner;
    Bits* to = static_cast<Bits*>(out) + (o * p.tokens + t) * p.inner;
    for (int64_t i0 = 0; i0 < p.inner; i0 += kSums) {
      const int64_t width = std::min(kSums, p.inner - i0);
      Acc sums[kSums] = {};
      for (int64_t j = 0; j < p.choices; ++j) {
        if (rows[j] < 0) continue;
        const Bits* row = from + rows[j] * p.inner + i0;
        const Acc scale = weights ? weight_at<Element>(p, weights, p.weight(o) + t * p.choices + j) : Acc{1};
        for (int64_t i = 0; i < width; ++i) sums[i] += scale * Element::decode(row[i]);
      }
      for (int64_t i = 0; i < width; ++i) to[i0 + i] = Element::encode(sums[i]);
    }
  });
}

template <class Element>
void combine_vjp(const VjpCall& call, const Workers& workers) {
  using Bits = typename Element::Bits;
  using Acc = Wide<Element>;
  const MoveProblem& p = call.problem;
  if (p.inner == 0) std::memset(call.dw, 0, p.outer * p.assignments() * (p.narrow ? sizeof(Bits) : sizeof(Acc)));
  for_each_line(workers, p.outer, p.rows, p.inner, [&](int64_t o, int64_t r) {
    if (call.assignment_of_row[p.other(o) + r] < 0)
      std::fill_n(static_cast<Bits*>(call.dy) + (o * p.rows + r) * p.inner, p.inner, Bits{});
  });
  for_each_line(workers, p.outer, p.tokens, p.inner, [&](int64_t o, int64_t t) {
    const int32_t* rows = call.row_of_assignment + p.index(o) + t * p.choices;
    const Bits* token = static_cast<const Bits*>(call.ct) + (o * p.tokens + t) * p.inner;
    for (int64_t j = 0; j < p.choices; ++j) {
      constexpr int64_t kLanes = 16;  // partial sums, which the compiler keeps in vector registers
      Acc sums[kLanes] = {};
      const Acc scale = weight_at<Element>(p, call.weights, p.weight(o) + t * p.choices + j);
      if (rows[j] >= 0) {
        const Bits* row = static_cast<const Bits*>(call.y) + (o * p.rows + rows[j]) * p.inner;
        Bits* to = static_cast<Bits*>(call.dy) + (o * p.rows + rows[j]) * p.inner;
        for (int64_t i0 = 0; i0 < p.inner; i0 += kLanes)
          for (int64_t i = i0; i < std::min(p.inner, i0 + kLanes); ++i) {
            const Acc c = Element::decode(token[i]);
            sums[i - i0] += c * Element::decode(row[i]);
            to[i] = Element::encode(scale * c);
          }
      }
      for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
      put_weight<Element>(p, call.dw, o * p.assignments() + t * p.choices + j, sums[0]);
    }
  });
}

ffi::Error combine_vjp_handler(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer ct,
                               ffi::AnyBuffer row_of_assignment, ffi::AnyBuffer assignment_of_row,
                               ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> dy,
                               ffi::Result<ffi::AnyBuffer> dw, int64_t axis, int64_t choices) {
  return handle("jaxgpuops.moe_combine_vjp", [&] {
    const VjpCall call = vjp_call(y, ct, row_of_assignment, assignment_of_row, weights, *dy, *dw, axis, choices);
    with_any_format(call.problem.dtype, [&](auto element) { combine_vjp<decltype(element)>(call, workers_of(pool)); });
  });
}

ffi::Error dispatch_handler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer assignment_of_row, ffi::AnyBuffer,
                            ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> out, int64_t axis,
                            int64_t choices) {
  return handle("jaxgpuops.moe_dispatch", [&] {
    MoveProblem p = move_problem("x", x, "out", *out, "assignment_of_row", assignment_of_row, true, axis, choices);
    Rest rest(weights);
    const void* scales = weights.size() > 0 ? weights_of(p, rest, dims_of(x), axis) : nullptr;
    rest.require_end();
    const Workers workers = workers_of(pool);
    if (!scales) return dispatch_whole(p, x.untyped_data(), ints(assignment_of_row), out->untyped_data(), workers);
    with_any_format(p.dtype, [&](auto element) {
      dispatch_scaled<decltype(element)>(p, x.untyped_data(), ints(assignment_of_row), scales, out->untyped_data(),
                                         workers);
    });
  });
}

ffi::Error combine_handler(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer row_of_assignment, ffi::AnyBuffer,
                           ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> out, int64_t axis, int64_t choices) {
  return handle("jaxgpuops.moe_combine", [&] {
    MoveProblem p = move_problem("out", *out, "y", y, "row_of_assignment", row_of_assignment, false, axis, choices);
    Rest rest(weights);
    const void* scales = weights.size() > 0 ? weights_of(p, rest, dims_of(y), axis) : nullptr;
    rest.require_end();
    with_any_format(p.dtype, [&](auto element) {
      combine<decltype(element)>(p, y.untyped_data(), ints(row_of_assignment), scales, out->untyped_data(),
                                 workers_of(pool));
    });
  });
}

XLA_FFI_DEFINE_HANDLER(kPlan, plan, plan_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kDispatch, dispatch_handler, move_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCombine, combine_handler, move_binding<OnCpu>());
XLA_FFI_DEFINE_HANDLER(kCombineVjp, combine_vjp_handler, vjp_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() {
  return {{"jaxgpuops.moe_plan", kPlan},
          {"jaxgpuops.moe_dispatch", kDispatch},
          {"jaxgpuops.moe_combine", kCombine},
          {"jaxgpuops.moe_combine_vjp", kCombineVjp}};
}

}  // namespace jaxgpuops::moe
