#include "segments/plan.h"

#include <algorithm>

#include "common/rounding.h"

namespace jaxgpuops::segments {
namespace {

// Bytes of the partial result of one element.
int64_t partial_bytes(const Segments& problem) {
  const int64_t bytes = bytes_of(problem.dtype);
  return problem.op == Op::kSum ? std::max<int64_t>(bytes, 4) : bytes;
}

// Plans a table of all segments for each lane. Returns false if there are too many segments for that.
bool plan_lanes(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  const Rows& rows = problem.rows;
  const int64_t most = kGpus[0].shared_bytes;  // the shared memory that every GPU has
  // The larger the tables, the fewer warps a multiprocessor holds. Sums of few columns have no faster kernel, so their
  // tables may be largest. Extremes of few columns have kTables or kAtomics instead, and rows of many columns kOrdered,
  // which beat large tables. Those of many floats in at least kWideSum columns beat smaller ones, too.
  constexpr int64_t kWideSum = 64, kMostWideSegments = 64, kManyNumbers = 4 << 20;
  const bool narrow = rows.inner <= kMostTableColumns;
  const int64_t bound = !narrow ? most / 4 : problem.op == Op::kSum ? most : most / 8;
  const int64_t warp_bytes = 32 * problem.segments * partial_bytes(problem);
  if (problem.byte_ids && !takes_byte_ids(problem.op, bytes_of(problem.dtype))) return false;
  const bool wide_sum = problem.op == Op::kSum && is_float(problem.dtype) && !problem.byte_ids &&
                        rows.inner >= kWideSum && rows.length * rows.inner >= kManyNumbers;
  if (wide_sum && problem.segments > kMostWideSegments) return false;
  if (warp_bytes > bound || rows.inner >= 1 << 26) return false;  // offsets within a row must fit in 32 bits
  plan.algorithm = Segmenting::kLanes;
  plan.columns = rows.inner % 2 == 0 && 2 * warp_bytes <= std::max(bound, most / 2) ? 2 : 1;
  // The steps of a warp wait for each other, and other warps must hide these waits. Where tables of two columns would
  // leave a multiprocessor only three or four warps, lanes have one column, and each warp has a slice of its own.
  const bool alone = plan.columns == 2 && 2 * warp_bytes > 48 << 10;
  if (alone) plan.columns = 1;
  while (plan.team_bits < 5 && rows.inner > plan.columns << plan.team_bits) ++plan.team_bits;
  const int64_t teams = 32 >> plan.team_bits, chunks = ceil_div(rows.inner, plan.columns << plan.team_bits);
  const int64_t own = warp_bytes * plan.columns;
  const int64_t most_parts = alone ? 1 : most / own;
  plan.parts =
      static_cast<int>(std::clamp<int64_t>(std::min(most_parts, ceil_div(rows.length, 8 * teams)), 1, kMostLaneWarps));
  const int64_t least = teams * plan.parts * std::max<int64_t>(32, problem.segments * plan.columns / 4);
  const int64_t slices = (alone ? 528 : 1056 * std::min(plan.parts, 2) / plan.parts) / chunks;
  plan.tiles = std::clamp<int64_t>(rows.length / least, 1, std::max<int64_t>(1, slices));
  plan.rows = ceil_div(rows.length, plan.tiles);
  // Rounds slices up to whole batches of loads, where that makes them hardly longer.
  const int64_t batch = teams * plan.parts * kLaneBatch;
  if (plan.rows >= 8 * batch) {
    plan.rows = ceil_div(plan.rows, batch) * batch;
    plan.tiles = ceil_div(rows.length, plan.rows);
  }
  if (plan.tiles > 1)
    plan.workspace_bytes = aligned(plan.tiles * rows.inner * problem.segments * partial_bytes(problem));
  const int64_t most_units = alone ? kMostLaneWarps : std::max(1, 4 / plan.parts);
  const int64_t units = std::clamp<int64_t>(gpu.shared_bytes / (own * plan.parts), 1, most_units);
  plan.warps = static_cast<int>(units * plan.parts);
  plan.shared_bytes = plan.warps * own;
  return true;
}

// Chooses the widths so that no accumulator of a sum overflows, even if one segment has all rows.
ExactShape exact_of(DType dtype, int64_t length) {
  ExactShape shape;
  const int mantissa = mantissa_bits(dtype), places = dtype == DType::kFloat16 ? 30 : 254;
  shape.width = 63 - mantissa - bits_for(length);
  shape.bins = (places + shape.width - 1) / shape.width;
  shape.reciprocal = static_cast<uint32_t>((65536 + shape.width - 1) / shape.width);
  return shape;
}

// The same for float64. A number's integer has 53 bits, which three accumulators share.
ExactShape wide_exact_of(int64_t length) {
  ExactShape shape;
  shape.width = 63 - bits_for(length);
  shape.bins = (kMostDoublePlace + 52) / shape.width + 1;
  shape.reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << kWidePlaceBits, shape.width));
  return shape;
}

