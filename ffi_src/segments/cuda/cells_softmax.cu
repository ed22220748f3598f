// Softmax of segments in no order, and the logarithms of their sums of exponentials. There is a cell for each segment
// and column. One pass over the rows finds the largest number of each cell, by atomics on keys. The next adds up the
// exponentials of the differences from it. Those lie between 0 and 1, so sums are integers: an exponential is rounded
// to a multiple of 2^-bits, where a sum of all rows still fits in 64 bits. So the order of additions does not matter,
// and one of the terms is 1, so that what rounding loses is small beside the sum. A last pass divides.
//
// A block, or a cluster of blocks, has the cells of a chunk of columns in shared memory, and all rows, if these are not
// many: then one launch does it all, and most numbers stay in registers between the passes. Else blocks share the rows,
// each pass is a launch, and cells are in the workspace, too, where blocks fold theirs in the end; or only there, if a
// block cannot hold them.
//
// After a pass, each block of a cluster folds a share of the cells of all its blocks, and tells them.
//
// If many rows in turn have the same id, their atomics would wait for each other. So a thread has a hot segment, which
// many of its rows had lately, and keeps the fold of that one in registers.
//
// Moves each id and number once and each result once; of many rows numbers three times, and for cells that no block
// holds a sector of 32 bytes for each row and column thrice.
#include <cuda_runtime.h>

#include "common/cuda/cluster.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "segments/cuda/args.cuh"
#include "segments/cuda/atomics.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kRows = 4;           // rows that a thread loads at a time, if it has several
constexpr int kMany = 2;           // a segment becomes hot if so many of them have it
constexpr int kManyLanes = 8;      // lanes of a warp fold together if so many have the same hot segment
constexpr uint32_t kNone = ~0u;    // the row is in no segment
constexpr int kCellThreads = 256;  // threads of a block that goes through cells

// The passes. Each is a loop over rows, and they share its code.
enum Pass { kLargest, kSums, kShares };

struct Args : SegmentArgs {
  using SegmentArgs::SegmentArgs;
  uint32_t chunks, slices;
  uint32_t cluster;         // blocks of a cluster, which have the same columns
  int columns, slice;       // columns of a block, rows of a slice
  int bits;                 // fraction bits of an exponential in fixed point
  int first = 0, last = 0;  // passes of the launch
  bool logs;                // whether the results are the logarithms of the sums
  DType dtype;              // of the numbers in memory, which may have 16 bits where cells have 32

  JAXGPUOPS_HOST_DEVICE int64_t cells() const { return segments * inner; }
};

// Calls visit(n) for n from 0 to kCount - 1 with the number at `places[n]`, or with 0 where there[n] is false. All
// numbers are loaded before the first is visited. E is the type of cells.
template <class E, int kCount, class Visit>
__device__ __forceinline__ void load_numbers(const Args& a, int64_t first, const int64_t (&places)[kCount],
                                             const bool (&there)[kCount], Visit visit) {
  using Bits = typename E::Bits;
  if (sizeof(Bits) == 8 || a.dtype == DType::kFloat32) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) visit(n, there[n] ? static_cast<const Bits*>(a.data)[first + places[n]] : Bits{0});
    return;
  }
  uint16_t narrow[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    narrow[n] = there[n] ? static_cast<const uint16_t*>(a.data)[first + places[n]] : uint16_t{0};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const float number = a.dtype == DType::kFloat16 ? Float16::load(narrow[n]) : BFloat16::load(narrow[n]);
    visit(n, static_cast<Bits>(bits_as<uint32_t>(number)));
  }
}

template <class Acc>
__device__ __forceinline__ void store_number(const Args& a, int64_t place, Acc number) {
  if (sizeof(Acc) == 8 || a.dtype == DType::kFloat32) {
    static_cast<Acc*>(a.out)[place] = number;
  } else {
    const auto narrow = static_cast<float>(number);
    static_cast<uint16_t*>(a.out)[place] =
        a.dtype == DType::kFloat16 ? Float16::store(narrow) : BFloat16::store(narrow);
  }
}

template <class E>
struct Cell {
  uint64_t sum;
  typename E::Bits key;
};

