// Extremes, and sums of integers, of rows with several columns in a moderate number of segments. A block has a slice of
// the rows and a table of all segments and columns in shared memory. Neighbouring threads have neighbouring columns of
// a row, up to 16 bytes each, so that a warp reads and folds whole vectors. Any order gives the same, so all threads
// fold into one table: most numbers are not larger than what is there, and the others take an atomic. If numbers rise
// or fall along the rows, blocks soon meet the largest ones, because every other group of rows is taken from the end of
// the slice.
//
// Bytes moved: each id and each number is read once, and each slice writes a table, which segment_slices_kernel reads.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "segments/cuda/tables.cuh"

namespace jaxgpuops::segments {
namespace {

constexpr int kSteps = 3;  // rows that a thread loads at a time; with four vectors, registers would not do

using Args = Slices;

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T value[kCount];
};

template <class Monoid, int kColumns>
__global__ void __launch_bounds__(kExtremeThreads) segment_wide_tables_kernel(const __grid_constant__ Args a) {
  using Bits = typename Monoid::Bits;
  using Acc = typename Monoid::Acc;
  using Word = TableWord<Monoid>;
  using Words = Vector<Word, kColumns>;
  auto* const table = reinterpret_cast<Word*>(dynamic_shared_memory());
  auto* const low = reinterpret_cast<uint32_t*>(table);  // for has_halves
  const int64_t slice = blockIdx.x % a.slices, o = blockIdx.x / a.slices;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int columns = static_cast<int>(a.inner), cells = a.segments * columns;
  for (int cell = thread; cell < cells; cell += threads) table[cell] = Monoid::identity();
  __syncthreads();

  const int team = columns / kColumns, step = threads / team;  // threads that have a row, rows of a block at a time
  const int slot = thread / team, column = (thread - slot * team) * kColumns;
  const auto segments = static_cast<uint32_t>(a.segments);
  const int64_t begin = slice * a.slice;
  const int rows = slot < step ? static_cast<int>(min(a.slice, a.length - begin)) : 0;
  const int32_t* const ids = a.ids + a.ids_at(o) + begin;
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(o) + begin * a.inner + column;
  const int group = kSteps * step, groups = (rows + group - 1) / group;
  const auto start_of = [&](int turn) { return (turn % 2 ? groups - 1 - turn / 2 : turn / 2) * group + slot; };
  // The rows of a group are loaded while those of the one before are folded, and the ids of a group one turn earlier.
  uint32_t later[kSteps], next_id[kSteps];
  Vector<Bits, kColumns> next[kSteps];
  const auto load_ids = [&](int turn, uint32_t (&to)[kSteps]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = start_of(turn) + i * step;
      to[i] = turn < groups && row < rows ? static_cast<uint32_t>(ids[row]) : ~0u;
    }
  };
  const auto load_rows = [&](int turn) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (next_id[i] < segments)
        next[i] = *reinterpret_cast<const Vector<Bits, kColumns>*>(data + (start_of(turn) + i * step) * a.inner);
  };
  load_ids(0, next_id);
  load_rows(0);
  load_ids(1, later);
  for (int turn = 0; turn < groups; ++turn) {
    uint32_t id[kSteps];
    Vector<Bits, kColumns> bits[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) id[i] = next_id[i], bits[i] = next[i], next_id[i] = later[i];
    load_rows(turn + 1);
    load_ids(turn + 2, later);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (id[i] >= segments) continue;
      const int cell = static_cast<int>(id[i]) * columns + column;
      if constexpr (is_extreme<Monoid>) {
        const Words seen = *reinterpret_cast<const Words*>(table + cell);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const Word key = Monoid::load(bits[i].value[c], a.keys);
          if (seen.value[c] < key) atomic_fold<true>(table + cell + c, key);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const Acc number = Monoid::load(bits[i].value[c], a.keys);
          if constexpr (has_halves<Monoid>) {
            add_halves(low + cell + c, low + cells + cell + c, number);
          } else {
            atomicAdd(table + cell + c, number);
          }
        }
      }
    }
  }
  __syncthreads();

  auto* partial = reinterpret_cast<Acc*>(a.workspace + o * a.workspace_bytes) + slice * cells;
  Bits* const out = static_cast<Bits*>(a.out) + o * cells;
  for (int cell = thread; cell < cells; cell += threads) {
    auto total = static_cast<Acc>(table[cell]);
    if constexpr (has_halves<Monoid>) total = static_cast<Acc>(low[cells + cell]) << 32 | low[cell];
    if (a.slices == 1) {
      out[cell] = Monoid::store(total, a.keys);
    } else {
      partial[cell] = total;
    }
  }
}

}  // namespace

cudaError_t launch_segment_wide_tables(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                       const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  return dispatch_monoid(problem, [&](auto monoid) -> cudaError_t {
    using Monoid = decltype(monoid);
    if constexpr (has_one_table<Monoid>) {
      constexpr int64_t kBytes = sizeof(typename Monoid::Bits);
      // Vectors begin at whole vectors if rows and the data do.
      const auto divides = [&](int64_t columns) {
        return a.inner % columns == 0 && reinterpret_cast<uintptr_t>(a.data) % (columns * kBytes) == 0;
      };
      auto* kernel = segment_wide_tables_kernel<Monoid, 1>;
      if (divides(2)) kernel = segment_wide_tables_kernel<Monoid, 2>;
      if constexpr (kBytes <= 4)
        if (divides(4)) kernel = segment_wide_tables_kernel<Monoid, 4>;
      Launch config;
      config.block = dim3(32 * plan.warps);
      config.grid = dim3(static_cast<unsigned>(problem.rows.outer * a.slices));
      config.shared_bytes = a.segments * a.inner * sizeof(TableWord<Monoid>);
      return launch(stream, config, kernel, a);
    }
    return cudaErrorInvalidValue;  // plans never choose this kernel for sums of floats
  });
}

}  // namespace jaxgpuops::segments