// Plans kFew: as with plan_lanes, each lane has a table, but of one range of the segments, and each range has a block.
// `cell_bytes`: the bytes of an accumulator. The order of additions follows from this geometry, so it may not depend on
// the GPU; tables and lists fit in the shared memory that every GPU has.
// `may_cut`: ranges may be shorter than the number of blocks demands. Small tables are cleared sooner, and more blocks
// fit on a multiprocessor.
void plan_few(const Rows& rows, int64_t segments, int64_t cell_bytes, bool may_cut, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 132, kLeastRange = 8;
  plan.algorithm = Segmenting::kFew;
  while (plan.team_bits < 5 && rows.inner > 1 << plan.team_bits) ++plan.team_bits;
  const auto chunks = [&] { return ceil_div(rows.inner, 1 << plan.team_bits); };
  // Where there would be few blocks, each has fewer columns, but at least 8: those are a sector of 32 bytes of float32.
  while (plan.team_bits > 3 && chunks() * ceil_div(segments, 16) < kBlocks && segments <= 128) --plan.team_bits;
  const int64_t teams = 32 >> plan.team_bits;
  // Every block reads all ids, so there are several ranges only if there is enough work. Once there are enough blocks
  // for the GPU, tables are as large as shared memory allows, with fewer warps if necessary.
  const int64_t most = std::max<int64_t>(1, kBlocks / chunks());
  const int64_t wanted = std::clamp<int64_t>(rows.length * segments >> 12, 1, most);
  int64_t range = std::min(segments, std::max(kLeastRange, ceil_div(segments, wanted)));
  int64_t most_shared = 60 << 10;
  const int64_t cut = segments > 256 ? 24 : 16;
  const bool many = chunks() * ceil_div(segments, cut) >= 2 * kBlocks;
  const bool pays = !many || (segments > 64 && (chunks() < kBlocks || rows.length > 512));
  if (may_cut && segments > 32 && range > cut && pays) {
    range = cut;
    if (many) most_shared = 20 << 10;
  }
  int64_t warps = std::clamp<int64_t>(ceil_div(rows.length, 4 * teams), 1, kMostFewWarps);
  // Of few segments and columns, one range takes less time, since its warps need no lists; with few warps, whose tables
  // are sooner added up.
  constexpr int64_t kWhole = 32, kWholeColumns = 4, kWholeWarps = 8;
  if (may_cut && segments <= kWhole && rows.inner <= kWholeColumns) {
    range = segments;
    warps = std::min(warps, kWholeWarps);
  }
  // Blocks have few warps, too, if they are many and need no lists.
  if (may_cut && range == segments && chunks() >= 2 * kBlocks) warps = std::min(warps, kWholeWarps);
  const int64_t row = 32 * cell_bytes;  // bytes of a segment in the table of a warp
  const auto bytes_of_warp = [&] { return row * (range + 1) + (range < segments ? 4 * kFewList : 0); };
  const int64_t least = std::min<int64_t>(warps, rows.length > kFewRows ? 8 : 4);
  const auto fewer = [](int64_t of) { return of > 12 ? 12 : of > 8 ? 8 : of / 2; };
  while (warps > least && warps * bytes_of_warp() > most_shared) warps = std::max(least, fewer(warps));
  if (warps * bytes_of_warp() > most_shared) range = (most_shared / warps - 4 * kFewList) / row - 1;
  plan.warps = static_cast<int>(warps);
  plan.rows = range;
  plan.tiles = ceil_div(segments, range);
  plan.batch = std::max<int64_t>(1, kMostBlocks / (plan.tiles * chunks()));
  plan.shared_bytes = warps * bytes_of_warp();
}

constexpr int64_t kLeastPickSegments = 32;

// Plans kPicks. Returns false if other kernels are faster, which also holds if one segment has most rows. The order of
// additions follows from this geometry, which fits in the shared memory that every GPU has.
bool plan_picks(const Segments& problem, SegmentsPlan& plan) {
  constexpr int64_t kMostIds = 7 << 18;  // that all blocks read together
  constexpr int64_t kMostOfTeam = 128, kFewOfTeam = 10;
  const auto [outer, length, inner] = problem.rows;
  const int64_t segments = problem.segments;
  if (problem.sorted || length > kMostRangeRows || inner >= int64_t{1} << 31 || segments < kLeastPickSegments)
    return false;
  plan = {};
  plan.algorithm = Segmenting::kPicks;
  while (plan.team_bits < 5 && inner > 1 << plan.team_bits) ++plan.team_bits;
  const auto chunks = [&, inner = inner] { return ceil_div(inner, 1 << plan.team_bits); };
  plan.rows = kPickRange;
  plan.tiles = ceil_div(segments, plan.rows);
  // Where a team would have many rows, or many of the block's segments, a block has fewer columns and more teams.
  const auto of_team = [&, length = length] { return length / (plan.warps * (32 >> plan.team_bits)); };
  plan.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(length, 128), 1, kMostPickWarps));
  const auto pays = [&] { return of_team() <= kMostOfTeam && of_team() * kPickRange <= kFewOfTeam * segments; };
  while (plan.team_bits > 3 && !pays()) --plan.team_bits;
  plan.shared_bytes = plan.warps * kPickBytes;
  plan.batch = std::max<int64_t>(1, kMostBlocks / (plan.tiles * chunks()));
  if (plan.tiles * chunks() * length <= kMostIds && pays()) return true;
  plan = {};  // those that are tried next begin with a new plan
  return false;
}

// Whether kRanges takes rows of many columns, although there are many numbers. One block has all rows of a segment, for
// some columns, so rows may be more only if numbers are narrow and fold in any order.
bool has_wide_ranges(const Segments& problem) {
  constexpr int64_t kMostWideRows = 4 << 10, kMostNarrowRows = 13 << 10, kLeastNarrow = 384, kMostNumbers = 16 << 20;
  const Rows& rows = problem.rows;
  if (rows.length <= kFewRows) return true;
  const bool sums_floats = problem.op == Op::kSum && is_float(problem.dtype);
  const bool narrow = !sums_floats && bytes_of(problem.dtype) <= 2 && rows.inner >= kLeastNarrow;
  return rows.length <= (narrow ? kMostNarrowRows : kMostWideRows) &&
         (rows.length + problem.segments) * rows.inner <= kMostNumbers;
}

