// Sums of long columns of 16-bit floats whose lines are not whole vectors (RowPlan::single of kColumnsFlat). Threads
// read aligned windows of 16 bytes, wherever lines begin: a window holds the last columns of one line and the first of
// the next, or ends beyond the columns of the block. (Where each thread put vectors of the same columns together out of
// two windows, 40 x 3001 x 301 bfloat16 took 45 us; it takes 28.)
//
// A record is some lines of all columns, if lines are short, or a part of one line. A block takes `deep` records at a
// time, at distances that are whole vectors, so a window of a thread always holds the same columns: a thread adds up
// each of them alone, in the order of positions. Then the block merges the threads that share columns, and the blocks
// that share columns are merged by a cluster or, if they are many, by a second kernel in the same order. That order
// follows from the length, the number of columns and the type: where a window begins does not change it. One read.
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

constexpr int kBatch = 8;           // windows that a thread loads at a time
constexpr int kMergedColumns = 32;  // columns of a block of merge_parts_kernel
constexpr int kMergeThreads = 256;
constexpr int kMostThreads = 512;

template <class P>
struct LooseColumns {
  const void* x;
  row_engine::Stat<P>* parts_of_strips;  // workspace: [outer][strip][part][column of the strip]
  int64_t outer, length, inner;
  uint32_t strips, across;   // strips of the columns, and columns of one
  int lines, windows, deep;  // lines and windows of a record; records that a block takes at a time
  uint32_t parts;
  int64_t part_records;  // records of a block
  bool cluster;
  typename P::Args args;
};

// Writes the results of `count` columns of a strip from number `first` on.
template <class P>
__device__ __forceinline__ void write_columns(const LooseColumns<P>& p, uint32_t strip_of_all, uint32_t first,
                                              uint32_t count, const row_engine::Stat<P>* stats) {
  const uint32_t outer = strip_of_all / p.strips, strip = strip_of_all - outer * p.strips;
  for (uint32_t c = threadIdx.x; c < count; c += blockDim.x) {
    const int64_t i = int64_t{strip} * p.across + first + c;
    if (i < p.inner) P::write_row(p.args, outer * p.inner + i, {}, P::finish(p.args, {}, stats[c]));
  }
}

template <class P>
__global__ void __launch_bounds__(kMostThreads, 2) loose_columns_kernel(const __grid_constant__ LooseColumns<P> p) {
  using E = typename P::Element;
  using Bits = typename P::Bits;
  using Stat = row_engine::Stat<P>;
  constexpr int kWidth = 16 / sizeof(Bits);
  if (p.cluster) {
    arrive_at_cluster_start();
  } else {
    let_dependents_start();
  }
  const uint32_t strip_of_all = blockIdx.x / p.parts, part = blockIdx.x - strip_of_all * p.parts;
  const uint32_t outer = strip_of_all / p.strips, strip = strip_of_all - outer * p.strips;
  const int record_of_block = threadIdx.x / static_cast<unsigned>(p.windows);
  const int window = threadIdx.x - record_of_block * p.windows;
  const int64_t begin = part * p.part_records, records = (p.length + p.lines - 1) / p.lines;
  const int64_t end = min(begin + p.part_records, records), stride = p.lines * p.inner;
  const int elements = p.lines * static_cast<int>(p.across);  // of a record
  int64_t record = begin + record_of_block;
  const Bits* const of_outer = static_cast<const Bits*>(p.x) + outer * p.length * p.inner + int64_t{strip} * p.across;
  const Bits* from = of_outer + record * stride;
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16 / sizeof(Bits));
  const int first = window * kWidth - before;  // the window's first element, in the record
  from += first;
  const bool active = record_of_block < p.deep && first < elements;

  Stat stats[kWidth];
#pragma unroll
  for (auto& stat : stats) stat = Stat::none();
  if (active) {
    const auto add = [&](const Pack& pack) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) stats[i].sum(0) = stats[i].sum(0) + E::load(get<Bits>(pack, i));
    };
    const int64_t step = p.deep * stride;
    // Adds a record of which the array, or the axis, may end within the window.
    const auto add_elements = [&] {
      const int64_t there =
          p.strips > 1 ? p.inner - int64_t{strip} * p.across : (p.length - record * p.lines) * p.inner;
      const int last = static_cast<int>(min(there, int64_t{elements}));
      Pack pack;
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        set<Bits>(pack, i, first + i >= 0 && first + i < last ? from[i] : P::pad(p.args, 0));
      add(pack);
      record += p.deep;
      from += step;
    };
    if (record == 0 && outer == 0 && strip == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 != 0 && end > 0)
      add_elements();
    // Records whose windows lie in the array.
    const int64_t beyond = outer + 1 == p.outer ? 1 + 15 / (stride * static_cast<int64_t>(sizeof(Bits))) : 0;
    int left = static_cast<int>(min(end, p.length / p.lines - beyond) - record);
    Pack padding;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(padding, i, P::pad(p.args, 0));
