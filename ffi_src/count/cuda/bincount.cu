// bincount. A block counts a slice of a row in shared-memory tables of a range of bins, one table for every two warps
// if they are small. In the end it adds its tables up. If it has the whole row, it writes the sums to the result; else
// atomics add them to the result, which is zero before. If the ids are few for so many bins, that would be nearly one
// atomic for each id: then a cluster of blocks has the row, and each of them adds up a share of the bins of all, which
// it reads from their shared memory, and writes it. Integers have the same sum in any order. Bytes moved: each id is
// read once for each range of bins, and the counts are written.
//
// Lanes of a warp that count the same bin in shared memory do not wait for each other. Atomics on the result would, so
// there each warp has one hot bin, which many of its lanes had recently, and counts it in a register by a ballot.
//
// Histograms work alike, but a block also has the edges of all bins in shared memory.
//
// If there would be many ranges of bins, parts.cu counts long rows. Else, and if the axis is not the last, atomics
// count in the result itself.
#include <cuda_runtime.h>

#include "common/cuda/set_words.h"
#include "common/cuda/cluster.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "count/cuda/counter.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

constexpr int kGlobalThreads = 256, kGlobalIds = 4;  // `kGlobalIds`: ids that a thread loads at a time

struct Args {
  const void* x;
  const void* edges;
  IndexMap edges_at;
  uint32_t* counts;
  int64_t outer, length, inner, bins;
  uint64_t limit;
  int64_t range, ranges, slices, slice;
  int tables, cluster;
};

// Turns an element into its target: its bin, counted from the first of the block's range. An id is its bin.
template <class T>
struct Ids {
  using Bits = T;
  using Target = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  Target low;

  __device__ Ids(const Args&, int64_t, uint64_t first, unsigned char*) : low(static_cast<Target>(first)) {}
  __device__ Target operator()(T id) const { return static_cast<Target>(id) - low; }
};

// Turns a number into its target, the bin between whose edges it lies. If the edges are at equal distances but for
// rounding, a multiplication gives the bin: it keeps the order of numbers, and edges give almost whole numbers. So a
// product that is further from any whole number than those of the edges is surely in the right bin; other numbers are
// compared with the edges.
template <class Element>
struct Edges {
  using Bits = typename Element::Bits;
  using Real = typename Element::Acc;
  using Word = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  using Target = uint32_t;
  static constexpr Real kRound = static_cast<Real>(sizeof(Real) == 8 ? 6755399441055744.0 : 12582912.0);  // 1.5 * 2^52

  Real first, scale, near;  // `near`: a result of place() nearer than this to a whole number is in this bin
  int bins;
  const Real* edges;

  // Where x is among the bins, less a half: edge b is at b - 1/2, so rounding gives the bin. Multiply-adds with a
  // positive factor keep the order of numbers.
  __device__ Real place(Real x) const { return fused_multiply_add(x - first, scale, Real(-0.5)); }

  __device__ Edges(const Args& a, int64_t row, uint64_t, unsigned char* memory) : bins(static_cast<int>(a.bins)) {
    __shared__ Word most;
    auto* const own = reinterpret_cast<Real*>(memory);
    const auto* const from = static_cast<const Bits*>(a.edges) + a.edges_at(row);
    for (int e = threadIdx.x; e <= bins; e += blockDim.x) own[e] = Element::load(from[e]);
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    edges = own;
    first = own[0];
    scale = static_cast<Real>(bins) / (own[bins] - first);
    Real far = 0;
    for (int e = threadIdx.x; e <= bins; e += blockDim.x) {
      const Real off = place(own[e]) - (static_cast<Real>(e) - Real(0.5));
      far = off <= far && -off <= far ? far : off < 0 ? -off : off;  // if `off` is NaN, so is `far`
    }
    atomic_largest(&most, bits_as<Word>(far));
    __syncthreads();
    near = Real(0.5) - 2 * bits_as<Real>(most);
  }
  __device__ static void atomic_largest(uint32_t* to, uint32_t value) { atomicMax(to, value); }
  __device__ static void atomic_largest(uint64_t* to, uint64_t value) {
    atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
  }

  __device__ Target operator()(Bits bits) const {
    const Real x = Element::load(bits), at = place(x), rounded = at + kRound;
    const Real off = at - (rounded - kRound);
    if ((off < 0 ? -off : off) < near) return static_cast<Target>(bits_as<Word>(rounded) - bits_as<Word>(kRound));
    if (!(x >= edges[0] && x <= edges[bins])) return ~Target{0};
    int low = 0, high = bins - 1;  // the last bin whose lower edge is not above x
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (edges[middle] <= x) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return static_cast<Target>(low);
  }
};

