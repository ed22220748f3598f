// Asynchronous copies, and the barriers in shared memory (mbarrier) that signal when they are complete. There are two
// kinds: copy_bulk() lets the copy engine bring a contiguous piece from global to shared memory; copy_to_block() stores
// registers into the shared memory of another block of the cluster. Unlike a cluster barrier, these barriers wait for
// the copies alone. They need compute capability 9.0.
#pragma once

#include <cstdint>

#include "common/cuda/intrinsics.cuh"

namespace jaxgpuops {

// Initialises a barrier for `arrivals` arrivals, of which expect_copies() is one. One thread calls this. The barrier is
// visible to other threads and to the copy engine after make_barriers_visible() and __syncthreads().
__device__ __forceinline__ void make_copy_barrier(uint64_t* barrier, int arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
// Arrives at the barrier. Threads that wait for it see what this thread stored before.
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

// Makes initialised barriers visible that copy_to_block() of other blocks uses, but not the copy engine.
__device__ __forceinline__ void make_barriers_visible_to_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Makes bulk copies that are issued later overwrite this thread's earlier stores to the same shared memory, and not the
// reverse.
__device__ __forceinline__ void order_with_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Makes the current phase of the barrier also wait for copies of this many bytes. One thread calls this.
__device__ __forceinline__ void expect_copies(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Starts a bulk copy that signals the barrier. Addresses and the number of bytes must be multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// Starts a bulk copy from shared to global memory, of what bulk copies brought there. Addresses and the number of bytes
// must be multiples of 16.
__device__ __forceinline__ void copy_bulk_back(void* to, const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
#endif
}
// Waits until all that this thread's copy_bulk_back() calls copy has been read. The block must not end before that.
__device__ __forceinline__ void wait_for_copies_back() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// Prefetches into the L2 cache. Addresses and the number of bytes must be multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#endif
}

// Increments a counter in shared memory that goes from 0 to count - 1 and then starts again, and returns the value
// before. The thread that gets count - 1 sees everything that the other threads stored before their calls.
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

// Copies a value to the address `to` in the shared memory of block `rank` of the cluster, and signals the barrier of
// that block at the address `barrier`.
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

// Waits until the phase with this parity has ended. The first phase has parity 0.
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
