// The form "tiles" of argmax.cu.
#include "common/cuda/async_copy.cuh"
#include "topk/cuda/argmax.cuh"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key>
__device__ __forceinline__ void merge_lanes(Candidate<Key>& c, int lanes) {
  for (int d = lanes / 2; d; d /= 2) c.merge({shuffle_xor(c.key, d), shuffle_xor(c.index, d)});
}

// Lanes that read rows a power of two apart meet fewer bank conflicts if vectors change places within 128 bytes.
__device__ __forceinline__ uint32_t scattered(uint32_t byte, uint32_t mask) { return byte ^ (byte >> 3 & mask); }

template <class Key>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_tiles(const __grid_constant__ Argmax a, const Ranks<Key> ranks, uint32_t outers, int lane_bits) {
  constexpr uint32_t kSize = sizeof(Key), kVector = 16 / kSize;
  unsigned char* tile = dynamic_shared_memory();
  const uint32_t length = a.length, inner = static_cast<uint32_t>(a.inner);
  const uint32_t plane = length * inner;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * outers;
  const uint32_t count = static_cast<uint32_t>(smaller<int64_t>(outers, a.outer - first));
  const uint32_t elements = count * plane;
  const Key* x = static_cast<const Key*>(a.x) + first * plane;

  const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16);
  const RowVectors<Key> all(x, elements);
  const uint32_t body = misaligned ? 16 : 0;
  const bool whole = inner == 1 && misaligned == 0 && length % kVector == 0;
  const uint32_t mask = whole || plane * kSize % 16 == 0 ? 0x70 : 0;
  for (uint32_t v = threadIdx.x; v < all.vectors; v += kArgmaxThreads)
    copy_async(tile + scattered(body + 16 * v, mask), all.body() + v);
  commit_async_copies();
  if (threadIdx.x < all.loose()) {
    const uint32_t i = all.loose_index(threadIdx.x);
    *reinterpret_cast<Key*>(tile + scattered(misaligned + i * kSize, mask)) = x[i];
  }
  wait_for_async_copies<0>();
  __syncthreads();

  const uint32_t lanes = 1u << lane_bits, lane = threadIdx.x & (lanes - 1), columns = count * inner;
  for (uint32_t from = 0; from < columns; from += kArgmaxThreads >> lane_bits) {
    const uint32_t column = smaller(from + (threadIdx.x >> lane_bits), columns - 1);
    const uint32_t outer = inner == 1 ? column : column / inner;
    Candidate<Key> best = {0, 0};
    if (whole) {
      const uint32_t row_vectors = length / kVector, each = (row_vectors + lanes - 1) >> lane_bits;
      const uint32_t begin = smaller(lane * each, row_vectors - 1), end = smaller(begin + each, row_vectors);
      const uint32_t at = 16 * row_vectors * column;
      Places<Key> places;
#pragma unroll
      for (uint32_t& step : places.steps) step = begin;
#pragma unroll 2
      for (uint32_t v = begin; v < end; ++v)
        places.see(*reinterpret_cast<const uint4*>(tile + scattered(at + 16 * v, 0x70)), ranks, v);
      best = places.best_of_row();
    } else {
      const uint32_t at = misaligned + (outer * (plane - inner) + column) * kSize, step = lanes * inner * kSize;
      best.index = smaller(lane, length - 1);
      const auto look = [&](uint32_t byte, uint32_t i) {
        best.see(ranks(ranks.word(*reinterpret_cast<const Key*>(tile + byte))), i);
      };
      uint32_t byte = at + lane * inner * kSize;
      if (mask) {
#pragma unroll 4
        for (uint32_t i = lane; i < length; i += lanes, byte += step) look(scattered(byte, 0x70), i);
      } else {
#pragma unroll 4
        for (uint32_t i = lane; i < length; i += lanes, byte += step) look(byte, i);
      }
    }
    merge_lanes(best, lanes);
    if (lane == 0 && from + (threadIdx.x >> lane_bits) < columns)
      write<Key>(a, first + outer, column - outer * inner, best.index);
  }
}

}  // namespace

cudaError_t launch_argmax_tiles(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                const Argmax& a) {
  const dim3 blocks(static_cast<unsigned>((a.outer + shape.outers - 1) / shape.outers));
  const auto shared = static_cast<size_t>(argmax_shared_bytes(problem.rows, problem.key_bits / 8, shape));
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return launch(stream, {blocks, dim3(kArgmaxThreads), shared}, argmax_tiles<Key>, a, Ranks<Key>(problem.order),
                  static_cast<uint32_t>(shape.outers), shape.lane_bits);
  });
}

}  // namespace jaxgpuops::topk
