// Sums of rows (inner == 1) of 16 and 32 bits that are not whole vectors (RowPlan::single): neighbouring threads read
// neighbouring words, so that no lane has to put vectors together. (With vectors, elements were moved to their lanes by
// shuffles and shifts, and the last warp of a row had little to do: 22453 x 2202 float16 took 40 us.) One read. Works
// on any GPU.
//
// A row has kChains chains of additions for each of the threads of kWarps warps; word w belongs to thread w % threads
// and chain w / threads % kChains. So the order of additions follows from the length. A thread has all its chains, or
// if rows are few, groups of threads have some of them each.
//
// Longer rows are cut into parts of a fixed length. A block leaves the sum of a part in the workspace, and a second
// kernel adds up the parts of a row. (By vectors, in clusters, 2 x 580126 bfloat16 took 4.65 us; it takes 3.1.)
#include <type_traits>

#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

constexpr int kChains = 8;
constexpr int kRowsOfBlock = 4;  // the most, if a warp has a row

template <class P>
struct LooseSums {
  const void* x;
  int64_t rows;  // or parts of rows, if they are cut
  int length;    // of a row, or of a part
  typename P::Args args;
  uint32_t parts;
  int64_t row_length;
  float* of_parts;  // workspace: [row][part]
};

// With kGroups, a block has a row, and so many groups of threads. Otherwise a warp has a row. (The number of warps is a
// constant, since addresses that follow from a variable took twice as many registers.)
template <class P, int kWarps, int kGroups>
__global__ void __launch_bounds__(32 * kWarps * (kGroups ? kGroups : kRowsOfBlock))
    loose_sums_kernel(const __grid_constant__ LooseSums<P> p) {
  using E = typename P::Element;
  using Bits = typename P::Bits;
  constexpr bool kAlone = kGroups == 0;
  constexpr int kOfWord = 4 / sizeof(Bits), kThreads = 32 * kWarps, kDeep = kAlone ? 1 : kGroups;
  constexpr int kOwn = kChains / kDeep;
  const int group = kDeep == 1 ? 0 : threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const int64_t row = kAlone ? int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32 : int64_t{blockIdx.x};
  if (row >= p.rows) return;
  const Bits* from = static_cast<const Bits*>(p.x) + row * p.length;
  int length = p.length;
  if (p.parts > 1) {  // `row` is the number of a part
    const uint32_t outer = blockIdx.x / p.parts, part = blockIdx.x - outer * p.parts;
    const int64_t first = int64_t{part} * p.length;
    from = static_cast<const Bits*>(p.x) + outer * p.row_length + first;
    length = static_cast<int>(min(p.row_length - first, int64_t{length}));
    let_dependents_start();
  }
  // A row of 16 bits may begin inside a word. Then the elements of a word of the row are in two words of memory.
  const bool inside = kOfWord == 2 && reinterpret_cast<uintptr_t>(from) % 4 != 0;
  const int begin = thread + kThreads * kOwn * group;
  const auto* words = reinterpret_cast<const uint32_t*>(from - (inside ? 1 : 0)) + begin;
  float sum[kOwn] = {};
  const auto add_words = [&](auto shifted) {
    constexpr bool kShifted = decltype(shifted)::value;
    int left = length / kOfWord - begin;
#pragma unroll 1
    for (; left > 0; left -= kThreads * kChains * kDeep, words += kThreads * kChains * kDeep) {
      uint32_t low[kChains], high[kChains];
#pragma unroll
      for (int s = 0; s < kChains; ++s) {
        const int at = kThreads * (s % kOwn + kChains * (s / kOwn));
        low[s] = at < left ? words[at] : 0;
        if constexpr (kShifted) high[s] = at < left ? words[at + 1] : 0;
      }
#pragma unroll
      for (int s = 0; s < kChains; ++s) {
        const uint32_t word = kShifted ? funnel_right(low[s], high[s], 16) : low[s];
        float& chain = sum[s % kOwn];
        chain = chain + E::load(static_cast<Bits>(word));
        if constexpr (kOfWord == 2) chain = chain + E::load(static_cast<Bits>(word >> 16));
      }
    }
  };
  if (inside) {
    add_words(std::true_type());
  } else {
    add_words(std::false_type());
  }
  if (kOfWord == 2 && length % 2 != 0 && begin == 0) sum[0] = sum[0] + E::load(from[length - 1]);

  float chain[kChains];
  if constexpr (kDeep == 1) {
#pragma unroll
    for (int u = 0; u < kChains; ++u) chain[u] = sum[u];
  } else {
    __shared__ float chains[kChains * kThreads];
#pragma unroll
    for (int u = 0; u < kOwn; ++u) chains[(group * kOwn + u) * kThreads + thread] = sum[u];
    __syncthreads();
    if (kWarps == 1 && group > 0) return;
#pragma unroll
    for (int u = 0; u < kChains; ++u) chain[u] = chains[u * kThreads + thread];
  }
#pragma unroll
  for (int n = kChains / 2; n > 0; n /= 2)
#pragma unroll
    for (int u = 0; u < n; ++u) chain[u] = chain[u] + chain[u + n];
  float all = row_engine::merged_sum(chain[0], 0, 5);
  if constexpr (kWarps > 1) {
    __shared__ float of_warps[kWarps];
    if (group == 0 && thread % 32 == 0) of_warps[thread / 32] = all;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    all = row_engine::merged_sum(thread < kWarps ? of_warps[thread] : 0.0f, 0, 5);
  }
  if (begin != 0) return;
  if (p.parts > 1) {
    p.of_parts[row] = all;
    return;
  }
  P::write_row(p.args, row, {}, P::finish(p.args, {}, row_engine::Stat<P>{{all}}));
}

