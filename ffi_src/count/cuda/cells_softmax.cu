// Softmax of segments in no order, and the logarithms of their sums of exponentials. There is a cell for each segment and
// column. One pass over the rows finds the largest number of each cell, by atomics on keys. The next adds up the
// exponentials of the differences from it. Those lie between 0 and 1, so sums are integers: an exponential is rounded to
// a multiple of 2^-bits, where a sum of all rows still fits in 64 bits. So the order of additions does not matter, and one
// of the terms is 1, so that what rounding loses is small beside the sum. A last pass divides.
//
// A block has the cells of a chunk of columns in shared memory, and all rows, if these are few: then one launch does it
// all, and most numbers stay in registers between the passes. Else blocks share the rows, each pass is a launch, and cells
// are in the workspace, too, where blocks fold theirs in the end; or only there, if a block cannot hold them.
//
// If many rows in turn have the same id, their atomics would wait for each other. So a thread has a hot segment, which
// many of its rows had lately, and keeps the fold of that one in registers.
//
// Moves each id and number once and each result once; of many rows numbers three times, and for cells that no block holds
// a sector of 32 bytes for each row and column thrice.
#include <cuda_runtime.h>

#include <tuple>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/args.cuh"
#include "count/cuda/atomics.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kItems = 8;            // rows that a thread loads at a time
constexpr int kMany = 3;             // a segment becomes hot if so many of them have it
constexpr uint32_t kNone = ~0u;      // the row is in no segment
constexpr int kCellThreads = 256;    // threads of a block that goes through cells

enum class Pass { kAll, kLargest, kSums, kShares };

struct Args : SegmentArgs {
  using SegmentArgs::SegmentArgs;
  uint32_t chunks, slices;
  int columns, slice;  // columns of a block, rows of a slice
  int bits;            // of an exponential, below the point

  JAXGPUOPS_HOST_DEVICE int64_t cells() const { return segments * inner; }
};

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
        size(static_cast<int>(a.segments) * a.columns) {
    low = reinterpret_cast<uint32_t*>(keys + size);
    high = low + size;
  }
  __device__ int at(uint32_t id, int column) const { return static_cast<int>(id) * pitch + column; }
  __device__ Bits key(uint32_t id, int column) const { return keys[at(id, column)]; }
  __device__ uint64_t sum(uint32_t id, int column) const { return sum(at(id, column)); }
  __device__ uint64_t sum(int cell) const { return static_cast<uint64_t>(high[cell]) << 32 | low[cell]; }
  __device__ void raise(uint32_t id, int column, Bits key) const { atomic_fold<true>(keys + at(id, column), key); }
  __device__ void add(uint32_t id, int column, uint64_t value) const {
    const int cell = at(id, column);
    const auto part = static_cast<uint32_t>(value);
    const uint32_t sum = part ? atomicAdd(low + cell, part) + part : 0;
    const uint32_t up = static_cast<uint32_t>(value >> 32) + (sum < part);
    if (up) atomicAdd(high + cell, up);
  }
};

// The rows of a thread. It has a column, and every `step`th row of the block's from `slot` on.
template <class E>
struct ThreadRows {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  const Args& a;
  const int32_t* ids;  // of the block's first row
  const Bits* data;    // the number of the first row
  int column, slot, step, rows;
  bool live;
  uint32_t id[kItems];
  Bits bits[kItems];

  __device__ void load(int start) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = start + slot + i * step;
      const bool has = live && row < rows;
      id[i] = has ? static_cast<uint32_t>(ids[row]) : kNone;
      bits[i] = has ? data[row * a.inner] : Bits{0};
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (id[i] >= a.segments) id[i] = kNone;
  }

  // Calls `take(start)` for each batch of rows. The first batch is loaded already; if it is the only one, it stays so.
  template <class Take>
  __device__ __forceinline__ void each(Take take) {
    const int batch = kItems * step;
#pragma unroll 1
    for (int start = 0; start < rows; start += batch) {
      if (rows > batch) load(start);
      take(start);
    }
  }

  // Folds `value_of(i)` of all rows, which is 0 if there is nothing to fold. `put(id, value)` folds a value into a cell.
  template <class Value, class Of, class Fold, class Put>
  __device__ __forceinline__ void fold(Of value_of, Fold fold, Put put) {
    uint32_t hot = kNone;
    Value sum = 0;
    each([&](int) {
      const auto rows_with = [&](uint32_t own) {
        int count = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) count += id[i] == own;
        return count;
      };
      const uint32_t candidate = id[0];
      if (candidate != hot && candidate != kNone && (hot == kNone || rows_with(hot) < kMany) &&
          rows_with(candidate) >= kMany) {
        if (sum) put(hot, sum);
        hot = candidate;
        sum = 0;
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (id[i] == kNone) continue;
        const Value value = value_of(i);
        if (id[i] == hot) {
          sum = fold(sum, value);
        } else if (value) {
          put(id[i], value);
        }
      }
    });
    // Lanes of the same column first add up what they have, if all have the same segment.
    const bool same = 32 % a.columns == 0 && __all_sync(kEveryLane, hot == __shfl_sync(kEveryLane, hot, 0));
    if (same)
      for (int lanes = a.columns; lanes < 32; lanes *= 2) sum = fold(sum, shuffle_xor(sum, lanes));
    if (sum && !(same && (threadIdx.x & 31) >= a.columns)) put(hot, sum);
  }
};

