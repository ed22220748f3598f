// Copies that go on by themselves, and the barriers in shared memory that tell when they have ended: from global to
// shared memory by the copy engine, one thread asking for all of it, and of registers into the shared memory of a block
// of the cluster. Nobody waits for what else a thread has written, as a cluster barrier does. Compute capability 9.0.
#pragma once

#include <cstdint>

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

// One thread; others, and the copy engine, see the barriers after make_barriers_visible() and a barrier of threads. Of
// so many arrivals, of which expect_copies() is one.
__device__ __forceinline__ void make_copy_barrier(uint64_t* barrier, int arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
// After what this thread has stored.
__device__ __forceinline__ void arrive_at(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void make_barriers_visible() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The same where the copy engine has nothing to do with them: only for copy_to_block(), from other blocks.
__device__ __forceinline__ void make_barriers_visible_to_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// What this thread has stored in shared memory comes before copies to there that are asked for after this.
__device__ __forceinline__ void order_with_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// One thread: the barrier's next phase ends after copies of so many bytes.
__device__ __forceinline__ void expect_copies(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// To the L2 cache. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#endif
}

// 0 to count - 1 and again, for a counter in shared memory. Who counts last sees what others stored before they
// counted.
__device__ __forceinline__ int count_in_turn(unsigned* counter, int count) {
  unsigned before = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(counter)), "r"(count - 1)
               : "memory");
#endif
  return static_cast<int>(before);
}

// To where `to` is in the shared memory of a block of the cluster, and told to its barrier.
template <class T>
__device__ __forceinline__ void copy_to_block(T* to, uint64_t* barrier, unsigned rank, T value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address, told;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(shared_address(barrier)), "r"(rank));
  const auto words = bits_as<WordsOf<T>>(value);
  constexpr int kWords = sizeof(T) / 4, kTogether = kWords % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int w = 0; w < kWords; w += kTogether) {
    if constexpr (kTogether == 2) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                       address + 4 * w),
                   "r"(words.word[w]), "r"(words.word[w + 1]), "r"(told)
                   : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address + 4 * w),
          "r"(words.word[w]), "r"(told)
          : "memory");
    }
  }
#endif
}

// Until the phase of this parity (that of the first is 0) has ended.
__device__ __forceinline__ void wait_for_copies(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

}  // namespace jaxgpuops