template <class Binning>
__global__ void __launch_bounds__(1024) bincount_tables_kernel(const __grid_constant__ Args a) {
  using Bits = typename Binning::Bits;
  using Target = typename Binning::Target;
  auto* tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  // Blocks of a cluster have neighbouring slices of the same range of bins. Neighbouring clusters share their slices.
  const unsigned cluster = a.cluster, rank = blockIdx.x % cluster, of_cluster = blockIdx.x / cluster;
  const int64_t clusters = a.slices / cluster * a.ranges, part = of_cluster % clusters, row = of_cluster / clusters;
  const int64_t low = part % a.ranges * a.range, slice = part / a.ranges * cluster + rank;
  const auto range = static_cast<int>(min(a.range, a.bins - low));
  for (int b = threadIdx.x; b < range * a.tables; b += blockDim.x) tables[b] = 0;
  const uint64_t first = static_cast<uint64_t>(low), stop = min(a.limit, first + range);
  const Binning binning(a, row, first, reinterpret_cast<unsigned char*>(tables + (range * a.tables + 1) / 2 * 2));
  __syncthreads();

  constexpr int kPerPack = 16 / sizeof(Bits), kPacks = 4;
  const int64_t begin = min(a.length, slice * a.slice), end = min(a.length, begin + a.slice);
  const Bits* x = static_cast<const Bits*>(a.x) + row * a.length;
  uint32_t* const table = tables + static_cast<int64_t>(threadIdx.x / 32 % a.tables) * range;
  const auto size = static_cast<Target>(stop > first ? stop - first : 0);
  const auto count = [&](Target target) {
    if (target < size) atomicAdd(table + target, 1u);
  };

  // The first elements, up to an aligned pack, and the last ones are counted one by one, the others by packs. There are
  // fewer than 16 of either, so the first warp loads all of them at once.
  const auto before = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(x + begin) % 16) % 16 / sizeof(Bits));
  const int64_t packs_at = min(end, begin + before), packs = (end - packs_at) / kPerPack;
  const int64_t rest = packs_at + packs * kPerPack;
  const int64_t loose = threadIdx.x < 16 ? begin + threadIdx.x : rest + threadIdx.x - 16;
  const bool has_loose = threadIdx.x < 32 && loose < (threadIdx.x < 16 ? packs_at : end);
  Bits loose_bits = {};
  if (has_loose) loose_bits = x[loose];
  const auto* from = reinterpret_cast<const Pack*>(x + packs_at);
  for (int64_t i = 0; i < packs; i += kPacks * blockDim.x) {
    Pack pack[kPacks];
    bool has[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = i + p * blockDim.x + threadIdx.x;
      has[p] = at < packs;
      if (has[p]) pack[p] = load_once(from + at);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int e = 0; e < kPerPack; ++e)
        if (has[p]) count(binning(get<Bits>(pack[p], e)));
  }
  if (has_loose) count(binning(loose_bits));

  uint32_t* to = a.counts + row * a.bins + low;
  const bool merged = a.slices > cluster;
  const auto put = [&](int bin, uint32_t total) {
    if (!merged) {
      to[bin] = total;
    } else if (total) {
      atomicAdd(to + bin, total);
    }
  };
  if (cluster > 1) {
    arrive_at_cluster_barrier();
    if (merged) wait_for_predecessor();  // which sets the counts to 0
    wait_at_cluster_barrier();
    // A block adds up its share of the bins of all tables. It begins with its own, so that not all ask the same block.
    const int share = (range + static_cast<int>(cluster) - 1) / static_cast<int>(cluster);
    const int share_end = min(range, (static_cast<int>(rank) + 1) * share);
    for (int b = static_cast<int>(rank) * share + threadIdx.x; b < share_end; b += blockDim.x) {
      uint32_t total = 0;
#pragma unroll 8
      for (unsigned i = 0; i < cluster; ++i) total += load_in_cluster(tables + b, (rank + i) & (cluster - 1));
      put(b, total);
    }
    arrive_at_cluster_barrier();  // no block may end while others read its table
    wait_at_cluster_barrier();
    return;
  }
  __syncthreads();
  if (merged) wait_for_predecessor();
  for (int b = threadIdx.x; b < range; b += blockDim.x) {
    uint32_t total = 0;
    for (int t = 0; t < a.tables; ++t) total += tables[t * range + b];
    put(b, total);
  }
}