constexpr int kMergeThreads = 128;

// A block adds up the parts of a row.
template <class P>
__global__ void __launch_bounds__(kMergeThreads) loose_parts_kernel(const __grid_constant__ LooseSums<P> p) {
  __shared__ float of_warps[kMergeThreads / 32];
  const float* const from = p.of_parts + uint64_t{blockIdx.x} * p.parts;
  wait_for_predecessor();
  float sum = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < p.parts; i += kMergeThreads) sum = sum + from[i];
  sum = row_engine::merged_sum(sum, 0, 5);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = (of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3]);
  P::write_row(p.args, blockIdx.x, {}, P::finish(p.args, {}, row_engine::Stat<P>{{sum}}));
}

// The kernel for so many warps, and for groups of them, of which a block has at most kMaxBlockWarps.
template <class P, int kWarps>
auto kernel_of(int groups) -> void (*)(LooseSums<P>) {
  constexpr int kMost = kMaxBlockWarps / kWarps < kChains ? kMaxBlockWarps / kWarps : kChains;
  if (groups == 0 && kWarps == 1) return loose_sums_kernel<P, 1, 0>;
  if (groups == 1 && kWarps > 1) return loose_sums_kernel < P, kWarps, kWarps == 1 ? 0 : 1 > ;
  return groups == kMost ? loose_sums_kernel<P, kWarps, kMost> : nullptr;
}

}  // namespace

cudaError_t launch_loose(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                         void* workspace) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Sum<decltype(element), false>;
    if constexpr (P::kFast) {
      const Rows& rows = problem.rows;
      const LooseSums<P> p = {buffers.x,
                              rows.outer * plan.blocks,
                              static_cast<int>(plan.split ? plan.part_length : rows.length),
                              parameters_of<P>(problem, buffers).args,
                              static_cast<uint32_t>(plan.blocks),
                              rows.length,
                              static_cast<float*>(workspace)};
      const auto kernel = plan.spans == 1   ? kernel_of<P, 1>(plan.wide)
                          : plan.spans == 2 ? kernel_of<P, 2>(plan.wide)
                          : plan.spans == 4 ? kernel_of<P, 4>(plan.wide)
                          : plan.spans == 8 ? kernel_of<P, 8>(plan.wide)
                                            : kernel_of<P, 16>(plan.wide);
      Launch launched;
      const int64_t blocks = plan.wide ? p.rows : (rows.outer + plan.block_warps - 1) / plan.block_warps;
      if (!kernel || plan.spans > 16 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
      launched.grid = dim3(static_cast<unsigned>(blocks));
      launched.block = dim3(plan.threads());
      const cudaError_t status = launch(stream, launched, kernel, p);
      if (status != cudaSuccess || !plan.split) return status;
      Launch merging = {dim3(static_cast<unsigned>(rows.outer)), dim3(kMergeThreads)};
      merging.overlap = plan.overlap;
      return launch(stream, merging, loose_parts_kernel<P>, p);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxgpuops::reduce
