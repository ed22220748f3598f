// Puts the results of each row, which another kernel has written in the order of keys, into the order of indices: for
// kernels that only sort (the sieve). A block sorts the results of a row, up to kMaxSieveK, in shared memory.
//
// Bytes moved: the results, twice.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/sieve_shape.h"

namespace jaxgpuops::topk {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kRoom = kMaxSieveK;
constexpr size_t kControl = stream_control_bytes(sizeof(uint64_t), kThreads);

template <class Key>
__global__ void __launch_bounds__(kThreads) reorder_kernel(const __grid_constant__ Call a) {
  using C = Composite<Key>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  static_assert(sizeof(Shared<kThreads, C>) <= kControl);
  auto& s = *reinterpret_cast<Shared<kThreads, C>*>(shared_bytes);
  C* const buffer = reinterpret_cast<C*>(shared_bytes + kControl);
  const int64_t row = blockIdx.x;
  const Packing<Key> packing = Packing<Key>::make(a.length);
  wait_for_predecessor();
  for (uint32_t i = threadIdx.x; i < a.k; i += kThreads) {
    const int64_t from = a.place(row, i);
    const Key key = encode(static_cast<const Key*>(a.values)[from], a.order);
    buffer[i] = packing.pack(key, static_cast<uint32_t>(a.indices[from]));
  }
  __syncthreads();
  write_selected<kThreads, Key>(s, a, packing, buffer, buffer + kRoom, kRoom, row);
}

}  // namespace

cudaError_t launch_reorder(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kControl + 2 * kRoom * sizeof(uint64_t);
  shape.overlap = plan.overlap;
  const auto kernel = problem.key_bits == 16 ? reorder_kernel<uint16_t> : reorder_kernel<uint32_t>;
  return launch(stream, shape, kernel, call_of(problem, buffers));
}

}  // namespace jaxgpuops::topk
