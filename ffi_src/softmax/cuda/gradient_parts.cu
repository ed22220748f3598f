// Gradients of softmax and log_softmax from x and the cotangent, for columns side by side along longer axes (of more
// than gradient_split.cu takes): one read, and one write, of single elements, wherever they begin.
//
// An outer index is a flat row of length * inner elements, and is cut into equal parts. A block holds a part in
// registers. Element e of a part belongs to chain e % `chains`, which is a multiple of inner, so a thread, which has a
// chain, stays with one column. Threads make shares of their chains, a team of 2^team_bits lanes merges those of a
// column, and blocks leave the shares of their parts in the workspace, and wait for each other. If the blocks of a flat
// row are a cluster, each then merges all parts for itself. Else the launch is cooperative: as many flat rows as fit
// are taken at a time; the blocks of a row divide its columns, and wait again. The order of additions follows from the
// length and inner.
#include <cooperative_groups.h>

#include "common/cuda/residents.cuh"
#include "common/cuda/small.cuh"
#include "softmax/cuda/gradient_share.cuh"
#include "softmax/cuda/gradient_split.h"

namespace jaxgpuops::softmax {
namespace {

struct PartParameters {
  const void *x, *cotangent;
  void* out;
  unsigned char* workspace;
  int64_t rows, stride;  // stride: bytes of the workspace of a flat row
  uint32_t size, inner, chains, part_size, parts;
  int team_bits;
};

// Merges the shares of the lanes of a team. All lanes of the warp take part.
template <bool kLogs>
__device__ __forceinline__ Share merged_of_team(Share all, uint32_t team) {
#pragma unroll 1
  for (uint32_t d = 1; d < team; d *= 2) all.add(shuffle_xor(all, d), kLogs);
  return all;
}

template <class E, bool kLogs, bool kCluster, int kEach>
__global__ void __launch_bounds__(2 * kGradientPartThreads)  // limits registers
    gradient_parts_kernel(const __grid_constant__ PartParameters p) {
  using Bits = typename E::Bits;
  __shared__ Share of_chains[kGradientPartThreads];
  __shared__ Gradient<E> gradients[kGradientPartThreads];
  const uint32_t chains = once(p.chains), inner = once(p.inner), parts = once(p.parts), chain = threadIdx.x;
  const uint32_t team = 1u << p.team_bits, mine = chain >> p.team_bits, lane = chain & (team - 1);
  const uint32_t part = blockIdx.x % parts, begin = part * p.part_size, rows = gridDim.x / parts;
  const uint32_t column = chain % inner;
#pragma unroll 1
  for (int64_t first = 0; first < p.rows; first += rows) {
    const int64_t row = first + blockIdx.x / parts;
    const bool exists = row < p.rows;
    const uint32_t end = exists && chain < chains ? min(p.size, begin + p.part_size) : 0;
    const uint64_t at = static_cast<uint64_t>(row) * p.size + begin + chain;
    const auto inside = [&](uint32_t k) { return begin + chain + k * chains < end; };
    auto* const of_parts = reinterpret_cast<Share*>(p.workspace + row * p.stride);
    auto* const of_columns = reinterpret_cast<Gradient<E>*>(of_parts + parts * inner);

    Bits x[kEach], cotangent[kEach];
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k)
      x[k] = inside(k) ? static_cast<const Bits*>(p.x)[at + k * chains] : E::store(-infinity<float>());
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k)
      cotangent[k] = inside(k) ? static_cast<const Bits*>(p.cotangent)[at + k * chains] : Bits{};
    Share share = Share::none();
#pragma unroll
    for (int k = 0; k < kEach; ++k) share.peak = larger_number(share.peak, E::load(x[k]));
#pragma unroll
    for (int k = 0; k < kEach; ++k) share.add<kLogs>(E::load(x[k]), E::load(cotangent[k]));
    of_chains[chain] = share;
    __syncthreads();
    share = Share::none();
    if (mine < inner)
#pragma unroll 1
      for (uint32_t c = mine + lane * inner; c < chains; c += inner << p.team_bits) share.add(of_chains[c], kLogs);
    share = merged_of_team<kLogs>(share, team);
    if (exists && mine < inner && lane == 0) of_parts[part * inner + mine] = share;

