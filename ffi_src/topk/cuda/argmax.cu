// k = 1: argmax, argmin and top-1, one read of the input.
//
// The result is the candidate (key, index) with the largest key, among equals the one with the lowest index. That is a
// total order, so neither the order of the reduction nor the number of blocks that share a row matters.
//
//   tiles    A block copies whole outer indices to shared memory, by aligned vectors wherever they begin, and 1 to 32
//            lanes share each column (each row, if inner is 1). For short rows, and small planes of columns.
//   rows     inner is 1: a warp, a block, or several blocks, read a row. A lane finds the largest key of its vectors,
//            and which batch of loads had it first; only lanes that have the largest of their warp look the element up
//            again. About five instructions for each word: narrow types run at memory speed, too.
//   columns  A block reads vectors of 16 bytes, at steps that are whole rows of columns: so each place of a vector
//            stays with one column, and a thread keeps the best of each place. Where inner is short, a step is several
//            rows.
//   strided  The same by single elements, where vectors would not stay with their columns (inner is long, and odd), and
//            where the axis is short: then a thread has whole columns (sheets: several).
//
//   small    Few elements in all, one by one (common/cuda/small.cuh). Blocks share columns that are long.
//
// If blocks share a row, each leaves a candidate for a second kernel, which finds the best of them.
#include <algorithm>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/small.cuh"
#include "topk/cuda/argmax_shape.h"
#include "topk/cuda/candidates.cuh"
#include "topk/cuda/delegates.cuh"
#include "topk/cuda/kernels.h"
#include "topk/cuda/row_vectors.cuh"

namespace jaxgpuops::topk {
namespace {

// ---- Order ----------------------------------------------------------------------------------------------------------

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

template <class Key>
__device__ __forceinline__ void merge_lanes(Candidate<Key>& c, int lanes) {
  for (int d = lanes / 2; d; d /= 2) c.merge({shuffle_xor(c.key, d), shuffle_xor(c.index, d)});
}

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

// For each place of a vector: the best element seen there, and the step in which it came.
template <class Key>
struct Places {
  static constexpr uint32_t kVector = 16 / sizeof(Key), kWords = kVector / (kPairs<Key> ? 2 : 1);
  Word<Key> keys[kWords] = {};
  uint32_t steps[kVector] = {};

