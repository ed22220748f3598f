// The places of the elements of short rows, by comparing all with all.
#pragma once

#include "topk/cuda/delegates.cuh"

namespace jaxgpuops::topk {

// Words that are loaded together, a vector of 16 bytes or two.
template <class Word>
struct alignas(16) Four {
  Word word[4];
};

// A team of kLanes lanes has a row of up to kLanes * kEach elements: element t + e * kLanes is own[e] of lane t. Counts
// in before[e] how many elements of the row come before it. Words of elements that do not exist are 0. `all` has room
// for a word of each element, as vectors of 16 bytes. All lanes of the warp call it; if a team has more lanes, all
// threads of the block.
//
// No step depends on k or on the data. The words are in shared memory, where lanes read four at a time, and the loop is
// short, since few rows mostly wait for the code to be fetched.
template <class Order, int kLanes, int kEach>
__device__ __forceinline__ void rank_in_team(typename Order::Word* all, const typename Order::Word (&own)[kEach],
                                             uint32_t t, uint32_t length, uint32_t (&before)[kEach]) {
#pragma unroll
  for (uint32_t e = 0; e < kEach; ++e) all[t + e * kLanes] = own[e], before[e] = 0;
  if constexpr (kLanes > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
#pragma unroll(kLanes* kEach > 32 ? 4 : 2)
  for (uint32_t j = 0; j < length; j += 4) {
    const auto four = *reinterpret_cast<const Four<typename Order::Word>*>(all + j);
#pragma unroll
    for (uint32_t q = 0; q < 4; ++q) {
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e) {
        if constexpr (Order::kDistinct) {
          count_less(before[e], own[e], four.word[q]);
        } else {
          count_before(before[e], own[e], t + e * kLanes, four.word[q], j + q);
        }
      }
    }
  }
}

}  // namespace jaxgpuops::topk
