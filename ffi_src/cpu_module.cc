// jaxgpuops._cpu: the CPU handlers, and the plans of the CUDA kernels, which are pure functions and needed wherever
// code for a GPU is lowered.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "along_axis/call.h"
#include "module.h"
#include "reduce/call.h"
#include "reduce/plan.h"
#include "scan/call.h"
#include "scan/plan.h"
#include "softmax/call.h"
#include "softmax/plan.h"
#include "topk/call.h"
#include "topk/plan.h"
#include "topk_softmax/call.h"
#include "topk_softmax/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::dict plan_dict(const jaxgpuops::topk::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::topk::name(plan.algorithm);
  dict["lanes"] = plan.lanes;
  dict["threads"] = plan.threads;
  dict["slices"] = plan.slices;
  dict["workspace_bytes"] = plan.workspace_bytes;
  dict["shared_bytes"] = plan.shared_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::topk_softmax::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = plan.empty ? "empty" : "rows";
  dict["lanes"] = plan.team;
  dict["elements"] = plan.elements;
  dict["workspace_bytes"] = 0;
  return dict;
}

// What a scan's plan depends on, but for its shape. Element types of one width may take different kernels: the first of
// these is shown, and the workspace suffices for all.
std::vector<jaxgpuops::scan::Problem> scan_problems(const std::string& target, int item_bytes) {
  using namespace jaxgpuops::scan;
  using jaxgpuops::DType;
  Problem problem;
  bool found = true;
  if (target == "linear_scan") {
    problem.kind = Kind::kLinear;
  } else if (target == "linear_scan_vjp") {
    problem.kind = Kind::kLinearVjp;
  } else {
    found = false;
    for (const Kind kind : {Kind::kCumulative, Kind::kTangent})
      for (const Op op : {Op::kSum, Op::kProd, Op::kMax, Op::kMin, Op::kLogSumExp}) {
        if (found || target_name(kind, op) != "jaxgpuops." + target) continue;
        problem.kind = kind;
        problem.op = op;
        found = true;
      }
  }
  if (!found) throw std::invalid_argument("no such scan: " + target);
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kFloat8E5M2, DType::kComplex64,
                            DType::kComplex128, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
    problem.dtype = dtype;
    if (bytes_of(dtype) == item_bytes && accepts(problem.kind, problem.op, dtype)) problems.push_back(problem);
  }
  if (problems.empty()) throw std::invalid_argument(target + " takes no elements of that width");
  return problems;
}

nb::dict scan_plan_dict(const std::string& target, jaxgpuops::Rows rows, int item_bytes, bool segmented,
                        int compute_capability) {
  using namespace jaxgpuops::scan;
  Plan plan;
  int64_t workspace_bytes = 0;
  bool first = true;
  for (Problem problem : scan_problems(target, item_bytes)) {
    problem.rows = rows;
    problem.segmented = segmented;
    const Plan other = plan_scan(problem, compute_capability);
    if (first) plan = other;
    first = false;
    workspace_bytes = std::max(workspace_bytes, other.workspace_bytes);
  }
  nb::dict dict;
  dict["algorithm"] = name(plan.algorithm);
  dict["layout"] = name(plan.layout);
  dict["threads"] = plan.algorithm == Algorithm::kEmpty ? 0 : plan.threads();
  dict["tile"] = plan.tile;
  dict["tiles"] = plan.tiles;
  dict["strips"] = plan.strips;
  dict["workspace_bytes"] = workspace_bytes;
  return dict;
}

// The plan of the first; the workspace suffices for all.
nb::dict plan_dict(const std::vector<jaxgpuops::RowPlan>& plans) {
  if (plans.empty()) throw std::invalid_argument("no such target, or it takes no elements of that width");
  const jaxgpuops::RowPlan& plan = plans[0];
  int64_t workspace_bytes = 0;
  for (const auto& other : plans) workspace_bytes = std::max(workspace_bytes, other.workspace_bytes);
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::name(plan.algorithm);
  dict["threads"] = plan.threads();
  dict["vectors"] = plan.vectors;
  dict["lanes"] = 1 << plan.lane_bits;
  dict["blocks"] = plan.blocks;
  dict["workspace_bytes"] = workspace_bytes;
  return dict;
}

