#include "scan/plan.h"

#include <algorithm>

namespace jaxgpuops::scan {
namespace {

// Fewer blocks than this would leave much of the device idle: they share the axis then. Blocks of kAcross, with some
// tiles on their way, are large enough to have a multiprocessor of their own.
int64_t enough_strips(Layout layout, const Gpu& gpu) {
  return layout == Layout::kAcross ? gpu.multiprocessors : 2 * gpu.multiprocessors;
}

constexpr int64_t kLeastLineBytes = 64;

// Rows that have a block each come in waves, the last of which leaves much of the device idle where there are few
// waves: fewer rows than this, of so many tiles that are almost all full, are shared instead, where a sum is one word
// (others take longer to fold than to load).
constexpr int64_t kManyRows = 2048;  // 660 are on an H200 at a time
constexpr int64_t kLongRow = 16;     // tiles

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int bits_for(int64_t n) {  // the least power of two that is not below n
  int bits = 0;
  while (int64_t{1} << bits < n) ++bits;
  return bits;
}

int operands_of(Kind kind) {
  switch (kind) {
    case Kind::kCumulative: return 1;
    case Kind::kLinear: return 2;
    case Kind::kTangent:
    case Kind::kLinearVjp: break;
  }
  return 3;
}

// 32-bit words of a policy's State, at most.
int state_words(const Problem& problem, int bytes) {
  const int value = std::max(1, bytes / 4);
  if (problem.kind != Kind::kCumulative) return 2 * value;
  const int words = problem.op == Op::kLogSumExp ? 2 * value : value;
  return problem.segmented ? words + (bytes >= 8 ? 2 : 1) : words;
}

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kLoop: return "loop";
    case Algorithm::kLookAhead: return "look_ahead";
    case Algorithm::kResident: return "resident";
  }
  return "?";
}

const char* name(Layout layout) {
  switch (layout) {
    case Layout::kAlong: return "along";
    case Layout::kAcross: return "across";
    case Layout::kSingle: return "single";
  }
  return "?";
}

