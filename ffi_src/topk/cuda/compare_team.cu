// Top-k of rows or columns of up to 128 elements. A team of lanes holds a row, one or two elements a lane. Each element
// is compared with all others of its row, and the number of those that come before it is its place in the result. That
// takes as long for any k and any data, and most calls are so small that they only wait for their loads.
//
// A key of up to 16 bits shares its word with the mirrored index, so no two words are equal; wider ones are compared
// with their indices.
//
// Bytes moved: the input once, and k results (value and index).
#include "common/cuda/launch.cuh"
#include "topk/cuda/compare_shape.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/ranks.cuh"

namespace jaxgpuops::topk {
namespace {

struct Args : Call {
  uint32_t rows;
};

template <class Key, int kLanes, int kEach>
__global__ void __launch_bounds__(kTeamThreads) compare_team_kernel(const __grid_constant__ Args a) {
  using Order = Ranked<Key>;
  using Word = typename Order::Word;
  constexpr uint32_t kPlaces = kLanes * kEach, kTeams = kTeamThreads / kLanes;
  __shared__ alignas(16) Word all[kTeams][kPlaces];
  const uint32_t team = threadIdx.x / kLanes, t = threadIdx.x % kLanes;
  const uint32_t r = blockIdx.x * kTeams + team;
  const bool live = r < a.rows;
  // The row begins behind so many whole rows and so many elements.
  const auto inner = static_cast<uint32_t>(a.inner);
  const uint32_t offset = inner > 1 ? r % inner : 0;
  const int64_t start = r - offset;
  const Key* const row = static_cast<const Key*>(a.x) + start * a.length + offset;
  Key raw[kEach];
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    raw[e] = live && i < a.length ? __ldg(row + static_cast<uint64_t>(i) * inner) : Key{0};
  }
  Word own[kEach];
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    own[e] = i < a.length ? Order::word(encode(raw[e], a.order), i) : 0;  // what does not exist comes after all others
  }
  uint32_t before[kEach];
  rank_in_team<Order, kLanes, kEach>(all[team], own, t, a.length, before);
  uint32_t others = 0;  // how many of the elements that earlier steps or lower warps have are selected
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) {
    const uint32_t i = t + e * kLanes;
    const bool selected = live && i < a.length && before[e] < a.k;
    uint32_t at = before[e];
    if (!a.sorted) {
      constexpr uint32_t kMates = kLanes < 32 ? (1u << (kLanes & 31)) - 1 : kEveryLane;
      const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const uint32_t mask = __ballot_sync(kEveryLane, selected) & (kMates << (kLanes < 32 ? lane - t : 0));
      if constexpr (kLanes > 32) {
        static_assert(kEach == 1);
        __shared__ uint32_t of_warp[kTeamThreads / 32];
        if (lane == 0) of_warp[warp] = __popc(mask);
        __syncthreads();
        for (uint32_t w = warp - t / 32; w < warp; ++w) others += of_warp[w];
      }
      at = others + __popc(mask & ((1u << lane) - 1));
      others += __popc(mask);
    }
    if (!selected) continue;
    const int64_t to = start * a.k + offset + static_cast<uint64_t>(at) * inner;
    static_cast<Key*>(a.values)[to] = raw[e];
    a.indices[to] = static_cast<int32_t>(i);
  }
}

template <class Key, int kLanes, int kEach>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Args& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(kTeamThreads);
  return launch(stream, config, compare_team_kernel<Key, kLanes, kEach>, a);
}

}  // namespace

cudaError_t launch_compare_team(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Args a = {call_of(problem, buffers)};
  a.rows = static_cast<uint32_t>(problem.rows.count());
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    switch (plan.lanes) {
      case 4: return run<Key, 4, 1>(stream, plan, a);
      case 8: return run<Key, 8, 1>(stream, plan, a);
      case 16: return run<Key, 16, 1>(stream, plan, a);
      case 32: return a.length <= 32 ? run<Key, 32, 1>(stream, plan, a) : run<Key, 32, 2>(stream, plan, a);
      default: return run<Key, 128, 1>(stream, plan, a);
    }
  });
}

}  // namespace jaxgpuops::topk
