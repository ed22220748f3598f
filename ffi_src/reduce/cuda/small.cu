// Sums of floats by kernels of little code. Those of 8 bits with few elements: the kernel of row_engine/cuda/small.cuh.
// Columns in tiles: row_engine/cuda/columns_tiles.cuh. Flat rows, each of a block: flat_sums_kernel, or
// chain_sums_kernel if they are no whole vectors. (There, flat_sums_kernel has a branch at each vector, so that loads
// wait for each other: 335 x 3 bfloat16 took 3 us.) Others with few elements: each thread has the positions of a column
// that a lane of a walking kernel has there (row_engine/cuda/columns_walk.cuh), all of them on their way before the
// first is used, and adds them up in the same order. One read; the parameters fill one line.
#include "row_engine/cuda/columns_tiles.cuh"
#include "row_engine/cuda/small.cuh"
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

template <class P>
struct SmallSums {
  const void* x;
  uint32_t columns, length, inner;
  Quotient outer_of;
  typename P::Args args;
};

// A block has 32 columns. Warp `part` of it has the positions part, part + parts, ..; they are at most kMost.
template <class P, int kMost>
__global__ void __launch_bounds__(32 * kSmallWarps) small_sums_kernel(const __grid_constant__ SmallSums<P> p) {
  using Bits = typename P::Bits;
  using Stat = row_engine::Stat<P>;
  constexpr int kCount = row_engine::Walk<P>::kCount;  // positions that are added up first
  const uint32_t lane = threadIdx.x, part = threadIdx.y, parts = blockDim.y;
  const uint32_t own = blockIdx.x * 32 + lane, column = min(own, p.columns - 1);  // lanes without one take the last
  const uint32_t first = (once(p.outer_of(column)) * (p.length - 1) + part) * p.inner + column;
  const uint32_t apart = once(parts * p.inner);
  const Bits* const from = static_cast<const Bits*>(p.x) + first;
  row_engine::Held<P, kCount, false> held[kMost / kCount];
#pragma unroll
  for (int n = 0; n < kMost; ++n)
    held[n / kCount].raw[0][n % kCount] = part + n * parts < p.length ? from[n * apart] : P::pad(p.args, 0);
  Stat stat = Stat::none();
#pragma unroll
  for (int batch = 0; batch < kMost / kCount; ++batch) {
    if (batch && part + batch * kCount * parts >= p.length) break;
    row_engine::take_in<P>(stat, typename P::Acc(0),
                           [&](int k, const auto& shift) { return held[batch].sum(p.args, k, shift, 0, 1); });
  }
  if (parts > 1) {
    __shared__ Stat all[kSmallWarps * 32];
    all[part * 32 + lane] = stat;
    __syncthreads();
    if (part > 0) return;
    stat = row_engine::merge_serially<P>([&](int w) { return all[w * 32 + lane]; }, 0, 1, parts);
  }
  if (own == column) P::write_row(p.args, column, {}, P::finish(p.args, {}, stat));
}

// Flat rows that a block has: the order of flat_kernel, with less code and fewer registers.
template <class P>
struct FlatSums {
  const void* x;
  uint32_t size, inner, packs;  // elements of a flat row; packs that a block takes at a time
  typename P::Args args;
};