// Plans kRanges. Returns false if other kernels are faster. The order of additions follows from this geometry, which
// fits in the shared memory that every GPU has.
bool plan_ranges(const Segments& problem, SegmentsPlan& plan) {
  constexpr int64_t kMostIds = 4 << 20;  // that all blocks read together
  constexpr int64_t kMostRows = 512;     // of a block, on average
  constexpr int64_t kMostNumbers = 5 << 18;
  const auto [outer, length, inner] = problem.rows;
  if (problem.sorted || length > kMostRangeRows || inner >= int64_t{1} << 31) return false;
  if (!has_wide_ranges(problem) && length * inner > kMostNumbers) return false;
  plan = {};
  plan.algorithm = Segmenting::kRanges;
  while (plan.team_bits < 5 && inner > 1 << plan.team_bits) ++plan.team_bits;
  const int64_t warps = std::clamp<int64_t>(ceil_div(length, 1024), 1, kMostRangeWarps / 4) * 4;
  const int64_t teams = 32 * warps >> plan.team_bits, chunks = ceil_div(inner, 1 << plan.team_bits);
  const int64_t cell_bytes = partial_bytes(problem), lists = 2 * 4 * kRangeList * warps;
  // Of each segment: its results, where it begins, and a count for each warp.
  const int64_t each = (cell_bytes << plan.team_bits) + 4 + 2 * warps;
  const int64_t most = std::min(32 * warps, (kGpus[0].shared_bytes - 512 - lists) / each);
  const int64_t own = std::min(kMostRows, kLeastRangePiece * teams);
  // A multiprocessor holds one block of more than 16 warps, or two others.
  const int64_t most_blocks = warps > 16 ? 132 : 264;
  const int64_t ranges = std::clamp<int64_t>(ceil_div(length, own), 1, std::max<int64_t>(1, most_blocks / chunks));
  plan.warps = static_cast<int>(warps);
  plan.rows = std::min(most, ceil_div(problem.segments, ranges));
  plan.tiles = ceil_div(problem.segments, plan.rows);
  // What pieces leave takes the place of the lists, of 16 bytes for each thread.
  plan.parts = static_cast<int>(std::min<int64_t>(std::max<int64_t>(1, 16 / cell_bytes) * teams, 128));
  plan.batch = std::max<int64_t>(1, kMostBlocks / (plan.tiles * chunks));
  plan.shared_bytes =
      range_result_bytes(plan.rows, plan.team_bits, cell_bytes) + lists + 4 * (plan.rows + 1) + 2 * warps * plan.rows;
  if (plan.tiles * chunks * length <= kMostIds) return true;
  plan = {};
  return false;
}

// Plans kMatch. Returns false if comparing each row with each segment would take longer than tables. The order of
// additions follows from this geometry.
bool plan_match(const Segments& problem, SegmentsPlan& plan) {
  constexpr int64_t kMostColumns = 16, kManyColumns = 8, kFewMatchWarps = 10, kMostSteps = 1024,
                    kStep = 32 * kMatchRows;  // `kStep`: rows that a warp takes
  const int64_t length = problem.rows.length, inner = problem.rows.inner;
  const int64_t ranges = ceil_div(problem.segments, int64_t{kMatchRange});
  const int64_t warps = std::max<int64_t>(1, ceil_div(length, kStep));
  // Where there are few blocks, folding the accumulators of many warps takes longer than small tables.
  const int64_t most_warps = ranges * inner <= 4 ? 4 : inner < kManyColumns ? kFewMatchWarps : kMostMatchWarps;
  if (inner > kMostColumns || warps > most_warps || ranges * inner * warps > kMostSteps) return false;
  plan.algorithm = Segmenting::kMatch;
  plan.warps = static_cast<int>(warps);
  plan.rows = kMatchRange;
  plan.tiles = ranges;
  return true;
}

// Whether kScatter takes the dtype and the fold: any order gives the same, and one atomic folds a number.
bool may_scatter(const Segments& problem) {
  const bool exact = problem.op != Op::kSum || !is_float(problem.dtype);
  return exact && bytes_of(problem.dtype) >= 4 && !problem.byte_ids;
}

// Whether numbers are so few that kScatter takes less time than tables. If one segment has all rows, atomics wait for
// each other, which bounds the numbers. If there are few segments, some wait anyway, so that kFew takes less for very
// few numbers, for several rows of ids, and for many columns. Rows in which one block of kTables finds the largest of
// few segments sooner are left to it.
bool prefers_scatter(const Segments& problem) {
  const Rows& rows = problem.rows;
  const int64_t segments = problem.segments, numbers = rows.length * rows.inner;
  if (rows.length > kWholeRows || rows.elements() > (segments > 64 ? 1 << 20 : 1 << 18)) return false;
  if (segments <= 32 && numbers <= (segments > 4 ? 1 << 10 : 1 << 11)) return false;
  if (segments <= 16 && rows.length <= kFewRows && (rows.outer > 1 || rows.inner > kMostScatterTeam)) return false;
  return problem.op == Op::kSum || rows.inner > 1 || rows.length <= kWholeRows / 2 ||
         segments > (bytes_of(problem.dtype) < 8 ? 256 : 16);
}

// The same where kAtomics would be the other choice, which keeps what warps fold in registers.
bool prefers_scatter_to_atomics(const Segments& problem) {
  const Rows& rows = problem.rows;
  const int64_t most = problem.segments <= 64 ? 1 << 16 : rows.inner <= kMostScatterTeam ? 1 << 19 : 1 << 18;
  return rows.length * rows.inner <= most && rows.elements() <= 1 << 20;
}

