// searchsorted of many queries of 8 or 16 bits in rows along the last axis, for the latter of fewer than 2^16 elements.
// A block makes a table of the places of all queries in shared memory, so that each query is one look into the table.
//
// For 16-bit queries, the last of equal elements marks its key, and a running maximum carries each mark on to later
// keys. Then the places are put where the bits of queries find them.
//
// Bytes moved: queries are read once and places written once; each block reads its row, of at most 128 KB, or searches
// in it for 256 keys.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "search/cuda/launch.h"
#include "search/cuda/search.cuh"

namespace jaxgpuops::search {
namespace {

constexpr int kThreads = 1024, kKeys = 1 << 16;
constexpr int kPacks = 8;  // vectors of the table that a lane has, 8 keys each
static_assert(kThreads * kPacks * 8 == kKeys);
constexpr int kByteThreads = 1 << 8;  // one for each key

__device__ __forceinline__ uint32_t largest_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

__device__ __forceinline__ uint32_t largest_half(uint32_t pair) { return max(pair & 0xffff, pair >> 16); }

// Replaces the mark of each key by the largest mark up to it (a running maximum). Stores the result under the bits from
// which the key is made, so that a query finds it by its own bits.
__device__ __forceinline__ void carry_marks(const KeyOrder& order, uint16_t* table) {
  __shared__ uint32_t largest[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The keys of a warp are neighbours, and so are those of lanes in a vector.
  uint4* const own = reinterpret_cast<uint4*>(table) + warp * 32 * kPacks + lane;
  uint4 pack[kPacks];
  uint32_t most = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    pack[p] = own[p * 32];
    most = largest_halves(most,
                          largest_halves(largest_halves(pack[p].x, pack[p].y), largest_halves(pack[p].z, pack[p].w)));
  }
  most = largest_of_warp(largest_half(most));
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  uint32_t before = largest_of_warp(lane < warp ? largest[lane] : 0);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    uint32_t word[4] = {pack[p].x, pack[p].y, pack[p].z, pack[p].w};
    uint32_t last = 0;  // the largest of the lane's numbers so far
#pragma unroll
    for (auto& w : word) {
      w = largest_halves(w, last);
      w = largest_halves(w, w << 16);
      last = w >> 16;
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(kEveryLane, last, lanes);
      if (lane >= lanes) last = max(last, other);
    }
    uint32_t earlier = __shfl_up_sync(kEveryLane, last, 1);
    earlier = max(lane == 0 ? 0 : earlier, before);
    before = max(before, __shfl_sync(kEveryLane, last, 31));
#pragma unroll
    for (auto& w : word) w = largest_halves(w, earlier << 16 | earlier);
    // Neighbouring keys are made from neighbouring bits, so they stay one vector of the table. The bits of negative
    // floats fall while their keys rise, so that vector is reversed.
    const auto key = static_cast<uint16_t>(8 * (warp * 32 * kPacks + p * 32 + lane));
    const uint16_t bits = decode(key, order), bits_of_last = decode(static_cast<uint16_t>(key + 7), order);
    if (bits_of_last < bits) {
      const auto turned = [](uint32_t w) { return w << 16 | w >> 16; };
      reinterpret_cast<uint4*>(table)[bits_of_last / 8] = {turned(word[3]), turned(word[2]), turned(word[1]),
                                                           turned(word[0])};
    } else {
      reinterpret_cast<uint4*>(table)[bits / 8] = {word[0], word[1], word[2], word[3]};
    }
  }
}

// Looks up the places of queries in a table that has the place for every bit pattern. prepare() makes the table.
template <class T, class Place, class Prepare>
__device__ __forceinline__ void look_up(const Place* table, const T* queries, int32_t* places, int64_t count,
                                        Prepare prepare) {
  find_places<4>(queries, places, count, prepare, [&](const auto& query, int64_t, auto& place) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(std::extent_v<std::remove_reference_t<decltype(query)>>); ++i)
      place[i] = static_cast<int32_t>(table[query[i]]);
  });
}

__global__ void __launch_bounds__(kThreads)
    search_table_kernel(const __grid_constant__ Search problem, const __grid_constant__ SearchPlan plan,
                        const uint16_t* __restrict__ queries, const uint16_t* __restrict__ sorted,
                        int32_t* __restrict__ places) {
  auto* const table = reinterpret_cast<uint16_t*>(dynamic_shared_memory());
  const auto blocks = static_cast<uint32_t>(plan.blocks);
  const int64_t row = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const auto length = static_cast<int>(problem.length);
  const uint16_t* const own = sorted + problem.sorted(row, 0, 0);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) reinterpret_cast<uint4*>(table)[p * kThreads + threadIdx.x] = {0, 0, 0, 0};
  __syncthreads();
  for (int i = threadIdx.x; i < length; i += kThreads) {
    const uint16_t key = sort_key(own[i], problem.order);
    if (i + 1 < length && sort_key(own[i + 1], problem.order) == key) continue;
    const int at = key + !problem.right;  // of the least key that the element comes before
    if (at < kKeys) table[at] = static_cast<uint16_t>(i + 1);
  }
  __syncthreads();
  carry_marks(problem.order.ascending.order, table);
  __syncthreads();
  if (const auto sign = static_cast<uint32_t>(problem.order.ascending.sign)) {
    // All NaNs are equal, and both zeros: copies the place of the last NaN to all NaNs, and that of +0 to -0.
    const uint16_t nan = table[sign - 1], zero = table[0];
    const auto infinity = static_cast<uint32_t>(problem.order.ascending.nan_above);
    __syncthreads();  // those two are written below, too
    for (uint32_t i = infinity + 1 + threadIdx.x; i < sign; i += kThreads) table[i] = table[i | sign] = nan;
    if (threadIdx.x == 0) table[sign] = zero;
    __syncthreads();
  }

  const int64_t first = part * plan.chunk, count = min(plan.chunk, plan.queries - first);
  look_up(table, queries + row * plan.queries + first, places + row * plan.queries + first, count, [] {});
}

// The same for 8 bits and rows of any length: each thread fills the entry of one key by a search in the row.
__global__ void __launch_bounds__(kByteThreads)
    search_byte_table_kernel(const __grid_constant__ Search problem, const __grid_constant__ SearchPlan plan,
                             const uint8_t* __restrict__ queries, const uint8_t* __restrict__ sorted,
                             int32_t* __restrict__ places) {
  __shared__ int32_t table[kByteThreads];
  const auto blocks = static_cast<uint32_t>(plan.blocks);
  const int64_t row = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const int64_t first = part * plan.chunk, count = min(plan.chunk, plan.queries - first);
  look_up(table, queries + row * plan.queries + first, places + row * plan.queries + first, count, [&] {
    const uint8_t key = sort_key(static_cast<uint8_t>(threadIdx.x), problem.order);
    table[threadIdx.x] =
        static_cast<int32_t>(search_row(problem, sorted + problem.sorted(row, 0, 0), key + uint32_t{problem.right}, 0,
                                        static_cast<uint32_t>(problem.length)));
    __syncthreads();
  });
}

}  // namespace

cudaError_t launch_search_table(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                                const void* sorted, int32_t* places) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.rows * plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  if (problem.bits == 8)
    return launch(stream, config, search_byte_table_kernel, problem, plan, static_cast<const uint8_t*>(queries),
                  static_cast<const uint8_t*>(sorted), places);
  return launch(stream, config, search_table_kernel, problem, plan, static_cast<const uint16_t*>(queries),
                static_cast<const uint16_t*>(sorted), places);
}

}  // namespace jaxgpuops::search
