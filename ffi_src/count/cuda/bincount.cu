// bincount. A block counts a slice of a row in shared-memory tables of a range of bins, one table for every two warps
// if they are small. In the end it adds its tables up, and writes the sums to the result if it has the whole row, else
// adds them by atomics to zeros. Integers have the same sum in any order. Bytes moved: each id is read once for each
// range of bins, and the counts are written.
//
// If most ids were the same bin, the atomics on it would wait for each other. So each warp has one hot bin, which many
// of its lanes had recently, and counts it in a register by a ballot.
//
// If there are many ranges of bins, or the axis is not the last, atomics count in the result itself.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"

namespace jaxgpuops::count {
namespace {

struct Args {
  const void* x;
  uint32_t* counts;
  int64_t outer, length, inner, bins;
  uint64_t limit;
  int64_t range, ranges, slices, slice;
  int tables;
};

// Counts targets, which are bins or places in the result. The warp counts its hot target in a register, and other
// targets in a table.
struct Counter {
  static constexpr int kMany = 8;  // the least number of lanes for a hot target; fewer are as fast one by one

  uint32_t* table;
  uint64_t size;  // targets below this are counted
  uint64_t hot = ~uint64_t{0};
  uint32_t count = 0;

  __device__ void flush() {
    if ((threadIdx.x & 31) == 0 && hot < size && count) atomicAdd(table + hot, count);
    count = 0;
  }

  // Counts one target of each lane. All lanes of the warp must call it.
  __device__ void add(uint64_t target, bool may_change) {
    unsigned mask = __ballot_sync(kEveryLane, target == hot);
    if (may_change && __popc(mask) < kMany) {
      const uint64_t candidate = shuffle_from(target, 0);
      const unsigned other = __ballot_sync(kEveryLane, target == candidate);
      if (__popc(other) >= kMany) {
        flush();
        hot = candidate;
        mask = other;
      }
    }
    count += __popc(mask);
    if (target != hot && target < size) atomicAdd(table + target, 1u);
  }
};

template <class T>
__global__ void __launch_bounds__(1024) bincount_tables_kernel(Args a) {
  auto* tables = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int64_t part = blockIdx.x % (a.slices * a.ranges), row = blockIdx.x / (a.slices * a.ranges);
  const int64_t low = part % a.ranges * a.range, slice = part / a.ranges;
  const auto range = static_cast<int>(min(a.range, a.bins - low));
  for (int b = threadIdx.x; b < range * a.tables; b += blockDim.x) tables[b] = 0;
  __syncthreads();

  constexpr int kPerPack = 16 / sizeof(T), kPacks = 4;
  const int64_t begin = min(a.length, slice * a.slice), end = min(a.length, begin + a.slice);
  const T* x = static_cast<const T*>(a.x) + row * a.length;
  const uint64_t first = static_cast<uint64_t>(low);
  const uint64_t stop = min(a.limit, first + range);
  Counter counter;
  counter.table = tables + static_cast<int64_t>(threadIdx.x / 32 % a.tables) * range;
  counter.size = stop > first ? stop - first : 0;
  const auto count = [&](int64_t j, bool has) {
    counter.add(has ? static_cast<uint64_t>(x[j]) - first : ~uint64_t{0}, true);
  };

  // The first ids, up to the alignment of packs, and the last ones are counted one by one, the others in packs.
  const auto before = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(x + begin) % 16) % 16 / sizeof(T));
  const int64_t packs_at = min(end, begin + before), packs = (end - packs_at) / kPerPack;
  if (threadIdx.x < 32) count(begin + threadIdx.x, begin + threadIdx.x < packs_at);
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
        counter.add(has[p] ? static_cast<uint64_t>(get<T>(pack[p], e)) - first : ~uint64_t{0}, e == 0);
  }
  const int64_t rest = packs_at + packs * kPerPack;
  if (threadIdx.x < 32) count(rest + threadIdx.x, rest + threadIdx.x < end);
  counter.flush();
  __syncthreads();

  uint32_t* to = a.counts + row * a.bins + low;
  for (int b = threadIdx.x; b < range; b += blockDim.x) {
    uint32_t total = 0;
    for (int t = 0; t < a.tables; ++t) total += tables[t * range + b];
    if (a.slices == 1) {
      to[b] = total;
    } else if (total) {
      atomicAdd(to + b, total);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256) bincount_global_kernel(Args a) {
  const auto* x = static_cast<const T*>(a.x);
  const int64_t total = a.outer * a.length * a.inner, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  Counter counter;
  counter.table = a.counts;
  counter.size = static_cast<uint64_t>(a.outer * a.bins * a.inner);
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * blockDim.x; start < total; start += stride) {
    const int64_t at = start + threadIdx.x;
    uint64_t target = ~uint64_t{0};
    if (at < total) {
      const uint64_t id = x[at];
      if (id < a.limit) {
        const int64_t row = at / a.inner;
        target = static_cast<uint64_t>((row / a.length * a.bins + static_cast<int64_t>(id)) * a.inner +
                                       (at - row * a.inner));
      }
    }
    counter.add(target, true);
  }
  counter.flush();
}

__global__ void __launch_bounds__(256) zero_kernel(uint32_t* counts, int64_t size) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += stride) counts[i] = 0;
}

unsigned blocks_for(int64_t size) { return static_cast<unsigned>(std::clamp<int64_t>((size + 255) / 256, 1, 132 * 8)); }

template <class T>
cudaError_t run(cudaStream_t stream, const BincountPlan& plan, const Args& a) {
  Launch config;
  config.block = dim3(plan.threads);
  if (plan.algorithm == Counting::kGlobal) {
    config.grid = dim3(blocks_for(a.outer * a.length * a.inner));
    return launch(stream, config, bincount_global_kernel<T>, a);
  }
  config.grid = dim3(static_cast<unsigned>(a.outer * a.ranges * a.slices));
  config.shared_bytes = plan.shared_bytes;
  return launch(stream, config, bincount_tables_kernel<T>, a);
}

}  // namespace

cudaError_t launch_bincount(cudaStream_t stream, const BincountPlan& plan, const Bincount& problem, const void* x,
                            int32_t* counts) {
  if (plan.algorithm == Counting::kEmpty) return cudaSuccess;
  if (plan.algorithm == Counting::kRows) return launch_bincount_rows(stream, plan, problem, x, counts);
  Args a = {};
  a.x = x;
  a.counts = reinterpret_cast<uint32_t*>(counts);
  a.outer = problem.rows.outer;
  a.length = problem.rows.length;
  a.inner = problem.rows.inner;
  a.bins = problem.bins;
  a.limit = problem.limit();
  a.range = plan.range;
  a.ranges = plan.ranges;
  a.slices = plan.slices;
  a.slice = (a.length + a.slices - 1) / a.slices;
  a.tables = plan.tables;
  if (plan.merged()) {
    const int64_t size = a.outer * a.bins * a.inner;
    Launch config;
    config.grid = dim3(blocks_for(size));
    config.block = dim3(256);
    const cudaError_t status = launch(stream, config, zero_kernel, a.counts, size);
    if (status != cudaSuccess || problem.rows.elements() == 0) return status;
  }
  return dispatch_key(8 * problem.bytes, [&](auto width) { return run<decltype(width)>(stream, plan, a); });
}

}  // namespace jaxgpuops::count