// The cells of an outer index in the workspace, from the block's first column on.
template <class E>
struct GlobalCells {
  using Bits = typename E::Bits;
  Cell<E>* cells;
  int64_t pitch;

  __device__ GlobalCells(const Args& a, int64_t o, int64_t left)
      : cells(reinterpret_cast<Cell<E>*>(a.workspace + o * a.workspace_bytes) + left), pitch(a.inner) {}
  __device__ Cell<E>& at(uint32_t id, int column) const { return cells[id * pitch + column]; }
  __device__ Bits key(uint32_t id, int column) const { return at(id, column).key; }
  __device__ uint64_t sum(uint32_t id, int column) const { return at(id, column).sum; }
  __device__ void raise(uint32_t id, int column, Bits key) const { atomic_fold<true>(&at(id, column).key, key); }
  __device__ void add(uint32_t id, int column, uint64_t value) const { atomic_fold<false>(&at(id, column).sum, value); }
};

// The cells of a block in shared memory, which has no additions of 64 bits: a sum is two words.
template <class E>
struct BlockCells {
  using Bits = typename E::Bits;
  Bits* keys;
  uint32_t *low, *high;
  int pitch, size;

  __device__ BlockCells(const Args& a)
      : keys(reinterpret_cast<Bits*>(dynamic_shared_memory())),
        pitch(a.columns),
        size(static_cast<int>(a.segments * a.columns)) {
    low = reinterpret_cast<uint32_t*>(keys + size);
    high = low + size;
  }
  __device__ int at(uint32_t id, int column) const { return static_cast<int>(id) * pitch + column; }
  __device__ Bits key(uint32_t id, int column) const { return keys[at(id, column)]; }
  __device__ uint64_t sum(uint32_t id, int column) const { return sum(at(id, column)); }
  __device__ uint64_t sum(int cell) const { return static_cast<uint64_t>(high[cell]) << 32 | low[cell]; }
  // The same of a block of the cluster.
  __device__ uint64_t sum_in(unsigned block, int cell) const {
    return static_cast<uint64_t>(load_in_cluster(high + cell, block)) << 32 | load_in_cluster(low + cell, block);
  }
  __device__ void raise(uint32_t id, int column, Bits key) const { atomic_fold<true>(keys + at(id, column), key); }
  __device__ void add(uint32_t id, int column, uint64_t value) const {
    const int cell = at(id, column);
    add_halves(low + cell, high + cell, value);
  }
};

template <class Bits>
constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);

// Keys in the order of floats, above 0; NaN has the largest.
template <class E>
__device__ __forceinline__ typename E::Bits key_of(typename E::Bits bits) {
  using Bits = typename E::Bits;
  return isnan(E::load(bits)) ? static_cast<Bits>(~Bits{0}) : bits ^ (sign_mask(bits) | kSign<Bits>);
}
template <class E>
__device__ __forceinline__ typename E::Acc number_of_key(typename E::Bits key) {
  return E::load(key ^ (~sign_mask(key) | kSign<typename E::Bits>));
}

// The integer nearest to the exponential times 2^bits, and the number that a sum of such integers stands for.
__device__ __forceinline__ uint64_t rounded(float term, int bits) {
  return __float2ull_rn(term * __int_as_float((127 + bits) << 23));
}
__device__ __forceinline__ uint64_t rounded(double term, int bits) {
  return __double2ull_rn(term * __hiloint2double((1023 + bits) << 20, 0));
}
template <class E>
__device__ __forceinline__ typename E::Acc number_of_sum(uint64_t sum, int bits) {
  if constexpr (sizeof(typename E::Acc) == 8) return __ull2double_rn(sum) * __hiloint2double((1023 - bits) << 20, 0);
  return __ull2float_rn(sum) * __int_as_float((127 - bits) << 23);
}
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

template <class E>
__device__ __forceinline__ typename E::Acc log_of(typename E::Bits key, uint64_t sum, const Args& a) {
  const auto largest = key ? number_of_key<E>(key) : E::lowest();
  return isfinite(largest) ? log_of_sum(number_of_sum<E>(sum, a.bits), largest) : largest;
}