void plan_scatter(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kFewest = 48 << 10;  // up to so many numbers, a thread has one, unless a warp shares a row
  const auto [outer, length, inner] = problem.rows;
  plan = {};
  plan.algorithm = Segmenting::kScatter;
  plan.overlap = gpu.dependent_launch;
  while (plan.team_bits < 5 && inner > 1 << plan.team_bits) ++plan.team_bits;
  const bool narrow = 1 << plan.team_bits <= kMostScatterTeam;
  plan.rows = narrow && problem.rows.elements() <= kFewest ? 1 : kScatterRows;
  const int64_t threads = ceil_div(length, plan.rows) * (narrow ? 1 << plan.team_bits : inner);
  plan.tiles = std::max<int64_t>(1, ceil_div(threads, kScatterThreads));
}

// Whether the plan of plan_few is taken: always for up to kFewRows rows. More rows take it only where other kernels
// need several launches, if all of the following hold: the blocks together do not read too many ids, a team folds few
// rows, and it folds not too many even if one segment has all rows.
bool takes_few(const Segments& problem, const SegmentsPlan& plan, bool several) {
  const Rows& rows = problem.rows;
  if (rows.inner >= int64_t{1} << 31) return false;  // offsets within a row must fit in 32 bits
  if (rows.length <= kFewRows) return true;
  if (problem.sorted ? rows.length * rows.inner > 8 << 10 : !several) return false;
  const int64_t blocks = plan.tiles * ceil_div(rows.inner, 1 << plan.team_bits);
  const int64_t of_team = rows.length / (plan.warps * (32 >> plan.team_bits));
  const int64_t most_ids = rows.inner <= kMostTableColumns ? 3 << 20 : 5 << 20;
  return blocks * rows.length <= most_ids && of_team <= 128 && of_team * plan.rows <= 64 * problem.segments;
}

// Plans atomics on integers. Returns false if rows have many columns, because reading them in order is faster, and for
// sums of floats whose accumulators would take far more memory than the data.
bool plan_atomics(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kMostWideSumColumns = 3;  // of float64; rows of more are read in order as fast
  // The most columns of other floats, and numbers of rows of more than kMostTableColumns; rows of more are read in
  // order as fast.
  constexpr int64_t kMostExactColumns = 24, kMostExactNumbers = 3 << 19;
  const Rows& rows = problem.rows;
  const int64_t cells = problem.segments * rows.inner;
  if (rows.inner > kMostAtomicColumns) return false;
  if (problem.op == Op::kSum && is_float(problem.dtype)) {
    const bool wide = problem.dtype == DType::kFloat64;
    const bool few_numbers = rows.inner <= kMostExactColumns && rows.length * rows.inner <= kMostExactNumbers;
    if (rows.inner > (wide ? kMostWideSumColumns : kMostTableColumns) && (wide || !few_numbers)) return false;
    if (wide && rows.length > kMostWideSumRows) return false;
    plan.exact = wide ? wide_exact_of(rows.length) : exact_of(problem.dtype, rows.length);
    const int64_t words = wide ? wide_stride(plan.exact.bins) : plan.exact.bins + 1;
    const int64_t bytes = (wide ? kWideHeadBytes : ExactShape::kHeadBytes) + aligned(8 * words * cells);
    if (bytes > (wide ? std::max<int64_t>(64 << 20, 32 * rows.length * rows.inner)
                      : std::max<int64_t>(16 << 20, 16 * rows.length * rows.inner)))
      return false;
    plan.workspace_bytes = bytes;
    // A block keeps the accumulators that most numbers use in shared memory, if adding these to memory takes much less
    // time than reading the numbers. Where many rows have one segment, atomics in memory would wait for each other, and
    // most so if there are few sums: then half a number for each accumulator of all blocks is enough.
    constexpr int64_t kMany = 200, kSome = 100, kFewSums = 2048;  // rows of a segment, and sums
    const int64_t halves = rows.length >= kSome * problem.segments && cells <= kFewSums ? 1
                           : rows.length >= kMany * problem.segments                    ? 2
                                                                                        : 8;
    plan.blocks = std::max<int64_t>(1, gpu.multiprocessors / rows.outer);
    int64_t bins =
        wide ? 0 : std::min<int64_t>({kMostTableBins, plan.exact.bins, (gpu.shared_bytes - 1024) / (8 * cells)});
    while (bins > 0 && 2 * rows.length * rows.inner < halves * plan.blocks * cells * bins) --bins;
    plan.table_bins = static_cast<int>(bins);
    plan.shared_bytes = 8 * cells * bins;
  } else if (bytes_of(problem.dtype) < 4) {
    plan.workspace_bytes = aligned(4 * cells);
  }
  plan.algorithm = Segmenting::kAtomics;
  while (plan.team_bits < 5 && rows.inner > 1 << plan.team_bits) ++plan.team_bits;
  plan.overlap = gpu.dependent_launch;
  // Looks at an accumulator before an atomic: if a segment has many rows, most numbers are not larger than those
  // before. With eight columns, one atomic instruction serves all of them, so that looking pays later, and so it does
  // for one column of results that are accumulators.
  const bool in_place = bytes_of(problem.dtype) >= 4;
  plan.looks = rows.length >= ((rows.inner == 1 && in_place) || rows.inner >= 8 ? 32 : 8) * problem.segments;
  // A warp takes `step` rows at a time, and several steps. Sums: at least two steps, eight if that leaves enough warps,
  // or four of float64, whose steps are long.
  // Extremes: up to sixteen. The more rows a warp has, the more it folds in registers where one segment is frequent.
  const bool long_runs = problem.op == Op::kSum || (rows.inner >= 8 && !plan.looks);
  const int64_t most = problem.op == Op::kSum && problem.dtype == DType::kFloat64 ? 4 : 8;
  const int64_t step = 32 >> plan.team_bits, steps = ceil_div(rows.length, step);
  plan.rows = step * (long_runs ? std::clamp<int64_t>(ceil_div(steps, 32 * 1056 / most),
                                                      std::clamp<int64_t>(steps / 1056, 2, most), 64)
                                : std::clamp<int64_t>(ceil_div(steps, 8448), 1, 16));
  plan.tiles = ceil_div(rows.length, plan.rows);
  return true;
}

}  // namespace