template <class P, bool kAligned>
__global__ void __launch_bounds__(32 * kFlatWarps, sizeof(typename P::Bits) > 1 ? 3 : 1)
    flat_sums_kernel(const __grid_constant__ FlatSums<P> p) {
  using Bits = typename P::Bits;
  constexpr int kCount = flat_vectors(1);
  using Lane = row_engine::Held<P, kCount, true>;
  constexpr uint32_t kWidth = Lane::kWidth;
  const uint32_t size = once(p.size), apart = once(p.packs * kWidth);
  const Bits* const from = static_cast<const Bits*>(p.x) + uint64_t{blockIdx.x} * size;
  row_engine::Stat<P> stat[kWidth];
#pragma unroll
  for (auto& of_column : stat) of_column = row_engine::Stat<P>::none();
  auto* const stats = reinterpret_cast<row_engine::Stat<P>*>(dynamic_shared_memory());
  if (threadIdx.x < p.packs) {
#pragma unroll 1
    for (uint32_t at = threadIdx.x * kWidth; at < size; at += kCount * apart) {
      Lane lane;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint32_t first = at + j * apart;
        Pack& pack = lane.raw[0][j];
        pack = Pack{};  // zeros
        if constexpr (kAligned) {
          if (first < size) pack = row_engine::load_pack(reinterpret_cast<const Pack*>(from + first));
        } else {
          if (first + kWidth <= size) {
            pack = row_engine::load_across(from + first);
          } else {
#pragma unroll
            for (uint32_t i = 0; i < kWidth - 1; ++i)
              if (first + i < size) set<Bits>(pack, i, from[first + i]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < static_cast<int>(kWidth); ++i)
        row_engine::take_in<P>(stat[i], typename P::Acc(0),
                               [&](int k, const auto& shift) { return lane.sum(p.args, k, shift, i, i + 1); });
    }
    // As vectors, so that threads of a warp rarely meet in a bank.
    constexpr int kOfVector = 16 / sizeof(stat[0]);
    auto* const vectors = reinterpret_cast<Pack*>(stats) + threadIdx.x * (kWidth / kOfVector);
#pragma unroll
    for (int v = 0; v < static_cast<int>(kWidth) / kOfVector; ++v) {
      Pack pack;
      memcpy(&pack, &stat[v * kOfVector], 16);
      row_engine::store_pack(vectors + v, pack);
    }
  }
  __syncthreads();
  row_engine::fold_flat<P>(stats, apart / p.inner, p.inner);
  for (uint32_t c = threadIdx.x; c < p.inner; c += blockDim.x)
    P::write_row(p.args, int64_t{blockIdx.x} * p.inner + c, {}, P::finish(p.args, {}, stats[c]));
}

// Flat rows that are no whole vectors. Element e belongs to chain e % `chains`, which is a multiple of inner, so a
// chain stays with one column. A thread has a chain, and a team of 2^team_bits lanes adds up the chains of a column. So
// the order of additions follows from the length and inner.
constexpr int kMostChains = 32 * kSmallFlatWarps;

template <class P>
struct ChainSums {
  const void* x;
  uint32_t size, inner, chains;
  int team_bits;
  typename P::Args args;
};

template <class P>
__global__ void __launch_bounds__(kMostChains) chain_sums_kernel(const __grid_constant__ ChainSums<P> p) {
  using E = typename P::Element;
  using Acc = typename E::Acc;
  constexpr uint32_t kBatch = 8;
  __shared__ Acc sums[kMostChains];
  const uint32_t chains = once(p.chains), inner = once(p.inner), size = threadIdx.x < chains ? once(p.size) : 0;
  const auto* const from = static_cast<const typename P::Bits*>(p.x) + uint64_t{blockIdx.x} * p.size;
  Acc sum = 0;
#pragma unroll 1
  for (uint32_t at = threadIdx.x; at < size; at += kBatch * chains) {
    typename P::Bits bits[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) bits[b] = at + b * chains < size ? from[at + b * chains] : P::pad(p.args, 0);
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) sum = sum + E::load(bits[b]);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  const uint32_t team = 1u << p.team_bits, lane = threadIdx.x & (team - 1), column = threadIdx.x >> p.team_bits;
  sum = 0;
  if (column < inner) {
#pragma unroll 4
    for (uint32_t at = column + lane * inner; at < chains; at += team * inner) sum = sum + sums[at];
  }
#pragma unroll 1
  for (uint32_t d = 1; d < team; d *= 2) sum = sum + shuffle_xor(sum, d);
  if (column < inner && lane == 0)
    P::write_row(p.args, uint64_t{blockIdx.x} * inner + column, {}, P::finish(p.args, {}, row_engine::Stat<P>{{sum}}));
}

template <class P>
cudaError_t launch_chains(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const Rows& rows = problem.rows;
  const ChainSums<P> p = {buffers.x,
                          static_cast<uint32_t>(rows.length * rows.inner),
                          static_cast<uint32_t>(rows.inner),
                          static_cast<uint32_t>(plan.part_length),
                          plan.lane_bits,
                          parameters_of<P>(problem, buffers).args};
  if (p.chains > kMostChains || rows.outer > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch(stream, {dim3(static_cast<unsigned>(rows.outer)), dim3(plan.threads())}, chain_sums_kernel<P>, p);
}

template <class P>
cudaError_t launch_flat(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  constexpr int kWidth = 16 / sizeof(typename P::Bits);
  const Rows& rows = problem.rows;
  const FlatSums<P> p = {buffers.x, static_cast<uint32_t>(rows.length * rows.inner), static_cast<uint32_t>(rows.inner),
                         static_cast<uint32_t>(plan.period * plan.deep), parameters_of<P>(problem, buffers).args};
  const bool aligned = p.size % kWidth == 0 && reinterpret_cast<uintptr_t>(buffers.x) % 16 == 0;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(rows.outer));
  launched.block = dim3(plan.threads());
  launched.shared_bytes = p.packs * kWidth * sizeof(row_engine::Stat<P>);
  return launch(stream, launched, aligned ? flat_sums_kernel<P, true> : flat_sums_kernel<P, false>, p);
}

template <class P>
cudaError_t launch_sums(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto all = parameters_of<P>(problem, buffers);
  const Rows& rows = problem.rows;
  if (plan.flat && plan.single) return launch_chains<P>(stream, plan, problem, buffers);
  if (plan.flat) return launch_flat<P>(stream, plan, problem, buffers);
  if (plan.algorithm == RowAlgorithm::kRowsTiles)
    return row_engine::run_column_tiles<P>(stream, plan, rows, all.operands[0], nullptr, all.args);
  if constexpr (sizeof(typename P::Bits) == 1)
    return row_engine::run_small<P>(stream, plan, rows, all.operands[0], all.out, all.args);
  const SmallSums<P> p = {buffers.x,
                          static_cast<uint32_t>(rows.count()),
                          static_cast<uint32_t>(rows.length),
                          static_cast<uint32_t>(rows.inner),
                          Quotient(rows.inner),
                          all.args};
  const int64_t most = (rows.length + plan.axis_warps - 1) / plan.axis_warps;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>((rows.count() + 31) / 32));
  launched.block = dim3(32, plan.axis_warps);
  return launch(stream, launched,
                most <= 8    ? small_sums_kernel<P, 8>
                : most <= 16 ? small_sums_kernel<P, 16>
                             : small_sums_kernel<P, kHeldWalk>,
                p);
}

}  // namespace

cudaError_t launch_small(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto run = [&](auto element) {
    return launch_sums<Sum<decltype(element), false>>(stream, plan, problem, buffers);
  };
  return is_float8(problem.dtype) ? with_float8(problem.dtype, run) : with_float(problem.dtype, run);
}

}  // namespace jaxgpuops::reduce