template <bool kFirst, class A, class B>
__device__ __forceinline__ const auto& one_of(const A& a, const B& b) {
  if constexpr (kFirst) {
    return a;
  } else {
    return b;
  }
}

// A thread has a column of the block's, and rows in equal steps.
template <class E, bool kShared, int kItems>
__global__ void __launch_bounds__(kMostCellThreads) segment_softmax_kernel(const __grid_constant__ Args a) {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  let_dependents_start();
  // Neighbouring blocks have the slices of a cluster, then the chunks of columns.
  const uint32_t cluster = a.cluster, rank = blockIdx.x % cluster, of_cluster = blockIdx.x / cluster;
  const uint32_t chunk = of_cluster % a.chunks, part = of_cluster / a.chunks, clusters = a.slices / cluster;
  const uint32_t slice = part % clusters * cluster + rank, o = part / clusters;
  const int64_t left = static_cast<int64_t>(chunk) * a.columns, begin = static_cast<int64_t>(slice) * a.slice;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int slot = thread / a.columns, column = thread - slot * a.columns, step = threads / a.columns;
  const bool live = slot < step && left + column < a.inner;
  const int rows = live ? static_cast<int>(min(int64_t{a.slice}, a.length - begin)) : 0;
  const int32_t* const ids = a.ids + a.ids_at(o) + begin;
  const int64_t data_at = a.data_at(o) + begin * a.inner + left + column;
  const GlobalCells<E> global(a, o, left);
  const BlockCells<E> own(a);
  const auto& cells = one_of<kShared>(own, global);
  // Calls `visit(cell, id, column)` for those cells from `from` to `to` that the block has in shared memory.
  const auto each_cell = [&](int from, int to, auto visit) {
#pragma unroll 1
    for (int cell = from + thread; kShared && cell < to; cell += threads) {
      const int id = cell / a.columns, of = cell - id * a.columns;
      if (left + of < a.inner) visit(cell, static_cast<uint32_t>(id), of);
    }
  };

  uint32_t id[kItems];
  Bits bits[kItems];
  const auto load = [&](int start) {
    int64_t places[kItems];
    bool there[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = start + slot + i * step;
      there[i] = row < rows;
      places[i] = row * a.inner;
      id[i] = there[i] ? static_cast<uint32_t>(ids[row]) : kNone;
    }
    load_numbers<E>(a, data_at, places, there, [&](int i, Bits number) { bits[i] = number; });
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (id[i] >= a.segments) id[i] = kNone;
  };
  const int batch = kItems * step;
  load(0);
  // The cells are clear or, in later passes, have what the pass before folded.
  if (a.first == kLargest && kShared) {
#pragma unroll 1
    for (int cell = thread; cell < own.size; cell += threads) own.keys[cell] = 0, own.low[cell] = own.high[cell] = 0;
  }
  if (a.first != kLargest || !kShared) wait_for_predecessor();
  if (a.first == kSums && kShared)
    each_cell(0, own.size, [&](int cell, uint32_t id, int of) {
      own.keys[cell] = global.key(id, of);
      own.low[cell] = own.high[cell] = 0;
    });

  // The share of the cells that the block folds for its cluster.
  const int size = own.size, each = (size + static_cast<int>(cluster) - 1) / static_cast<int>(cluster);
  const int share = min(static_cast<int>(rank) * each, size), share_end = min(share + each, size);
  const auto fold_cluster = [&](const auto& own, int pass) {
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    // Each block begins with itself, so that not all ask the same block. A cluster has a power of two of them.
    const auto each_block = [&](auto visit) {
#pragma unroll 8
      for (uint32_t i = 0; i < cluster; ++i) visit((rank + i) & (cluster - 1));
    };
#pragma unroll 1
    for (int cell = share + thread; cell < share_end; cell += threads) {
      if (pass == kLargest) {
        Bits key = 0;
        each_block([&](uint32_t block) { key = max(key, load_in_cluster(own.keys + cell, block)); });
        each_block([&](uint32_t block) { store_in_cluster(own.keys + cell, block, key); });
      } else {
        uint64_t sum = 0;
        each_block([&](uint32_t block) { sum += own.sum_in(block, cell); });
        each_block([&](uint32_t block) {
          store_in_cluster(own.low + cell, block, static_cast<uint32_t>(sum));
          store_in_cluster(own.high + cell, block, static_cast<uint32_t>(sum >> 32));
        });
      }
    }
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
  };

#pragma unroll 1
  for (int pass = a.first; pass <= a.last; ++pass) {
    if constexpr (kShared) __syncthreads();
    uint32_t hot = kNone;
    uint64_t sum = 0;  // of the hot segment, or its largest key
    const auto put = [&](uint32_t id, uint64_t value) {
      if (value == 0) return;
      if (pass == kLargest) {
        cells.raise(id, column, static_cast<Bits>(value));
      } else {
        cells.add(id, column, value);
      }
    };
#pragma unroll 1
    for (int start = 0; start < (kItems == 1 ? 1 : a.slice); start += batch) {
      if (kItems > 1 && a.slice > batch) load(start);  // else all rows are still there
      if (pass == kShares) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int row = start + slot + i * step;
          if (row >= rows) continue;
          Acc share = 0;
          if (id[i] != kNone) {
            const Acc largest = number_of_key<E>(cells.key(id[i], column)), x = E::load(bits[i]);
            if (isfinite(largest)) {
              share = quotient(exp_below_one(x - largest), number_of_sum<E>(cells.sum(id[i], column), a.bits));
            } else if (largest != INFINITY || x == INFINITY) {
              share = NAN;
            }
          }
          store_number(a, (o * a.length + begin + row) * a.inner + left + column, share);
        }
        continue;
      }
      const auto rows_with = [&](uint32_t own) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) count += id[i] == own;
        return count;
      };
      const uint32_t candidate = id[0];
      if (kItems == 1) {
        hot = candidate;
      } else if (candidate != hot && candidate != kNone && rows_with(candidate) >= kMany &&
                 (hot == kNone || rows_with(hot) < kMany)) {
        put(hot, sum);
        hot = candidate;
        sum = 0;
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (id[i] == kNone) continue;
        uint64_t value = 0;
        if (pass == kLargest) {
          value = key_of<E>(bits[i]);
        } else {
          // Where the largest is not finite, the results follow from it alone.
          const Acc largest = number_of_key<E>(cells.key(id[i], column));
          if (isfinite(largest)) value = rounded(exp_below_one(E::load(bits[i]) - largest), a.bits);
        }
        if (id[i] != hot) {
          put(id[i], value);
        } else {
          sum = pass == kSums ? sum + value : max(sum, value);
        }
      }
    }
    if (pass == kShares) break;
    // Lanes of the same column first fold what they have of a segment that many of them have.
    const int lane = thread & 31;
    uint32_t common = kNone;
