// Turns the buffers and attributes of a target into a checked problem. The handlers of both backends start here. The
// values of the indices are not checked, since moe_plan has computed them.
#pragma once

#include "ffi.h"
#include "moe/moe.h"

namespace jaxgpuops::moe {

// Checks a buffer whose last dimension is the axis of the call.
inline Rows require_last(const char* name, ffi::AnyBuffer buffer, int64_t axis, int64_t outer) {
  const Rows rows = require_rows(name, buffer, axis);
  if (rows.inner != 1 || rows.outer != outer)
    throw invalid(name, " has shape ", text_of(dims_of(buffer)), ": axis ", axis, " must be the last, and ", outer,
                  " the size before it");
  return rows;
}

inline PlanProblem plan_problem(ffi::AnyBuffer experts, ffi::AnyBuffer assignment_of_row,
                                ffi::AnyBuffer row_of_assignment, ffi::AnyBuffer sizes, ffi::AnyBuffer offsets,
                                int64_t axis, int64_t capacity, int64_t align) {
  PlanProblem problem;
  problem.outer = rows_of("experts", experts, axis).outer;
  problem.assignments = require_last("experts", experts, axis, problem.outer).length;
  problem.rows = require_last("assignment_of_row", assignment_of_row, axis, problem.outer).length;
  problem.experts = require_last("group_sizes", sizes, axis, problem.outer).length;
  for (const auto& [name, buffer] : {std::pair<const char*, ffi::AnyBuffer>{"experts", experts},
                                     {"assignment_of_row", assignment_of_row},
                                     {"row_of_assignment", row_of_assignment},
                                     {"group_sizes", sizes},
                                     {"group_offsets", offsets}})
    require_type(name, buffer, ffi::DataType::S32);
  require_shape("row_of_assignment", row_of_assignment, dims_of(experts));
  require_shape("group_offsets", offsets, with_axis(dims_of(sizes), axis, problem.experts + 1));
  if (align < 1) throw invalid("align is ", align, ", expected 1 or more");
  problem.capacity = capacity;
  problem.align = align;
  // The most rows that any routing needs: all kept assignments, and the rows by which rounding up lengthens each group.
  const int64_t kept =
      capacity < 0 ? problem.assignments : std::min(problem.assignments, problem.experts * problem.padded(capacity));
  if (problem.rows < kept) throw invalid("assignment_of_row has ", problem.rows, " rows, expected ", kept, " or more");
  return problem;
}

// Checks an operand that has one entry for each position along the axis and nothing after it. It may lack dimensions
// before the axis.
inline IndexMap require_entries(const char* name, ffi::AnyBuffer buffer, const Dims& whole, int64_t axis,
                                int64_t length) {
  const IndexMap map = require_broadcast(name, buffer, with_axis(whole, axis, length), axis).outer;
  const Rows rows = rows_of(name, buffer, axis);
  if (rows.inner != 1 || rows.length != length)
    throw invalid(name, " has shape ", text_of(dims_of(buffer)), ": it must have ", length, " entries along axis ",
                  axis, " and nothing after it");
  return map;
}

// `token_side` has one line for each token along the axis, `row_side` one for each row. `index` holds the indices that
// the call follows.
inline MoveProblem move_problem(const char* token_name, ffi::AnyBuffer token_side, const char* row_name,
                                ffi::AnyBuffer row_side, const char* index_name, ffi::AnyBuffer index, bool by_row,
                                int64_t axis, int64_t choices) {
  MoveProblem problem;
  const Rows tokens = require_rows(token_name, token_side, axis), rows = require_rows(row_name, row_side, axis);
  require_type(row_name, row_side, token_side.element_type());
  require_shape(row_name, row_side, with_axis(dims_of(token_side), axis, rows.length));
  problem.outer = tokens.outer;
  problem.tokens = tokens.length;
  problem.rows = rows.length;
  problem.inner = tokens.inner;
  problem.choices = choices;
  problem.dtype = require_dtype(token_name, token_side);
  if (!accepts(problem.dtype)) throw invalid(token_name, " has element type ", printable(token_side.element_type()));
  if (choices < 1) throw invalid("choices is ", choices, ", expected 1 or more");
  if (problem.assignments() > INT32_MAX) throw invalid("there are ", problem.assignments(), " assignments, too many");
  require_type(index_name, index, ffi::DataType::S32);
  problem.index =
      require_entries(index_name, index, dims_of(token_side), axis, by_row ? problem.rows : problem.assignments());
  return problem;
}

// Checks the second indices, the assignment of each row, of calls that follow both kinds of indices.
inline void require_other(MoveProblem& problem, ffi::AnyBuffer assignment_of_row, const Dims& whole, int64_t axis) {
  require_type("assignment_of_row", assignment_of_row, ffi::DataType::S32);
  problem.other = require_entries("assignment_of_row", assignment_of_row, whole, axis, problem.rows);
}

// The dtype of sums, and of weights that are not narrow.
inline ffi::DataType wide_type(const MoveProblem& problem) {
  return problem.dtype == DType::kFloat64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// Checks the weights, and notes whether they are narrow.
inline const void* weights_of(MoveProblem& problem, Rest& rest, const Dims& whole, int64_t axis) {
  const ffi::AnyBuffer weights = rest.next("weights");
  problem.narrow = bytes_of(problem.dtype) == 2 && require_dtype("weights", weights) == problem.dtype;
  if (!problem.narrow) require_type("weights", weights, wide_type(problem));
  problem.weight = require_entries("weights", weights, whole, axis, problem.assignments());
  return weights.untyped_data();
}

struct VjpCall {
  MoveProblem problem;
  const void *y, *ct;
  const int32_t *row_of_assignment, *assignment_of_row;
  const void* weights;
  void *dy, *dw;
};

inline VjpCall vjp_call(ffi::AnyBuffer y, ffi::AnyBuffer ct, ffi::AnyBuffer row_of_assignment,
                        ffi::AnyBuffer assignment_of_row, ffi::RemainingArgs weights, ffi::AnyBuffer dy,
                        ffi::AnyBuffer dw, int64_t axis, int64_t choices) {
  VjpCall call;
  MoveProblem& problem = call.problem;
  problem = move_problem("ct", ct, "y", y, "row_of_assignment", row_of_assignment, false, axis, choices);
  require_other(problem, assignment_of_row, dims_of(ct), axis);
  Rest rest(weights);
  call.weights = weights_of(problem, rest, dims_of(y), axis);
  rest.require_end();
  require_type("dy", dy, y.element_type());
  require_shape("dy", dy, dims_of(y));
  require_type("dw", dw, problem.narrow ? y.element_type() : wide_type(problem));
  Dims expected = with_axis(dims_of(ct), axis, problem.assignments());
  for (size_t d = axis + 1; d < expected.size(); ++d) expected[d] = 1;
  require_shape("dw", dw, expected);
  call.y = y.untyped_data();
  call.ct = ct.untyped_data();
  call.row_of_assignment = static_cast<const int32_t*>(row_of_assignment.untyped_data());
  call.assignment_of_row = static_cast<const int32_t*>(assignment_of_row.untyped_data());
  call.dy = dy.untyped_data();
  call.dw = dw.untyped_data();
  return call;
}

// The bindings of the targets, which both backends share. The operands, results and attributes are in the order of
// the handlers' parameters.
template <class Backend>
auto plan_binding() {
  return Backend::scratch(Backend::start()
                              .template Arg<ffi::AnyBuffer>()   // experts
                              .template Ret<ffi::AnyBuffer>()   // assignment_of_row
                              .template Ret<ffi::AnyBuffer>()   // row_of_assignment
                              .template Ret<ffi::AnyBuffer>()   // group_sizes
                              .template Ret<ffi::AnyBuffer>())  // group_offsets
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("capacity")
      .template Attr<int64_t>("align");
}

template <class Backend>
auto move_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // x or y
      .template Arg<ffi::AnyBuffer>()  // the indices that the call follows
      .template Arg<ffi::AnyBuffer>()  // the indices that the transposed call follows
      .RemainingArgs()                 // weights
      .template Ret<ffi::AnyBuffer>()  // out
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("choices");
}

template <class Backend>
auto vjp_binding() {
  return Backend::start()
      .template Arg<ffi::AnyBuffer>()  // y
      .template Arg<ffi::AnyBuffer>()  // ct
      .template Arg<ffi::AnyBuffer>()  // row_of_assignment
      .template Arg<ffi::AnyBuffer>()  // assignment_of_row
      .RemainingArgs()                 // weights
      .template Ret<ffi::AnyBuffer>()  // dy
      .template Ret<ffi::AnyBuffer>()  // dw
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("choices");
}

// Defined in cpu/handlers.cc and cuda/handlers.cc.
std::vector<Target> cpu_targets();
std::vector<Target> cuda_targets();

}  // namespace jaxgpuops::moe