// Calls that differ in their optional operands, or in an element type of one width, may take different kernels.
nb::dict softmax_plan_dict(const std::string& target, jaxgpuops::Rows rows, int item_bytes, int compute_capability) {
  using namespace jaxgpuops::softmax;
  using jaxgpuops::DType;
  std::vector<jaxgpuops::RowPlan> plans;
  for (const Op op : {Op::kSoftmax, Op::kLogSoftmax, Op::kLogSumExp, Op::kCrossEntropy, Op::kCrossEntropyGrad,
                      Op::kSoftmaxJvp, Op::kLogSoftmaxJvp})
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kFloat64})
      for (const bool general : {false, true}) {
        if (target_name(op) != "jaxgpuops." + target || bytes_of(dtype) != item_bytes) continue;
        Problem problem;
        problem.op = op;
        problem.dtype = dtype;
        problem.rows = rows;
        plans.push_back(plan_softmax(problem, general, compute_capability));
      }
  return plan_dict(plans);
}

nb::dict reduce_plan_dict(const std::string& target, jaxgpuops::Rows rows, int item_bytes, int compute_capability) {
  using namespace jaxgpuops::reduce;
  using jaxgpuops::DType;
  std::vector<jaxgpuops::RowPlan> plans;
  for (const Op op : {Op::kSum, Op::kMax, Op::kMin, Op::kDot})
    for (const DType dtype : {DType::kFloat8E5M2, DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kInt8,
                              DType::kInt16, DType::kInt32, DType::kInt64})
      for (const bool masked : {false, true}) {
        if (target_name(op) != "jaxgpuops." + target || bytes_of(dtype) != item_bytes) continue;
        Problem problem;
        problem.op = op;
        problem.dtype = dtype;
        problem.rows = rows;
        plans.push_back(plan_reduce(problem, masked, compute_capability));
      }
  return plan_dict(plans);
}

}  // namespace

NB_MODULE(_cpu, module) {
  using namespace jaxgpuops;
  define_module(module, {topk::cpu_targets(), along_axis::cpu_targets(), scan::cpu_targets(),
                         topk_softmax::cpu_targets(), softmax::cpu_targets(), reduce::cpu_targets()});

  module.def(
      "plan_topk",
      [](int64_t outer, int64_t length, int64_t inner, int64_t k, int key_bits, bool sorted, int compute_capability) {
        return plan_dict(topk::plan_topk(Rows{outer, length, inner}, k, key_bits, sorted, compute_capability));
      },
      "outer"_a, "length"_a, "inner"_a, "k"_a, "key_bits"_a, "sorted"_a, "compute_capability"_a);

  module.def(
      "plan_argmax",
      [](int64_t outer, int64_t length, int64_t inner, int key_bits) {
        return plan_dict(topk::plan_argmax(Rows{outer, length, inner}, key_bits));
      },
      "outer"_a, "length"_a, "inner"_a, "key_bits"_a);

  module.def(
      "plan_topk_softmax",
      [](int64_t outer, int64_t length, int64_t inner, int64_t k) {
        return plan_dict(topk_softmax::plan_topk_softmax(Rows{outer, length, inner}, k));
      },
      "outer"_a, "length"_a, "inner"_a, "k"_a);

  module.def(
      "plan_scan",
      [](const std::string& target, int64_t outer, int64_t length, int64_t inner, int item_bytes, bool segmented,
         int compute_capability) {
        return scan_plan_dict(target, Rows{outer, length, inner}, item_bytes, segmented, compute_capability);
      },
      "target"_a, "outer"_a, "length"_a, "inner"_a, "item_bytes"_a, "segmented"_a, "compute_capability"_a);

  module.def(
      "plan_softmax",
      [](const std::string& target, int64_t outer, int64_t length, int64_t inner, int item_bytes,
         int compute_capability) {
        return softmax_plan_dict(target, Rows{outer, length, inner}, item_bytes, compute_capability);
      },
      "target"_a, "outer"_a, "length"_a, "inner"_a, "item_bytes"_a, "compute_capability"_a);

  module.def(
      "plan_reduce",
      [](const std::string& target, int64_t outer, int64_t length, int64_t inner, int item_bytes,
         int compute_capability) {
        return reduce_plan_dict(target, Rows{outer, length, inner}, item_bytes, compute_capability);
      },
      "target"_a, "outer"_a, "length"_a, "inner"_a, "item_bytes"_a, "compute_capability"_a);
}
