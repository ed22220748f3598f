// The parts that all scan kernels share: their parameters, the words in global memory by which blocks exchange folds,
// and the shared memory by which the warps of a block exchange them.
#pragma once

#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "scan/plan.h"
#include "scan/cuda/policy.h"
#include "scan/scan.h"

namespace jaxgpuops::scan {

// The parameters of a kernel. Each line of 64 bytes that a kernel reads is one more wait for the constant cache, so the
// maps, which are large, come last; most calls do without them.
struct Parameters {
  const void* operands[3];
  void* results[2];
  const void* h0;
  bool wide_h0;  // h0 is float32, and elements are smaller
  const uint8_t* starts;
  unsigned* counters_at;
  uint64_t* words;
  Options options;
  int64_t inner, columns;  // columns: outer * inner
  int64_t length;
  int tile, tiles;
  unsigned strips;
  int run_bits, axis_warps, column_bits, per_lane, levels, late, stages;
  int threads;      // threads of a block, without those that look ahead
  int runs, width;  // kSpans: runs of a warp, columns of a span
  // Parts into which `inner` is cut, each of `width` columns; 0 if a block has whole outer indices of a short axis.
  unsigned parts;
  int span_bytes, padding;         // bytes of an operand in shared memory; free bytes after each line of it
  int staged;                      // bit o: operand o comes to shared memory
  bool packed;                     // a run in shared memory is a whole number of packs
  uint64_t row_begins;             // kPacks: bit i is set if i is a multiple of the length
  uint32_t of_length;              // kPacks: 2^32 / length, rounded up
  int row_lanes, lanes_before;     // kPacks: lanes of a row; lanes in front of a warp's own
  int64_t block_columns;           // columns of a block, where the axis is short
  int64_t outer_step, inner_step;  // `threads` columns further: by so many outer indices and, of the last, columns
  int stage_bytes;
  int copies;  // resident: copies of each sum in the workspace
  unsigned counters;
  unsigned level_at[kMaxLevels];            // where the words of a level begin
  unsigned staging_at, states_at;           // bytes from the start of shared memory
  bool backward;                            // positions count from the end of the array
  bool aligned;                             // all packs are aligned to 16 bytes; if by_words, all words are aligned
  bool by_words;                            // kAcross: a row is not a whole number of packs
  bool at_vectors;                          // kAlong: tiles begin at vectors of memory (kCutAtVectors)
  bool starts_aligned;                      // the starts that belong to a pack are one aligned load
  int a_inner_stride, starts_inner_stride;  // kAcross: strides of a and starts from column to column
  bool neighbour_before;                    // the policy's neighbour is the position before; if not, the one after
  int start_offset;                         // the policy asks for the boundary at starts[index + start_offset]
  bool folded;                              // .._twice: whether each tile's sum is already the fold of all before
  int64_t a_axis_stride, a_outer_stride;    // of the operand a; a_outer_stride is -1 if outer indices have several
  Broadcast a, starts_at;

  // Where an outer index of the operand a begins.
  __device__ int64_t outer_of_a(int64_t outer) const {
    return a_outer_stride >= 0 ? outer * a_outer_stride : a.outer(outer);
  }
};

// ---- Words and barriers ---------------------------------------------------------------------------------------------

// Loads two words in one access. Each word is consistent by itself, the pair is not.
__device__ __forceinline__ void load_two_words(const uint64_t* words, uint64_t (&values)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(values[0]), "=l"(values[1])
               : "l"(words)
               : "memory");
}

// Sets a word that is 0. An atomic does it, because other blocks see it sooner than a plain store.
__device__ __forceinline__ void set_word(uint64_t* word, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.or.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A named barrier: some threads of the block wait at it, others only arrive.
__device__ __forceinline__ void wait_at_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void pass_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Starts to copy the first `bytes` (0 to 16) of 16 bytes to shared memory, and clears the rest. No other byte is read.
__device__ __forceinline__ void copy_async_part(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#else
#pragma unroll 1
  for (int i = 0; i < 16; ++i)
    static_cast<unsigned char*>(to)[i] = i < bytes ? static_cast<const unsigned char*>(from)[i] : 0;
#endif
}

// ---- Between warps --------------------------------------------------------------------------------------------------

// The folds that the warps of a block exchange through shared memory. They lie after the tiles in flight. A slot has
// the total of each warp, [axis_warps][columns], and the carry, [columns]: the fold of all that comes before the tile.
template <class Policy>
class BetweenWarps {
 public:
  using State = typename Policy::State;

  __device__ int block_columns() const { return columns; }
  __device__ State* totals(int slot) const {
    return reinterpret_cast<State*>(dynamic_shared_memory() + p.states_at) + slot * (p.axis_warps + 1) * columns;
  }
  __device__ State* carry(int slot) const { return totals(slot) + p.axis_warps * columns; }

  __device__ State tile_total(int slot, int column) const {
    State fold = identity();
    for (int w = 0; w < p.axis_warps; ++w) fold = Policy::combine(fold, totals(slot)[w * columns + column], p.options);
    return fold;
  }

  // The fold of the tile's warps before a warp.
  __device__ State before_in_tile(int slot, int axis_warp, int column) const {
    State fold = identity();
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) {
      if (w >= axis_warp) continue;
      fold = Policy::combine(fold, totals(slot)[w * columns + column], p.options);
    }
    return fold;
  }

  // The fold of all that comes before a warp.
  __device__ State before_warp(int slot, int axis_warp, int column) const {
    return Policy::combine(carry(slot)[column], before_in_tile(slot, axis_warp, column), p.options);
  }

  // The state before the first position.
  __device__ State initial(int64_t column) const {
    if constexpr (Policy::kInitial) {
      using Element = typename Policy::Element;
      using Bits = typename Element::Bits;
      if (p.h0 && column < p.columns) {
        if constexpr (is_float(Element::kDType) && sizeof(Bits) < sizeof(float))
          if (p.wide_h0) return Policy::initial(static_cast<const float*>(p.h0)[column], p.options);
        return Policy::initial(Element::load(static_cast<const Bits*>(p.h0)[column]), p.options);
      }
    }
    return identity();
  }

  // The neighbour of the position at the end of the axis, which has none: h0, or the policy's edge().
  __device__ auto edge(int64_t column) const {
    using Element = typename Policy::Element;
    if (p.h0 && column < p.columns) return static_cast<const typename Element::Bits*>(p.h0)[column];
    return Element::store(Policy::edge(p.options));
  }

  __device__ State identity() const { return Policy::identity(p.options); }

 protected:
  __device__ BetweenWarps(const Parameters& p, int columns) : p(p), columns(columns) {}

  const Parameters& p;
  const int columns;  // columns of the block
};

}  // namespace jaxgpuops::scan
