// Top-k of long rows for large k, in one read of the row, and of long columns of which few lie side by side, for any k.
//
// Each thread samples elements of the row at places that depend on nothing but the length, as if by chance. The best
// ones of the threads give a threshold that somewhat more than k elements of the row reach. It is a key with an index,
// as all candidates are, so that elements that tie with it do not matter. The blocks of a row read it and stage what
// reaches the threshold in shared memory. For large k, the threads' best samples, sorted, divide that into buckets:
// each block counts its candidates, the blocks meet, and move the candidates to their buckets. If these buckets would
// be large, or a block has no room, the blocks append their candidates to one list first, of which a sample, sorted,
// divides it. A second kernel sorts neighbouring buckets in shared memory, and writes. For results in the order of
// indices, what it has selected is divided and sorted once more, with indices above keys.
//
// Columns have as many blocks as if they were rows. Those of a column find its threshold; then those of all columns
// side by side read them together, and append to the list of each column what reaches its threshold. From there on
// columns are rows.
//
// If fewer than k elements reach the threshold, or more than there is room for, digits of the composites find another
// one, with a read of the row each. If buckets have too many candidates for shared memory, they are sorted in the
// workspace. Both hardly ever happen, and are slow.
//
// If candidates are few, they are not divided: one block sorts the whole list. If one block has all k candidates, it
// also sorts them for results in the order of indices.
//
// Bytes moved: the input once, k results (value and index), and each candidate, of which there are 1.5 to 4 times k
// (more where k is a small part of the row), two to five times. All composites are distinct, so neither the order of
// the list nor timing can change a result. Sources: sample sort (Frazer & McKellar 1970), Floyd & Rivest's SELECT
// (1975).
//
// The phases of the first kernel are in buckets_sample.cuh, buckets_filter.cuh and buckets_divide.cuh, and the second
// kernel in buckets_sort.cu.
#include <cooperative_groups.h>

#include <algorithm>
#include <utility>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "topk/cuda/buckets_divide.cuh"
#include "topk/cuda/buckets_filter.cuh"
#include "topk/cuda/buckets_sample.cuh"

namespace jaxgpuops::topk {
namespace {

namespace cg = cooperative_groups;

template <class Key, bool kColumns>
__global__ void __launch_bounds__(kBucketsThreads, kBucketsResident) buckets_kernel(const __grid_constant__ Buckets a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Block<Key, kColumns> block(a, shared_bytes);
  block.begin();
  if (a.by_index) {
    cg::this_grid().sync();
  } else {
    if constexpr (kColumns) {
      block.sample();
      if (block.rank == 0 && threadIdx.x == 0) *block.exchange.threshold = block.threshold;
      cg::this_grid().sync();
      block.filter_columns();
    } else {
      auto token = cg::this_grid().barrier_arrive();
      block.sample();
      cg::this_grid().barrier_wait(std::move(token));
      block.filter();
      if (a.direct && block.divide_staged()) return;
      block.append();
    }
    const uint32_t found = __ldcg(block.exchange.found);
    if (found < a.k || found > a.room) block.repair();
    if (a.alone && __ldcg(block.exchange.found) <= a.alone) return let_dependents_start();
  }
  block.divide();
}

template <class Key, bool kColumns>
cudaError_t run(cudaStream_t stream, const Problem& problem, bool overlap, Buckets a) {
  using C = Composite<Key>;
  const int64_t rows = problem.rows.count(), beside = problem.rows.inner;
  Launch shape;
  shape.block = dim3(kBucketsThreads);
  shape.shared_bytes = buckets_shared(sizeof(C));
  static Residents of_kernel;
  int fitting = 0;
  cudaError_t status = of_kernel.count(reinterpret_cast<const void*>(buckets_kernel<Key, kColumns>), shape, &fitting);
  if (status != cudaSuccess) return status;
  if (fitting < beside) return cudaErrorCooperativeLaunchTooLarge;
  // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
  a.slices = std::min(a.slices, static_cast<uint32_t>(fitting / beside));
  const int64_t together = fitting / (a.slices * beside) * beside;
  shape.together = true;
  // Blocks that would have to stage too many candidates list them first.
  a.direct = a.direct && !kColumns && a.room / a.slices + 1024 <= kStaged<C>;
  // Small buckets of few rows are sorted by as many blocks as run at the same time.
  if (!a.direct || !a.sorted) a.window = buckets_window(sizeof(C));
  const auto windows_of = [&](uint32_t places) { return (a.k + places - 1) / places; };
  if (a.direct && a.sorted)
    while (a.window > buckets_window(sizeof(C)) / 4 && rows * windows_of(a.window / 2) <= fitting) a.window /= 2;
  const uint32_t windows = windows_of(a.window);
  a.alone = !a.direct && (a.sorted || windows == 1) ? kRoom<C> : 0;
  if (a.direct) a.splitters = std::max<uint32_t>(a.splitters, kBucketsThreads);
  Launch last = {dim3(static_cast<unsigned>(rows * windows)), dim3(kBucketsThreads), buckets_sort_shared(sizeof(C))};
  last.overlap = overlap;
  for (;; a.by_index = true) {
    for (a.first_row = 0; a.first_row < rows && status == cudaSuccess; a.first_row += together) {
      shape.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.slices));
      status = launch(stream, shape, buckets_kernel<Key, kColumns>, a);
    }
    if (status == cudaSuccess) status = launch_buckets_sort(stream, last, a, windows, problem.key_bits);
    if (status != cudaSuccess || a.sorted || a.by_index || windows == 1) return status;
  }
}

}  // namespace

cudaError_t launch_buckets(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const BucketsShape shape = buckets_shape(problem.rows.length, problem.k, problem.key_bits / 8);
  Buckets a = {call_of(problem, buffers)};
  a.row_bytes = shape.bytes;
  a.slices = static_cast<uint32_t>(plan.slices);
  a.sample = shape.sample;
  a.reach = shape.reach;
  a.splitters = shape.splitters;
  a.room = static_cast<uint32_t>(shape.room);
  a.direct = shape.direct;
  a.window = static_cast<uint32_t>(shape.window);
  a.starts = shape.starts;
  a.list = shape.list;
  a.in_order = shape.in_order;
  const auto start = [&](auto key) {
    using Key = decltype(key);
    return problem.rows.inner > 1 ? run<Key, true>(stream, problem, plan.overlap, a)
                                  : run<Key, false>(stream, problem, plan.overlap, a);
  };
  return dispatch_key(problem.key_bits, start);
}

}  // namespace jaxgpuops::topk
