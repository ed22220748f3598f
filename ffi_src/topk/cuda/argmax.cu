// k = 1: argmax, argmin and top-1, one read of the input.
//
// The result is the candidate (key, index) with the largest key, among equals the one with the lowest index. That is a
// total order, so neither the order of the reduction nor the number of blocks that share a row matters.
//
//   teams    inner is 1, and rows are short: lanes of a warp share a row, and hold it in registers. They compare all of
//            it, then look for the best element's first place.
//   packed   inner is 1, and a vector of 16 bytes holds several rows, all of which one thread has.
//   tiles    A block copies whole outer indices to shared memory, by aligned vectors wherever they begin, and 1 to 32
//            lanes share each column (each row, if inner is 1). For short rows, and small planes of columns.
//   rows     inner is 1. A warp has a row: a lane finds the largest key of its vectors, and which batch of loads had it
//            first; only lanes that have the largest of the warp look the element up again. Or a block has a row or a
//            slice of one: a thread keeps the best element of each place of its vectors. About five instructions for
//            each word: narrow types run at memory speed, too.
//   columns  A block reads vectors of 16 bytes, at steps that are whole rows of columns: so each place of a vector
//            stays with one column, and a thread keeps the best of each place. Where inner is short, a step is several
//            rows; if a vector has all columns, warps merge their candidates without shared memory.
//   strided  The same by single elements, or words of elements of 8 or 16 bits: for arrays that are not large, where
//            vectors would not stay with their columns (inner is long, and odd), and where the axis is short: then a
//            thread has whole columns (sheets: several).
//   planes   The axis is short, and many columns are whole vectors: a thread has a vector of columns from the first
//            element to the last.
//   small    Few elements in all, one by one (common/cuda/small.cuh).
//   blocks   The same along longer axes: a block, or a cluster of blocks, has a column.
//
// Most forms have a file of their own. If blocks share a row, each leaves a candidate for a second kernel, which finds
// the best of them; or they are a cluster, whose first block does.
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

// Of columns. (argmax_rows.cu has the same for rows.)
template <class Key>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_finish(const __grid_constant__ Argmax a, uint32_t team) {
  const uint32_t lane = threadIdx.x & (team - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kArgmaxThreads / team) + threadIdx.x / team;
  wait_for_predecessor();
  Candidate<Key> c = {0, ~0u};
  if (row < a.outer * a.inner) {
#pragma unroll 4
    for (uint32_t i = lane; i < a.slices; i += team)
      c.merge(reinterpret_cast<const Candidate<Key>*>(a.workspace)[row * a.slices + i]);
  }
  if (team > 1) merge_team(c, team);
  if (lane != 0 || row >= a.outer * a.inner) return;
  const int64_t outer = row / a.inner;
  write<Key>(a, outer, static_cast<uint32_t>(row - outer * a.inner), c.index);
}

cudaError_t launch_form(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem, const Argmax& a,
                        bool overlap) {
  switch (shape.form) {
    case ArgmaxForm::kTeams: return launch_argmax_teams(stream, shape, problem, a);
    case ArgmaxForm::kPacked: return launch_argmax_packed(stream, problem, a);
    case ArgmaxForm::kTiles: return launch_argmax_tiles(stream, shape, problem, a);
    case ArgmaxForm::kRows: return launch_argmax_rows(stream, shape, problem, a, overlap);
    case ArgmaxForm::kColumns: return launch_argmax_columns(stream, shape, problem, a);
    case ArgmaxForm::kStrided:
    case ArgmaxForm::kSheets:
    case ArgmaxForm::kPlanes: return launch_argmax_strided(stream, shape, problem, a);
    case ArgmaxForm::kSmall: return launch_argmax_small(stream, shape, problem, a);
    case ArgmaxForm::kBlocks: return launch_argmax_blocks(stream, shape, problem, a);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_argmax_kernels(cudaStream_t stream, const Plan& plan, const ArgProblem& problem,
                                  const Buffers& buffers) {
  const Rows& rows = problem.rows;
  Argmax a = {call_of({rows, 1, problem.key_bits, problem.order.order}, buffers)};
  a.outer = rows.outer;
  const bool aligned = reinterpret_cast<uintptr_t>(buffers.x) % 16 == 0;
  ArgmaxShape shape = argmax_shape(rows, problem.key_bits / 8, aligned);
  if (shape.form == ArgmaxForm::kPacked && reinterpret_cast<uintptr_t>(buffers.indices) % 16 != 0)
    shape = argmax_shape(rows, problem.key_bits / 8, false);  // it would store vectors of indices
  const bool unshared = shape.form == ArgmaxForm::kBlocks && rows.length > kArgmaxUnshared &&
                        (plan.slices == 1 || plan.workspace_bytes > 0);
  if (unshared || plan.slices % shape.period != 0) shape = argmax_strided_shape(rows, problem.key_bits / 8, aligned);
  // As many slices as needed, so that none is empty.
  const Rows turns = {rows.outer, (rows.length + shape.period - 1) / shape.period, rows.inner};
  const int64_t slice = argmax_slice(turns, plan.slices / shape.period);
  a.slice = static_cast<uint32_t>(slice);
  a.slices = shape.form == ArgmaxForm::kBlocks
                 ? static_cast<uint32_t>(plan.slices)
                 : static_cast<uint32_t>((turns.length + slice - 1) / slice * shape.period);
  a.cluster = a.slices > 1 && plan.workspace_bytes == 0;
  const cudaError_t status = launch_form(stream, shape, problem, a, plan.overlap);
  if (status != cudaSuccess || a.slices == 1 || a.cluster || shape.form == ArgmaxForm::kRows) return status;
  const uint32_t team = a.slices > 128 ? kArgmaxThreads : a.slices > 8 ? 32 : 1;
  Launch last = {dim3(static_cast<unsigned>((rows.count() * team + kArgmaxThreads - 1) / kArgmaxThreads)),
                 dim3(kArgmaxThreads)};
  last.overlap = plan.overlap;
  return dispatch_key(problem.key_bits,
                      [&](auto key) { return launch(stream, last, argmax_finish<decltype(key)>, a, team); });
}

}  // namespace jaxgpuops::topk
