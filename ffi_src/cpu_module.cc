// jaxgpuops._cpu: the CPU handlers, and the plans of the CUDA kernels, which are pure functions and needed wherever
// code for a GPU is lowered.
#include <nanobind/nanobind.h>

#include "along_axis/call.h"
#include "module.h"
#include "topk/call.h"
#include "topk/plan.h"

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

}  // namespace

NB_MODULE(_cpu, module) {
  using namespace jaxgpuops;
  define_module(module, {topk::cpu_targets(), along_axis::cpu_targets()});

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
}
