// jaxgpuops._cpu: the CPU handlers, and the plans of the CUDA kernels, which are pure functions and needed wherever
// code for a GPU is lowered.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "count/plan.h"
#include "families.h"
#include "module.h"
#include "moe/plan.h"
#include "reduce/plan.h"
#include "scan/plan.h"
#include "search/plan.h"
#include "segments/plan.h"
#include "select/plan.h"
#include "softmax/plan.h"
#include "sort/keys.h"
#include "sort/plan.h"
#include "topk/plan.h"
#include "topk_softmax/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Returned in the place of a plan if no kernel takes the call in the form that was asked for.
nb::dict none_dict() {
  nb::dict dict;
  dict["algorithm"] = "none";
  return dict;
}

nb::dict plan_dict(const jaxgpuops::topk::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::topk::name(plan.algorithm);
  dict["lanes"] = plan.lanes;
  dict["threads"] = plan.threads;
  dict["slices"] = plan.slices;
  dict["blocks"] = plan.blocks;
  dict["workspace_bytes"] = plan.workspace_bytes;
  dict["shared_bytes"] = plan.shared_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::sort::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::sort::name(plan.algorithm);
  dict["turns"] = plan.turns;
  dict["threads"] = plan.threads;
  dict["blocks"] = plan.blocks;
  dict["workspace_bytes"] = plan.workspace_bytes;
  dict["shared_bytes"] = plan.shared_bytes;
  if (plan.algorithm == jaxgpuops::sort::Algorithm::kSweep)
    dict["exchanges"] = plan.exchanges, dict["items"] = plan.items;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::sort::KeysPlan& plan) {
  nb::dict dict;
  dict["algorithm"] = plan.taken ? "keys" : "none";
  dict["turns"] = false;
  dict["threads"] = jaxgpuops::sort::kKeysThreads;
  dict["blocks"] = plan.blocks;
  dict["workspace_bytes"] = plan.workspace_bytes;
  dict["shared_bytes"] = jaxgpuops::sort::keys_shared_bytes(plan.items, true);
  return dict;
}