// Ids are sorted as unsigned numbers. So negative ids, whose rows are dropped, come last.
sort::Problem order_of(const Segments& problem) {
  sort::Problem ids;
  ids.rows = {problem.id_rows, problem.rows.length, 1};
  ids.k = problem.rows.length;
  ids.low_keys = problem.segments <= 1 << 16;
  return ids;
}

namespace {

// Plans tables of all columns for blocks: for extremes, and for sums of integers. Returns false if other kernels are
// faster: where there are fewer rows than the tables of all blocks have segments, since each block leaves a table; for
// many columns; and for few rows or numbers.
bool plan_wide_tables(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 132, kMostColumns = 128;
  const auto [outer, length, inner] = problem.rows;
  const bool extremes = problem.op != Op::kSum;
  if ((!extremes && is_float(problem.dtype)) || problem.byte_ids || problem.sorted) return false;
  if (inner < (extremes ? 2 : 8) || inner > kMostColumns) return false;
  if (length <= (inner > kMostAtomicColumns ? kFewRows : kWholeRows)) return false;
  if (length < kBlocks * problem.segments || length >= 1 << 30) return false;
  const bool many = length >= 4 * kBlocks * std::max<int64_t>(problem.segments, 64);
  if (!many && may_scatter(problem) && prefers_scatter_to_atomics(problem)) return false;
  const int64_t cells = problem.segments * inner;
  if (cells * std::max<int64_t>(4, partial_bytes(problem)) > gpu.shared_bytes - 1024) return false;
  plan.algorithm = Segmenting::kTables;
  plan.columns = static_cast<int>(inner);
  plan.warps = kExtremeThreads / 32;
  plan.tiles = std::max<int64_t>(1, kBlocks / outer);
  plan.rows = ceil_div(length, plan.tiles);
  plan.tiles = ceil_div(length, plan.rows);
  plan.workspace_bytes = aligned(kBlocks * cells * partial_bytes(problem));  // as for a part of the batch
  return true;
}

// Plans tables that leave a multiprocessor one block: for extremes and sums of integers in more segments, of one
// column, and for extremes of very many rows. Returns false if atomics in memory are faster: where there are few rows
// for each segment, since each block leaves a table, so that these would take more than kOfNumber bytes for each
// number, and for extremes of 64 bits.
bool plan_large_tables(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 132, kLeast = 48 << 10, kLeastNumbers = 1 << 19, kOfNumber = 16;
  constexpr int64_t kLeastOfMany = 6 << 10, kMany = 4 << 20;
  const auto [outer, length, inner] = problem.rows;
  const bool sums = problem.op == Op::kSum;
  const int64_t table = problem.segments * std::max<int64_t>(4, partial_bytes(problem));
  if (sums ? is_float(problem.dtype) : bytes_of(problem.dtype) == 8) return false;
  if (table <= (!sums && length > kMany ? kLeastOfMany : kLeast) || table > gpu.shared_bytes - 1024) return false;
  if (problem.byte_ids || problem.sorted || inner > 1) return false;
  if (kBlocks * table > kOfNumber * length || length < kLeastNumbers || length >= 1 << 30) return false;
  plan.algorithm = Segmenting::kTables;
  plan.warps = kExtremeThreads / 32;
  plan.tiles = std::max<int64_t>(1, kBlocks / outer);
  plan.rows = ceil_div(ceil_div(length, plan.tiles), 4) * 4;  // a lane loads four rows at a time
  plan.tiles = ceil_div(length, plan.rows);
  plan.workspace_bytes = aligned(kBlocks * problem.segments * partial_bytes(problem));  // as for a part of the batch
  return true;
}

// Plans how the order of rows by id is found. All ways find the same, so the plan may depend on the batch and the GPU.
OrderPlan plan_order(const Segments& problem, const Gpu& gpu) {
  // All blocks read all ids, so more than kRanges blocks would not be faster. With fewer than kLeastRanges blocks, each
  // has many rows, and the sort is faster.
  constexpr int64_t kLeastRanges = 16, kRanges = 132;
  // Shared memory: the lists of all warps; of each segment, a count for each warp and a start; 2048 bytes for the rest.
  constexpr int64_t kListBytes = kOrderThreads / 32 * 4 * kOrderList, kSegmentBytes = 4 * (kOrderThreads / 32 + 1);
  const int64_t most_range = (gpu.shared_bytes - kListBytes - 2048) / kSegmentBytes;
  OrderPlan plan;
  const int64_t length = problem.rows.length, keys = problem.segments + 1;
  plan.sort = sort::plan_sort(order_of(problem), gpu);
  plan.positions = aligned(4 * length);
  plan.workspace = 2 * plan.positions;
  plan.bytes = plan.workspace + aligned(plan.sort.workspace_bytes);
  const int64_t wanted = std::clamp<int64_t>(gpu.multiprocessors / std::max<int64_t>(1, problem.id_rows), 1, kRanges);
  const int64_t range = ceil_div(keys, std::min(wanted, keys));
  if (length <= kMostOrderRows && wanted >= kLeastRanges && range <= most_range) {
    plan.range = range;
    plan.ranges = ceil_div(keys, range);
    plan.shared_bytes = kSegmentBytes * range + kListBytes;
  }
  return plan;
}

// Plans kBuckets. Returns false if other kernels are faster: for rows of which a block adds up some columns at a time,
// for some 10^5 rows of 16 bits, and for very many rows in many buckets, whose runs are short. The order of additions
// follows from `shift` and `piece`, which may not depend on the GPU.
bool plan_buckets(const Segments& problem, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kBlocks = 256, kLeastBuckets = 128, kLeastShift = 5, kLeastPiece = 8192, kMostPiece = 64 << 10;
  constexpr int64_t kStep = kBucketRows * kBucketThreads;
  constexpr int64_t kLeastRows = 1 << 16, kLeastNarrowRows = 1 << 18, kMostRows = 1 << 24, kManyRows = 8 << 20,
                    kMostOfMany = 640;
  constexpr int64_t kMostSumBytes = 64 << 10, kMostBuckets = (1 << kMostBucketBits) - 1;
  const auto [outer, length, inner] = problem.rows;
  const int64_t width = bytes_of(problem.dtype), bytes = inner * width, acc = partial_bytes(problem);
  if (problem.op != Op::kSum || !is_float(problem.dtype) || problem.sorted || problem.byte_ids) return false;
  if (inner * acc > 16 || (bytes % 4 != 0 && inner > 1) || outer > 65535) return false;
  if (length < (bytes < 4 ? kLeastNarrowRows : kLeastRows) || length > kMostRows) return false;
  BucketsPlan& own = plan.buckets;
  own.shift = acc > 4 ? kMostShift - 1 : kMostShift;
  while ((inner * acc) << own.shift > kMostSumBytes) --own.shift;
  const auto buckets = [&] { return ceil_div(problem.segments, int64_t{1} << own.shift); };
  while (own.shift > kLeastShift && buckets() < kLeastBuckets) --own.shift;
  const int64_t count = buckets();
  if (count > (length > kManyRows ? kMostOfMany : kMostBuckets)) return false;
  own.count = static_cast<uint32_t>(count);
  own.digits = (own.count + 2) / 2 * 2;
  // Two blocks fit on a multiprocessor, if possible, besides 1 KiB that the system takes and static variables.
  const auto shared = [&, bytes = bytes](int64_t warps) {
    return warps * (32 * kBucketItems * (bytes + 6) + 2 * own.digits) + 8 * own.digits;
  };
  const int64_t most = gpu.shared_bytes - 1024, half = gpu.multiprocessor_shared / 2 - 2048;
  plan.warps = kBucketThreads / 32;
  while (plan.warps > 8 && shared(plan.warps) > half) --plan.warps;
  while (plan.warps > 1 && shared(plan.warps) > most) --plan.warps;
  if (shared(plan.warps) > most) return false;
  plan.shared_bytes = shared(plan.warps);
  plan.columns = static_cast<int>(inner);
  while (bucket_sum_bytes(own.shift, plan.columns * acc) > most) plan.columns = plan.columns == 4 ? 2 : 1;
  own.tile = static_cast<uint32_t>(32 * kBucketItems * plan.warps);
  own.tiles = static_cast<uint32_t>(ceil_div(length, own.tile));
  const int64_t blocks = std::max<int64_t>(1, 2 * gpu.multiprocessors / outer);
  own.blocks = static_cast<uint32_t>(std::min<int64_t>(own.tiles, blocks));
  own.piece = static_cast<uint32_t>(std::clamp(length / kBlocks / kStep * kStep, kLeastPiece, kMostPiece));
  own.pieces = own.count + static_cast<uint32_t>(length / own.piece);
  plan.algorithm = Segmenting::kBuckets;
  plan.rows = own.tile;
  plan.tiles = own.tiles;
  plan.overlap = gpu.dependent_launch;
  own.before = aligned(2 * own.tiles * count);
  own.totals = own.before + aligned(4 * own.tiles * count);
  own.low = own.totals + aligned(4 * count);
  own.moved = own.low + aligned(2 * length);
  own.parts = own.moved + aligned(length * bytes);
  plan.workspace_bytes = own.parts;
  if (own.pieces > own.count) plan.workspace_bytes += aligned((own.pieces * inner * acc) << own.shift);
  return true;
}

}  // namespace

