// What the kernels of tiles (tiles.cuh) share: their arguments, and vectors of neighbouring columns, as elements and as
// partial results.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "segments/cuda/args.cuh"
#include "sort/cuda/launch.h"

namespace jaxgpuops::segments {
namespace {

constexpr int kThreads = kTileThreads;

struct Args : SegmentArgs {
  const int32_t* positions;  // the row that each sorted id belongs to; null: the ids of the rows ascend as they are
  int64_t tails_at, rows, tiles;
  int64_t lanes = 0;  // threads that share a row, or a piece of it
  // For segment_teams_kernel: a tile is cut into `shares` of `share` rows, if there are several. A row is cut into
  // `pieces`, each with a block, which has so many teams.
  int shares, share, teams = 0;
  int64_t pieces = 0;
  int64_t fillers = 0;  // blocks that fill long gaps, with `cells` cells each (tiles_gaps.cuh)
  int64_t cells = 0;
  int64_t gap = 0;  // the most segments without rows in a run that tiles fill
  // The members below are for segment_join_kernel.
  int64_t counters_at;  // where its counters are, in the workspace of an outer index
  int64_t chunks = 0;   // chunks that the columns are cut into; a team of 2^team_bits threads has one of them
  int team_bits;
  bool overlap;  // whether a kernel may start before the one before it ends

  // If the ids do not ascend, launches kernels that find their order first; `status` says whether that worked.
  Args(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem, const SegmentsBuffers& buffers,
       cudaError_t& status)
      : SegmentArgs(problem, buffers),
        positions(nullptr),
        tails_at(plan.tails),
        rows(plan.rows),
        tiles(plan.tiles),
        shares(plan.parts),
        share(static_cast<int>((plan.rows + plan.parts - 1) / plan.parts)),
        counters_at(plan.counters),
        team_bits(join_team_bits(inner)),
        overlap(plan.overlap) {
    status = cudaSuccess;
    if (plan.algorithm == Segmenting::kOrdered && length > 0) {
      auto* const sorted = reinterpret_cast<int32_t*>(workspace);
      auto* const order = reinterpret_cast<int32_t*>(workspace + outer * plan.order.positions);
      status = plan.order.ranges > 0 ? launch_segment_order(stream, plan, problem, ids, sorted, order)
                                     : sort::launch_sort(stream, plan.order.sort, order_of(problem), ids, sorted, order,
                                                         workspace + outer * plan.order.workspace);
      ids = sorted;
      positions = order;
    }
    workspace += outer * plan.order.bytes;
    workspace_bytes = plan.joined_bytes;
  }

  // The bytes of shared memory that have the ids of a tile's rows, and which rows these are.
  JAXGPUOPS_HOST_DEVICE int lists_bytes() const { return (4 * (2 * shares * share + 2) + 15) / 16 * 16; }

  // The counter of a segment that several blocks of the join kernel fold: how many of them have folded their part. It
  // is the counter of the block in which the segment begins, since at most one segment begins in a block and goes on in
  // the next one. `tile`: any tile of that block. `column`: the first column of a chunk.
  __device__ uint32_t* counter(char* workspace, int64_t tile, int64_t column) const {
    const int64_t block = tile >> (kJoinTeamBits - team_bits), columns = ((inner - 1) >> team_bits) + 1;
    return reinterpret_cast<uint32_t*>(workspace + counters_at) + block * columns + (column >> team_bits);
  }
  // Clears the counter of a block of the join kernel, if the block begins with this tile. The kernels of tiles call
  // this for all of their vectors before the join kernel passes its wait, since the workspace keeps nothing between
  // calls.
  __device__ void clear_counter(char* workspace, int64_t tile, int64_t column) const {
    if (tiles > 1 && tile % (kJoinThreads >> team_bits) == 0) *counter(workspace, tile, column) = 0;
  }

  // Where an id stands among the segments: -1 if it is before all of them, `segments` if it is behind them. Ids that
  // were ordered here ascend as unsigned numbers, so that negative ones are behind.
  __device__ int64_t place_of(int32_t id) const {
    const int64_t place = positions ? static_cast<int64_t>(static_cast<uint32_t>(id)) : id;
    return max(int64_t{-1}, min(place, segments));
  }
};

// Returns where the ids or the data of an outer index begin. Not inlined, since divisions are many instructions.
__device__ __noinline__ int64_t offset_of(const IndexMap& map, int64_t o) { return map(o); }

// kCount neighbouring elements, which are loaded and stored as one vector.
template <class Bits, int kCount>
struct alignas(kCount * sizeof(Bits)) Elements {
  Bits value[kCount];
};

// A partial result of kCount columns, aligned for the widest load that it fills. It has no padding, so partial results
// of neighbouring columns lie beside each other.
template <class Monoid, int kCount>
struct alignas(std::min<size_t>(16, kCount * sizeof(typename Monoid::Acc))) Partial {
  typename Monoid::Acc value[kCount];

  __device__ void clear() {
#pragma unroll
    for (auto& v : value) v = Monoid::identity();
  }
  __device__ void fold(const Partial& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Monoid::fold(value[i], other.value[i]);
  }
  __device__ void fold(const Elements<typename Monoid::Bits, kCount>& elements, const Keys& keys) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Monoid::fold(value[i], Monoid::load(elements.value[i], keys));
  }
  __device__ void store_result(void* out, int64_t at, const Keys& keys) const {
    using Result = typename Monoid::Result;
    Elements<Result, kCount> elements;
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements.value[i] = Monoid::store(value[i], keys);
    *reinterpret_cast<Elements<Result, kCount>*>(static_cast<Result*>(out) + at) = elements;
  }
  __device__ void store(typename Monoid::Acc* to) const { *reinterpret_cast<Partial*>(to) = *this; }
  __device__ void load(const typename Monoid::Acc* from) { *this = *reinterpret_cast<const Partial*>(from); }
};

}  // namespace
}  // namespace jaxgpuops::segments
