// What the forms of argmax share: the order of elements, candidates, and what a call is. argmax.cu describes the forms.
#pragma once

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "topk/cuda/argmax_shape.h"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {

// The word that integer instructions work on: one element, or two elements with 16 bits each (8-bit elements are in the
// upper half of their 16 bits).
template <class Key>
using Word = std::conditional_t<sizeof(Key) == 8, uint64_t, uint32_t>;

template <class Key>
constexpr bool kPairs = sizeof(Key) <= 2;

// Maps elements to unsigned numbers (ranks) in the order of argmax: all NaNs have the same, largest rank, and both
// zeros have the same rank. With other parameters it gives the order of top-1, in which all bit patterns differ.
// Integer instructions limit the speed for narrow types, so there are few of them: multiplications run on another unit,
// and from compute capability 9.0 on, one instruction adds and takes a minimum.
template <class Key>
struct Ranks {
  using W = Word<Key>;
  W flip, negative, magnitude, one, lowest, nan;
  Key least;  // an element whose rank is 0

  explicit Ranks(const ArgOrder& arg) {
    constexpr int kBits = 8 * sizeof(Key), kShift = sizeof(Key) == 1 ? 8 : 0;
    const Key sign = static_cast<Key>(Key{1} << (kBits - 1)), change = static_cast<Key>(arg.order.flip ^ sign);
    // Floats in reverse order, which a change of sign gives.
    const bool floats = arg.order.magnitude != 0, turned = floats && change != 0;
    const auto highest = static_cast<Key>(arg.nan_above);
    const auto both = [](uint64_t bits) { return static_cast<W>(kPairs<Key> ? (bits & 0xffff) * 0x10001 : bits); };
    least = arg.sign ? static_cast<Key>(turned ? highest : highest | sign) : decode(Key{0}, arg.order);
    flip = floats ? static_cast<Key>(turned ? sign : 0) : change;
    if (kPairs<Key>) flip = both(static_cast<uint64_t>(flip ^ sign) << kShift);
    negative = both(turned);
    magnitude = static_cast<W>(arg.order.magnitude) << kShift;
    const W middle = W{1} << (kPairs<Key> ? 15 : 8 * sizeof(W) - 1);
    if (arg.sign) {  // a float -m becomes the integer -m, and NaNs with a sign, below -infinity, wrap to the top
      one = kPairs<Key> ? 1 << kShift : ~W{0};
      const W infinity = static_cast<W>(highest) << kShift;
      lowest = both(infinity + (kPairs<Key> ? middle : 0));
      nan = both(2 * infinity + (1 << kShift));
    } else {
      one = 0;
      lowest = kPairs<Key> ? 0 : middle;
      nan = ~W{0};
    }
  }

  __device__ __forceinline__ W operator()(W word) const {
    if constexpr (kPairs<Key>) {
      const W n = (word >> 15 ^ negative) & 0x10001;
      return __viaddmin_u16x2((word ^ n * magnitude ^ flip) + n * one, lowest, nan);
    } else {
      const W number = word ^ flip, n = sign_mask(number), t = number ^ (n & magnitude);
      if constexpr (sizeof(Key) == 8) {
        W rank;
        asm("mad.wide.s32 %0, %1, %2, %3;"
            : "=l"(rank)
            : "r"(static_cast<uint32_t>(n)), "r"(static_cast<uint32_t>(one)), "l"(t));
        return smaller(rank + lowest, nan);
      } else {
        W rank;
        asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(rank) : "r"(n), "r"(one), "r"(t));
        return __viaddmin_u32(rank, lowest, nan);
      }
    }
  }
  // The word of a single element. (The other half of the word is 0 for all elements, so it does not change their
  // order.)
  __device__ static __forceinline__ W word(Key bits) { return sizeof(Key) == 1 ? W{bits} << 8 : W{bits}; }
};

template <class Key>
struct alignas(2 * sizeof(Word<Key>)) Candidate {
  Word<Key> key;
  uint32_t index;
  // Sees elements in rising order of index, so an equal one does not replace the best.
  __device__ __forceinline__ void see(Word<Key> k, uint32_t i) {
    const bool better = k > key;
    key = better ? k : key;
    index = better ? i : index;
  }
  __device__ __forceinline__ void merge(const Candidate& other) {
    const bool better = other.key > key || (other.key == key && other.index < index);
    key = better ? other.key : key;
    index = better ? other.index : index;
  }
};