#pragma unroll
    for (int of = 0; of < 32; of += 11) {
      const uint32_t one = shuffle_from(hot, of);
      if (common == kNone && __popc(__ballot_sync(kEveryLane, hot == one)) >= kManyLanes) common = one;
    }
    if (32 % a.columns == 0 && common != kNone) {
      uint64_t all = hot == common ? sum : 0;
      if (hot == common) sum = 0;
#pragma unroll 1
      for (int lanes = a.columns; lanes < 32; lanes *= 2) {
        const uint64_t other = shuffle_xor(all, lanes);
        all = pass == kSums ? all + other : max(all, other);
      }
      if (lane < a.columns) put(common, all);
    }
    put(hot, sum);
    if constexpr (kShared && sizeof(Bits) == 4)
      if (cluster > 1) fold_cluster(own, pass);
  }
  if constexpr (!kShared) return;
  if (a.last == kShares) return;
  __syncthreads();
  if (a.first == kLargest && a.last == kLargest) wait_for_predecessor();  // which clears the cells
  each_cell(share, share_end, [&](int cell, uint32_t id, int of) {
    if (a.first != a.last) {
      const Acc log = log_of<E>(own.keys[cell], own.sum(cell), a);
      store_number(a, (o * a.segments + id) * a.inner + left + of, log);
    } else if (a.last == kLargest) {
      if (own.keys[cell]) global.raise(id, of, own.keys[cell]);
    } else {
      if (const uint64_t sum = own.sum(cell)) global.add(id, of, sum);
    }
  });
}