Plan plan_scan(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, int forced) {
  Plan plan;
  const auto [outer, length, inner] = problem.rows;
  if (problem.rows.elements() == 0) return plan;
  const int bytes = bytes_of(problem.dtype), operands = operands_of(problem.kind);

  // The geometry of a tile follows length, inner and the kind of element only: results depend on it.
  const bool product = problem.kind == Kind::kCumulative && problem.op == Op::kProd;
  const bool rare = is_rare(problem.kind, product, problem.segmented, problem.dtype);
  const bool simple = problem.a.inner.groups <= 1 && problem.starts.inner.groups <= 1;  // columns beside each other
  const bool across = inner * bytes % 16 == 0 && inner * bytes >= kLeastLineBytes && simple;
  plan.layout = rare ? Layout::kSingle : inner == 1 ? Layout::kAlong : across ? Layout::kAcross : Layout::kSingle;
  const RunShape shape = run_shape(plan.layout, operands, bytes);
  int max_run_bits = 5;
  if (plan.layout == Layout::kAcross)
    max_run_bits = 0;
  else if (plan.layout == Layout::kSingle)
    max_run_bits -= bits_for(std::min<int64_t>(32, inner));
  const int64_t runs = ceil_div(length, shape.run);
  if (plan.layout == Layout::kAlong && runs <= 8) {
    plan.run_bits = bits_for(runs);
  } else {
    plan.run_bits = std::min(max_run_bits, bits_for(ceil_div(runs, shape.per_lane)));
  }
  const int lanes = 1 << plan.run_bits;
  const int64_t warps = ceil_div(runs, lanes * shape.per_lane);
  if (plan.layout == Layout::kAlong) {  // tiny rows have one run in a lane (engine.cuh), others all (rows.cuh)
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, warps));
    plan.per_lane = runs <= 8 ? 1 : shape.per_lane;
  } else {
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, int64_t{1} << bits_for(warps)));
    plan.per_lane = static_cast<int>(std::min<int64_t>(shape.per_lane, ceil_div(runs, lanes * plan.axis_warps)));
  }
  plan.tile = plan.axis_warps * plan.per_lane * lanes * shape.run;
  plan.tiles = ceil_div(length, plan.tile);
  while (int64_t{1} << (kGroupBits * plan.levels) < plan.tiles) ++plan.levels;

  // The rest does not change results. Blocks as large as leaves enough of them.
  const int64_t vectors = outer * (inner / shape.width), vectors_of_warp = 32 / lanes;
  plan.column_bits = bits_for(kWarps / plan.axis_warps);
  const auto strips = [&] { return ceil_div(vectors, vectors_of_warp << plan.column_bits); };
  while (plan.column_bits > 0 && strips() < 2 * gpu.multiprocessors) --plan.column_bits;
  plan.strips = strips();
  plan.algorithm = Algorithm::kLoop;
  const int state_bytes = 4 * state_words(problem, bytes),
            stage = stage_bytes(plan.layout, operands, bytes, state_bytes);
  const int64_t most = gpu.shared_bytes;
  // Of a block: tiles on their way, and for each slot what warps tell each other; 1 KB to spare.
  const auto shared = [&](int stages, int slots) {
    const int64_t columns = (vectors_of_warp << plan.column_bits) * shape.width;
    return stages * stage * plan.width() + slots * (plan.axis_warps + 1) * columns * state_bytes + 1024;
  };
  bool enough = plan.strips >= enough_strips(plan.layout, gpu);
  if (forced >= 0) enough = forced == static_cast<int>(Algorithm::kLoop);
  if (plan.layout == Layout::kAcross) {
    // Two blocks of a multiprocessor, if they have two tiles each; or one that is twice as wide, where that leaves none
    // idle: the pieces of memory that it takes are, too.
    const int64_t least = enough ? 2 * gpu.multiprocessors * 9 / 10 : 2 * kManyStrips;
    if (plan.axis_warps == kWarps && plan.tiles > 1 && plan.strips >= least) {
      ++plan.column_bits;
      if ((enough ? shared(2, 2) : shared(kMostLate + 2, kMostLate + 2)) > most) --plan.column_bits;
      plan.strips = strips();
    }
    const int blocks = 2 / plan.width();
    plan.stages = static_cast<int>(std::min<int64_t>(3, plan.tiles));
    while (plan.stages > 2 && blocks * shared(plan.stages, 2) > most) --plan.stages;
    while (plan.stages > 1 && shared(plan.stages, 2) > most) --plan.stages;
  }
  if (plan.layout == Layout::kAlong && plan.tiles > 1) plan.stages = shared(2, 2) <= most ? 2 : 1;
  if (plan.tiles == 1 || plan.strips * plan.tiles > INT32_MAX) return plan;
  const bool cut = problem.kind == Kind::kCumulative && problem.segmented;
  const bool fits = plan.layout == Layout::kAlong && !cut && plan.strips * plan.tiles <= kResidentTiles;
  const bool ragged = plan.layout == Layout::kAlong && !cut && bytes == 4 && state_bytes == 4 && length % 4 == 0 &&
                      plan.strips < kManyRows && plan.tiles >= kLongRow &&
                      plan.tiles * plan.tile - length <= length / 16 && gpu.bulk_copy;
  auto choice = enough && !ragged ? Algorithm::kLoop : fits ? Algorithm::kResident : Algorithm::kLookAhead;
  if (forced >= 0) choice = static_cast<Algorithm>(forced);
  if (choice == Algorithm::kResident && !fits) choice = Algorithm::kLookAhead;
  if (choice == Algorithm::kLoop) return plan;

  int64_t words = 0;
  for (int level = 0; level < plan.levels; ++level) words += ceil_div(plan.tiles, int64_t{1} << (kGroupBits * level));
  // (What a part of the batch may need, too.)
  if (plan.layout == Layout::kAlong && plan.tiles <= kResidentTiles)
    words = std::max(words, plan.tiles * resident_copies(plan.tiles));
  const int64_t needed = kWorkspaceHeader + inner * words * state_words(problem, bytes) * 8;
  if (workspace_bytes >= 0 && needed > workspace_bytes) return plan;

  const auto room = [&](int stages) { return shared(stages, stages); };
  if (const int wanted = row_blocks(operands, cut); plan.layout == Layout::kAlong && wanted > 0) {
    const int blocks = wanted * room(4) <= most ? wanted : 1;
    int stages = kMostStages;
    while (stages > 2 && blocks * room(stages) > most) --stages;
    if (room(stages) > most) return plan;
    plan.stages = stages;
  } else {
    plan.late = kMostLate;
    while (plan.late > 0 && room(plan.late + 2) > most) --plan.late;
    if (room(plan.late + 2) > most) return plan;
  }
  plan.algorithm = choice;
  plan.workspace_bytes = needed;
  plan.overlap = gpu.dependent_launch;
  return plan;
}

}  // namespace jaxgpuops::scan