// The larger numbers of two pairs, and whether they are those of the first pair. One instruction from compute
// capability 9.0 on. (CUDA 13.0's own, __vibmax_u16x2, may be given one register for its result and for an operand that
// it reads later.)
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b, bool& low_stays, bool& high_stays) {
#if __CUDA_ARCH__ >= 900
  uint32_t most, low, high;
  asm("{\n.reg .pred p, q;\n.reg .u16 a, b, c, d;\nmax.u16x2 %0, %3, %4;\n"
      "mov.b32 {a, b}, %0;\nmov.b32 {c, d}, %3;\nsetp.eq.u16 p, a, c;\nsetp.eq.u16 q, b, d;\n"
      "selp.b32 %1, 1, 0, p;\nselp.b32 %2, 1, 0, q;\n}"
      : "=&r"(most), "=&r"(low), "=&r"(high)
      : "r"(a), "r"(b));
  low_stays = low, high_stays = high;
#else
  const uint32_t most = __vmaxu2(a, b), changed = most ^ a;
  low_stays = (changed & 0xffff) == 0, high_stays = changed >> 16 == 0;
#endif
  return most;
}

// For each place of a vector of kParts words: the best element seen there, and the step in which it came.
template <class Key, uint32_t kParts = 4>
struct Places {
  static constexpr uint32_t kVector = 4 * kParts / sizeof(Key), kWords = kVector / (kPairs<Key> ? 2 : 1);
  Word<Key> keys[kWords] = {};
  uint32_t steps[kVector] = {};

  // Sees vectors in rising order of step.
  __device__ __forceinline__ void see(uint4 vector, const Ranks<Key>& ranks, uint32_t step) {
    const uint32_t parts[4] = {vector.x, vector.y, vector.z, vector.w};
    see(parts, ranks, step);
  }
  __device__ __forceinline__ void see(const uint32_t (&parts)[kParts], const Ranks<Key>& ranks, uint32_t step) {
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      if constexpr (sizeof(Key) == 8) {
        see(w, ranks(static_cast<uint64_t>(parts[2 * w + 1]) << 32 | parts[2 * w]), step);
      } else if constexpr (sizeof(Key) == 1) {
        see(w, ranks((w % 2 ? parts[w / 2] : parts[w / 2] << 8) & 0xff00ff00), step);
      } else {
        see(w, ranks(parts[w]), step);
      }
    }
  }
  // The best of all places, if steps count the vectors of a row that is shorter than 2^16.
  __device__ __forceinline__ Candidate<Key> best_of_row() const {
    if constexpr (kPairs<Key>) {  // a word has a rank above its mirrored index
      uint32_t best = 0;
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        const uint32_t low = place_of(w, 0), high = place_of(w, 1);
        best = larger(best, keys[w] * 0x10000 + (0xffff - low - steps[low] * kVector));
        best = larger(best, (keys[w] & 0xffff0000) + (0xffff - high - steps[high] * kVector));
      }
      return {best >> 16, 0xffff - (best & 0xffff)};
    } else {
      Candidate<Key> best = {keys[0], steps[0] * kVector};
#pragma unroll
      for (uint32_t e = 1; e < kVector; ++e) best.merge({keys[e], steps[e] * kVector + e});
      return best;
    }
  }
  __device__ __forceinline__ Candidate<Key> at(uint32_t place) const {
    return {kPairs<Key> ? keys[word_of(place)] >> (half_of(place) ? 16 : 0) & 0xffff : keys[place], steps[place]};
  }

 private:
  __device__ static constexpr uint32_t word_of(uint32_t place) {
    return sizeof(Key) == 1 ? place / 4 * 2 + place % 2 : sizeof(Key) == 2 ? place / 2 : place;
  }
  __device__ static constexpr uint32_t half_of(uint32_t place) { return sizeof(Key) == 1 ? place / 2 % 2 : place % 2; }
  __device__ static constexpr uint32_t place_of(uint32_t word, uint32_t half) {
    return sizeof(Key) == 1 ? word / 2 * 4 + word % 2 + 2 * half : 2 * word + half;
  }
  __device__ __forceinline__ void see(uint32_t w, Word<Key> rank, uint32_t step) {
    if constexpr (kPairs<Key>) {
      bool low_stays, high_stays;
      keys[w] = larger_pair(keys[w], rank, low_stays, high_stays);
      steps[place_of(w, 0)] = low_stays ? steps[place_of(w, 0)] : step;
      steps[place_of(w, 1)] = high_stays ? steps[place_of(w, 1)] : step;
    } else {
      const bool better = rank > keys[w];
      keys[w] = better ? rank : keys[w];
      steps[w] = better ? step : steps[w];
    }
  }
};