void plan_tiles(const Segments& problem, int64_t part_bytes, const Gpu& gpu, SegmentsPlan& plan) {
  constexpr int64_t kMostTile = 256;
  const bool sums = problem.op == Op::kSum;
  const Rows& rows = problem.rows;
  plan.algorithm = problem.sorted ? Segmenting::kSorted : Segmenting::kOrdered;
  if (!problem.sorted && rows.length >= int64_t{1} << 31) {  // the order of the rows is one of int32
    plan.algorithm = Segmenting::kNone;
    return;
  }
  if (!problem.sorted) plan.order = plan_order(problem, gpu);
  plan.overlap = gpu.dependent_launch;
  // An H200 runs `warps` warps of the kernel at a time, which is how many warps tiles of `all` rows would need. If such
  // tiles are longer than kMostTile, tiles are made shorter, so that warps take a whole number of turns. Many short
  // tiles would leave much to join, so no tile has fewer than `least` rows.
  const int64_t width = bytes_of(problem.dtype), bytes = rows.inner * width;
  const int64_t most = width == 1 ? 8 : std::min<int64_t>(16, kMostVectorPart / part_bytes * width);
  const int64_t vector = bytes % most == 0             ? most
                         : width > 1 && bytes % 8 == 0 ? 8
                         : width < 4 && bytes % 4 == 0 ? 4
                                                       : width;
  const int64_t warps = vector > 4 * width ? 3 * 1024 : 4 * 1024;
  const int64_t all = std::max<int64_t>(1, ceil_div(rows.length * (bytes / vector), 32 * warps));
  const int64_t least = std::clamp<int64_t>(rows.length >> 14, rows.length < 8 * problem.segments ? 8 : 16, 64);
  int64_t tile = std::max(least, ceil_div(ceil_div(all, ceil_div(all, kMostTile)), 4) * 4);
  // Of sums of rows of few vectors, a block has a tile, if its teams leave few threads idle. They have shares of whole
  // steps of rows: long ones, but not so long that there are less than kBlocks tiles. Where there are gaps to fill,
  // short shares fill more of them at once.
  constexpr int64_t kBlocks = 396, kMostShare = 32, kLeastTeams = 3, kLeastThreads = 208;
  const int64_t lanes = bytes / vector, teams = std::max<int64_t>(1, kTileThreads / lanes);
  plan.parts = 1;
  if (sums && rows.inner > 1 && teams >= kLeastTeams && teams * lanes >= kLeastThreads) {
    int64_t share = std::min({rows.length / (teams * kBlocks), kMostShare, kMostTileRows / teams});
    share = problem.segments >= rows.length ? kTileStep : std::max(kTileStep, share / kTileStep * kTileStep);
    plan.parts = static_cast<int>(teams);
    tile = teams * share;
  }
  // With one column, a warp has a tile, and takes 256 rows at a time.
  if (rows.inner == 1) tile = rows.length < 1 << 20 ? 256 : 1024;
  plan.rows = tile;
  plan.tiles = ceil_div(rows.length, tile);
  if (plan.tiles > 1) {
    const int bits = join_team_bits(rows.inner);
    plan.tails = aligned(plan.tiles * rows.inner * part_bytes);
    plan.counters = 2 * plan.tails;
    plan.joined_bytes =
        plan.counters + aligned(4 * ceil_div(plan.tiles, kJoinThreads >> bits) * ceil_div(rows.inner, 1 << bits));
  }
  plan.workspace_bytes = plan.order.bytes + plan.joined_bytes;
}