// Blocks have neighbouring ids. The counter's targets are places in the result. Division of 64-bit numbers takes as
// long as the rest, so Index is 32 bits wide if that is enough.
template <class T, class Index>
__global__ void __launch_bounds__(kGlobalThreads) bincount_global_kernel(const __grid_constant__ Args a) {
  const auto* x = static_cast<const T*>(a.x);
  const int64_t begin = blockIdx.x * a.slice, end = min(begin + a.slice, a.outer * a.length * a.inner);
  const auto length = static_cast<Index>(a.length), inner = static_cast<Index>(a.inner);
  Counter<uint64_t> counter;
  counter.table = a.counts;
  counter.size = static_cast<uint64_t>(a.outer * a.bins * a.inner);
  for (int64_t start = begin; start < end; start += kGlobalIds * kGlobalThreads) {
    uint64_t target[kGlobalIds];
#pragma unroll
    for (int i = 0; i < kGlobalIds; ++i) {
      const int64_t at = start + i * kGlobalThreads + threadIdx.x;
      target[i] = at < end ? static_cast<uint64_t>(x[at]) : ~uint64_t{0};
    }
#pragma unroll
    for (int i = 0; i < kGlobalIds; ++i) {
      const auto at = static_cast<Index>(start + i * kGlobalThreads + threadIdx.x);
      const Index row = inner == 1 ? at : at / inner, column = at - row * inner, o = row / length;
      target[i] = target[i] < a.limit ? (o * a.bins + target[i]) * a.inner + column : counter.kNone;
    }
    wait_for_predecessor();  // which sets the counts to 0
#pragma unroll
    for (int i = 0; i < kGlobalIds; ++i) counter.add(target[i], i == 0);
  }
  counter.flush();
}

template <class Binning>
cudaError_t run_tables(cudaStream_t stream, const BincountPlan& plan, const Args& a) {
  Launch config;
  config.block = dim3(plan.threads);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.ranges * a.slices));
  config.shared_bytes = plan.shared_bytes;
  config.overlap = plan.overlap;
  config.cluster = a.cluster;
  const auto kernel = bincount_tables_kernel<Binning>;
  const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), a.cluster);
  return status == cudaSuccess ? launch(stream, config, kernel, a) : status;
}

template <class T>
cudaError_t run(cudaStream_t stream, const BincountPlan& plan, const Args& a) {
  if (plan.algorithm != Counting::kGlobal) return run_tables<Ids<T>>(stream, plan, a);
  Launch config;
  config.block = dim3(kGlobalThreads);
  const int64_t size = a.outer * a.length * a.inner;
  config.grid = dim3(static_cast<unsigned>((size + a.slice - 1) / a.slice));
  config.overlap = plan.overlap;
  if constexpr (sizeof(T) >= 4)  // the usual ids
    if (size < int64_t{1} << 32) return launch(stream, config, bincount_global_kernel<T, uint32_t>, a);
  return launch(stream, config, bincount_global_kernel<T, uint64_t>, a);
}

Args args_of(const BincountPlan& plan, const Rows& rows, int64_t bins, const void* x, int32_t* counts) {
  Args a = {};
  a.x = x;
  a.counts = reinterpret_cast<uint32_t*>(counts);
  a.outer = rows.outer;
  a.length = rows.length;
  a.inner = rows.inner;
  a.bins = bins;
  a.limit = static_cast<uint64_t>(bins);
  a.range = plan.range;
  a.ranges = plan.ranges;
  a.slices = plan.slices;
  a.slice = plan.algorithm == Counting::kGlobal ? plan.range : (a.length + a.slices - 1) / a.slices;
  a.tables = plan.tables;
  a.cluster = plan.cluster;
  return a;
}

// Sets the result to zero if blocks add their counts to it.
cudaError_t clear(cudaStream_t stream, const BincountPlan& plan, const Args& a) {
  if (!plan.merged()) return cudaSuccess;
  return launch_set_words(stream, a.counts, a.outer * a.bins * a.inner, 0, 0);
}

}  // namespace

cudaError_t launch_bincount(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                            int32_t* counts, char* workspace, int64_t workspace_bytes) {
  if (plan.algorithm == Counting::kEmpty) return cudaSuccess;
  if (plan.algorithm == Counting::kRows || plan.algorithm == Counting::kWarps)
    return launch_bincount_rows(stream, plan, problem, x, counts);
  Args a = args_of(plan, problem.rows, problem.bins, x, counts);
  a.limit = problem.limit();
  const cudaError_t status = clear(stream, plan, a);
  if (status != cudaSuccess || (plan.merged() && problem.rows.elements() == 0)) return status;
  if (plan.algorithm == Counting::kParts)
    return launch_bincount_parts(stream, plan, problem, x, counts, workspace, workspace_bytes);
  return dispatch_key(8 * problem.bytes, [&](auto width) { return run<decltype(width)>(stream, plan, a); });
}

cudaError_t launch_histogram(cudaStream_t stream, const BincountPlan& plan, const Histogram& problem, const void* x,
                             const void* edges, int32_t* counts) {
  if (plan.algorithm == Counting::kEmpty) return cudaSuccess;
  Args a = args_of(plan, problem.rows, problem.bins, x, counts);
  a.edges = edges;
  a.edges_at = problem.edges;
  const cudaError_t status = clear(stream, plan, a);
  if (status != cudaSuccess) return status;
  switch (problem.dtype) {
    case DType::kFloat16: return run_tables<Edges<Float16>>(stream, plan, a);
    case DType::kBFloat16: return run_tables<Edges<BFloat16>>(stream, plan, a);
    case DType::kFloat32: return run_tables<Edges<Float32>>(stream, plan, a);
    case DType::kFloat64: return run_tables<Edges<Float64>>(stream, plan, a);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::count
