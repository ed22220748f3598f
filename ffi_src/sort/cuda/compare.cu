// Sorts rows, or the segments of rows, by comparing: the place of an element is the number of elements of its row or
// segment that come before it. So blocks share a row without waiting for each other, and one launch does all. It is for
// few elements (plan.cc): comparing all pairs of them takes less time than the steps of another sort, which must wait
// for each other.
//
// A block has some neighbouring elements of a row, or some short rows. A team of lanes compares one element with the
// others of its segment, whose keys are in shared memory. A row without segments is one segment, along any axis.
//
// If there are many short rows that have the same segments, a block finds these once for all the rows that it takes,
// and a thread has the same places of all of them. Segments being short, such rows are compared however many there are.
//
// Bytes moved: every element is read by the blocks that have elements of its segment, from L2 but for the first of
// them, and every result is written once.
#include <type_traits>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/rounding.h"
#include "sort/cuda/kernels.h"
#include "sort/cuda/rank_in.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr uint32_t kThreads = kCompareThreads, kWords = kMostCompared / 32;
static_assert(kWords == 2 * kThreads);  // a thread has two words of bits

struct CompareArgs {
  const void* x;
  void* values;      // null: not wanted
  int32_t* indices;  // null: not wanted
  const int32_t* offsets;
  IndexMap offsets_at;
  int64_t count, rows, inner;  // of offsets; of all; from one element of a row to the next
  uint32_t length;
  CompareShape shape;
  SortOrder order;
};

// Where the segments of a row are, by bits at the places where they begin.
struct Bounds {
  uint32_t begins[kWords];  // a bit for each place
  uint32_t before[kWords];  // the last place in the words before that has a bit
  uint32_t after[kWords];   // the first place in the words behind that has one, or the length
  uint32_t of_warps[2][kThreads / 32];

  __device__ Range around(uint32_t place) const {
    const uint32_t word = begins[place / 32], up_to = (2u << place % 32) - 1;
    return {word & up_to ? last_bit(place / 32, word & up_to) : before[place / 32],
            word & ~up_to ? first_bit(place / 32, word & ~up_to) : after[place / 32]};
  }
};

// Finds the segments of a row, and returns the places between which all are. All threads of the block call it.
__device__ __forceinline__ Range find_bounds(const CompareArgs& a, int64_t row, Bounds& bounds) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = 2 * threadIdx.x;
  bounds.begins[pair] = bounds.begins[pair + 1] = 0;
  __syncthreads();
  const auto mark = [&](uint32_t place) {
    if (place < a.length) atomicOr(bounds.begins + place / 32, 1u << place % 32);
  };
  const Range all = mark_offsets<kThreads>(a.offsets + a.offsets_at(row), a.count, a.length, bounds.of_warps[0], mark);
  __syncthreads();
  const auto last_in = [&](uint32_t w, uint32_t none) {
    return bounds.begins[w] ? last_bit(w, bounds.begins[w]) : none;
  };
  const auto first_in = [&](uint32_t w, uint32_t none) {
    return bounds.begins[w] ? first_bit(w, bounds.begins[w]) : none;
  };
  uint32_t last = last_in(pair + 1, last_in(pair, 0)), first = first_in(pair, first_in(pair + 1, a.length));
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {  // a lane without such a neighbour gets its own place
    last = max(last, __shfl_up_sync(kEveryLane, last, lanes));
    first = min(first, __shfl_down_sync(kEveryLane, first, lanes));
  }
  if (lane == 31) bounds.of_warps[0][warp] = last;
  if (lane == 0) bounds.of_warps[1][warp] = first;
  last = __shfl_up_sync(kEveryLane, last, 1);
  first = __shfl_down_sync(kEveryLane, first, 1);
  if (lane == 0) last = 0;
  if (lane == 31) first = a.length;
  __syncthreads();
#pragma unroll
  for (uint32_t w = 0; w < kThreads / 32; ++w) {
    if (w < warp) last = max(last, bounds.of_warps[0][w]);
    if (w > warp) first = min(first, bounds.of_warps[1][w]);
  }
  bounds.before[pair] = last;
  bounds.before[pair + 1] = last_in(pair, last);
  bounds.after[pair] = first_in(pair + 1, first);
  bounds.after[pair + 1] = first;
  __syncthreads();
  return all;
}

