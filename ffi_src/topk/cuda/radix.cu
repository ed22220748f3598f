// Top-k for large k. The k-th element of each row is selected, and the elements up to it are gathered in the order of
// their indices: that alone is `sorted=False`. A stable radix sort of the k elements follows otherwise.
//
// Bytes moved: the row is mostly read twice; k elements and indices are written, and then read and written by each pass
// of the sort. select/cuda/long.cu and firsts.cuh select and gather, sort/cuda/sweep.cu sorts.
#include "select/cuda/launch.h"
#include "sort/cuda/launch.h"
#include "topk/cuda/kernels.h"
#include "topk/cuda/radix_shape.h"

namespace jaxgpuops::topk {

cudaError_t launch_radix(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  select::Select select = select::firsts_of(problem.rows, problem.k, problem.key_bits);
  // There, smaller keys come first. Without a rule for NaNs and zeros, floats are in their total order.
  select.order = {{problem.order}, ~uint64_t{0}};
  const auto gather = [&](void* values, int32_t* indices, void* workspace) {
    return select::launch_firsts(stream, plan.whole.select, select, buffers.x, {values, indices}, workspace);
  };
  if (!problem.sorted) return gather(buffers.values, buffers.indices, buffers.workspace);
  const RadixShape shape(problem.rows, problem.k, problem.key_bits / 8);
  auto* const gathered = static_cast<unsigned char*>(buffers.workspace);
  auto* const indices = reinterpret_cast<int32_t*>(gathered + shape.indices);
  void* const rest = gathered + shape.bytes;
  const cudaError_t error = gather(gathered, indices, rest);
  if (error != cudaSuccess) return error;
  sort::Problem chosen;
  chosen.rows = {problem.rows.count(), problem.k, 1};
  chosen.k = problem.k;
  chosen.key_bits = problem.key_bits;
  chosen.order = select.order;
  chosen.carries = true;
  return sort::launch_sort(stream, plan.whole, chosen, gathered, buffers.values, buffers.indices, rest, nullptr,
                           indices);
}

}  // namespace jaxgpuops::topk
