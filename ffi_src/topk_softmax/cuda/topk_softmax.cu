// The gate of a mixture of experts. A team of 8 to 32 lanes holds a row, each lane up to 32 logits, in registers.
// Logits that are looked up by index are read again, from L1.
//
// Rows of up to 64 logits without a bias or groups go through sorting networks, for k <= 8; of others, a threshold
// leaves few logits to be ranked (choose.cuh).
//
// Other kernels take k = 1 (first.cuh), rows of few logits (ranked.cuh), few rows (few.cuh), and many short ones
// (short.cuh).
//
// Groups of experts are chosen before that: keys go to shared memory, and each lane finds the best two keys of each of
// its groups, and how many groups have a larger sum. Experts of groups that are not chosen are then left out.
//
// Bytes moved: logits once, k (weight + index) out. Sums are taken in an order that follows from the length and k.
#include <algorithm>
#include <cmath>

#include "common/cuda/element.h"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/network.cuh"
#include "topk_softmax/cuda/choose.cuh"
#include "topk_softmax/cuda/few.cuh"
#include "topk_softmax/cuda/first.cuh"
#include "topk_softmax/cuda/launch.h"
#include "topk_softmax/cuda/load.cuh"
#include "topk_softmax/cuda/ranked.cuh"
#include "topk_softmax/cuda/selection.cuh"
#include "topk_softmax/cuda/short.cuh"

