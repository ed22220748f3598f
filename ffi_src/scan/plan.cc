#include "scan/plan.h"

#include <algorithm>

#include "common/rounding.h"
#include "scan/plan_parts.h"

namespace jaxgpuops::scan {
namespace {

// With fewer strips than this, one block for each strip would leave much of the device idle, so blocks share the axis.
// Blocks that share an axis of spans read it twice; the more there is to compute for a byte, the more strips this pays
// for. One block of kAcross has several tiles in flight and fills a multiprocessor; if there are few tiles, fewer
// blocks are enough, as it takes some time to begin to share an axis. So the fewer tiles rows have, the fewer rows are
// enough.
int64_t enough_strips(const Problem& problem, Layout layout, Algorithm shared_out, int64_t tiles, const Gpu& gpu) {
  const int64_t all = gpu.multiprocessors;
  const int operands = operands_of(problem.kind), bytes = bytes_of(problem.dtype);
  const bool cumulative = problem.kind == Kind::kCumulative, exponentials = cumulative && problem.op == Op::kLogSumExp;
  if (layout == Layout::kAlong) {
    if (operands > 2 || (cumulative && problem.segmented)) return tiles > 2 ? all * 3 / 2 : 2 * all;
    return tiles <= 3 ? all + 1 : tiles <= 8 ? all * 3 / 2 : 2 * all;
  }
  if (layout == Layout::kSpans) {
    if (tiles > 2 && (bytes <= 2 || exponentials))
      return problem.rows.inner > kFewColumns && !exponentials ? 2 * all : 3 * all;
    return tiles > 2 && operands == 1 && bytes == 4 ? 2 * all : all * 11 / 8;
  }
  if (exponentials) return all;
  const int64_t most = shared_out == Algorithm::kColumnTwice ? all * 3 / 4 : all;
  return tiles <= 8 ? std::min(most, all - all * 5 / 3 / tiles) : most;
}

// With one block for each row, blocks run in waves, and the last wave leaves much of the device idle; that matters if
// there are few waves. So blocks share rows if there are fewer than kManyRows rows, a row has at least kLongRow almost
// full tiles, and a sum is one number (larger sums take longer to fold than to load).
constexpr int64_t kManyRows = 2048;  // an H200 runs 660 blocks at the same time
constexpr int64_t kLongRow = 16;     // tiles of such a row
constexpr int64_t kOddTiles = 8;     // the least tiles of a row that is shared because it is not whole packs

constexpr int64_t kManyTiles = 256;       // kSpans of several operands: tiles are larger if there are more
constexpr int kSlimRun = 33;              // kSpans of lines that are too long for one span: positions of a run
constexpr int64_t kLongColumn = 256;      // kSpans: the longest axis along which gradients of 4 bytes have short runs
constexpr int kHalfRun = 33;              // kSpans: positions of a run of 16 bits, if there are few tiles
constexpr int64_t kShortColumn = 48;      // kSpans: the longest axis along which runs may have less than 17 positions
constexpr int64_t kExactBlocks = 132;     // kSpans of exact operations: tiles are smaller if there are fewer
constexpr int64_t kOnceBytes = 24 << 20;  // columns of more bytes are not read twice if a kernel can read them once
// kResident of spans, without clusters: the most tiles of all strips, of a strip, and sums that a block reads.
constexpr int64_t kResidentSpans = 396, kResidentStrip = 256, kResidentSums = 1024;
// Clusters. The most tiles of one (kClusterFewTiles of rows of 16 bits, and where a block could walk along a strip).
// The most blocks for each multiprocessor: kClusterBlocks where all run at the same time; kClusterTurns where they do
// not (half as many where a block could walk along spans); kClusterWalks where that is nearly as fast.
constexpr int64_t kClusterTiles = 16, kClusterFewTiles = 8;
constexpr int64_t kClusterBlocks = 3, kClusterTurns = 32, kClusterWalks = 6;
// Few elements are left to clusters, not to kPieces, if the lines of memory that hold a column have more than
// kClusterLines bytes, or if there are more than kClusterElements along at most kClusterInner columns.
constexpr int64_t kClusterLines = 64 << 10, kClusterElements = 5 << 15, kClusterInner = 64;
// Lines that are no whole vectors in kSpans: the most columns, of logsumexps twice as many; and the shortest axis of
// logsumexps and recurrences.
constexpr int64_t kOddLines = 128, kOddLength = 4096;

// The workspace of kernels that read tiles twice: the sums of tiles, and the states that the threads of a tile have of
// what comes before them within it.
int64_t bytes_of_twice(int64_t tiles, int64_t columns, int64_t of_threads, int state_bytes) {
  return kWorkspaceHeader + tiles * (columns + of_threads) * state_bytes;
}

// Whether clusters of so many strips and tiles all run at the same time.
bool is_one_wave(int64_t strips, int64_t tiles, const Gpu& gpu) {
  return strips <= gpu.multiprocessors && strips * tiles <= kClusterBlocks * gpu.multiprocessors;
}

// Whether the tiles of each strip of `plan` have a cluster. `enough`: otherwise a block would walk along each strip.
bool in_clusters(const Problem& problem, const Plan& plan, bool enough, const Gpu& gpu) {
  const int bytes = bytes_of(problem.dtype);
  const int64_t tiles = plan.tiles, blocks = plan.strips * tiles;
  const bool rows = plan.layout == Layout::kAlong, cumulative = problem.kind == Kind::kCumulative;
  const bool logs = cumulative && problem.op == Op::kLogSumExp;
  const int64_t most = (rows && bytes == 2) || enough ? kClusterFewTiles : kClusterTiles;
  if (tiles < 2 || tiles > std::min<int64_t>(most, gpu.max_cluster) || plan.width() > 1) return false;
  if (is_one_wave(plan.strips, tiles, gpu)) return true;
  if (blocks > kClusterTurns * gpu.multiprocessors || (logs && bytes > 4)) return false;
  if (rows && tiles > kClusterFewTiles) return false;
  if (plan.layout == Layout::kAcross) return !enough;
  if (plan.layout == Layout::kSpans)
    return !enough || (cumulative && blocks <= kClusterTurns / 2 * gpu.multiprocessors);
  if (logs || problem.kind == Kind::kTangent) return true;
  // Where there is less to compute, a block takes no longer to walk along two tiles, or if there are more rows.
  if (problem.kind == Kind::kLinear || tiles == 2) return false;
  return !enough || blocks <= kClusterWalks * gpu.multiprocessors;
}

// Whether a problem that has clusters is not for kPieces, whose blocks read the lines of memory in which their columns
// are. (Gradients are for kPieces, where they may be one kernel.)
bool leaves_pieces(const Problem& problem) {
  const auto [outer, length, inner] = problem.rows;
  if (problem.kind == Kind::kTangent) return false;
  return length * std::min<int64_t>(inner * bytes_of(problem.dtype), kLineBytes) > kClusterLines ||
         (problem.rows.elements() > kClusterElements && inner <= kClusterInner);
}

}  // namespace

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kEmpty: return "empty";
    case Algorithm::kShort: return "short";
    case Algorithm::kPacks: return "packs";
    case Algorithm::kSmall: return "small";
    case Algorithm::kLanes: return "lanes";
    case Algorithm::kPieces: return "pieces";
    case Algorithm::kFew: return "few";
    case Algorithm::kLaneRows: return "lane_rows";
    case Algorithm::kRows: return "rows";
    case Algorithm::kWalk: return "walk";
    case Algorithm::kResident: return "resident";
    case Algorithm::kRowLookAhead: return "row_look_ahead";
    case Algorithm::kChunkLookAhead: return "chunk_look_ahead";
    case Algorithm::kChunkTwice: return "chunk_twice";
    case Algorithm::kColumns: return "columns";
    case Algorithm::kColumnLookAhead: return "column_look_ahead";
    case Algorithm::kColumnTwice: return "column_twice";
    case Algorithm::kSpans: return "spans";
    case Algorithm::kSpanTwice: return "span_twice";
  }
  return "?";
}

