// Orders up to kMostOrderRows rows by id in one launch, with a stable counting sort. A block has a range of segments
// and reads all ids. So it counts for itself the rows that come before its range, and no block waits for another. Each
// warp has neighbouring rows. It lists the rows whose segment is in the block's range, and counts them by segment in a
// table of its own; sums over the tables of all warps give the place of each row. If a sample shows that one segment
// has many of a warp's rows, the warp only counts the rows of this frequent segment, so that its list has room for the
// others.
//
// Passes: one. Bytes moved: every block reads all ids, from L2, and writes the ids and positions of its range. A warp
// reads its ids once more if it has a frequent segment, and twice more if its list is too short.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/launch.h"

namespace jaxgpuops::segments {
namespace {

constexpr int kWarps = kOrderThreads / 32;
constexpr int kIds = 12;   // ids that a lane loads at a time to list rows
constexpr int kBatch = 4;  // ids, or entries of the list, that a lane loads at a time later
constexpr uint32_t kNone = ~0u;

struct Args {
  const int32_t* ids;
  int32_t *sorted, *positions;
  uint32_t length, segments, ranges, range, share;  // `share`: the rows of a warp
};

__global__ void __launch_bounds__(kOrderThreads) segment_order_kernel(const __grid_constant__ Args a) {
  __shared__ uint32_t lower_of[kWarps], sums[kWarps];
  let_dependents_start();  // segment_tiles_kernel
  const uint32_t o = blockIdx.x / a.ranges, first = (blockIdx.x - o * a.ranges) * a.range;
  // Ids out of range belong to one more segment, which comes after all others.
  const uint32_t own = min(a.range, a.segments + 1 - first);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
  auto* const tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  uint32_t* const table = tables + warp * a.range;
  uint32_t* const starts = tables + kWarps * a.range;  // of each segment of the range
  // An entry of the list has, in the high 16 bits, the row's segment, counted from the first one of the range; and in
  // the low 16 bits, the row's place among the warp's rows.
  uint32_t* const list = starts + a.range + warp * kOrderList;
  const int32_t* const ids = a.ids + static_cast<int64_t>(o) * a.length;
  const uint32_t begin = min(warp * a.share, a.length), end = min(begin + a.share, a.length);
  for (uint32_t s = lane; s < own; s += 32) table[s] = 0;

  // A row is in the range if its id minus that of the range's first segment, as an unsigned number, is at most `most`.
  // The last range also has all larger ids, so its `most` is the largest difference that such ids can have. Ids before
  // the range give still larger differences.
  const bool is_last = first + own > a.segments;
  const uint32_t most = is_last ? ~first : own - 1;
  // A segment that many of the warp's rows belong to, or kNone. The warp looks at a sample of its rows, and at the
  // segment of the first sampled row in the range. This segment is frequent if it has a quarter of the sample.
  uint32_t frequent = kNone, frequent_rows = 0;
  if (begin < end) {
    const uint32_t sample = static_cast<uint32_t>(ids[begin + (end - begin) * lane / 32]) - first;
    const unsigned in_range = __ballot_sync(kEveryLane, sample <= most);
    if (in_range) {
      const uint32_t one = __shfl_sync(kEveryLane, min(sample, own - 1), __ffs(in_range) - 1);
      if (__popc(in_range & __ballot_sync(kEveryLane, min(sample, own - 1) == one)) >= 8) frequent = one;
    }
  }
  // `lower`: how many of the lane's ids are before the range. `size`: how many rows the warp has to list, even if its
  // list is too short for them.
  uint32_t lower = 0, size = 0;
  // Lists the rows of the warp's next kIds steps. `whole`: all of these steps have rows, so bounds need no check.
  const auto list_rows = [&](uint32_t at, auto whole) {
    const int32_t* const from = ids + at + lane;
    const auto is_there = [&](int i) { return whole || at + 32 * i + lane < end; };
    uint32_t segment[kIds];
#pragma unroll
    for (int i = 0; i < kIds; ++i) segment[i] = is_there(i) ? static_cast<uint32_t>(from[32 * i]) - first : 0;
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      lower += segment[i] > ~first && is_there(i);
      bool has = segment[i] <= most && is_there(i);
      unsigned mask = __ballot_sync(kEveryLane, has);
      if (mask == 0) continue;
      segment[i] = min(segment[i], own - 1);
      has = has && segment[i] != frequent;
      const unsigned to_list = __ballot_sync(kEveryLane, has);
      frequent_rows += __popc(mask & ~to_list);
      mask = to_list;
      const uint32_t to = size + __popc(mask & below);
      if (has && to < kOrderList) list[to] = segment[i] << 16 | (at + 32 * i + lane - begin);
      size += __popc(mask);
    }
  };
  uint32_t start = begin;
#pragma unroll 1
  for (; start + 32 * kIds <= end; start += 32 * kIds) list_rows(start, std::true_type{});
  if (start < end) list_rows(start, std::false_type{});
  __syncwarp();