    // Merges the parts of a column.
    const auto all_parts = [&](uint32_t c, uint32_t begin, uint32_t lanes) {
      constexpr int kAtOnce = 4;
      Share all = Share::none();
#pragma unroll 1
      for (uint32_t u = begin; u < (exists && c < inner ? parts : 0); u += kAtOnce * lanes) {
        Share some[kAtOnce];
#pragma unroll
        for (int t = 0; t < kAtOnce; ++t)
          some[t] = u + t * lanes < parts ? of_parts[(u + t * lanes) * inner + c] : Share::none();
#pragma unroll
        for (const Share& one : some) all.add(one, kLogs);
      }
      return merged_of_team<kLogs>(all, lanes);
    };
    if constexpr (kCluster) {
      arrive_at_cluster_barrier();
      wait_at_cluster_barrier();
      const Share all = all_parts(mine, lane, team);
      if (mine < inner && lane == 0) gradients[mine] = Gradient<E>(all, kLogs);
    } else {
      cooperative_groups::this_grid().sync();
#pragma unroll 1
      for (uint32_t c = part + chain / 32 * parts; c < inner; c += blockDim.x / 32 * parts) {
        const Share all = all_parts(c, chain % 32, 32);
        if (exists && chain % 32 == 0) of_columns[c] = Gradient<E>(all, kLogs);
      }
      cooperative_groups::this_grid().sync();
    }
    if constexpr (kCluster) __syncthreads();
    const Gradient<E> gradient = kCluster ? gradients[column] : exists ? of_columns[column] : Gradient<E>();
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k)
      if (inside(k))
        static_cast<Bits*>(p.out)[at + k * chains] =
            E::store(gradient.template at<kLogs>(E::load(x[k]), E::load(cotangent[k])));
  }
}

template <class E, bool kLogs, bool kCluster, int kEach>
cudaError_t launch_kernel(cudaStream_t stream, const RowPlan& plan, const PartParameters& p) {
  const auto kernel = gradient_parts_kernel<E, kLogs, kCluster, kEach>;
  const auto grid = [&](int64_t rows) { return dim3(static_cast<unsigned>(std::min(rows, p.rows) * p.parts)); };
  Launch shape;
  shape.block = dim3(plan.threads());
  if constexpr (kCluster) {
    if (p.rows * p.parts > INT32_MAX) return cudaErrorInvalidConfiguration;
    shape.grid = grid(p.rows);
    shape.cluster = static_cast<int>(p.parts);
    shape.packed = true;
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), shape.cluster);
    return status == cudaSuccess ? launch(stream, shape, kernel, p) : status;
  } else {
    static Residents residents;
    int most = 0;
    const cudaError_t status = residents.count(reinterpret_cast<const void*>(kernel), shape, &most);
    if (status != cudaSuccess) return status;
    if (static_cast<unsigned>(most) < p.parts) return cudaErrorCooperativeLaunchTooLarge;
    shape.grid = grid(most / p.parts);
    shape.together = true;
    return launch(stream, shape, kernel, p);
  }
}

}  // namespace

cudaError_t launch_gradient_parts(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                  const Buffers& buffers, void* workspace) {
  const Rows& rows = problem.rows;
  PartParameters p = {};
  p.x = buffers.y;
  p.cotangent = buffers.x;
  p.out = buffers.out;
  p.workspace = static_cast<unsigned char*>(workspace);
  p.rows = rows.outer;
  p.stride = plan.workspace_bytes;
  p.size = static_cast<uint32_t>(rows.length * rows.inner);
  p.inner = static_cast<uint32_t>(rows.inner);
  p.chains = static_cast<uint32_t>(plan.threads()) / p.inner * p.inner;
  p.part_size = static_cast<uint32_t>(plan.part_length * rows.inner);
  p.parts = static_cast<uint32_t>(plan.blocks);
  p.team_bits = plan.lane_bits;
  if (plan.each * p.chains < p.part_size || plan.threads() > kGradientPartThreads) return cudaErrorInvalidConfiguration;
  return with_float(problem.dtype, [&](auto element) -> cudaError_t {
    using E = decltype(element);
    if constexpr (sizeof(typename E::Bits) > 4) {
      return cudaErrorInvalidValue;
    } else {
      const auto launched = [&](auto logs, auto cluster) {
        constexpr bool kLogs = decltype(logs)::value, kCluster = decltype(cluster)::value;
        return plan.each == 8    ? launch_kernel<E, kLogs, kCluster, 8>(stream, plan, p)
               : plan.each == 16 ? launch_kernel<E, kLogs, kCluster, 16>(stream, plan, p)
                                 : cudaErrorInvalidConfiguration;
      };
      const auto with_logs = [&](auto logs) {
        return plan.split ? launched(logs, std::false_type()) : launched(logs, std::true_type());
      };
      return problem.op == Op::kLogSoftmaxJvp ? with_logs(std::true_type()) : with_logs(std::false_type());
    }
  });
}

}  // namespace jaxgpuops::softmax
