// choose: the places of what a mask chooses, in order. The first kernel turns the mask into bits, an eighth of its
// size, and counts them in chunks. The second adds up the counts of the chunks before its own and turns bits into
// places.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/warp.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256, kTileWords = kChooseTile / 32, kOwn = kTileWords / kThreads;
static_assert(kOwn == 2 && kChooseTile <= 1 << 16);

// A chunk of a row. Bits stand in words as the elements do in memory from a multiple of 16 bytes on: before the first
// element of the row there are `past` zeros.
struct Chunk {
  int64_t row;
  int chunk, past;
  uint32_t* counts;  // of the chunks of the row
  uint32_t* bits;    // of the chunk

  __device__ Chunk(const ChoosePlan& plan, const Choose& problem, const uint8_t* mask, char* workspace)
      : row(blockIdx.x / plan.chunks), chunk(static_cast<int>(blockIdx.x % plan.chunks)) {
    past = static_cast<int>(reinterpret_cast<uintptr_t>(mask + row * problem.rows.length) % 16);
    char* const own = workspace + row * plan.workspace_bytes;
    counts = reinterpret_cast<uint32_t*>(own);
    bits = reinterpret_cast<uint32_t*>(own + plan.bits_at) + chunk * plan.chunk_words;
  }
};

// Four bytes that are 0 or 1, as four bits.
__device__ __forceinline__ uint32_t nibble(uint32_t bytes) { return bytes * 0x10204080u >> 28; }

__global__ void __launch_bounds__(kThreads)
    choose_count_kernel(const __grid_constant__ ChoosePlan plan, const __grid_constant__ Choose problem,
                        const uint8_t* __restrict__ mask, char* __restrict__ workspace) {
  __shared__ uint32_t sums[kThreads / 32];
  const Chunk c(plan, problem, mask, workspace);
  let_dependents_start();
  const int64_t length = problem.rows.length;
  const uint8_t* const row = mask + c.row * length;
  uint32_t own = 0;
#pragma unroll 2
  for (int64_t w = threadIdx.x; w < plan.chunk_words; w += kThreads) {
    const int64_t first = (c.chunk * plan.chunk_words + w) * 32 - c.past;
    uint32_t word = 0;
#pragma unroll
    for (int half = 0; half < 32; half += 16) {
      const int64_t at = first + half;
      if (at >= 0 && at + 16 <= length) {
        const uint4 four = load_once(reinterpret_cast<const uint4*>(row + at));
        word |= (nibble(four.x) | nibble(four.y) << 4 | nibble(four.z) << 8 | nibble(four.w) << 12) << half;
      } else {
        for (int i = 0; i < 16; ++i)
          if (at + i >= 0 && at + i < length) word |= uint32_t{row[at + i]} << (half + i);
      }
    }
    c.bits[w] = word;
    own += __popc(word);
  }
  uint32_t total;
  sum_before(own, sums, kThreads / 32, total);
  if (threadIdx.x == 0) c.counts[c.chunk] = total;
}

__global__ void __launch_bounds__(kThreads)
    choose_write_kernel(const __grid_constant__ ChoosePlan plan, const __grid_constant__ Choose problem,
                        const uint8_t* __restrict__ mask, int32_t* __restrict__ places, char* __restrict__ workspace) {
  __shared__ uint32_t sums[kThreads / 32];
  __shared__ uint16_t chosen[kChooseTile];  // the places of a tile, counted from its first bit
  const Chunk c(plan, problem, mask, workspace);
  wait_for_predecessor();
  uint32_t before = 0, all = 0;
  for (int k = threadIdx.x; k < plan.chunks; k += kThreads) {
    const uint32_t count = __ldcg(c.counts + k);
    before += k < c.chunk ? count : 0;
    all += count;
  }
  uint32_t base, total;
  sum_before(before, sums, kThreads / 32, base);
  sum_before(all, sums, kThreads / 32, total);
  const int64_t size = problem.size;
  int32_t* const to = places + c.row * size;
  for (int64_t tile = 0; tile < plan.chunk_words && base < size; tile += kTileWords) {
    const uint2 words = __ldcg(reinterpret_cast<const uint2*>(c.bits + tile) + threadIdx.x);
    uint32_t count;
    uint32_t at = sum_before(static_cast<uint32_t>(__popc(words.x) + __popc(words.y)), sums, kThreads / 32, count);
#pragma unroll
    for (int w = 0; w < kOwn; ++w)
      for (uint32_t left = w ? words.y : words.x; left; left &= left - 1)
        chosen[at++] = static_cast<uint16_t>((threadIdx.x * kOwn + w) * 32 + __ffs(static_cast<int>(left)) - 1);
    __syncthreads();
    const auto first = static_cast<int32_t>((c.chunk * plan.chunk_words + tile) * 32 - c.past);
    for (uint32_t i = threadIdx.x; i < count && base + i < size; i += kThreads) to[base + i] = first + chosen[i];
    base += count;
    __syncthreads();
  }
  // What no element has is divided among the blocks.
  const int64_t rest = size - total, share = rest > 0 ? (rest + plan.chunks - 1) / plan.chunks : 0;
  const int64_t begin = total + c.chunk * share, end = min(begin + share, size);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) to[i] = static_cast<int32_t>(problem.rows.length);
}

}  // namespace

cudaError_t launch_choose(cudaStream_t stream, const ChoosePlan& plan, const Choose& problem, const uint8_t* mask,
                          int32_t* places, char* workspace) {
  if (plan.algorithm == Choosing::kEmpty) return cudaSuccess;
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.outer * plan.chunks));
  config.block = dim3(kThreads);
  const cudaError_t error = launch(stream, config, choose_count_kernel, plan, problem, mask, workspace);
  if (error != cudaSuccess) return error;
  config.overlap = plan.overlap;
  return launch(stream, config, choose_write_kernel, plan, problem, mask, places, workspace);
}

}  // namespace jaxgpuops::count