struct Argmax : Call {  // `k` is 1; values may be null
  int64_t outer;
  uint32_t slices, slice;  // how many blocks share a row, and how many elements each has
  bool cluster;            // those blocks are a cluster, and need no second kernel
};

template <class Key>
__device__ __forceinline__ void write(const Argmax& a, int64_t outer, uint32_t inner, uint32_t index) {
  const int64_t row = outer * a.inner + inner;
  a.indices[row] = static_cast<int32_t>(index);
  if (a.values)
    static_cast<Key*>(a.values)[row] = static_cast<const Key*>(a.x)[(outer * a.length + index) * a.inner + inner];
}

template <class Key>
__device__ __forceinline__ void finish(const Argmax& a, int64_t outer, uint32_t inner, uint32_t part,
                                       Candidate<Key> c) {
  if (a.slices == 1) {
    write<Key>(a, outer, inner, c.index);
  } else {
    reinterpret_cast<Candidate<Key>*>(a.workspace)[(outer * a.inner + inner) * a.slices + part] = c;
  }
}

__device__ __forceinline__ uint32_t smallest_of_warp(uint32_t value) { return ~largest_of_warp(~value); }

// The best of the candidates of a team's threads, for its first one. A team is a warp or a block.
template <class Key>
__device__ __forceinline__ void merge_team(Candidate<Key>& c, uint32_t team) {
  const auto merge = [&] {
    const Word<Key> most = largest_of_warp(c.key);
    c = {most, smallest_of_warp(c.key == most ? c.index : ~0u)};
  };
  merge();
  if (team <= 32) return;
  __shared__ Candidate<Key> warps[32];
  const uint32_t count = team / 32;
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = c;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  c = warps[threadIdx.x & (count - 1)];  // if there are fewer warps than lanes, several lanes read the same candidate
  merge();
}

// The best of the candidates of a cluster's blocks, of which the first threads have one each, for the first thread of
// the first block. The blocks have arrived at the cluster barrier. Returns false to the threads that have nothing left
// to do.
template <class Key>
__device__ __forceinline__ bool merge_cluster(Candidate<Key>& c, uint32_t rank, uint32_t blocks) {
  __shared__ Candidate<Key> of_blocks[kArgmaxMostCluster];
  wait_at_cluster_barrier();
  if (threadIdx.x == 0) store_in_cluster(&of_blocks[rank], 0, c);
  arrive_at_cluster_barrier();
  if (rank != 0 || threadIdx.x >= 32) return false;
  wait_at_cluster_barrier();
  c = of_blocks[smaller(threadIdx.x, blocks - 1)];
  merge_team(c, 32);
  return true;
}

// The place of the i-th candidate in shared memory, if each thread writes `run` neighbouring ones: one place is left
// free after each run, so that threads write to different banks.
template <uint32_t run>
__device__ __forceinline__ uint32_t spaced(uint32_t i) {
  return run == 1 ? i : i + i / run;
}

// Candidates lie in shared memory as `deep` rows. Moves the best of each column to the first row. All threads of the
// block call it.
template <uint32_t run, class Key>
__device__ __forceinline__ void merge_rows(Candidate<Key>* all, uint32_t width, uint32_t deep, uint32_t thread,
                                           uint32_t threads) {
  while (deep > 1) {
    const uint32_t rows = (deep + 15) / 16;
    __syncthreads();
    for (uint32_t i = thread; i < rows * width; i += threads) {
      Candidate<Key> c = all[spaced<run>(i)];
#pragma unroll 4
      for (uint32_t j = i + rows * width; j < deep * width; j += rows * width) c.merge(all[spaced<run>(j)]);
      all[spaced<run>(i)] = c;
    }
    deep = rows;
  }
  __syncthreads();
}

// Each launches one form; `a` says how many blocks share a row.
cudaError_t launch_argmax_teams(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);
cudaError_t launch_argmax_packed(cudaStream_t, const ArgProblem&, const Argmax&);
cudaError_t launch_argmax_tiles(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);
// Also launches the kernel that merges candidates, which may begin early (`overlap`).
cudaError_t launch_argmax_rows(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&, bool overlap);
cudaError_t launch_argmax_columns(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);
cudaError_t launch_argmax_strided(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);
cudaError_t launch_argmax_small(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);
cudaError_t launch_argmax_blocks(cudaStream_t, const ArgmaxShape&, const ArgProblem&, const Argmax&);

}  // namespace jaxgpuops::topk