namespace jaxgpuops::topk_softmax {
namespace {

// ---- The phases of the kernel --------------------------------------------------------------------------------------

// What a team shares while it chooses groups. Keys have a gap after 32, so that lanes whose groups begin at multiples
// of it do not meet in a bank.
template <int kTeam, int kElements>
struct GroupBoard {
  static __device__ __forceinline__ uint32_t at(uint32_t index) { return index + index / 32; }
  uint32_t keys[kTeam * kElements / 32 * 33];
  uint32_t groups[kMaxGroups];
};

// A bit for each of the best groups.
template <int kTeam, bool kBiased, class B>
__device__ __forceinline__ uint64_t choose_groups(const Args& a, B& board, uint32_t t) {
  __syncwarp();
  for (uint32_t g = t; g < a.groups; g += kTeam) {
    uint32_t best = 0, second = 0;
    for (uint32_t i = g * a.group_size; i < (g + 1) * a.group_size; ++i) {
      const uint32_t key = board.keys[B::at(i)];
      second = max(second, min(best, key));
      best = max(best, key);
    }
    if (kBiased && a.group_size > 1) best = key_of(canonical(__fadd_rn(value_of(best), value_of(second))));
    board.groups[g] = best;
  }
  __syncwarp();
  uint64_t chosen = 0;
  for (uint32_t g = t; g < a.groups; g += kTeam) {
    const uint32_t own = board.groups[g];
    uint32_t rank = 0;
    for (uint32_t h = 0; h < a.groups; ++h) rank += board.groups[h] > own || (board.groups[h] == own && h < g);
    if (rank < a.topk_groups) chosen |= uint64_t{1} << g;
  }
  return fold_lanes<kTeam>(chosen, [](uint64_t x, uint64_t y) { return x | y; });
}

// ---- The kernel ----------------------------------------------------------------------------------------------------

// Blocks per multiprocessor for __launch_bounds__, which leave a lane registers for its elements and the rest.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kMostResident = 8;  // a multiprocessor has 1024 threads
#else
constexpr int kMostResident = 10;
#endif
constexpr int resident(int elements, bool biased) {
  const int blocks = elements == 32 ? 8 : 10;
  return std::min(kMostResident, biased && elements > 8 ? blocks - 2 : blocks);
}

template <class Element, int kTeam, int kElements, bool kBiased, bool kGrouped>
__global__ void __launch_bounds__(kBlock, resident(kElements, kBiased || kGrouped))
    gate_kernel(const __grid_constant__ Args a) {
  using Bits = typename Element::Bits;
  constexpr uint32_t kTeams = kBlock / kTeam;
  __shared__ Board<kTeam> boards[kTeams];
  const uint32_t lane = threadIdx.x & 31, t = threadIdx.x % kTeam, in_block = threadIdx.x / kTeam;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kTeams + in_block;
  const bool live = r < a.rows;
  if (!__any_sync(kEveryLane, live)) return;
  const RowAt at = row_at(a, live ? r : 0);  // a team without a row reads the first one
  const auto index = [&](uint32_t j) { return index_of<Element, kTeam>(j, t); };

  const Bits* row = static_cast<const Bits*>(a.logits) + at.logits;
  Bits bits[kElements];
  float v[kElements];
  load<Element, kTeam>(a, row, t, bits);
#pragma unroll
  for (uint32_t j = 0; j < kElements; ++j) v[j] = Element::load(bits[j]);
  const uint32_t count = count_of<Element, kTeam>(a.length, t);
  uint32_t present = count >= 32 ? ~0u : (1u << count) - 1;

  // Computes what scores need of the whole row, if they need it.
  Selection<Element, kBiased, kGrouped> selection{row, a.inner, nullptr, 0, 0, 1, a.score, 0, a.group_reciprocal};
  if (sums_rows(a) || (kBiased && a.score == Score::kSoftmax))
    sum_up<kTeam>(v, selection, a.log_sums && live && t == 0 ? a.log_sums + r : nullptr);
  if constexpr (kBiased) {
    selection.bias = a.bias + a.bias_at.outer(at.outer) + a.bias_at.inner(at.inner);
    selection.bias_stride = a.bias_at.axis_stride;
    constexpr uint32_t kCount = 4;
#pragma unroll
    for (uint32_t j = 0; j < kElements; j += kCount) {
      const Scores<kCount> scores =
          scores_of<kCount>({{v[j], v[j + 1], v[j + 2], v[j + 3]}}, selection.top, selection.inverse, a.score);
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i)
        v[j + i] = j + i < count ? selection.biased(scores.of[i], index(j + i)) : -INFINITY;
    }
  }
  if constexpr (kGrouped) {
    __shared__ GroupBoard<kTeam, kElements> group_boards[kTeams];
    auto& board = group_boards[in_block];
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j)
      if (j < count) board.keys[board.at(index(j))] = kBiased ? key_of(v[j]) : key_of(bits[j]);
    selection.groups = choose_groups<kTeam, kBiased>(a, board, t);
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      if (j >= count || selection.allows(index(j))) continue;
      v[j] = -INFINITY;
      present &= ~(1u << j);
    }
  }

  constexpr bool kNetwork = kElements == topk::kBest && !kBiased;
  Chosen<> chosen;
  chosen.has[0] = true;
  chosen.has[1] = !kNetwork && a.k > kTeam;
  if constexpr (kNetwork) {
    uint32_t keys[kElements], key;
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) keys[j] = j < count ? key_of(bits[j]) : 0;
    topk::best_of_short_row(
        topk::Network{a.one, a.minus_one}, keys, a.length, a.k, index,
        [&](uint32_t i) { return key_of(__ldg(row + i * a.inner)); }, key, chosen.index[0]);
    if (t < a.k) chosen.z[0] = logit_of<Element>(key);
  } else {
    choose<Element, kTeam, kElements, kBiased>(a, v, present, live, selection, boards[in_block], lane, t, chosen);
  }
  weigh<kTeam, kBiased>(a, selection, lane, t, chosen);
#pragma unroll
  for (uint32_t s = 0; s < 2; ++s) {
    const uint32_t rank = t + s * kTeam;
    if (!chosen.has[s] || !live || rank >= a.k) continue;
    static_cast<Bits*>(a.weights)[at.results + rank * a.inner] = Element::store(chosen.w[s] * a.scale);
    a.indices[at.results + rank * a.inner] = static_cast<int32_t>(chosen.index[s]);
  }
}

template <class Element, int kTeam, int kElements, bool kGrouped>
cudaError_t run(cudaStream_t stream, const Args& a) {
  constexpr int64_t kTeams = kBlock / kTeam;
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.rows + kTeams - 1) / kTeams));
  config.block = dim3(kBlock);
  if constexpr (!kGrouped)
    if (a.k == 1 && !a.bias) return launch(stream, config, gate_first_kernel<Element, kTeam, kElements>, a);
  return launch(stream, config,
                a.bias ? gate_kernel<Element, kTeam, kElements, true, kGrouped>
                       : gate_kernel<Element, kTeam, kElements, false, kGrouped>,
                a);
}

