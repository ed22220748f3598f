// The second kernel of kBuckets, see buckets.cu: blocks sort neighbouring buckets in shared memory, and write.
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/buckets.cuh"

namespace jaxgpuops::topk {
namespace {

// Writes the candidates in_order[0, count) as the results from place `from` on. If these are to be in the order of
// indices, and are not yet, it lists them instead.
template <class Key>
__device__ __forceinline__ void write(const Buckets& a, const Composite<Key>* in_order, int64_t row, uint32_t from,
                                      uint32_t count) {
  const Packing<Key> packing = Packing<Key>::make(a.length);
  Composite<Key>* const list = Exchange<Composite<Key>>(a, row).list + from;
  const int64_t at = (row / a.inner * a.k + from) * a.inner + row % a.inner;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count; i += kBucketsThreads) {
    const Composite<Key> c = a.by_index ? packing.from_by_index(in_order[i]) : in_order[i];
    if (!a.sorted && !a.by_index) {
      list[i] = packing.by_index(c);
    } else {
      static_cast<Key*>(a.values)[at + i * a.inner] = decode(packing.key(c), a.order);
      a.indices[at + i * a.inner] = static_cast<int32_t>(packing.index(c));
    }
  }
}

// Sorts the buckets that begin within a window of places, or a list that was not divided, and writes them.
template <class C>
__global__ void __launch_bounds__(kBucketsThreads, kBucketsResident)
    buckets_sort_kernel(const __grid_constant__ Buckets a, uint32_t windows, int key_bits) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ uint32_t begin, end;
  auto& s = *reinterpret_cast<Shared<kBucketsThreads, C>*>(shared_bytes);
  C* buffer = reinterpret_cast<C*>(shared_bytes + buckets_control(sizeof(C)));
  const int64_t row = blockIdx.x / windows;
  const uint32_t window = blockIdx.x % windows, from = window * a.window, to = min(a.k, from + a.window);
  const Exchange<C> exchange(a, row);
  wait_for_predecessor();
  const uint32_t found = *exchange.found;
  const bool alone = a.alone && found <= a.alone;
  if (alone) {
    if (window) return;
    if (threadIdx.x == 0) begin = 0, end = found;
  } else {
    // If several buckets have the same start, only the first of them meets these conditions. The last start is at least
    // k.
    for (uint32_t b = threadIdx.x; b <= a.splitters + 1; b += kBucketsThreads) {
      const uint32_t start = exchange.starts[b], before = b ? exchange.starts[b - 1] : 0;
      if (start >= from && (b == 0 || before < from)) begin = start;
      if (start >= to && before < to) end = start;
    }
  }
  __syncthreads();
  if (begin >= to) return;
  const uint32_t m = end - begin, count = min(m, a.k - begin);
  C* in_order = (alone ? exchange.list : exchange.sorted) + begin;
  if (m <= kRoom<C>) {
    for (uint32_t i = threadIdx.x; i < m; i += kBucketsThreads) buffer[i] = in_order[i];
    if (threadIdx.x == 0) s.count = m;
    __syncthreads();
    sort_candidates<kBucketsThreads>(s, buffer, count, buffer + kRoom<C>, kRoom<C>);
  } else {
    sort_descending<kBucketsThreads>(in_order, m);
  }
  const bool has_all = !a.sorted && windows == 1;  // the block has all k elements, and sorts them by index
  if (m > kRoom<C> && has_all) {
    for (uint32_t i = threadIdx.x; i < count; i += kBucketsThreads) buffer[i] = in_order[i];
    __syncthreads();
  }
  if (m <= kRoom<C> || has_all) in_order = buffer;
  const auto finish = [&](auto key) {
    using Key = decltype(key);
    if (has_all) {
      write_selected<kBucketsThreads, Key>(s, a, Packing<Key>::make(a.length), buffer, buffer + kRoom<C>, kRoom<C>,
                                           row);
    } else {
      write<Key>(a, in_order, row, begin, count);
    }
  };
  if constexpr (sizeof(C) == 16) {
    finish(uint64_t{});
  } else {
    key_bits == 32 ? finish(uint32_t{}) : key_bits == 16 ? finish(uint16_t{}) : finish(uint8_t{});
  }
}

}  // namespace

cudaError_t launch_buckets_sort(cudaStream_t stream, const Launch& shape, const Buckets& a, uint32_t windows,
                                int key_bits) {
  const auto kernel =
      key_bits == 64 ? buckets_sort_kernel<Composite<uint64_t>> : buckets_sort_kernel<Composite<uint32_t>>;
  return launch(stream, shape, kernel, a, windows, key_bits);
}

}  // namespace jaxgpuops::topk