  const bool listed = size <= kOrderList;
  if (!listed) frequent = kNone, frequent_rows = 0;
  // Loads the segments of kBatch rows, from `at` on: kNone for other ranges, and behind the warp's rows.
  const auto load_batch = [&](uint32_t at, uint32_t (&segment)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      segment[i] = at + 32 * i < end ? static_cast<uint32_t>(ids[at + 32 * i]) - first : kNone;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      segment[i] = segment[i] <= most && at + 32 * i < end ? min(segment[i], own - 1) : kNone;
  };
  // Calls take(segment, row, place) for the warp's rows in the range, in order, except for those of the frequent
  // segment. `place`: what the table had for the segment at first, plus how many rows of the segment were taken before.
  // In the end, each value of the table has grown by the number of rows taken.
  const auto each_row = [&](auto take) {
    const uint32_t count = listed ? size : end - begin;
#pragma unroll 1
    for (uint32_t start = 0; start < count; start += 32 * kBatch) {
      uint32_t segments[kBatch];
      if (!listed) load_batch(begin + start + lane, segments);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t at = start + 32 * i + lane;
        if (at - lane >= count) break;
        uint32_t segment = segments[i], row = begin + at;
        if (listed) {
          const uint32_t entry = list[min(at, count - 1)];
          segment = at < count ? entry >> 16 : kNone, row = begin + (entry & 0xffff);
        }
        const bool has = segment != kNone;
        const unsigned mask = __ballot_sync(kEveryLane, has);
        if (mask == 0) continue;
        // Finds the lanes that have the same segment. Often all or most lanes have one segment, so a ballot finds these
        // lanes, and a match then finds the others.
        const uint32_t most_often = __shfl_sync(kEveryLane, segment, __ffs(mask) - 1);
        unsigned same = __ballot_sync(kEveryLane, segment == most_often);
        if (has && segment != most_often) same = __match_any_sync(mask & ~same, segment);
        const uint32_t place = has ? table[segment] : 0;
        __syncwarp();
        if (has && (same & below) == 0) table[segment] = place + __popc(same);
        __syncwarp();
        if (has) take(segment, row, place + __popc(same & below));
      }
    }
  };
  each_row([](uint32_t, uint32_t, uint32_t) {});  // counts
  if (lane == 0 && frequent_rows > 0) table[frequent] = frequent_rows;
  lower = sum_of_warp(lower);
  if (lane == 0) lower_of[warp] = lower;
  __syncthreads();

  // Turns counts into places. A table says where the warp's rows begin among all rows of a segment; `starts` says where
  // the segment begins in the result.
  const uint32_t of_thread = (own + kOrderThreads - 1) / kOrderThreads, from = threadIdx.x * of_thread;
  uint32_t total = 0;
  for (uint32_t s = from; s < min(from + of_thread, own); ++s) {
    uint32_t count = 0;
    constexpr int kTables = 8;  // read at a time
    for (uint32_t* at = tables + s; at < tables + kWarps * a.range; at += kTables * a.range) {
      uint32_t more[kTables];
#pragma unroll
      for (int w = 0; w < kTables; ++w) more[w] = at[w * a.range];
#pragma unroll
      for (int w = 0; w < kTables; ++w) {
        at[w * a.range] = count;
        count += more[w];
      }
    }
    starts[s] = count;
    total += count;
  }
  uint32_t place = sum_before<kOrderThreads>(total, sums) + sum_of_warp(lower_of[lane]);
  for (uint32_t s = from; s < min(from + of_thread, own); ++s) {
    const uint32_t count = starts[s];
    starts[s] = place;
    place += count;
  }
  __syncthreads();

  int32_t* const sorted = a.sorted + static_cast<int64_t>(o) * a.length;
  int32_t* const positions = a.positions + static_cast<int64_t>(o) * a.length;
  const auto put = [&](uint32_t segment, uint32_t row, uint32_t place) {
    sorted[starts[segment] + place] = static_cast<int32_t>(first + segment);
    positions[starts[segment] + place] = static_cast<int32_t>(row);
  };
  each_row(put);
  if (frequent_rows == 0) return;
  place = table[frequent];
#pragma unroll 1
  for (uint32_t at = begin + lane; at - lane < end; at += 32 * kBatch) {
    uint32_t segments[kBatch];
    load_batch(at, segments);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const unsigned mask = __ballot_sync(kEveryLane, segments[i] == frequent);
      if (segments[i] == frequent) put(frequent, at + 32 * i, place + __popc(mask & below));
      place += __popc(mask);
    }
  }
}

}  // namespace

cudaError_t launch_segment_order(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const int32_t* ids, int32_t* sorted, int32_t* positions) {
  Args a = {ids, sorted, positions};
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.segments = static_cast<uint32_t>(problem.segments);
  a.ranges = static_cast<uint32_t>(plan.order.ranges);
  a.range = static_cast<uint32_t>(plan.order.range);
  a.share = (a.length + kWarps - 1) / kWarps;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.id_rows * plan.order.ranges));
  config.block = dim3(kOrderThreads);
  config.shared_bytes = plan.order.shared_bytes;
  return launch(stream, config, segment_order_kernel, a);
}

}  // namespace jaxgpuops::segments