// Choices that depend on the number of outer indices or on the GPU must not change the order of additions.
SegmentsPlan plan_segments(const Segments& problem, const Gpu& gpu) {
  SegmentsPlan plan;
  const Rows& rows = problem.rows;
  if (rows.outer == 0 || rows.inner == 0 || problem.segments == 0) return plan;
  const bool extremes = problem.op != Op::kSum, sums_floats = !extremes && is_float(problem.dtype);
  const bool few = rows.length <= kFewRows, dense = rows.length >= 32 * problem.segments || problem.segments <= 64;
  const int64_t bytes = bytes_of(problem.dtype), count = rows.count(),
                table = problem.segments * partial_bytes(problem);
  // For kTables: slices of at least `part` thousand rows, or as many as there are segments.
  const auto slices = [&](int64_t part) {
    return std::clamp<int64_t>(rows.length / (part * std::max<int64_t>(1024, problem.segments)), 1, 528);
  };
  const bool whole = rows.length <= kWholeRows && bytes < 8;
  const int64_t most = sums_floats ? slices(8) : whole ? 1 : std::clamp<int64_t>(264 / rows.inner, 1, slices(2));
  const int64_t table_bytes = most > 1 ? aligned(most * rows.inner * table) : 0;  // workspace of kTables
  // What is the same in any order needs one table for a block, not one for each lane. But sums wait where lanes have
  // the same of few segments, and of several columns a block would read one only.
  const bool may_suit = !sums_floats && (rows.inner > 1 ? rows.inner <= kMostTableColumns && rows.length <= kWholeRows
                                                        : rows.length > 4096 && (extremes || problem.segments >= 16));
  // Of short rows, lanes take many sooner, except for sums of up to 32 bits, and also some that do not begin at whole
  // vectors. A part of a batch suits blocks if the batch does.
  const bool whole_vectors = count <= 8 || rows.length % 4 == 0, short_sums = !extremes && bytes < 8;
  const bool one_table =
      may_suit &&
      (rows.inner > 1 ? rows.outer == 1 : rows.length > 16384 || short_sums || (count <= 132 && whole_vectors));
  // Clearing and adding up the tables of lanes must not take longer than reading the rows. Ids of 8 bits have no other
  // kernel.
  const bool has_lanes =
      few ? problem.byte_ids && problem.segments <= 64 && (rows.inner < 4 || rows.length * rows.inner > 1 << 18)
          : dense && !problem.sorted && (problem.byte_ids || !one_table) &&
                (!extremes || rows.inner <= kMostTableColumns || rows.inner > kMostAtomicColumns);
  // Atomics are fastest for few numbers, where the order of folding does not matter and one instruction does it. But
  // one block finds extremes of few segments sooner.
  const bool by_block = extremes && one_table && rows.inner == 1 && rows.length <= kWholeRows &&
                        problem.segments <= (bytes < 8 ? 256 : 16);
  const bool few_numbers = !few && !problem.sorted && !by_block && rows.elements() <= kFewNumbers;
  if (may_scatter(problem) && (few_numbers || prefers_scatter(problem))) {
    plan_scatter(problem, gpu, plan);
    return plan;
  }
  if (!few && (plan_wide_tables(problem, gpu, plan) || plan_large_tables(problem, gpu, plan))) return plan;
  // Few wide rows: a block of `few` would clear a table for each warp, though it mostly writes results. If there are
  // far more results than numbers, tiles write them at the speed of memory.
  constexpr int64_t kLeastWide = 384, kLeastWideSegments = 24, kLeastNumbers = 3 << 17, kManyResults = 1 << 25;
  const bool many_results = problem.segments * rows.inner >= kManyResults && problem.segments >= 4 * rows.length;
  if (has_wide_ranges(problem) && !problem.sorted && !problem.byte_ids && rows.inner >= kLeastWide &&
      problem.segments >= kLeastWideSegments && (rows.length + problem.segments) * rows.inner >= kLeastNumbers) {
    if (many_results) {
      plan_tiles(problem, partial_bytes(problem), gpu, plan);
      return plan;
    }
    if (plan_ranges(problem, plan)) return plan;
  }
  // Lanes are faster for batches, but where the order of additions matters, the kernel may not follow from the batch.
  const bool may_pick = !few && !problem.byte_ids && (sums_floats || rows.outer == 1);
  if (has_lanes && may_pick && sums_floats && problem.segments >= kLeastPickSegments) {
    // Long rows of few columns have exact sums: batches take less time for these, too, and frequent segments.
    constexpr int64_t kLeastExact = 16 << 10, kLeastExactSegments = 200, kMostExactColumns = 3, kMostFew = 12 << 10;
    if (bytes < 8 && rows.inner <= kMostExactColumns && rows.length >= kLeastExact && rows.length <= kMostRangeRows &&
        problem.segments >= kLeastExactSegments && plan_atomics(problem, gpu, plan))
      return plan;
    plan = {};
    // Where few rows meet in a lane, kFew takes about as long as kPicks, and batches of it less.
    if (rows.length <= kMostFew) {
      plan_few(rows, problem.segments, partial_bytes(problem), few, plan);
      if (takes_few(problem, plan, true)) return plan;
      plan = {};
    }
  }
  if (has_lanes && ((may_pick && plan_picks(problem, plan)) || plan_lanes(problem, gpu, plan))) {
    // A part of the batch has the same workspace, and may take kTables.
    if (may_suit && !problem.byte_ids) plan.workspace_bytes = std::max(plan.workspace_bytes, table_bytes);
    return plan;
  }
  if (problem.byte_ids) {
    plan.algorithm = Segmenting::kNone;
    return plan;
  }
  if (plan_match(problem, plan)) return plan;
  plan_few(rows, problem.segments, partial_bytes(problem), few, plan);
  // Atomics take two short launches if the results are their accumulators, and three if they need keys.
  const bool on_keys = bytes < 4 && rows.length * rows.inner <= 4 << 10;
  if (takes_few(problem, plan, sums_floats || on_keys || rows.inner > kMostAtomicColumns)) return plan;
  plan = {};
  // If the table of a block is large, atomics are faster for fewer rows; for extremes, they are also faster for very
  // many rows.
  const bool one = extremes ? rows.length >= 64 * problem.segments && rows.length <= 4 << 20
                            : !sums_floats && rows.length >= 64 * problem.segments;
  const int64_t shared =
      one ? std::max<int64_t>(4, partial_bytes(problem)) * problem.segments : table * kTableThreads / 32;
  const bool has_tables = !problem.sorted && rows.inner <= kMostTableColumns && shared <= 48 << 10;
  const bool wide_floats = sums_floats && rows.inner > kMostTableColumns;  // which kPicks and kRanges take first
  if (!(has_tables && (dense || by_block)) && !problem.sorted &&
      ((!wide_floats && plan_atomics(problem, gpu, plan)) || plan_lanes(problem, gpu, plan))) {
    const bool atomics = plan.algorithm == Segmenting::kAtomics;
    if (atomics && may_scatter(problem) && prefers_scatter_to_atomics(problem)) plan_scatter(problem, gpu, plan);
    return plan;
  }
  // Exact sums take less time than folds of equal ids; of float64, only if tables would be larger.
  if (has_tables && sums_floats && bytes < 8 && plan_atomics(problem, gpu, plan)) return plan;
  if (has_tables) {
    plan.algorithm = Segmenting::kTables;
    plan.warps = kTableThreads / 32;
    plan.tiles = most;
    plan.rows = ceil_div(rows.length, plan.tiles);
    // With one table for a block, the result does not depend on how rows are cut. So there is one block for each
    // multiprocessor, or two smaller ones, and one block takes few rows in a single launch.
    if (!sums_floats) {
      const bool wide = bytes == 8 || rows.length <= kWholeRows || rows.elements() >= 3 << 19;
      plan.warps = static_cast<int>(count > 132 ? std::clamp<int64_t>(ceil_div(rows.length, 1024), 8, 16)
                                    : wide      ? kExtremeThreads / 32
                                                : kExtremeThreads / 64);
      const int64_t blocks = count <= 132 && wide && rows.length > kWholeRows ? 132 : 264;
      plan.rows = ceil_div(rows.length, std::clamp<int64_t>(blocks / count, 1, most));
      plan.rows = ceil_div(plan.rows, 4) * 4;  // a lane loads four rows at a time
      plan.tiles = ceil_div(rows.length, plan.rows);
    }
    plan.workspace_bytes = table_bytes;
    return plan;
  }
  constexpr int64_t kMostRanged = 8 << 10;  // of more rows, ranges take too long if one segment has most of them
  // A multiprocessor holds one block of kPicks. If there are more, kRanges takes less time.
  const bool has_ranges = rows.length <= kMostRanged && !many_results;
  const auto picks_at_once = [&] { return plan.tiles * ceil_div(rows.inner, 1 << plan.team_bits) <= 132; };
  if (plan_picks(problem, plan) && (!has_ranges || picks_at_once())) return plan;
  if (has_ranges && plan_ranges(problem, plan)) return plan;
  if (plan_picks(problem, plan)) return plan;
  plan = {};
  if (wide_floats && !problem.sorted && plan_atomics(problem, gpu, plan)) return plan;
  plan = {};
  if (plan_buckets(problem, gpu, plan)) return plan;
  plan = {};
  plan_tiles(problem, partial_bytes(problem), gpu, plan);
  return plan;
}

}  // namespace jaxgpuops::segments