nb::dict plan_dict(const jaxgpuops::topk_softmax::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = plan.empty ? "empty" : plan.ranked ? "ranked" : plan.few ? "few" : "rows";
  dict["lanes"] = plan.team;
  dict["elements"] = plan.elements;
  dict["workspace_bytes"] = 0;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::count::BincountPlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::count::kCountingNames[static_cast<int>(plan.algorithm)];
  dict["threads"] = plan.threads;
  dict["tables"] = plan.tables;
  dict["ranges"] = plan.ranges;
  dict["slices"] = plan.slices;
  dict["cluster"] = plan.cluster;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["tiles"] = plan.tiles;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::search::ChoosePlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::search::kChoosingNames[static_cast<int>(plan.algorithm)];
  dict["threads"] = plan.threads;
  dict["blocks"] = plan.blocks;
  dict["tiles"] = plan.tiles;
  dict["units"] = plan.units;
  dict["list"] = plan.list;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::search::UniquePlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::search::kFindingNames[static_cast<int>(plan.algorithm)];
  dict["blocks"] = plan.blocks;
  dict["chunk"] = plan.chunk;
  dict["slot_bits"] = plan.slot_bits;
  dict["samples"] = plan.samples;
  dict["sampled_rank"] = plan.sampled_rank;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::select::SelectPlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::select::kSelectingNames[static_cast<int>(plan.algorithm)];
  dict["turns"] = plan.turns;
  dict["threads"] = plan.threads;
  dict["slices"] = plan.slices;
  if (plan.algorithm == jaxgpuops::select::Selecting::kWarp) dict["bisects"] = plan.bisects;
  if (plan.algorithm == jaxgpuops::select::Selecting::kCluster) dict["blocks"] = plan.blocks;
  if (plan.algorithm == jaxgpuops::select::Selecting::kTeams) dict["blocks"] = plan.blocks, dict["team"] = plan.team;
  if (plan.algorithm == jaxgpuops::select::Selecting::kLong)
    dict["kept"] = plan.kept, dict["kept_steps"] = plan.kept_steps, dict["counts"] = plan.counts;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::segments::SegmentsPlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::segments::kSegmentingNames[static_cast<int>(plan.algorithm)];
  if (plan.order.bytes > 0)
    dict["order"] = plan.order.ranges > 0 ? "ranges" : jaxgpuops::sort::name(plan.order.sort.algorithm);
  dict["rows"] = plan.rows;
  dict["tiles"] = plan.tiles;
  if (plan.algorithm == jaxgpuops::segments::Segmenting::kFew) dict["batch"] = plan.batch;
  dict["columns"] = plan.columns;
  if (plan.algorithm == jaxgpuops::segments::Segmenting::kCells) dict["cluster"] = plan.cluster;
  dict["warps"] = plan.warps;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::moe::Plan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::moe::kAlgorithmNames[static_cast<int>(plan.algorithm)];
  dict["threads"] = 32 * plan.warps;
  dict["blocks"] = plan.blocks;
  dict["shared_bytes"] = plan.shared_bytes;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::scan::Plan& plan) {
  using namespace jaxgpuops::scan;
  nb::dict dict;
  dict["algorithm"] = name(plan.algorithm);
  dict["layout"] = name(plan.layout);
  dict["threads"] = plan.algorithm == Algorithm::kEmpty ? 0 : plan.threads();
  dict["tile"] = plan.tile;
  dict["tiles"] = plan.tiles;
  dict["strips"] = plan.strips;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

nb::dict plan_dict(const jaxgpuops::RowPlan& plan) {
  nb::dict dict;
  dict["algorithm"] = jaxgpuops::name(plan.algorithm);
  dict["threads"] = plan.threads();
  dict["vectors"] = plan.vectors;
  dict["lanes"] = 1 << plan.lane_bits;
  dict["each"] = plan.spread ? plan.each : 0;
  dict["blocks"] = plan.blocks;
  dict["staged"] = plan.staged;
  dict["workspace_bytes"] = plan.workspace_bytes;
  return dict;
}

// The name that NumPy and ml_dtypes have for an element type.
jaxgpuops::DType dtype_named(const std::string& name) {
  using jaxgpuops::DType;
  static const std::pair<const char*, DType> kNames[] = {
      {"bool", DType::kBool},
      {"int8", DType::kInt8},
      {"int16", DType::kInt16},
      {"int32", DType::kInt32},
      {"int64", DType::kInt64},
      {"uint8", DType::kUint8},
      {"uint16", DType::kUint16},
      {"uint32", DType::kUint32},
      {"uint64", DType::kUint64},
      {"float8_e4m3fn", DType::kFloat8E4M3FN},
      {"float8_e5m2", DType::kFloat8E5M2},
      {"float16", DType::kFloat16},
      {"bfloat16", DType::kBFloat16},
      {"float32", DType::kFloat32},
      {"float64", DType::kFloat64},
      {"complex64", DType::kComplex64},
      {"complex128", DType::kComplex128},
  };
  for (const auto& [known, dtype] : kNames)
    if (name == known) return dtype;
  throw std::invalid_argument("no such element type: " + name);
}

// Returns the op of a family whose target has this name.
template <class Op>
Op op_named(std::initializer_list<Op> ops, const std::string& name) {
  for (const Op op : ops)
    if (target_name(op) == "jaxgpuops." + name) return op;
  throw std::invalid_argument("no such op: " + name);
}

jaxgpuops::scan::Problem scan_named(const std::string& name) {
  using namespace jaxgpuops::scan;
  Problem problem;
  for (const Kind kind : {Kind::kCumulative, Kind::kTangent, Kind::kLinear, Kind::kLinearVjp})
    for (const Op op : {Op::kSum, Op::kProd, Op::kMax, Op::kMin, Op::kLogSumExp}) {
      problem.kind = kind;
      problem.op = op;
      if (target_name(kind, op) == "jaxgpuops." + name) return problem;
    }
  throw std::invalid_argument("no such op: " + name);
}

// ---- Plans for Python -----------------------------------------------------------------------------------------------
// Each function returns the plan of a call on a GPU of a compute capability. `workspace_bytes` < 0 asks for the best
// plan. Otherwise the call has a workspace of that size, as when a part of a batch runs what was lowered for the whole
// batch.

void define_selections(nb::module_& module) {
  using namespace jaxgpuops;
  module.def(
      "plan_topk",
      [](int64_t outer, int64_t length, int64_t inner, int64_t k, int key_bits, bool sorted, int compute_capability,
         int64_t workspace_bytes) {
        const Rows rows{outer, length, inner};
        return plan_dict(topk::plan_topk(rows, k, key_bits, sorted, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "length"_a, "inner"_a, "k"_a, "key_bits"_a, "sorted"_a, "compute_capability"_a,
      "workspace_bytes"_a = -1);

  module.def(
      "plan_argmax",
      [](int64_t outer, int64_t length, int64_t inner, int key_bits, int compute_capability, int64_t workspace_bytes) {
        const Rows rows{outer, length, inner};
        return plan_dict(topk::plan_argmax(rows, key_bits, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "length"_a, "inner"_a, "key_bits"_a, "compute_capability"_a, "workspace_bytes"_a = -1);

  module.def(
      "plan_sort",
      [](int64_t outer, int64_t length, int64_t inner, int key_bits, bool values, bool indices, int compute_capability,
         int64_t kth, bool carries, int64_t workspace_bytes) {
        sort::Problem problem;
        problem.rows = {outer, length, inner};
        problem.k = length;
        problem.kth = kth;
        problem.key_bits = key_bits;
        problem.values = values;
        problem.indices = indices;
        problem.carries = carries;
        if (const auto keys = sort::plan_keys(problem, gpu_of(compute_capability), workspace_bytes); keys.taken)
          return plan_dict(keys);
        return plan_dict(sort::plan_sort(problem, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "length"_a, "inner"_a, "key_bits"_a, "values"_a, "indices"_a, "compute_capability"_a, "kth"_a = -1,
      "carries"_a = false, "workspace_bytes"_a = -1);

  module.def(
      "plan_lexsort",
      [](int64_t outer, int64_t length, int64_t inner, int compute_capability, int64_t workspace_bytes) {
        sort::KeysProblem problem;
        problem.rows = {outer, length, inner};
        return plan_dict(sort::plan_keys(problem, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "length"_a, "inner"_a, "compute_capability"_a, "workspace_bytes"_a = -1);

  module.def(
      "plan_sort_segments",
      [](int64_t outer, int64_t length, int64_t inner, int64_t offsets, int key_bits, int compute_capability,
         bool values, bool indices, bool shared, int64_t workspace_bytes) {
        sort::Problem problem;
        problem.rows = {outer, length, inner};
        problem.k = length;
        problem.key_bits = key_bits;
        problem.values = values;
        problem.indices = indices;
        problem.offsets = offsets;
        problem.offsets_at.outer.groups = 1;
        problem.offsets_at.outer.stride[0] = shared ? 0 : offsets;
        return plan_dict(sort::plan_sort(problem, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "length"_a, "inner"_a, "offsets"_a, "key_bits"_a, "compute_capability"_a, "values"_a = true,
      "indices"_a = true, "shared"_a = true, "workspace_bytes"_a = -1);

  module.def(
      "plan_topk_softmax",
      [](int64_t outer, int64_t length, int64_t inner, int64_t k, int64_t groups, bool biased, bool sums_rows) {
        return plan_dict(topk_softmax::plan_topk_softmax(Rows{outer, length, inner}, k, groups, biased, sums_rows));
      },
      "outer"_a, "length"_a, "inner"_a, "k"_a, "groups"_a, "biased"_a, "sums_rows"_a);
}

void define_row_operations(nb::module_& module) {
  using namespace jaxgpuops;
  // `groups`: how many groups the dimensions after the axis form for an operand that broadcasts; a group is a run of
  // neighbouring dimensions that the operand has, or that it lacks. With several operands, the largest of these
  // numbers. `dense`: whether the operand a, if any, has the whole shape.
  module.def(
      "plan_scan",
      [](const std::string& op, int64_t outer, int64_t length, int64_t inner, const std::string& dtype, bool segmented,
         int groups, int compute_capability, int64_t workspace_bytes, bool exclusive, bool transpose, bool initial,
         bool dense, bool from_x, int64_t a_axis_stride, int64_t a_outer_stride) {
        scan::Problem problem = scan_named(op);
        problem.rows = {outer, length, inner};
        problem.dtype = dtype_named(dtype);
        if (!scan::accepts(problem.kind, problem.op, problem.dtype))
          throw std::invalid_argument(op + " takes no " + dtype);
        problem.exclusive = exclusive;
        problem.transpose = transpose;
        problem.segmented = segmented;
        problem.initial = initial;
        problem.a.inner.groups = groups;
        problem.a.axis_stride = dense ? inner : a_axis_stride;
        problem.a.outer.groups = 1;
        problem.a.outer.stride[0] = dense ? length * inner : a_outer_stride;
        const Gpu gpu = gpu_of(compute_capability);
        if (from_x && !scan::takes_x(problem, gpu)) return none_dict();
        return plan_dict(scan::plan_scan(problem, gpu, workspace_bytes));
      },
      "op"_a, "outer"_a, "length"_a, "inner"_a, "dtype"_a, "segmented"_a, "groups"_a, "compute_capability"_a,
      "workspace_bytes"_a = -1, "exclusive"_a = false, "transpose"_a = true, "initial"_a = false, "dense"_a = true,
      "from_x"_a = false, "a_axis_stride"_a = 0, "a_outer_stride"_a = 0);

  module.def(
      "plan_softmax",
      [](const std::string& op, int64_t outer, int64_t length, int64_t inner, const std::string& dtype, double factor,
         bool scaled, bool biased, bool masked, int compute_capability, int64_t workspace_bytes, bool transpose,
         bool of_logits) {
        using softmax::Op;
        softmax::Problem problem;
        problem.op = op_named({Op::kSoftmax, Op::kLogSoftmax, Op::kLogSumExp, Op::kCrossEntropy, Op::kCrossEntropyGrad,
                               Op::kSoftmaxJvp, Op::kLogSoftmaxJvp, Op::kLogSumExpGrad},
                              op);
        problem.rows = {outer, length, inner};
        problem.dtype = dtype_named(dtype);
        problem.factor = factor;
        problem.transpose = transpose;
        problem.general = softmax::is_general(problem.op, factor, scaled, biased, masked, transpose);
        problem.of_logits = of_logits;
        const Gpu gpu = gpu_of(compute_capability);
        if (of_logits && (scaled || !softmax::takes_logits(problem) || !softmax::prefers_logits(problem, gpu))) {
          return none_dict();
        }
        return plan_dict(softmax::plan_softmax(problem, gpu, workspace_bytes));
      },
      "op"_a, "outer"_a, "length"_a, "inner"_a, "dtype"_a, "factor"_a, "scaled"_a, "biased"_a, "masked"_a,
      "compute_capability"_a, "workspace_bytes"_a = -1, "transpose"_a = true, "of_logits"_a = false);

  module.def(
      "plan_reduce",
      [](const std::string& op, int64_t outer, int64_t length, int64_t inner, const std::string& dtype, bool masked,
         int compute_capability, int64_t workspace_bytes) {
        using reduce::Op;
        reduce::Problem problem;
        problem.op = op_named({Op::kSum, Op::kMax, Op::kMin, Op::kDot}, op);
        problem.rows = {outer, length, inner};
        problem.dtype = dtype_named(dtype);
        problem.masked = masked;
        return plan_dict(reduce::plan_reduce(problem, gpu_of(compute_capability), workspace_bytes));
      },
      "op"_a, "outer"_a, "length"_a, "inner"_a, "dtype"_a, "masked"_a, "compute_capability"_a,
      "workspace_bytes"_a = -1);
}

void define_counts(nb::module_& module) {
  using namespace jaxgpuops;
  module.def(
      "plan_bincount",
      [](int64_t outer, int64_t length, int64_t inner, int64_t bins, const std::string& dtype, int compute_capability) {
        count::Bincount problem;
        problem.rows = {outer, length, inner};
        problem.bins = bins;
        problem.bytes = bytes_of(dtype_named(dtype));
        return plan_dict(count::plan_bincount(problem, gpu_of(compute_capability)));
      },
      "outer"_a, "length"_a, "inner"_a, "bins"_a, "dtype"_a, "compute_capability"_a);

  module.def(
      "plan_histogram",
      [](int64_t outer, int64_t length, int64_t inner, int64_t bins, const std::string& dtype, int compute_capability) {
        count::Histogram problem;
        problem.rows = {outer, length, inner};
        problem.bins = bins;
        problem.dtype = dtype_named(dtype);
        return plan_dict(count::plan_histogram(problem, gpu_of(compute_capability)));
      },
      "outer"_a, "length"_a, "inner"_a, "bins"_a, "dtype"_a, "compute_capability"_a);

  module.def(
      "plan_choose",
      [](int64_t outer, int64_t length, int64_t inner, int64_t size, bool starts, int compute_capability) {
        search::Choose problem;
        problem.rows = {outer, length, inner};
        problem.size = size;
        problem.starts = starts;
        return plan_dict(search::plan_choose(problem, gpu_of(compute_capability)));
      },
      "outer"_a, "length"_a, "inner"_a, "size"_a, "starts"_a, "compute_capability"_a);

  module.def(
      "plan_unique",
      [](int64_t outer, int64_t length, int64_t inner, int64_t size, int bits, bool index, bool inverse, bool counted,
         int compute_capability) {
        search::Unique problem;
        problem.rows = {outer, length, inner};
        problem.size = size;
        problem.bits = bits;
        problem.index = index;
        problem.inverse = inverse;
        return plan_dict(search::plan_unique(problem, gpu_of(compute_capability), counted));
      },
      "outer"_a, "length"_a, "inner"_a, "size"_a, "bits"_a, "index"_a, "inverse"_a, "counted"_a,
      "compute_capability"_a);

  module.def(
      "plan_select",
      [](int64_t outer, int64_t length, int64_t inner, int64_t count, int key_bits, int compute_capability) {
        select::Select problem;
        problem.rows = {outer, length, inner};
        problem.count = count;
        problem.bits = key_bits;
        return plan_dict(select::plan_select(problem, gpu_of(compute_capability)));
      },
      "outer"_a, "length"_a, "inner"_a, "count"_a, "key_bits"_a, "compute_capability"_a);

  module.def(
      "plan_segments",
      [](const std::string& op, int64_t outer, int64_t length, int64_t inner, int64_t segments,
         const std::string& dtype, bool sorted, bool byte_ids, int compute_capability) {
        using segments::Op;
        segments::Segments problem;
        problem.op = op_named({Op::kSum, Op::kMax, Op::kMin}, op);
        problem.rows = {outer, length, inner};
        problem.segments = segments;
        problem.dtype = dtype_named(dtype);
        problem.sorted = sorted;
        problem.byte_ids = byte_ids;
        return plan_dict(segments::plan_segments(problem, gpu_of(compute_capability)));
      },
      "op"_a, "outer"_a, "length"_a, "inner"_a, "segments"_a, "dtype"_a, "sorted"_a, "byte_ids"_a,
      "compute_capability"_a);

  module.def(
      "plan_segment_softmax",
      [](int64_t outer, int64_t length, int64_t inner, int64_t segments, const std::string& dtype, bool sorted,
         int compute_capability) {
        segments::Segments problem;
        problem.rows = {outer, length, inner};
        problem.segments = segments;
        problem.dtype = dtype_named(dtype);
        problem.sorted = sorted;
        return plan_dict(segments::plan_segment_softmax(problem, gpu_of(compute_capability)));
      },
      "outer"_a, "length"_a, "inner"_a, "segments"_a, "dtype"_a, "sorted"_a, "compute_capability"_a);

  module.def(
      "plan_moe",
      [](int64_t outer, int64_t assignments, int64_t experts, int64_t capacity, int64_t align, int compute_capability,
         int64_t workspace_bytes) {
        moe::PlanProblem problem;
        problem.outer = outer;
        problem.assignments = assignments;
        problem.experts = experts;
        problem.capacity = capacity;
        problem.align = align;
        return plan_dict(moe::plan_route(problem, gpu_of(compute_capability), workspace_bytes));
      },
      "outer"_a, "assignments"_a, "experts"_a, "capacity"_a, "align"_a, "compute_capability"_a,
      "workspace_bytes"_a = -1);
}

}  // namespace

NB_MODULE(_cpu, module) {
  using namespace jaxgpuops;
  define_module(module, {JAXGPUOPS_FAMILIES(cpu_targets)});
  define_selections(module);
  define_row_operations(module);
  define_counts(module);
}