const char* name(Layout layout) {
  switch (layout) {
    case Layout::kAlong: return "along";
    case Layout::kAcross: return "across";
    case Layout::kSpans: return "spans";
  }
  return "?";
}

bool is_paired(const Problem& problem) {
  return problem.kind == Kind::kCumulative && problem.op == Op::kSum && problem.dtype == DType::kFloat32 &&
         problem.rows.inner == 2 && problem.rows.length > kShortAxis && !problem.segmented;
}

Problem paired(Problem problem) {
  problem.dtype = DType::kComplex64;
  problem.rows.inner = 1;
  return problem;
}

Plan plan_scan(const Problem& problem, const Gpu& gpu, int64_t workspace_bytes, int forced) {
  Plan plan;
  const auto [outer, length, inner] = problem.rows;
  if (problem.rows.elements() == 0) return plan;
  const bool in_spans =
      forced == static_cast<int>(Algorithm::kSpans) || forced == static_cast<int>(Algorithm::kSpanTwice);
  if (is_paired(problem) && !in_spans) return plan_scan(paired(problem), gpu, workspace_bytes, forced);
  const int bytes = bytes_of(problem.dtype), operands = operands_of(problem.kind);
  const int state_bytes = 4 * state_words(problem, bytes);

  // Results depend on the geometry of a tile, so that geometry depends on length, inner and the dtype only.
  const bool rare = is_rare(problem);
  // Whether neighbouring columns of all operands are neighbours in memory.
  const bool simple = problem.a.inner.groups <= 1 && problem.starts.inner.groups <= 1;
  // Whether a column has one factor for all positions, so that only one operand comes to shared memory; and whether
  // tiles of spans have more positions then. (Those of 16 bits take longer where they are few.)
  const bool one = problem.kind == Kind::kLinear && problem.a.axis_stride == 0, single = one && bytes >= 4;
  // Lines that are no whole vectors are loaded faster as they lie in memory, those with more to compute along long
  // axes.
  const bool logs = problem.kind == Kind::kCumulative && problem.op == Op::kLogSumExp;
  const bool pairs = problem.kind == Kind::kLinear && problem.a.axis_stride == inner;
  const bool cumulative = problem.kind == Kind::kCumulative, sums = cumulative && !logs;
  const bool along = (logs || pairs) && bytes <= 4 && length >= kOddLength;
  const bool odd_lines = (sums || along) && inner * bytes % 16 != 0 && inner <= (logs ? 2 * kOddLines : kOddLines);
  const bool across = inner * bytes % 4 == 0 && inner > 32 && simple && !odd_lines;
  const bool twice = forced == static_cast<int>(Algorithm::kSpanTwice);
  const bool rows = is_any_operator(problem) && inner == 1 && forced != static_cast<int>(Algorithm::kSpans);
  plan.layout = (rare && !rows) || twice || length <= kShortAxis ? Layout::kSpans
                : inner == 1                                     ? Layout::kAlong
                : across                                         ? Layout::kAcross
                                                                 : Layout::kSpans;
  if (plan.layout == Layout::kSpans && length <= kShortAxis) return plan_short(problem, gpu, plan, forced);
  const RunShape shape = run_shape(plan.layout, operands, bytes);
  const int64_t runs = ceil_div(length, shape.run);
  if (plan.layout == Layout::kAcross) {
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, int64_t{1} << bits_for(runs)));
  } else if (plan.layout == Layout::kAlong) {
    plan.run_bits = std::min(5, bits_for(ceil_div(runs, shape.per_lane)));
    plan.axis_warps = static_cast<int>(std::min<int64_t>(kWarps, ceil_div(runs, shape.per_lane << plan.run_bits)));
    plan.per_lane = shape.per_lane;
  } else {
    // If a rare call has many columns, a span takes only 128 bytes of them or a little more, so that a tile has more
    // positions. So it is with lines of small elements that are too long for one span.
    const bool slim = inner > kMostColumns && (bytes == 2 || (bytes == 1 && !is_float(problem.dtype)));
    const bool narrow = slim || (rare && bytes >= 4 && inner > 64);
    plan.columns = static_cast<int>(std::min<int64_t>(narrow ? 32 : kMostColumns, inner));
    plan.runs = std::max(1, 32 / plan.columns);
    plan.column_bits = bits_for(ceil_div(plan.columns, 32));
    plan.axis_warps = kWarps >> plan.column_bits;
    // A run has an odd number of positions, so that the runs of neighbouring lanes start in different banks of shared
    // memory.
    plan.per_lane = slim ? kSlimRun : single ? run_shape(plan.layout, 1, bytes).per_lane : shape.per_lane;
    const int64_t lanes = plan.runs * plan.axis_warps;  // lanes that share a column
    // Runs of 16 bits are half as long if the tiles of a strip have a cluster then; gradients of 4 bytes have longer
    // ones along long axes.
    const bool exact = is_exact(problem) && !problem.segmented;
    const bool halved = cumulative && bytes == 2 && !exact && ceil_div(length, lanes * kHalfRun) <= kClusterTiles;
    if (halved && !slim) plan.per_lane = std::min(plan.per_lane, kHalfRun);
    const bool doubled = problem.kind == Kind::kTangent && bytes == 4 && length > kLongColumn;
    if (doubled) plan.per_lane = 2 * plan.per_lane - 1;
    if (exact && lanes * plan.per_lane >= length) {
      // Few warps with long runs take fewer instructions in all; few elements take kPieces, which has runs of its own.
      plan.axis_warps = static_cast<int>(ceil_div(length, plan.runs * plan.per_lane));
      plan.per_lane = std::max<int>(9, ceil_div(length, plan.runs * plan.axis_warps) | 1);
    } else if (!slim) {
      const int64_t parts = ceil_div(inner, plan.columns);
      const auto few = [&](int64_t per_lane) {
        const int64_t tiles = ceil_div(length, lanes * per_lane);
        if (tiles == 1) return true;
        if (!exact || outer * parts * ceil_div(length, lanes * plan.per_lane) >= kExactBlocks) return false;
        // Clusters need no workspace.
        if (tiles <= std::min<int64_t>(kClusterTiles, gpu.max_cluster) && is_one_wave(outer * parts, tiles, gpu))
          return true;
        return workspace_bytes < 0 || bytes_of_twice(tiles, inner, parts * kThreads, state_bytes) <= workspace_bytes;
      };
      // Two parts of a logsumexp and one position: with a single part, the position would take most of the time.
      const int least = (logs && bytes <= 2) || (!exact && operands < 3 && length > kShortColumn) ? 17 : 9;
      while (plan.per_lane > least && few(plan.per_lane / 2 + 1)) plan.per_lane = plan.per_lane / 2 + 1;
      // Much of the work for a tile does not depend on its size.
      const bool more = (operands == 2 && !single) || (problem.kind == Kind::kTangent && bytes <= 4 && !doubled);
      if (more && ceil_div(length, lanes * plan.per_lane) > kManyTiles) plan.per_lane = 2 * plan.per_lane - 1;
    }
    plan.axis_warps = static_cast<int>(std::min<int64_t>(plan.axis_warps, ceil_div(length, plan.runs * plan.per_lane)));
  }
  const int lanes = 1 << plan.run_bits;
  plan.tile = plan.axis_warps * plan.per_lane * (plan.layout == Layout::kSpans ? plan.runs : lanes * shape.run);
  plan.tiles = ceil_div(length, plan.tile);
  // Rows that are no whole packs may begin up to a pack after their first tile (kCutAtVectors of cuda/chunks.cuh).
  const bool loose = plan.layout == Layout::kAlong && length * bytes % 16 != 0;
  if (loose && is_exact(problem) && plan.tiles > 1) plan.tiles = ceil_div(length + 16 / bytes - 1, plan.tile);
  while (int64_t{1} << (kGroupBits * plan.levels) < plan.tiles) ++plan.levels;
  if (plan_few_elements(problem, forced, plan)) return plan;
  const Plan of_tiles = plan;

  // Nothing below changes results. Blocks get more columns as long as there are enough blocks for the device.
  const int64_t vectors = outer * (inner / shape.width), vectors_of_warp = 32 / lanes;
  const auto strips = [&] { return ceil_div(vectors, vectors_of_warp << plan.column_bits); };
  if (plan.layout == Layout::kSpans) {
    plan.parts = ceil_div(inner, plan.columns);
    plan.strips = outer * plan.parts;
  } else {
    plan.column_bits = bits_for(kWarps / plan.axis_warps);
    // A warp of the forward call may have the rows of two warps.
    const int least = problem.from_x && plan.axis_warps == 1 ? 1 : 0;
    while (plan.column_bits > least && strips() < 2 * gpu.multiprocessors) --plan.column_bits;
    plan.strips = strips();
  }
  const bool cut = problem.kind == Kind::kCumulative && problem.segmented;
  const int stayers = plan.layout == Layout::kAlong ? row_blocks(problem.kind, problem.op, cut, problem.dtype)
                                                    : 0;  // blocks per multiprocessor of row_look_ahead
  const bool once = reads_once(plan.layout, problem.kind, problem.op, cut, problem.dtype);
  // The kernel in which a block has all of an axis, and the one in which blocks share it.
  Algorithm alone = Algorithm::kSpans, shared_out = Algorithm::kSpanTwice;
  if (plan.layout == Layout::kAlong) {
    alone = plan.tiles == 1 ? Algorithm::kRows : Algorithm::kWalk;
    shared_out = stayers > 0 ? Algorithm::kRowLookAhead : once ? Algorithm::kChunkLookAhead : Algorithm::kChunkTwice;
  } else if (plan.layout == Layout::kAcross) {
    alone = Algorithm::kColumns;
    const bool large = forced < 0 ? problem.rows.elements() * bytes > kOnceBytes
                                  : forced == static_cast<int>(Algorithm::kColumnLookAhead);
    shared_out = once && large ? Algorithm::kColumnLookAhead : Algorithm::kColumnTwice;
  }
  plan.algorithm = alone;
  int stage = 0;
  if (plan.layout == Layout::kSpans) {
    if (inner == plan.columns) plan.span_bytes = static_cast<int>(span_bytes(plan.tile * inner, bytes, 0));
    stage = (one ? 1 : operands) * plan.span_bytes;
  } else {
    stage = stage_bytes(plan.layout, operands, bytes, state_bytes);
  }
  const int64_t most = gpu.shared_bytes;
  // Shared memory of a block: its tiles in flight, the folds that warps exchange, and 1 KB to spare.
  const auto shared = [&](int stages, int slots) {
    const int64_t columns =
        plan.layout == Layout::kSpans ? plan.columns : (vectors_of_warp << plan.column_bits) * shape.width;
    return stages * stage * plan.width() + slots * (plan.axis_warps + 1) * columns * state_bytes + 1024;
  };
  if (plan.layout == Layout::kSpans && shared(1, 2) > most)
    plan.span_bytes = stage = 0;  // lanes load operands themselves
  if (shared_out == Algorithm::kColumnLookAhead && shared(2, 2) > most) shared_out = Algorithm::kColumnTwice;
  bool enough = plan.strips >= enough_strips(problem, plan.layout, shared_out, plan.tiles, gpu);
  if (forced >= 0) enough = forced == static_cast<int>(alone);
  if (plan.layout == Layout::kAcross) {
    // Two blocks share a multiprocessor if there is room for two tiles of each. If it leaves no multiprocessor idle,
    // one block of twice the width replaces them, which also reads memory in contiguous pieces of twice the size. (The
    // kernels that read tiles twice have no such blocks.)
    const int64_t least = shared_out == Algorithm::kColumnTwice && !enough ? INT64_MAX
                          : enough                                         ? 2 * gpu.multiprocessors * 9 / 10
                                                                           : 2 * kManyStrips;
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
  if (plan.layout == Layout::kSpans) {  // two blocks share a multiprocessor
    plan.stages = static_cast<int>(std::min<int64_t>(3, plan.tiles));
    while (plan.stages > 1 && 2 * shared(plan.stages, 2) > most) --plan.stages;
  }
  plan.stage_bytes = stage * plan.width();
  const bool cluster = forced < 0 && in_clusters(problem, plan, enough, gpu);
  if (forced == static_cast<int>(Algorithm::kPieces) || (forced < 0 && !(cluster && leaves_pieces(problem)))) {
    const Plan pieces = plan_pieces(problem, gpu, of_tiles);
    if (pieces.algorithm == Algorithm::kPieces) return pieces;
  }
  if (plan.tiles == 1 || plan.strips * plan.tiles > INT32_MAX) return plan;
  // The kernels in which blocks share rows load long rows of 16 bits faster if these are not whole packs.
  const bool odd = loose && operands < 3 && bytes == 2 && plan.tiles >= kOddTiles && !is_exact(problem);
  // Whether all tiles may be on the GPU at the same time.
  const bool fits = plan.layout == Layout::kAlong && !cut && plan.strips * plan.tiles <= kResidentTiles;
  const bool ragged = plan.layout == Layout::kAlong && !cut && bytes >= 4 && state_bytes == bytes && length % 4 == 0 &&
                      !is_complex(problem.dtype) && plan.strips < kManyRows && plan.tiles >= kLongRow &&
                      plan.tiles * plan.tile - length <= length / 16 && gpu.bulk_copy;
  if (cluster) {
    plan.algorithm = Algorithm::kResident;
    plan.cluster = static_cast<int>(plan.tiles);
    plan.stages = 1;
    return plan;
  }
  const bool resident_spans = plan.layout == Layout::kSpans && !rare && plan.tiles <= kResidentStrip &&
                              plan.strips * plan.tiles <= kResidentSpans && plan.tiles * plan.columns <= kResidentSums;
  auto choice = enough && !ragged && !odd ? alone : fits || resident_spans ? Algorithm::kResident : shared_out;
  if (forced >= 0) choice = static_cast<Algorithm>(forced);
  if (choice == Algorithm::kResident && !fits && !resident_spans) choice = shared_out;
  if (choice != Algorithm::kResident && choice != shared_out) return plan;
  // A call for a part of this batch may take the resident kernel, or read columns twice, so the workspace has room for
  // that, too.
  const bool reads_twice = shared_out == Algorithm::kSpanTwice || shared_out == Algorithm::kColumnTwice ||
                           shared_out == Algorithm::kChunkTwice;
  int64_t words = 0;  // of 8 bytes, with tags, for each column
  if (once || stayers > 0)
    for (int level = 0; level < plan.levels; ++level) words += ceil_div(plan.tiles, int64_t{1} << (kGroupBits * level));
  if (plan.layout == Layout::kAlong && !cut && plan.tiles <= kResidentTiles)
    words = std::max(words, plan.tiles * resident_copies(plan.tiles));
  if (plan.layout == Layout::kSpans && !rare && plan.tiles <= kResidentStrip) words = std::max(words, plan.tiles);
  int64_t needed = kWorkspaceHeader + inner * words * 2 * state_bytes;
  if (reads_twice || plan.layout == Layout::kAcross) {
    const int64_t parts = plan.layout == Layout::kAcross ? ceil_div(inner, 32 * shape.width) : plan.parts;
    const int64_t of_threads = plan.layout == Layout::kSpans
                                   ? plan.threads()
                                   : (plan.layout == Layout::kAlong ? 2 : shape.width) * 32 * plan.axis_warps;
    needed = std::max(needed, bytes_of_twice(plan.tiles, inner, parts * of_threads, state_bytes));
  }
  if (workspace_bytes >= 0 && needed > workspace_bytes) return plan;

  const auto room = [&](int stages) { return shared(stages, stages); };
  if (stayers > 0) {
    const int blocks = stayers * room(4) <= most ? stayers : 1;
    int stages = kMostStages;
    while (stages > 2 && blocks * room(stages) > most) --stages;
    if (room(stages) > most) return plan;
    plan.stages = stages;
  } else if (reads_twice) {
    plan.stages = 1;
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

bool takes_x(const Problem& problem, const Gpu& gpu) {
  if (problem.kind != Kind::kTangent || is_complex(problem.dtype)) return false;
  const Plan plan = plan_scan(problem, gpu);
  if (plan.algorithm == Algorithm::kSmall) return true;
  // A logsumexp of fewer positions takes them together in other numbers, and XLA has the call anyway.
  const bool few = plan.algorithm == Algorithm::kShort || plan.algorithm == Algorithm::kPacks;
  if (few && is_plain(problem.kind, problem) && problem.rows.length > 3)
    return problem.dtype != DType::kFloat64 || problem.op != Op::kLogSumExp;
  if (plan.algorithm == Algorithm::kPieces) return makes_y(problem, plan);
  if (is_rare(problem)) return false;
  // Rows of 16 bits that are shifted on the way to several rows of a warp take longer in one kernel.
  const bool shifted = bytes_of(problem.dtype) == 2 && problem.rows.length % 8 != 0 && plan.axis_warps == 1;
  return plan.algorithm == Algorithm::kRows && !shifted;
}

Problem forward_of(const Problem& gradient) {
  Problem problem = gradient;
  problem.kind = Kind::kCumulative;
  problem.transpose = problem.from_x = false;
  return problem;
}

Order forward_order(const Problem& gradient, const Plan& plan) {
  const Problem problem = forward_of(gradient);
  if (is_exact(problem)) return {plan.per_lane, plan.runs, plan.axis_warps};
  const Plan forward = plan_scan(problem, gpu_of(90), -1, static_cast<int>(Algorithm::kSpans));
  if (forward.layout != Layout::kAcross) return {forward.per_lane, forward.runs, forward.axis_warps};
  return {run_shape(forward.layout, operands_of(problem.kind), bytes_of(problem.dtype)).run, 1, forward.axis_warps};
}

Plan plan_forward(const Problem& gradient, const Plan& plan) {
  // Of this plan, only the shape of a tile is used, which is the same for any GPU.
  Plan forward = plan_scan(forward_of(gradient), gpu_of(90), -1, static_cast<int>(Algorithm::kRows));
  forward.column_bits = plan.column_bits + forward.run_bits - plan.run_bits;
  forward.strips = plan.strips;
  return forward;
}

}  // namespace jaxgpuops::scan
