// The state of a block of the first kernel of kBuckets.
#pragma once

#include "topk/cuda/buckets.cuh"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

// The functions are the phases of the kernel, in the order in which they run.
template <class Key, bool kColumns>
struct Block {
  using C = Composite<Key>;
  using Row = RowVectors<Key>;
  using Word = typename Filter<Key>::Word;
  static constexpr uint32_t kVector = Row::kVector, kWords = 16 / sizeof(Word);
  static constexpr uint32_t kLoads = sizeof(Key) == 1 ? 2 : 4;  // 32 elements at most, one bit each

  const Buckets& a;
  Shared<kBucketsThreads, C>& s;
  C* const buffer;
  const uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int64_t row = a.first_row + blockIdx.x / a.slices;
  const uint32_t rank = blockIdx.x % a.slices;
  const uint32_t beside = kColumns ? static_cast<uint32_t>(a.inner) : 1;  // columns side by side,
  const uint32_t column = kColumns ? static_cast<uint32_t>(row % beside) : 0;
  const Row all{static_cast<const Key*>(a.x) + (row - column) * a.length, a.length * beside};  // and all their elements
  const Packing<Key> packing = Packing<Key>::make(a.length);
  const Exchange<C> exchange{a, row};
  uint32_t target = 0;  // arrivals at the barriers of the row, see meet()
  C threshold = 0;

  __device__ __forceinline__ Block(const Buckets& a, unsigned char* shared_bytes)
      : a(a),
        s(*reinterpret_cast<Shared<kBucketsThreads, C>*>(shared_bytes)),
        buffer(reinterpret_cast<C*>(shared_bytes + buckets_control(sizeof(C)))) {
    static_assert(sizeof(Shared<kBucketsThreads, C>) <= buckets_control(sizeof(C)));
  }

  // Element i of the row or column.
  __device__ __forceinline__ Key element(uint32_t i) const {
    return __ldg(all.x + (kColumns ? static_cast<uint64_t>(i) * beside + column : i));
  }
  __device__ __forceinline__ C at(uint32_t i) const { return packing.pack(encode(element(i), a.order), i); }

  __device__ __forceinline__ void begin() const {
    if (rank != 0) return;
    if (tid == 0) *exchange.arrivals = 0, *exchange.found = a.by_index ? a.k : 0;
#pragma unroll 1
    for (uint32_t b = tid; b <= a.splitters; b += kBucketsThreads) exchange.counts[b] = 0;
  }

  // If the sample divides the candidates, it stays behind what the block stages, in order.
  __device__ __forceinline__ C* samples() const { return buffer + kStaged<C>; }

  // Every block finds the same threshold, so that the blocks of a row need not wait for each other.
  __device__ void sample();
  // Appends all elements of this block's part of the row that reach the threshold to the list of the row.
  __device__ void filter();
  // The same for all columns side by side.
  __device__ void filter_columns();
  // Appends what the block has staged to the list.
  __device__ void append();
  // Moves what the blocks have staged to its buckets, between which the samples lie. Returns false, and moves nothing,
  // if a block had no room, or if the threshold is of no use.
  __device__ bool divide_staged();
  // Finds another threshold, where the sampled one is of no use, and lists what reaches it.
  __device__ void repair();
  // Moves the candidates from the list to their buckets.
  __device__ void divide();

 private:
  // Sorts so many values, a power of two, from `to` on, where there must be room for them twice, and returns where they
  // are. Each warp sorts 32 of them at a time. Then neighbouring runs are merged: a value's place is its rank in its
  // own run plus that in the other one, behind the equal values of an earlier run. (Threads may sample the same
  // element.)
  template <class Load>
  __device__ C* sorted(C* to, uint32_t count, Load load) const;

  __device__ __forceinline__ uint32_t reserve(uint32_t count) {
    uint32_t at = 0;
    if (lane == 0) at = atomicAdd(exchange.found, count);
    return __shfl_sync(kEveryLane, at, 0);
  }
};

}  // namespace

}  // namespace jaxgpuops::topk
