// Sums of rows (inner == 1) of 16 and 32 bits that are not whole vectors (RowPlan::single): neighbouring threads read
// neighbouring words, so that no lane has to put vectors together. (With vectors, elements were moved to their lanes by
// shuffles and shifts, and the last warp of a row had little to do: 22453 x 2202 float16 took 40 us.) One read. Works
// on any GPU.
//
// A row has kChains chains of additions for each of the threads of `spans` warps; word w belongs to thread w % threads
// and chain w / threads % kChains. So the order of additions follows from the length. A thread has all its chains, or
// if rows are few, groups of threads have some of them each.
#include <type_traits>

#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

constexpr int kChains = 8;

template <class P>
struct LooseSums {
  const void* x;
  int64_t rows;
  int length, spans;
  typename P::Args args;
};

// With kGroups, a block has a row, and so many groups of threads. Otherwise a warp has a row.
template <class P, int kGroups>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) loose_sums_kernel(const __grid_constant__ LooseSums<P> p) {
  using E = typename P::Element;
  using Bits = typename P::Bits;
  constexpr bool kAlone = kGroups == 0;
  constexpr int kOfWord = 4 / sizeof(Bits), kDeep = kAlone ? 1 : kGroups, kOwn = kChains / kDeep;
  const int threads = kAlone ? 32 : 32 * p.spans;
  const int group = kDeep == 1 ? 0 : static_cast<int>(threadIdx.x) / threads;
  const int thread = kAlone ? threadIdx.x % 32 : static_cast<int>(threadIdx.x) - group * threads;
  const int64_t row = kAlone ? int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32 : int64_t{blockIdx.x};
  if (row >= p.rows) return;
  const Bits* const from = static_cast<const Bits*>(p.x) + row * p.length;
  // A row of 16 bits may begin inside a word. Then the elements of a word of the row are in two words of memory.
  const bool inside = kOfWord == 2 && reinterpret_cast<uintptr_t>(from) % 4 != 0;
  const int begin = thread + threads * kOwn * group;
  const auto* words = reinterpret_cast<const uint32_t*>(from - (inside ? 1 : 0)) + begin;
  float sum[kOwn] = {};
  const auto add_words = [&](auto shifted) {
    constexpr bool kShifted = decltype(shifted)::value;
    const auto at = [&](int s) { return threads * (s % kOwn + kChains * (s / kOwn)); };
    const auto add = [&](int s, uint32_t low, uint32_t high) {
      const uint32_t word = kShifted ? funnel_right(low, high, 16) : low;
      sum[s % kOwn] = sum[s % kOwn] + E::load(static_cast<Bits>(word));
      if constexpr (kOfWord == 2) sum[s % kOwn] = sum[s % kOwn] + E::load(static_cast<Bits>(word >> 16));
    };
    uint32_t low[kChains], high[kChains];
    int left = p.length / kOfWord - begin;
#pragma unroll 1
    for (; left > at(kChains - 1); left -= threads * kChains * kDeep, words += threads * kChains * kDeep) {
#pragma unroll
      for (int s = 0; s < kChains; ++s) {
        low[s] = words[at(s)];
        if constexpr (kShifted) high[s] = words[at(s) + 1];
      }
#pragma unroll
      for (int s = 0; s < kChains; ++s) add(s, low[s], high[s]);
    }
#pragma unroll
    for (int s = 0; s < kChains; ++s) {
      low[s] = at(s) < left ? words[at(s)] : 0;
      if constexpr (kShifted) high[s] = at(s) < left ? words[at(s) + 1] : 0;
    }
#pragma unroll
    for (int s = 0; s < kChains; ++s) add(s, low[s], high[s]);
  };
  if (inside) {
    add_words(std::true_type());
  } else {
    add_words(std::false_type());
  }
  if (kOfWord == 2 && p.length % 2 != 0 && begin == 0) sum[0] = sum[0] + E::load(from[p.length - 1]);

  float chain[kChains];
  if constexpr (kDeep == 1) {
#pragma unroll
    for (int u = 0; u < kChains; ++u) chain[u] = sum[u];
  } else {
    auto* const chains = reinterpret_cast<float*>(dynamic_shared_memory());
#pragma unroll
    for (int u = 0; u < kOwn; ++u) chains[(group * kOwn + u) * threads + thread] = sum[u];
    __syncthreads();
    if (group == 0)
#pragma unroll
      for (int u = 0; u < kChains; ++u) chain[u] = chains[u * threads + thread];
  }
#pragma unroll
  for (int n = kChains / 2; n > 0; n /= 2)
#pragma unroll
    for (int u = 0; u < n; ++u) chain[u] = chain[u] + chain[u + n];
  float all = row_engine::merged_sum(chain[0], 0, 5);
  if (!kAlone && p.spans > 1) {
    __shared__ float of_warps[kMaxBlockWarps];
    if (group == 0 && thread % 32 == 0) of_warps[thread / 32] = all;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    all = row_engine::merged_sum(thread < p.spans ? of_warps[thread] : 0.0f, 0, 5);
  }
  if (begin == 0) P::write_row(p.args, row, {}, P::finish(p.args, {}, row_engine::Stat<P>{{all}}));
}

}  // namespace

cudaError_t launch_loose(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Sum<decltype(element), false>;
    if constexpr (P::kFast) {
      const Rows& rows = problem.rows;
      const LooseSums<P> p = {buffers.x, rows.outer, static_cast<int>(rows.length), static_cast<int>(plan.spans),
                              parameters_of<P>(problem, buffers).args};
      // plan.wide: groups of threads; plan.block_warps: of a block
      Launch launched;
      const int64_t blocks = plan.wide ? rows.outer : (rows.outer + plan.block_warps - 1) / plan.block_warps;
      if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
      launched.grid = dim3(static_cast<unsigned>(blocks));
      launched.block = dim3(plan.threads());
      if (plan.wide > 1) launched.shared_bytes = 32 * plan.spans * kChains * sizeof(float);
      switch (plan.wide) {
        case 0: return launch(stream, launched, loose_sums_kernel<P, 0>, p);
        case 1: return launch(stream, launched, loose_sums_kernel<P, 1>, p);
        case 2: return launch(stream, launched, loose_sums_kernel<P, 2>, p);
        case 8: return launch(stream, launched, loose_sums_kernel<P, 8>, p);
      }
      return cudaErrorInvalidValue;
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxgpuops::reduce
