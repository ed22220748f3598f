// What the kernels of kBuckets share: their arguments, and what the blocks of a row publish for each other.
#pragma once

#include "common/cuda/launch.cuh"
#include "topk/cuda/buckets_shape.h"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {

constexpr uint32_t kBucketsWarps = kBucketsThreads / 32;
template <class C>
constexpr uint32_t kStaged = buckets_staged(sizeof(C));  // candidates that a block stages
template <class C>
constexpr uint32_t kRoom = buckets_room(sizeof(C));

struct Buckets : Call {
  int64_t first_row;
  uint32_t slices;  // blocks that share a row
  uint32_t sample, reach, splitters, room;
  uint32_t alone;   // the most candidates of a row that are not divided
  uint32_t window;  // places within which buckets begin that one block sorts
  bool direct;      // the sample divides the candidates
  int64_t starts, list, in_order;
  bool by_index;  // the list has the k elements of the result, with their indices above their keys
};

// Loads what other blocks have written.
template <class C>
__device__ __forceinline__ C load_published(const C* from) {
  if constexpr (sizeof(C) == 16) {
    return bits_as<C>(__ldcg(reinterpret_cast<const uint4*>(from)));
  } else {
    return __ldcg(from);
  }
}

// What the blocks of a row publish for each other, in the workspace.
template <class C>
struct Exchange {
  uint32_t* arrivals;
  uint32_t* found;   // candidates on the list, or that found no place there
  C* threshold;      // of a column
  uint32_t* counts;  // of digits, then of buckets
  uint32_t* starts;  // where buckets begin, and where the last one ends
  C* list;
  C* sorted;  // the list in the order of buckets

  __device__ Exchange(const Buckets& a, int64_t row) {
    unsigned char* bytes = a.workspace_of(row);
    arrivals = reinterpret_cast<uint32_t*>(bytes);
    found = arrivals + 1;
    threshold = reinterpret_cast<C*>(arrivals + 8);
    counts = arrivals + 16;
    starts = reinterpret_cast<uint32_t*>(bytes + a.starts);
    list = reinterpret_cast<C*>(bytes + a.list);
    sorted = reinterpret_cast<C*>(bytes + a.in_order);
  }
};

// Sorts the buckets of all rows, each window of places by a block, and writes the results.
cudaError_t launch_buckets_sort(cudaStream_t, const Launch&, const Buckets&, uint32_t windows, int key_bits);

}  // namespace jaxgpuops::topk