template <class E>
__device__ __forceinline__ typename E::Acc number_of_key(typename E::Bits key, const Keys& keys) {
  return E::load(Extreme<typename E::Bits>::store(key, keys));
}

// The integer nearest to the exponential times 2^bits.
template <class E>
__device__ __forceinline__ uint64_t rounded(typename E::Acc term, int bits) {
  if constexpr (sizeof(term) == 8) return __double2ull_rn(term * __hiloint2double((1023 + bits) << 20, 0));
  return __float2ull_rn(term * __int_as_float((127 + bits) << 23));
}
template <class E>
__device__ __forceinline__ typename E::Acc number_of_sum(uint64_t sum, int bits) {
  if constexpr (sizeof(typename E::Acc) == 8) return __ull2double_rn(sum) * __hiloint2double((1023 - bits) << 20, 0);
  return __ull2float_rn(sum) * __int_as_float((127 - bits) << 23);
}

template <class E, Pass kPass, bool kShared, bool kLogs>
__global__ void __launch_bounds__(kMostCellThreads) segment_softmax_kernel(const __grid_constant__ Args a) {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  let_dependents_start();
  const uint32_t chunk = blockIdx.x % a.chunks, part = blockIdx.x / a.chunks;
  const uint32_t slice = part % a.slices, o = part / a.slices;
  const int64_t left = static_cast<int64_t>(chunk) * a.columns, first = static_cast<int64_t>(slice) * a.slice;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const GlobalCells<E> global(a, o, left);
  const BlockCells<E> own(a);
  const auto& cells = std::get<kShared ? 1 : 0>(std::tie(global, own));

  ThreadRows<E> rows = {a};
  rows.slot = thread / a.columns;
  rows.column = thread - rows.slot * a.columns;
  rows.step = threads / a.columns;
  rows.live = rows.slot < rows.step && left + rows.column < a.inner;
  rows.rows = static_cast<int>(min(static_cast<int64_t>(a.slice), a.length - first));
  rows.ids = a.ids + a.ids_at(o) + first;
  rows.data = static_cast<const Bits*>(a.data) + a.data_at(o) + first * a.inner + left + rows.column;
  const int column = rows.column;
  rows.load(0);

  // Calls `visit(cell, id, column)` for all cells of the block, if it has any.
  const auto each_cell = [&](auto visit) {
    if constexpr (kShared) {
      for (int cell = thread; cell < own.size; cell += threads) {
        const int id = cell / a.columns, of = cell - id * a.columns;
        if (left + of < a.inner) visit(cell, static_cast<uint32_t>(id), of);
      }
    }
  };
  if constexpr (kPass == Pass::kAll || kPass == Pass::kLargest) {
    each_cell([&](int cell, uint32_t, int) {
      own.keys[cell] = 0;
      if (kPass == Pass::kAll) own.low[cell] = own.high[cell] = 0;
    });
    if constexpr (kShared) __syncthreads();
    if constexpr (!kShared) wait_for_predecessor();
    rows.template fold<Bits>([&](int i) { return Extreme<Bits>::load(rows.bits[i], a.keys); },
                             [](Bits x, Bits y) { return x > y ? x : y; },
                             [&](uint32_t id, Bits key) { cells.raise(id, column, key); });
    if constexpr (kShared) __syncthreads();
    if constexpr (kPass == Pass::kLargest && kShared) {
      wait_for_predecessor();
      each_cell([&](int cell, uint32_t id, int of) {
        if (own.keys[cell]) global.raise(id, of, own.keys[cell]);
      });
    }
  } else {
    wait_for_predecessor();
  }

  if constexpr (kPass == Pass::kAll || kPass == Pass::kSums) {
    if constexpr (kPass == Pass::kSums && kShared) {
      each_cell([&](int cell, uint32_t id, int of) {
        own.keys[cell] = global.key(id, of);
        own.low[cell] = own.high[cell] = 0;
      });
      __syncthreads();
    }
    rows.template fold<uint64_t>(
        [&](int i) {
          const Acc largest = number_of_key<E>(cells.key(rows.id[i], column), a.keys);
          // Where the largest is not finite, the results follow from it alone.
          return isfinite(largest) ? rounded<E>(exp_below_one(E::load(rows.bits[i]) - largest), a.bits) : uint64_t{0};
        },
        [](uint64_t x, uint64_t y) { return x + y; },
        [&](uint32_t id, uint64_t value) { cells.add(id, column, value); });
    if constexpr (kShared) __syncthreads();
    if constexpr (kPass == Pass::kSums && kShared)
      each_cell([&](int cell, uint32_t id, int of) {
        if (const uint64_t sum = own.sum(cell)) global.add(id, of, sum);
      });
  }

  if constexpr (kPass == Pass::kAll && kLogs) {
    each_cell([&](int cell, uint32_t id, int of) {
      const Acc largest = number_of_key<E>(own.keys[cell], a.keys);
      const Acc log = log_of_sum(number_of_sum<E>(own.sum(cell), a.bits), largest);
      static_cast<Acc*>(a.out)[(o * a.segments + id) * a.inner + left + of] = isfinite(largest) ? log : largest;
    });
  } else if constexpr (kPass == Pass::kAll || kPass == Pass::kShares) {
    auto* const out = static_cast<Acc*>(a.out) + (o * a.length + first) * a.inner + left + column;
    rows.each([&](int start) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int row = start + rows.slot + i * rows.step;
        if (!rows.live || row >= rows.rows) continue;
        Acc share = 0;
        if (rows.id[i] != kNone) {
          const Acc largest = number_of_key<E>(cells.key(rows.id[i], column), a.keys), x = E::load(rows.bits[i]);
          if (isfinite(largest)) {
            share = exp_below_one(x - largest) / number_of_sum<E>(cells.sum(rows.id[i], column), a.bits);
          } else if (largest != INFINITY || x == INFINITY) {
            share = NAN;
          }
        }
        out[row * a.inner] = share;
      }
    });
  }
}