template <class Element, uint32_t kElements>
cudaError_t run_few(cudaStream_t stream, const Args& a) {
  constexpr int64_t kRows = kBlock / 32;
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.rows + kRows - 1) / kRows));
  config.block = dim3(kBlock);
  return launch(stream, config, gate_few_kernel<Element, kElements>, a);
}

template <class Element, uint32_t kElements>
cudaError_t run_short(cudaStream_t stream, const Args& a) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.rows + kBlock - 1) / kBlock));
  config.block = dim3(kBlock);
  return launch(stream, config, gate_short_kernel<Element, kElements>, a);
}

template <class Element, int kLanes, int kEach>
cudaError_t run_ranked(cudaStream_t stream, const Args& a) {
  constexpr int64_t kTeams = kBlock / kLanes;
  Launch config;
  config.grid = dim3(static_cast<unsigned>((a.rows + kTeams - 1) / kTeams));
  config.block = dim3(kBlock);
  return launch(stream, config, gate_ranked_kernel<Element, kLanes, kEach>, a);
}

template <class Element>
cudaError_t dispatch(cudaStream_t stream, const Plan& plan, Args a) {
  const size_t size = sizeof(typename Element::Bits);
  const uintptr_t together = a.length * size | reinterpret_cast<uintptr_t>(a.logits);
  a.vectors = a.inner == 1 && together % 16 == 0;
  a.halves = a.inner == 1 && size == 2 && together % 16 == 8;
  if (plan.ranked) {
    switch (plan.team) {
      case 8: return run_ranked<Element, 8, 1>(stream, a);
      case 16: return run_ranked<Element, 16, 1>(stream, a);
      default:
        return plan.elements == 1 ? run_ranked<Element, 32, 1>(stream, a) : run_ranked<Element, 32, 2>(stream, a);
    }
  }
  if (plan.few) return plan.elements == 4 ? run_few<Element, 4>(stream, a) : run_few<Element, 8>(stream, a);
  if (plan.team == 1) return plan.elements == 8 ? run_short<Element, 8>(stream, a) : run_short<Element, 16>(stream, a);
  if (a.groups > 1) {
    switch (plan.team) {
      case 32: return run<Element, 32, 32, true>(stream, a);
      case 16: return run<Element, 16, 32, true>(stream, a);
      default: return run<Element, 8, 32, true>(stream, a);
    }
  }
  if (plan.team == 32) return run<Element, 32, 32, false>(stream, a);
  if (plan.team == 16) return run<Element, 16, 32, false>(stream, a);
  switch (plan.elements) {
    case 8: return run<Element, 8, 8, false>(stream, a);
    case 16: return run<Element, 8, 16, false>(stream, a);
    default: return run<Element, 8, 32, false>(stream, a);
  }
}

}  // namespace

cudaError_t launch_topk_softmax(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  if (plan.empty) return cudaSuccess;
  Args a = {};
  a.logits = buffers.logits;
  a.bias = buffers.bias;
  a.weights = buffers.weights;
  a.indices = buffers.indices;
  a.bias_at = problem.bias;
  a.rows = problem.rows.count();
  a.inner = problem.rows.inner;
  a.length = static_cast<uint32_t>(problem.rows.length);
  a.k = static_cast<uint32_t>(problem.k);
  a.one = 1;
  a.minus_one = ~0u;
  a.log_sums = buffers.log_sums;
  a.groups = static_cast<uint32_t>(problem.groups);
  a.topk_groups = static_cast<uint32_t>(problem.topk_groups);
  a.group_size = static_cast<uint32_t>(problem.group_size());
  a.group_reciprocal = (1u << 20) / a.group_size + 1;
  a.score = problem.score;
  a.normalize = problem.normalize;
  a.scale = problem.scale;
  switch (problem.dtype) {
    case DType::kFloat16: return dispatch<Float16>(stream, plan, a);
    case DType::kBFloat16: return dispatch<BFloat16>(stream, plan, a);
    case DType::kFloat32: return dispatch<Float32>(stream, plan, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::topk_softmax