#pragma unroll 1
    for (; left > 0; left -= kBatch * p.deep) {
      Pack packs[kBatch];
      int rest = left;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        packs[b] = padding;
        if (rest > 0) {
          packs[b] = row_engine::load_pack(reinterpret_cast<const Pack*>(from));
          from += step;
          record += p.deep;
        }
        rest -= p.deep;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) add(packs[b]);
    }
#pragma unroll 1
    while (record < end) add_elements();
  }
  auto* const of_records = reinterpret_cast<Stat*>(dynamic_shared_memory());
  if (active) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (first + i >= 0 && first + i < elements) of_records[record_of_block * elements + first + i] = stats[i];
  }
  __syncthreads();
  row_engine::fold_flat<P>(of_records, p.deep * p.lines, p.across);
  if (p.parts == 1) return write_columns<P>(p, strip_of_all, 0, p.across, of_records);
  if (!p.cluster) {
    for (uint32_t i = threadIdx.x; i < p.across; i += blockDim.x)
      p.parts_of_strips[int64_t{blockIdx.x} * p.across + i] = of_records[i];
    return;
  }
  // The first block of the cluster gets the statistics of all.
  Stat* const of_parts = of_records + p.deep * p.lines * p.across;
  wait_at_cluster_barrier();
  for (uint32_t i = threadIdx.x; i < p.across; i += blockDim.x)
    store_in_cluster(&of_parts[part * p.across + i], 0, of_records[i]);
  arrive_at_cluster_barrier();
  if (part != 0) return;
  wait_at_cluster_barrier();
  row_engine::fold_flat<P>(of_parts, p.parts, p.across);
  write_columns<P>(p, strip_of_all, 0, p.across, of_parts);
}

// A block merges the parts of up to kMergedColumns columns of a strip.
template <class P>
__global__ void __launch_bounds__(kMergeThreads) merge_parts_kernel(const __grid_constant__ LooseColumns<P> p) {
  using Stat = row_engine::Stat<P>;
  auto* const stats = reinterpret_cast<Stat*>(dynamic_shared_memory());
  const uint32_t first = blockIdx.y * kMergedColumns, columns = min(p.across - first, uint32_t{kMergedColumns});
  const Stat* const from = p.parts_of_strips + int64_t{blockIdx.x} * p.parts * p.across + first;
  const uint32_t all = p.parts * columns;
  wait_for_predecessor();
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < all; i += kMergeThreads) {
    const uint32_t part = i / columns;
    stats[i] = from[part * p.across + i - part * columns];
  }
  __syncthreads();
  row_engine::fold_flat<P>(stats, p.parts, columns);
  write_columns<P>(p, blockIdx.x, first, columns, stats);
}

template <class P>
cudaError_t launch_columns(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                           void* workspace) {
  const Rows& rows = problem.rows;
  LooseColumns<P> p = {};
  p.x = buffers.x;
  p.parts_of_strips = static_cast<row_engine::Stat<P>*>(workspace);
  p.outer = rows.outer, p.length = rows.length, p.inner = rows.inner;
  p.strips = static_cast<uint32_t>(plan.slices);
  p.across = static_cast<uint32_t>(plan.across);
  p.lines = plan.turns;
  p.windows = plan.period;
  p.deep = plan.deep;
  p.parts = static_cast<uint32_t>(plan.blocks);
  p.part_records = plan.part_length / plan.turns;
  p.cluster = plan.blocks > 1 && !plan.split;
  p.args = parameters_of<P>(problem, buffers).args;
  const int64_t strips = rows.outer * plan.slices, blocks = strips * plan.blocks;
  if (blocks > INT32_MAX || plan.threads() > kMostThreads) return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  launched.block = dim3(plan.threads());
  launched.shared_bytes =
      (plan.deep * plan.turns + (p.cluster ? plan.blocks : 0)) * plan.across * sizeof(row_engine::Stat<P>);
  if (p.cluster) launched.cluster = static_cast<int>(plan.blocks);
  const auto kernel = loose_columns_kernel<P>;
  cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), launched.cluster);
  if (status == cudaSuccess) status = launch(stream, launched, kernel, p);
  if (status != cudaSuccess || !plan.split) return status;
  Launch merging;
  merging.grid = dim3(static_cast<unsigned>(strips), (p.across + kMergedColumns - 1) / kMergedColumns);
  merging.block = dim3(kMergeThreads);
  merging.shared_bytes = plan.blocks * std::min(plan.across, kMergedColumns) * sizeof(row_engine::Stat<P>);
  merging.overlap = plan.overlap;
  return launch(stream, merging, merge_parts_kernel<P>, p);
}

}  // namespace

cudaError_t launch_loose_columns(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                 const Buffers& buffers, void* workspace) {
  return with_float(problem.dtype, [&](auto element) -> cudaError_t {
    using P = Sum<decltype(element), false>;
    if constexpr (sizeof(typename P::Bits) == 2) {
      return launch_columns<P>(stream, plan, problem, buffers, workspace);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxgpuops::reduce