// Clears the cells in the workspace.
__global__ void __launch_bounds__(kCellThreads) segment_clear_kernel(uint4* to, int64_t count) {
  let_dependents_start();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCellThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCellThreads + threadIdx.x; i < count; i += stride)
    to[i] = uint4{0, 0, 0, 0};
}

// Computes the logarithms from the cells in the workspace.
template <class E>
__global__ void __launch_bounds__(kCellThreads) segment_cell_logs_kernel(const __grid_constant__ Args a) {
  wait_for_predecessor();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCellThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCellThreads + threadIdx.x; i < a.outer * a.cells(); i += stride) {
    const int64_t o = i / a.cells();
    const Cell<E> cell = GlobalCells<E>(a, o, 0).cells[i - o * a.cells()];
    const auto largest = number_of_key<E>(cell.key, a.keys);
    const auto log = log_of_sum(number_of_sum<E>(cell.sum, a.bits), largest);
    static_cast<typename E::Acc*>(a.out)[i] = isfinite(largest) ? log : largest;
  }
}

unsigned blocks_for(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + kCellThreads - 1) / kCellThreads, 1, 132 * 8));
}

template <class E, Pass kPass, bool kShared, bool kLogs = false>
cudaError_t run_pass(cudaStream_t stream, const SegmentsPlan& plan, const Args& a) {
  Launch config;
  config.block = dim3(32 * plan.warps);
  config.grid = dim3(static_cast<unsigned>(a.outer * a.slices * a.chunks));
  config.shared_bytes = kShared ? plan.shared_bytes : 0;
  config.overlap = plan.overlap && kPass != Pass::kAll;
  return launch(stream, config, segment_softmax_kernel<E, kPass, kShared, kLogs>, a);
}

template <class E, bool kShared>
cudaError_t run_passes(cudaStream_t stream, const SegmentsPlan& plan, const Args& a, bool logs) {
  Launch config;
  config.block = dim3(kCellThreads);
  const int64_t packs = a.outer * a.workspace_bytes / 16;
  config.grid = dim3(blocks_for(packs));
  cudaError_t status = launch(stream, config, segment_clear_kernel, reinterpret_cast<uint4*>(a.workspace), packs);
  if (status == cudaSuccess) status = run_pass<E, Pass::kLargest, kShared>(stream, plan, a);
  if (status == cudaSuccess) status = run_pass<E, Pass::kSums, kShared>(stream, plan, a);
  if (status != cudaSuccess) return status;
  if (!logs) return run_pass<E, Pass::kShares, false>(stream, plan, a);
  config.grid = dim3(blocks_for(a.outer * a.cells()));
  config.overlap = plan.overlap;
  return launch(stream, config, segment_cell_logs_kernel<E>, a);
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
  a.bits = term_bits(a.length);
  if (plan.workspace_bytes == 0)
    return logs ? run_pass<Float32, Pass::kAll, true, true>(stream, plan, a)
                : run_pass<Float32, Pass::kAll, true, false>(stream, plan, a);
  return plan.shared_bytes > 0 ? run_passes<Float32, true>(stream, plan, a, logs)
                               : run_passes<Float32, false>(stream, plan, a, logs);
}

}  // namespace jaxgpuops::count
