// Transposes the results of columns that were transposed to rows: values and indices together, in one launch.
//
// Bytes moved: every result is read and written once. Threads write neighbouring places, and read from as many lines as
// columns lie side by side, which the L1 cache serves.
#include "common/cuda/launch.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

constexpr int kThreads = 256;

template <class Key>
__global__ void __launch_bounds__(kThreads)
    turn_back_kernel(const Key* __restrict__ values, const int32_t* __restrict__ indices, Key* __restrict__ to_values,
                     int32_t* __restrict__ to_indices, uint32_t k, uint32_t inner, uint32_t results) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= results) return;
  const uint32_t line = i / inner, column = i - line * inner, outer = line / k, place = line - outer * k;
  const uint32_t from = (outer * inner + column) * k + place;
  to_values[i] = values[from];
  to_indices[i] = indices[from];
}

}  // namespace

cudaError_t launch_turn_back(cudaStream_t stream, const Problem& problem, const void* values, const int32_t* indices,
                             const Buffers& buffers) {
  const auto results = static_cast<uint32_t>(problem.rows.count() * problem.k);
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return launch(stream, {dim3((results - 1) / kThreads + 1), dim3(kThreads)}, turn_back_kernel<Key>,
                  static_cast<const Key*>(values), indices, static_cast<Key*>(buffers.values), buffers.indices,
                  static_cast<uint32_t>(problem.k), static_cast<uint32_t>(problem.rows.inner), results);
  });
}

}  // namespace jaxgpuops::topk