  // Sees vectors in rising order of step.
  __device__ __forceinline__ void see(uint4 vector, const Ranks<Key>& ranks, uint32_t step) {
    const uint32_t parts[4] = {vector.x, vector.y, vector.z, vector.w};
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

// ---- Calls ----------------------------------------------------------------------------------------------------------

struct Argmax : Call {  // `k` is 1; values may be null
  int64_t outer;
  uint32_t slices, slice;  // how many blocks share a row, and how many elements each has
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

// ---- tiles ----------------------------------------------------------------------------------------------------------

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

// ---- rows -----------------------------------------------------------------------------------------------------------

// The largest key of some vectors, in the order of argmax.
template <class Key, uint32_t kVectors>
__device__ __forceinline__ Key largest_key(const uint4 (&vectors)[kVectors], const ArgOrder& order) {
  if constexpr (sizeof(Key) == 8) {
    Key most = 0;
#pragma unroll
    for (const uint4& v : vectors) {
      most = larger(most, encode_arg(static_cast<Key>(v.y) << 32 | v.x, order));
      most = larger(most, encode_arg(static_cast<Key>(v.w) << 32 | v.z, order));
    }
    return most;
  } else {
    // Compares plain keys, several in a word. They have numbers in the order of argmax (except that its two zeros are
    // equal); only negative NaNs stand elsewhere, and the least key shows whether there are any.
    const Lanes<Key> lanes(order.order);
    uint32_t most = 0, least = ~0u;
#pragma unroll
    for (const uint4& v : vectors) {
#pragma unroll
      for (const uint32_t word : {v.x, v.y, v.z, v.w}) {
        const uint32_t keys = lanes.encode(word);
        most = lanes.max(most, keys);
        least = sizeof(Key) == 4   ? smaller(least, keys)
                : sizeof(Key) == 2 ? __vminu2(least, keys)
                                   : __vminu4(least, keys);
      }
    }
    const Key ends[2] = {static_cast<Key>(lanes.largest(most)), static_cast<Key>(~lanes.largest(~least))};
    return larger(encode_arg(decode(ends[0], order.order), order), encode_arg(decode(ends[1], order.order), order));
  }
}

// The best of the candidates of a team's lanes, for its first lane. A team larger than a warp is a block.
template <class Key>
__device__ __forceinline__ void merge_team(Candidate<Key>& c, uint32_t team) {
  const auto lanes = [&](uint32_t count) {
#pragma unroll 1
    for (uint32_t d = count / 2; d; d /= 2) c.merge({shuffle_xor(c.key, d), shuffle_xor(c.index, d)});
  };
  lanes(smaller(team, 32u));
  if (team <= 32) return;
  __shared__ Candidate<Key> warps[32];
  const uint32_t count = team / 32;
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = c;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  c = warps[threadIdx.x & (count - 1)];  // if there are fewer warps than lanes, several lanes read the same candidate
  lanes(count);
}

// A team (a warp or a block) has a row or a slice of a row.
template <class Key, uint32_t kTeam>
__global__ void __launch_bounds__(kArgmaxRowThreads, 1024 / kArgmaxRowThreads)
    argmax_rows(const __grid_constant__ Argmax a, const __grid_constant__ ArgOrder order, uint32_t units) {
  constexpr uint32_t kVector = 16 / sizeof(Key), kTeams = kArgmaxRowThreads / kTeam;
  const uint32_t lane = threadIdx.x % kTeam, own = blockIdx.x * kTeams + threadIdx.x / kTeam;
  const uint32_t unit = smaller(own, units - 1);  // a team without a row reads the last one
  const uint32_t row = a.slices == 1 ? unit : unit / a.slices, part = unit - row * a.slices;
  let_dependents_start();
  const uint32_t length = a.length;
  const uint32_t begin = part * a.slice, count = min(a.slice, length - begin);
  const Key* x = static_cast<const Key*>(a.x) + static_cast<int64_t>(row) * length + begin;
  const RowVectors<Key> all(x, count);
  const uint32_t vectors = all.vectors;
  const uint4* body = all.body();

  Candidate<Key> c = {0, ~0u};
  for (uint32_t i = lane; i < all.loose(); i += kTeam) {
    const uint32_t at = all.loose_index(i);
    c.merge({encode_arg(x[at], order), begin + at});
  }

  // The last batch repeats the last vector, which changes nothing. Batches of a warp are small, since its rows are
  // short.
  constexpr uint32_t kBatch = kTeam == 32 ? 4 : 8;
  Key best = 0;
  uint32_t batch = lane, v = lane;
  const auto place = [&](uint32_t v, uint32_t u) { return min(v + u * kTeam, vectors - 1); };
  const auto look = [&](auto whole) {
    uint4 loaded[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) loaded[u] = __ldg(body + (whole ? v + u * kTeam : place(v, u)));
    const Key most = largest_key<Key>(loaded, order);
    if (most > best) best = most, batch = v;
    v += kBatch * kTeam;
  };
  if constexpr (kTeam > 32) {
    while (v + (kBatch - 1) * kTeam < vectors) look(std::true_type());
  }
#pragma unroll 1
  while (v < vectors) look(std::false_type());

  const Key most = largest_of_lanes(best);
  if (best == most && lane < vectors) {
    // All elements with this key have the same bits, except for zeros and NaNs.
    const Key sign = static_cast<Key>(order.sign), found = decode(best, order.order);
    const bool nan = sign && best == static_cast<Key>(~Key{0});
    const Key drop = nan || static_cast<Key>(found & ~sign) == 0 ? sign : 0;
    const Key from = static_cast<Key>(nan ? order.nan_above + 1 : found & ~drop);
    const Key span = static_cast<Key>(nan ? ~sign - from : 0);
    uint32_t first = 0;
#pragma unroll(kTeam == 32 ? 1 : kBatch)
    for (int u = kBatch - 1; u >= 0; --u) {
      Key elements[kVector];
      *reinterpret_cast<uint4*>(elements) = __ldg(body + place(batch, u));
#pragma unroll
      for (int e = kVector - 1; e >= 0; --e)
        if (static_cast<Key>((elements[e] & ~drop) - from) <= span) first = place(batch, u) * kVector + e;
    }
    c.merge({best, begin + all.head + first});
  }
  merge_team(c, kTeam);
  if (lane == 0 && own == unit) finish(a, row, 0, part, c);
}

// ---- columns --------------------------------------------------------------------------------------------------------

// `beside` threads read vectors side by side, and `deep` of these groups the rows behind each other: a step is that
// many rows. If `beside` is 0, the block's rows are one run of vectors without a gap, of which `threads` are a step.
struct ColumnsCall {
  uint32_t tiles, beside, deep, threads;
};

template <class Key>
__global__ void __launch_bounds__(kArgmaxMostThreads, 1024 / kArgmaxMostThreads)
    argmax_columns(const __grid_constant__ Argmax a, const Ranks<Key> ranks, const ColumnsCall call) {
  constexpr uint32_t kVector = 16 / sizeof(Key), kBatch = 4;
  struct Elements {
    Key of[kVector];
  };
  const uint32_t inner = static_cast<uint32_t>(a.inner), thread = threadIdx.x;
  const uint32_t unit = a.slices == 1 ? blockIdx.x : blockIdx.x / a.slices, part = blockIdx.x - unit * a.slices;
  const uint32_t outer = call.tiles == 1 ? unit : unit / call.tiles, tile = unit - outer * call.tiles;
  const uint32_t begin = part * a.slice, count = smaller(a.slice, a.length - begin);
  const Key* x = static_cast<const Key*>(a.x) + (static_cast<int64_t>(outer) * a.length + begin) * inner;
  let_dependents_start();

  // The thread reads vectors v, v + stride, .. up to `end`.
  const uint4* body;
  uint32_t v, stride, end, pitch, misaligned = 0, depth = 0, column = 0, width = call.beside * kVector;
  if (call.beside) {
    depth = call.deep == 1 ? 0 : thread / call.beside;
    column = (thread - depth * call.beside) * kVector;
    body = reinterpret_cast<const uint4*>(x + tile * width + column);
    v = depth;
    stride = call.deep;
    pitch = inner / kVector;
    end = tile * width + column < inner && depth < call.deep ? count : 0;
  } else {
    misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
    width = inner;
    body = reinterpret_cast<const uint4*>(x - misaligned);
    v = thread;
    stride = call.threads;
    pitch = 1;
    end =
        thread < call.threads ? static_cast<uint32_t>((misaligned + static_cast<int64_t>(count) * inner) / kVector) : 0;
  }
  Places<Key> places;
  uint32_t s = 0;
  // Sees a vector of which only a part belongs to this block.
  const auto edge = [&] {
    const int64_t at = static_cast<int64_t>(v) * kVector - misaligned, all = static_cast<int64_t>(count) * inner;
    Elements elements;
#pragma unroll
    for (int e = 0; e < static_cast<int>(kVector); ++e)
      elements.of[e] = at + e >= 0 && at + e < all ? x[at + e] : ranks.least;
    places.see(bits_as<uint4>(elements), ranks, s);
    v += stride;
    ++s;
  };
  if (misaligned && thread == 0) edge();
  const auto load = [&](uint32_t at) { return __ldg(body + static_cast<int64_t>(at) * pitch); };
  for (; v + (kBatch - 1) * stride < end; v += kBatch * stride, s += kBatch) {
    uint4 loaded[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) loaded[u] = load(v + u * stride);
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) places.see(loaded[u], ranks, s + u);
  }
  if (v < end) {
    Elements least;
#pragma unroll
    for (Key& element : least.of) element = ranks.least;
    uint4 loaded[kBatch - 1];
#pragma unroll
    for (uint32_t u = 0; u < kBatch - 1; ++u)
      loaded[u] = v + u * stride < end ? load(v + u * stride) : bits_as<uint4>(least);
#pragma unroll
    for (uint32_t u = 0; u < kBatch - 1; ++u) {
      places.see(loaded[u], ranks, s);
      if (v < end) v += stride, ++s;
    }
  }

  if (call.beside && call.deep == 1) {
    if (end == 0) return;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      Candidate<Key> c = places.at(e);
      c.index += begin;
      finish(a, outer, tile * width + column + e, part, c);
    }
    return;
  }

  auto* all = reinterpret_cast<Candidate<Key>*>(dynamic_shared_memory());
  const uint32_t rows = call.beside ? call.deep : call.threads * kVector / inner;  // rows in a step
  if (thread < call.threads) {
    uint32_t steps_before = 0;
    if (!call.beside) {
      const int64_t elements = misaligned + static_cast<int64_t>(count) * inner;
      if (v == end && elements % kVector) edge();
      // If the block's elements begin within a vector, the first thread's places before that are not used in the first
      // step; in the others they belong to the end of the step before.
      uint32_t place = thread * kVector;
      steps_before = place < misaligned;
      place = (steps_before ? place + call.threads * kVector : place) - misaligned;
      depth = place / inner;
      column = place - depth * inner;
    }
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      Candidate<Key> c = places.at(e);
      c.index = begin + (larger(c.index, steps_before) - steps_before) * rows + depth;
      all[spaced<kVector>(depth * width + column)] = c;
      if (++column == width) {
        column = 0;
        if (++depth == rows) depth = steps_before = 0;
      }
    }
  }
  merge_rows<kVector>(all, width, smaller(rows, count), thread, blockDim.x);
  for (uint32_t c = thread; c < width && tile * width + c < inner; c += blockDim.x)
    finish(a, outer, tile * width + c, part, all[spaced<kVector>(c)]);
}

// ---- strided --------------------------------------------------------------------------------------------------------

// blockDim.x neighbouring threads have kColumns columns each, and blockDim.y threads share the axis. If kColumns is
// more than 1, blockDim.y is 1.
template <class Key, int kColumns>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_strided(const __grid_constant__ Argmax a, const Ranks<Key> ranks, uint32_t tiles) {
  constexpr uint32_t kBatch = kColumns == 1 ? 8 : 2;
  const uint32_t inner = static_cast<uint32_t>(a.inner), width = blockDim.x, deep = blockDim.y;
  const uint32_t unit = blockIdx.x / a.slices, part = blockIdx.x - unit * a.slices, depth = threadIdx.y;
  const uint32_t outer = unit / tiles, column = (unit - outer * tiles) * width * kColumns + threadIdx.x;
  const uint32_t begin = part * a.slice, end = smaller(begin + a.slice, a.length);
  let_dependents_start();
  Candidate<Key> best[kColumns];
  uint32_t columns[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    best[c] = {0, begin + depth};
    columns[c] = smaller(column + c * width, inner - 1);
  }
  const int64_t step = static_cast<int64_t>(deep) * inner;
  const Key* x = static_cast<const Key*>(a.x) + (static_cast<int64_t>(outer) * a.length + begin + depth) * inner;
  const auto look = [&](uint32_t i, auto all_there) {
    Key loaded[kBatch][kColumns];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        loaded[u][c] = all_there || i + u * deep < end ? __ldg(x + u * step + columns[c]) : ranks.least;
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) best[c].see(ranks(ranks.word(loaded[u][c])), i + u * deep);
  };
  uint32_t i = begin + depth;
  for (; i + (kBatch - 1) * deep < end; i += kBatch * deep, x += kBatch * step) look(i, std::true_type());
  if (i < end) look(i, std::false_type());
  if constexpr (kColumns == 1) {
    if (deep > 1) {
      auto* all = reinterpret_cast<Candidate<Key>*>(dynamic_shared_memory());
      const uint32_t thread = depth * width + threadIdx.x;
      all[thread] = best[0];
      merge_rows<1>(all, width, smaller(deep, end - begin), thread, width * deep);
      if (depth == 0) best[0] = all[thread];
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (depth == 0 && column + c * width < inner) finish(a, outer, columns[c], part, best[c]);
}

// ---- small ----------------------------------------------------------------------------------------------------------

struct SmallCall {
  const void* x;
  int32_t* indices;
  void* values;  // null where only indices are wanted
  SmallColumns columns;
};

// If columns are cut into slices, SmallCall::columns are the slices.
struct SmallSlices {
  Quotient slices_of;
  uint32_t slices, length, missing;  // `missing`: by how many elements the last slice is shorter
  void* candidates;
};

// A thread takes kEach elements at a time. Beyond the end of the column it takes the last element again, which changes
// nothing.
template <class Key, int kEach>
__global__ void __launch_bounds__(kMostSmallThreads)
    argmax_small(const __grid_constant__ SmallCall a, const __grid_constant__ Ranks<Key> ranks,
                 const __grid_constant__ SmallSlices s) {
  const bool sliced = kEach == kArgmaxEach && s.slices > 1;
  if (sliced) let_dependents_start();
  const SmallPlace place(a.columns);
  const Key* x = static_cast<const Key*>(a.x) + place.first;
  uint32_t last = once(a.columns.length - 1), outer = 0, slice = 0;
  if (sliced) {
    const uint32_t cut = a.columns.outer_of(place.column);
    outer = s.slices_of(cut);
    slice = cut - outer * s.slices;
    x -= outer * s.missing * place.step;
    if (slice + 1 == s.slices) last -= s.missing;
  }
  Candidate<Key> best = {0, smaller(place.part, last)};
#pragma unroll 1
  for (uint32_t i = place.part; i <= last; i += kEach * place.parts) {
    Key loaded[kEach];
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) loaded[u] = __ldg(x + smaller(i + u * place.parts, last) * place.step);
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) best.see(ranks(ranks.word(loaded[u])), i + u * place.parts);
  }
  const auto better = [](Candidate<Key> one, const Candidate<Key>& other) {
    one.merge(other);
    return one;
  };
  if (!place.merge(best, better)) return;
  if (sliced) {
    const uint32_t inner = place.step, column = place.column - (outer * (s.slices - 1) + slice) * inner;
    best.index += slice * s.length;
    static_cast<Candidate<Key>*>(s.candidates)[column * s.slices + slice] = best;
  } else {
    a.indices[place.column] = static_cast<int32_t>(best.index);
    if (a.values) static_cast<Key*>(a.values)[place.column] = x[best.index * place.step];
  }
}

// ---- the end of shared rows -----------------------------------------------------------------------------------------

template <class Key>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_finish(const __grid_constant__ Argmax a, uint32_t team) {
  const uint32_t lane = threadIdx.x & (team - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kArgmaxThreads / team) + threadIdx.x / team;
  wait_for_predecessor();
  Candidate<Key> c = {0, ~0u};
  if (row < a.outer * a.inner) {
#pragma unroll 4
    for (uint32_t i = lane; i < a.slices; i += team)
      c.merge(reinterpret_cast<const Candidate<Key>*>(a.workspace)[row * a.slices + i]);
  }
  merge_team(c, team);
  if (lane != 0 || row >= a.outer * a.inner) return;
  const int64_t outer = a.inner == 1 ? row : row / a.inner;
  write<Key>(a, outer, static_cast<uint32_t>(row - outer * a.inner), c.index);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const ArgmaxShape& shape, const Rows& rows,
                const ArgOrder& order, const Argmax& a) {
  const auto blocks = [](int64_t count) { return dim3(static_cast<unsigned>(count)); };
  constexpr int kSheet = argmax_sheet_columns(sizeof(Key));
  const Ranks<Key> ranks(order);
  const int64_t units = rows.outer * shape.tiles * a.slices;
  const auto tiles = static_cast<uint32_t>(shape.tiles), threads = static_cast<uint32_t>(shape.threads);
  const auto beside = static_cast<uint32_t>(shape.beside), deep = static_cast<uint32_t>(shape.deep);
  const auto shared = static_cast<size_t>(argmax_shared_bytes(rows, sizeof(Key), shape));
  cudaError_t status = cudaErrorInvalidValue;
  switch (shape.form) {
    case ArgmaxForm::kTiles:
      status = launch(stream, {blocks((rows.outer + shape.outers - 1) / shape.outers), dim3(kArgmaxThreads), shared},
                      argmax_tiles<Key>, a, ranks, static_cast<uint32_t>(shape.outers), shape.lane_bits);
      break;
    case ArgmaxForm::kRows:
      status = launch(stream, {blocks(((units << shape.lane_bits) + threads - 1) / threads), dim3(threads)},
                      argmax_has_warps(sizeof(Key)) && shape.lane_bits == 5    ? argmax_rows < Key,
                      argmax_has_warps(sizeof(Key)) ? 32 : kArgmaxRowThreads > : argmax_rows<Key, kArgmaxRowThreads>, a,
                      order, static_cast<uint32_t>(units));
      break;
    case ArgmaxForm::kColumns:
      status = launch(stream, {blocks(units), dim3((threads + 31) / 32 * 32), shared}, argmax_columns<Key>, a, ranks,
                      ColumnsCall{tiles, beside, deep, threads});
      break;
    case ArgmaxForm::kStrided:
      status = launch(stream, {blocks(units), dim3(beside, deep), shared}, argmax_strided<Key, 1>, a, ranks, tiles);
      break;
    case ArgmaxForm::kSmall: {
      const Rows cut = argmax_cut(rows, plan.slices);
      const ArgmaxShape small = argmax_small_shape(rows, sizeof(Key), plan.slices);
      const SmallCall call = {a.x, a.indices, a.values, SmallColumns(cut, small.column_bits, small.lane_bits)};
      const SmallSlices slices = {Quotient(a.slices), a.slices, a.slice, a.slices * a.slice - a.length, a.workspace};
      const bool few = argmax_small_each(rows, sizeof(Key)) == kSmallEach;
      status = launch(stream, {blocks(small.tiles), dim3(static_cast<unsigned>(small.threads))},
                      few ? argmax_small<Key, kSmallEach> : argmax_small<Key, kArgmaxEach>, call, ranks, slices);
      break;
    }
    case ArgmaxForm::kSheets:
      status = launch(stream, {blocks(units), dim3(beside)}, argmax_strided<Key, kSheet>, a, ranks, tiles);
      break;
  }
  if (status != cudaSuccess || a.slices == 1) return status;
  const uint32_t team = a.slices > 128 ? kArgmaxThreads : 32;
  Launch last = {blocks((rows.count() * team + kArgmaxThreads - 1) / kArgmaxThreads), dim3(kArgmaxThreads)};
  last.overlap = plan.overlap;
  return launch(stream, last, argmax_finish<Key>, a, team);
}

}  // namespace

cudaError_t launch_argmax_kernels(cudaStream_t stream, const Plan& plan, const ArgProblem& problem,
                                  const Buffers& buffers) {
  const Rows& rows = problem.rows;
  Argmax a = {call_of({rows, 1, problem.key_bits, problem.order.order}, buffers)};
  a.outer = rows.outer;
  a.slice = static_cast<uint32_t>(argmax_slice(rows, plan.slices));
  // As many slices as needed, so that none is empty.
  a.slices = static_cast<uint32_t>((rows.length + a.slice - 1) / a.slice);
  const bool aligned = reinterpret_cast<uintptr_t>(buffers.x) % 16 == 0;
  const ArgmaxShape shape = argmax_shape(rows, problem.key_bits / 8, aligned);
  return dispatch_key(problem.key_bits,
                      [&](auto key) { return run<decltype(key)>(stream, plan, shape, rows, problem.order, a); });
}

}  // namespace jaxgpuops::topk