template <class Bits, bool kSegments>
__global__ void __launch_bounds__(kThreads) compare_kernel(const __grid_constant__ CompareArgs a) {
  using Key = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  struct Nothing {};
  __shared__ std::conditional_t<kSegments, Bounds, Nothing> bounds;
  auto* const keys = reinterpret_cast<Key*>(dynamic_shared_memory());
  const uint32_t group = blockIdx.x / a.shape.chunks, chunk = blockIdx.x - group * a.shape.chunks;
  const int64_t row = int64_t{group} * a.shape.together;
  const auto there = static_cast<uint32_t>(min(int64_t{a.shape.together}, a.rows - row)) * a.length;
  const uint32_t begin = chunk * a.shape.each, end = min(begin + a.shape.each, there);
  const Bits* const x = static_cast<const Bits*>(a.x);
  // Where element i of the block's rows is in memory.
  const auto in_memory = [&](uint32_t i) {
    if (kSegments || a.inner == 1) return row * a.length + i;
    const auto inner = static_cast<uint32_t>(a.inner);
    const uint32_t of_block = i / a.length, all = static_cast<uint32_t>(row) + of_block, outer = all / inner;
    return int64_t{outer} * a.length * inner + (i - of_block * a.length) * inner + all - outer * inner;
  };
  const auto read = [&](uint32_t first, uint32_t last) {
#pragma unroll 4
    for (uint32_t i = first + threadIdx.x; i < last; i += kThreads) keys[i] = sort_key(x[in_memory(i)], a.order);
  };
  read(begin, end);
  Range all = {0, a.length};
  if constexpr (kSegments) all = find_bounds(a, row, bounds);
  const auto is_inside = [&](uint32_t place) { return place - all.begin < all.end - all.begin; };
  const auto segment_of = [&](uint32_t place) {
    if constexpr (kSegments) return bounds.around(place);
    return all;
  };
  if (a.shape.chunks > 1) {  // other blocks have elements of the first and of the last segment, too
    if (is_inside(begin)) read(segment_of(begin).begin, begin);
    if (is_inside(end - 1)) read(end, segment_of(end - 1).end);
  }
  __syncthreads();
  const uint32_t lanes = a.shape.lanes, lane = threadIdx.x % lanes, teams = kThreads / lanes;
  for (uint32_t first = begin; first < end; first += teams) {
    const uint32_t i = first + threadIdx.x / lanes;
    const uint32_t head = a.shape.together > 1 ? i / a.length * a.length : 0, place = i - head;
    uint32_t rank = 0, start = place;
    Bits own = {};
    if (i < end) {
      own = x[in_memory(i)];
      if (is_inside(place)) {
        const Range segment = segment_of(place);
        start = segment.begin;
        rank = rank_in(keys, {head + segment.begin, head + segment.end}, i, lane, lanes);
      }
    }
    for (uint32_t other = lanes / 2; other > 0; other /= 2) rank += __shfl_xor_sync(kEveryLane, rank, other);
    if (i >= end || lane > 0) continue;
    const int64_t to = in_memory(head + start + rank);
    if (a.values) static_cast<Bits*>(a.values)[to] = own;
    if (a.indices) a.indices[to] = static_cast<int32_t>(place);
  }
}

// Sorts the segments of many short rows, which all have the same offsets.
template <class Bits>
__global__ void __launch_bounds__(kThreads) many_kernel(const __grid_constant__ CompareArgs a) {
  using Key = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  __shared__ Bounds bounds;
  __shared__ uint32_t segments[kMostShared];  // where the segment of a place begins, and above that where it ends
  auto* const keys = reinterpret_cast<Key*>(dynamic_shared_memory());
  const Range all = find_bounds(a, 0, bounds);
  for (uint32_t place = threadIdx.x; place < a.length; place += kThreads) {
    const Range range = place - all.begin < all.end - all.begin ? bounds.around(place) : Range{place, place + 1};
    segments[place] = range.begin | range.end << 16;
  }
  const uint32_t first_place = threadIdx.x % a.length, place_step = kThreads % a.length;
  const int64_t step = int64_t{gridDim.x} * a.shape.together;
#pragma unroll 1
  for (int64_t row = int64_t{blockIdx.x} * a.shape.together; row < a.rows; row += step) {
    const auto there = static_cast<uint32_t>(min(int64_t{a.shape.together}, a.rows - row)) * a.length;
    const int64_t base = row * a.length;
    const Bits* const x = static_cast<const Bits*>(a.x) + base;
    Bits bits[kManyEach];
#pragma unroll
    for (int e = 0; e < kManyEach; ++e)
      if (const uint32_t i = threadIdx.x + e * kThreads; i < there) bits[e] = x[i];
    __syncthreads();  // the keys of the rows before have been read
#pragma unroll
    for (int e = 0; e < kManyEach; ++e)
      if (const uint32_t i = threadIdx.x + e * kThreads; i < there) keys[i] = sort_key(bits[e], a.order);
    __syncthreads();
    uint32_t place = first_place;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < there; i += kThreads) {
      const uint32_t head = i - place, range = segments[place];
      const Range segment = {head + (range & 0xffff), head + (range >> 16)};
      const uint32_t to = segment.begin + rank_in(keys, segment, i, 0, 1);
      if (a.values) static_cast<Bits*>(a.values)[base + to] = x[i];
      if (a.indices) a.indices[base + to] = static_cast<int32_t>(place);
      place += place_step;
      if (place >= a.length) place -= a.length;
    }
  }
}

}  // namespace

cudaError_t launch_compare(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  CompareArgs a = {buffers.x, buffers.values, buffers.indices, buffers.offsets};
  a.offsets_at = problem.offsets_at.outer;
  a.count = problem.offsets;
  a.rows = problem.rows.count();
  a.inner = problem.rows.inner;
  a.length = static_cast<uint32_t>(problem.rows.length);
  bool shared = true;
  for (int g = 0; g < a.offsets_at.groups; ++g) shared = shared && a.offsets_at.stride[g] == 0;
  a.order = problem.order;
  Launch config;
  if (plan.together > 0) {
    a.shape.together = static_cast<uint32_t>(plan.together);
    config.grid = dim3(static_cast<unsigned>(plan.blocks));
    config.block = dim3(kThreads);
    return dispatch_key(problem.key_bits, [&](auto bits) {
      config.shared_bytes = plan.shared_bytes;
      return launch(stream, config, many_kernel<decltype(bits)>, a);
    });
  }
  a.shape = compare_shape(problem.rows, shared);
  config.grid = dim3(static_cast<unsigned>(ceil_div(a.rows, a.shape.together) * a.shape.chunks));
  config.block = dim3(kThreads);
  return dispatch_key(problem.key_bits, [&](auto bits) {
    using Bits = decltype(bits);
    config.shared_bytes = compare_shared_bytes(problem.rows, a.shape, sizeof(Bits));
    return problem.offsets > 0 ? launch(stream, config, compare_kernel<Bits, true>, a)
                               : launch(stream, config, compare_kernel<Bits, false>, a);
  });
}

}  // namespace jaxgpuops::sort
