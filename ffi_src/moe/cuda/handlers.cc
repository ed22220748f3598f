// CUDA handlers of the mixture of experts: each checks its buffers and launches its kernels.
#include "common/cuda/device.h"
#include "moe/call.h"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {
namespace {

const int32_t* ints(ffi::AnyBuffer buffer) { return static_cast<const int32_t*>(buffer.untyped_data()); }
int32_t* ints(ffi::Result<ffi::AnyBuffer> buffer) { return static_cast<int32_t*>(buffer->untyped_data()); }

ffi::Error plan(cudaStream_t stream, ffi::AnyBuffer experts, ffi::Result<ffi::AnyBuffer> assignment_of_row,
                ffi::Result<ffi::AnyBuffer> row_of_assignment, ffi::Result<ffi::AnyBuffer> sizes,
                ffi::Result<ffi::AnyBuffer> offsets, ffi::Result<ffi::AnyBuffer> workspace, int64_t axis,
                int64_t capacity, int64_t align) {
  return handle("jaxgpuops.moe_plan", [&] {
    const PlanProblem problem =
        plan_problem(experts, *assignment_of_row, *row_of_assignment, *sizes, *offsets, axis, capacity, align);
    if (problem.experts > kMostExperts)
      throw invalid("there are ", problem.experts, " experts, at most ", kMostExperts, " have counters");
    const int64_t workspace_bytes = require_workspace(*workspace, experts, axis);
    const Device device = current_device();
    const Plan plan = plan_route(problem, device.gpu(), workspace_bytes);
    const Routes routes = {ints(experts), ints(assignment_of_row), ints(row_of_assignment),
                           ints(sizes),   ints(offsets),           ints(workspace)};
    require_launched(launch_route(stream, plan, problem, routes), "route", {problem.outer, problem.assignments, 1},
                     experts, device);
  });
}

ffi::Error dispatch(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer assignment_of_row,
                    ffi::AnyBuffer row_of_assignment, ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> out,
                    int64_t axis, int64_t choices) {
  return handle("jaxgpuops.moe_dispatch", [&] {
    MoveProblem problem =
        move_problem("x", x, "out", *out, "row_of_assignment", row_of_assignment, false, axis, choices);
    require_other(problem, assignment_of_row, dims_of(x), axis);
    Rest rest(weights);
    const void* scales = weights.size() > 0 ? weights_of(problem, rest, dims_of(x), axis) : nullptr;
    rest.require_end();
    const Device device = current_device();
    const cudaError_t status = launch_dispatch(stream, device.gpu(), problem, x.untyped_data(), ints(row_of_assignment),
                                               ints(assignment_of_row), scales, out->untyped_data());
    require_launched(status, "dispatch", {problem.outer, problem.rows, problem.inner}, x, device);
  });
}

ffi::Error combine(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer row_of_assignment, ffi::AnyBuffer,
                   ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> out, int64_t axis, int64_t choices) {
  return handle("jaxgpuops.moe_combine", [&] {
    MoveProblem problem =
        move_problem("out", *out, "y", y, "row_of_assignment", row_of_assignment, false, axis, choices);
    Rest rest(weights);
    const void* scales = weights.size() > 0 ? weights_of(problem, rest, dims_of(y), axis) : nullptr;
    rest.require_end();
    const cudaError_t status =
        launch_combine(stream, problem, y.untyped_data(), ints(row_of_assignment), scales, out->untyped_data());
    require_launched(status, "combine", {problem.outer, problem.tokens, problem.inner}, y, current_device());
  });
}

ffi::Error combine_vjp(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer ct, ffi::AnyBuffer row_of_assignment,
                       ffi::AnyBuffer assignment_of_row, ffi::RemainingArgs weights, ffi::Result<ffi::AnyBuffer> dy,
                       ffi::Result<ffi::AnyBuffer> dw, int64_t axis, int64_t choices) {
  return handle("jaxgpuops.moe_combine_vjp", [&] {
    const VjpCall call = vjp_call(y, ct, row_of_assignment, assignment_of_row, weights, *dy, *dw, axis, choices);
    const MoveProblem& problem = call.problem;
    const cudaError_t status = launch_combine_vjp(stream, problem, call.y, call.ct, call.row_of_assignment,
                                                  call.assignment_of_row, call.weights, call.dy, call.dw);
    require_launched(status, "combine_vjp", {problem.outer, problem.tokens, problem.inner}, y, current_device());
  });
}

XLA_FFI_DEFINE_HANDLER(kPlan, plan, plan_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kDispatch, dispatch, move_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCombine, combine, move_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCombineVjp, combine_vjp, vjp_binding<OnCuda>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::vector<Target> cuda_targets() {
  return {{"jaxgpuops.moe_plan", kPlan},
          {"jaxgpuops.moe_dispatch", kDispatch},
          {"jaxgpuops.moe_combine", kCombine},
          {"jaxgpuops.moe_combine_vjp", kCombineVjp}};
}

}  // namespace jaxgpuops::moe