// Clears the cells in the workspace.
__global__ void __launch_bounds__(kCellThreads) segment_clear_kernel(uint4* to, int64_t count) {
  let_dependents_start();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCellThreads;
#pragma unroll 2
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCellThreads + threadIdx.x; i < count; i += stride)
    to[i] = uint4{0, 0, 0, 0};
}

// Computes the logarithms from the cells in the workspace.
template <class E>
__global__ void __launch_bounds__(kCellThreads) segment_cell_logs_kernel(const __grid_constant__ Args a) {
  wait_for_predecessor();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCellThreads, cells = a.outer * a.cells();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCellThreads + threadIdx.x; i < cells; i += stride) {
    const int64_t o = i / a.cells();
    const Cell<E> cell = GlobalCells<E>(a, o, 0).cells[i - o * a.cells()];
    store_number(a, i, log_of<E>(cell.key, cell.sum, a));
  }
}

unsigned blocks_for(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + kCellThreads - 1) / kCellThreads, 1, 132 * 8));
}

// Launches the kernel that does all for blocks that have all rows.
template <class E>
cudaError_t run_whole(cudaStream_t stream, const SegmentsPlan& plan, Args a) {
  Launch config;
  config.block = dim3(32 * plan.warps);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.slices * a.chunks));
  config.shared_bytes = plan.shared_bytes;
  config.cluster = a.cluster;
  a.last = a.logs ? kSums : kShares;
  auto* kernel = segment_softmax_kernel<E, true, 1>;
  if constexpr (sizeof(typename E::Bits) == 4) {
    if (a.slice > 32 * plan.warps / a.columns) kernel = segment_softmax_kernel<E, true, kRows>;
  }
  if (a.cluster > 1) {
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), a.cluster);
    if (status != cudaSuccess) return status;
  }
  return launch(stream, config, kernel, a);
}

template <class E>
cudaError_t run_passes(cudaStream_t stream, const SegmentsPlan& plan, Args a) {
  Launch config, of_cells;
  config.block = dim3(32 * plan.warps);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.slices * a.chunks));
  config.shared_bytes = plan.shared_bytes;
  of_cells.block = dim3(kCellThreads);
  const int64_t packs = a.outer * a.workspace_bytes / 16;
  of_cells.grid = dim3(blocks_for(packs));
  cudaError_t status = launch(stream, of_cells, segment_clear_kernel, reinterpret_cast<uint4*>(a.workspace), packs);
  config.overlap = of_cells.overlap = plan.overlap;
  for (const int pass : {kLargest, kSums, kShares}) {
    if (status != cudaSuccess || (a.logs && pass == kShares)) break;
    a.first = a.last = pass;
    const bool shared = plan.shared_bytes > 0 && pass != kShares;
    if (!shared) config.shared_bytes = 0;
    const auto kernel = shared                                  ? segment_softmax_kernel<E, true, kRows>
                        : a.slice > 32 * plan.warps / a.columns ? segment_softmax_kernel<E, false, kRows>
                                                                : segment_softmax_kernel<E, false, 1>;
    status = launch(stream, config, kernel, a);
  }
  if (status != cudaSuccess || !a.logs) return status;
  of_cells.grid = dim3(blocks_for(a.outer * a.cells()));
  return launch(stream, of_cells, segment_cell_logs_kernel<E>, a);
}

}  // namespace

cudaError_t launch_cells_softmax(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                 const SegmentsBuffers& buffers, bool logs) {
  Args a(problem, buffers);
  a.workspace_bytes = plan.workspace_bytes;
  a.columns = plan.columns;
  a.chunks = static_cast<uint32_t>((a.inner + a.columns - 1) / a.columns);
  a.slice = static_cast<int>(plan.rows);
  a.slices = static_cast<uint32_t>(plan.tiles);
  a.cluster = plan.cluster;
  a.bits = term_bits(a.length);
  a.logs = logs;
  a.dtype = problem.dtype;
  if (problem.dtype == DType::kFloat64) return run_whole<Float64>(stream, plan, a);
  return plan.workspace_bytes == 0 ? run_whole<Float32>(stream, plan, a) : run_passes<Float32>(stream, plan, a);
}

}  // namespace jaxgpuops::segments
