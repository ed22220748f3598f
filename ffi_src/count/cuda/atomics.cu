// Segments of rows of few columns, in no order, where there are many: atomics on an accumulator of each segment and
// column. They only add integers or take the larger of two, so the result is the same in whatever order they come.
//
// Sums of floats are exact, and rounded once. A float is an integer times a power of two. Its exponent chooses one of
// some accumulators of 64 bits, each for `width` neighbouring exponents, and the integer is shifted by the rest of it:
// so wide that as many numbers as there are rows cannot overflow it. What is not finite sets a bit of one accumulator
// more. In the end each accumulator carries into the next, and the digits that are left are added up in float64.
//
// If many lanes of a warp have the same segment, their atomics would wait for each other. So a warp has one hot
// segment, which many of its lanes had recently, and keeps its sum in registers: of floats, lane b that of accumulator
// b.
//
// Moves each id and number once, and one sector of 32 bytes for each row and column between L2 and its atomic units;
// accumulators are cleared and read once.
#include <cuda_runtime.h>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "count/cuda/launch.h"
#include "count/cuda/monoid.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 8;  // groups of 32 rows that a warp loads at a time
constexpr int kMany = 8;   // the least number of lanes for a hot segment; fewer atomics are as fast one by one
constexpr uint32_t kNone = ~0u;

struct Args {
  const void* data;
  const int32_t* ids;
  IndexMap ids_at, data_at;
  void* out;
  char* workspace;
  int64_t workspace_bytes, outer, length, inner, segments;
  int64_t run, runs;  // rows of a warp, and how many warps a column has
  ExactShape exact;
  Keys keys;

  JAXGPUOPS_HOST_DEVICE int64_t cells() const { return segments * inner; }
  // Of an outer index: a bit for each accumulator that is not 0 everywhere.
  __device__ uint32_t* marks(int64_t o) const { return reinterpret_cast<uint32_t*>(workspace + o * workspace_bytes); }
};

__device__ __forceinline__ void atomic_fold(uint32_t* to, uint32_t value, bool largest) {
  if (largest) {
    atomicMax(to, value);
  } else {
    atomicAdd(to, value);
  }
}
__device__ __forceinline__ void atomic_fold(uint64_t* to, uint64_t value, bool largest) {
  auto* const word = reinterpret_cast<unsigned long long*>(to);
  if (largest) {
    atomicMax(word, static_cast<unsigned long long>(value));
  } else {
    atomicAdd(word, static_cast<unsigned long long>(value));
  }
}

// One accumulator of a cell, which is the result itself if that is wide enough.
template <class Monoid, bool kLargest>
struct Whole {
  using Bits = typename Monoid::Bits;
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  static constexpr bool kInPlace = sizeof(Word) == sizeof(Bits), kFinishes = kLargest || !kInPlace;

  const Args& a;
  Word* words;  // of the column
  uint32_t hot = kNone;
  Word sum = 0;

  __device__ static Word* words_of(const Args& a, int64_t o) {
    if constexpr (kInPlace) return static_cast<Word*>(a.out) + o * a.cells();
    return reinterpret_cast<Word*>(a.workspace + o * a.workspace_bytes);
  }
  __device__ Whole(const Args& args, int64_t o, int64_t column) : a(args), words(words_of(args, o) + column) {}

  __device__ void add(uint32_t id, Bits bits, unsigned of_hot) {
    const Word word = Monoid::load(bits, a.keys);
    const bool is_hot = of_hot >> (threadIdx.x & 31) & 1;
    if (of_hot) {
      const auto fold = [](Word x, Word y) -> Word { return kLargest ? (x > y ? x : y) : x + y; };
      sum = fold(sum, fold_lanes(is_hot ? word : Word{0}, fold));
    }
    if (!is_hot && id != kNone) atomic_fold(words + id * a.inner, word, kLargest);
  }
  __device__ void flush() {
    if ((threadIdx.x & 31) == 0 && hot != kNone && sum) atomic_fold(words + hot * a.inner, sum, kLargest);
    sum = 0;
  }
  __device__ void end() {}

  __device__ static void finish(const Args& a, int64_t o, int64_t cell) {
    using Acc = typename Monoid::Acc;
    const Word word = words_of(a, o)[cell];
    static_cast<Bits*>(a.out)[o * a.cells() + cell] = Monoid::store(static_cast<Acc>(word), a.keys);
  }
};

// Exact sums of floats.
template <class Element>
struct Exact {
  using Bits = typename Element::Bits;
  static constexpr bool kInPlace = false, kFinishes = true;
  static constexpr int kMantissa = ExactShape::mantissa(Element::kDType);  // bits that are stored
  static constexpr uint32_t kMostExponent = (1u << (8 * sizeof(Bits) - 1 - kMantissa)) - 1;
  static constexpr uint32_t kInfinity = 1, kMinusInfinity = 2, kNan = 4;  // bits of what is not finite

  const Args& a;
  int64_t o;
  uint64_t* words;  // of the column
  uint32_t hot = kNone;
  int64_t sum = 0;       // of the accumulator that is this lane's
  uint32_t touched = 0;  // a bit for each accumulator that this lane has used

  __device__ static uint64_t* words_of(const Args& a, int64_t o) {
    return reinterpret_cast<uint64_t*>(a.workspace + o * a.workspace_bytes + ExactShape::kHeadBytes);
  }
  __device__ Exact(const Args& args, int64_t row, int64_t column)
      : a(args), o(row), words(words_of(args, row) + column) {}

  __device__ uint64_t* word_of(uint32_t id, uint32_t bin) const { return words + (bin * a.segments + id) * a.inner; }

  __device__ void add(uint32_t id, Bits bits, unsigned of_hot) {
    const uint32_t exponent = bits >> kMantissa & kMostExponent, fraction = bits & ((1u << kMantissa) - 1);
    const bool negative = bits >> (8 * sizeof(Bits) - 1), finite = exponent != kMostExponent;
    const uint32_t place = exponent ? exponent - 1 : 0, integer = fraction | (exponent ? 1u << kMantissa : 0);
    const uint32_t bin = place * a.exact.reciprocal >> 16;
    int64_t shifted = static_cast<int64_t>(integer) << (place - bin * a.exact.width);
    if (negative) shifted = -shifted;
    const bool is_hot = finite && (of_hot >> (threadIdx.x & 31) & 1);
    unsigned left = __ballot_sync(kEveryLane, is_hot);
    while (left) {
      const uint32_t own = __shfl_sync(kEveryLane, bin, __ffs(left) - 1);
      const bool has = is_hot && bin == own;
      left &= ~__ballot_sync(kEveryLane, has);
      // |shifted| < 2^52, so that neither sum of 32 halves overflows.
      const int64_t value = has ? shifted : 0;
      const uint32_t low = sum_of_warp(static_cast<uint32_t>(value) & 0x3ffffff);
      const auto high = static_cast<int32_t>(sum_of_warp(static_cast<uint32_t>(value >> 26)));
      if ((threadIdx.x & 31) == own) sum += (static_cast<int64_t>(high) << 26) + low;
    }
    if (is_hot || id == kNone) return;
    if (!finite) {
      const uint32_t what = fraction ? kNan : negative ? kMinusInfinity : kInfinity;
      atomicOr(reinterpret_cast<unsigned long long*>(word_of(id, a.exact.bins)), what);
      touched |= 1u << 31;
    } else if (integer) {
      atomicAdd(reinterpret_cast<unsigned long long*>(word_of(id, bin)), static_cast<unsigned long long>(shifted));
      touched |= 1u << bin;
    }
  }
  __device__ void flush() {
    if (sum) {
      const uint32_t bin = threadIdx.x & 31;
      atomicAdd(reinterpret_cast<unsigned long long*>(word_of(hot, bin)), static_cast<unsigned long long>(sum));
      touched |= 1u << bin;
    }
    sum = 0;
  }
  __device__ void end() {
    const uint32_t all = fold_lanes(touched, [](uint32_t x, uint32_t y) { return x | y; });
    uint32_t* const marks = a.marks(o);
    if ((threadIdx.x & 31) == 0 && (all & ~__ldcg(marks))) atomicOr(marks, all);
  }

  __device__ static void finish(const Args& a, int64_t o, int64_t cell) {
    const uint64_t* words = words_of(a, o);
    const uint32_t touched = *a.marks(o);
    int64_t word[ExactShape::kMostBins];
#pragma unroll
    for (int b = 0; b < ExactShape::kMostBins; ++b)
      word[b] = touched >> b & 1 ? static_cast<int64_t>(words[b * a.cells() + cell]) : 0;
    int64_t carry = 0;
#pragma unroll
    for (int b = 0; b < ExactShape::kMostBins; ++b)
      if (b < a.exact.bins) carry = (word[b] + carry) >> a.exact.width;
    const bool negative = carry < 0;
    // Now all digits are positive, so that rounding their sum loses no more than the last bits of a float64.
    double total = 0, unit = a.exact.unit;
    carry = 0;
#pragma unroll
    for (int b = 0; b < ExactShape::kMostBins; ++b) {
      if (b >= a.exact.bins) break;
      const int64_t value = (negative ? -word[b] : word[b]) + carry;
      carry = value >> a.exact.width;
      total += unit * static_cast<double>(value - (carry << a.exact.width));
      unit *= a.exact.step;
    }
    total += unit * static_cast<double>(carry);
    auto result = static_cast<float>(negative ? -total : total);
    if (touched >> 31) {
      const uint64_t what = words[a.exact.bins * a.cells() + cell];
      if (what)
        result = what & kNan || what == (kInfinity | kMinusInfinity) ? NAN : what & kInfinity ? INFINITY : -INFINITY;
    }
    static_cast<Bits*>(a.out)[o * a.cells() + cell] = Element::store(result);
  }
};

template <class Policy>
__global__ void __launch_bounds__(kThreads) segment_atomics_kernel(const __grid_constant__ Args a) {
  using Bits = typename Policy::Bits;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t column = warp % a.inner, run = warp / a.inner % a.runs, o = warp / a.inner / a.runs;
  if (o >= a.outer) return;
  const int lane = threadIdx.x & 31;
  const int32_t* const ids = a.ids + a.ids_at(o);
  const Bits* const data = static_cast<const Bits*>(a.data) + a.data_at(o) + column;
  const int64_t end = min(a.length, (run + 1) * a.run);
  Policy policy(a, o, column);
  for (int64_t start = run * a.run; start < end; start += 32 * kSteps) {
    uint32_t id[kSteps];
    Bits bits[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t at = start + 32 * i + lane;
      id[i] = at < end ? static_cast<uint32_t>(ids[at]) : kNone;
      bits[i] = at < end ? data[at * a.inner] : Bits{0};
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (id[i] >= a.segments) id[i] = kNone;
      unsigned of_hot = __ballot_sync(kEveryLane, id[i] == policy.hot && id[i] != kNone);
      if (i == 0 && __popc(of_hot) < kMany) {
        const uint32_t candidate = __shfl_sync(kEveryLane, id[i], 0);
        const unsigned of_candidate = __ballot_sync(kEveryLane, id[i] == candidate);
        if (candidate != kNone && __popc(of_candidate) >= kMany) {
          policy.flush();
          policy.hot = candidate;
          of_hot = of_candidate;
        }
      }
      policy.add(id[i], bits[i], of_hot);
    }
  }
  policy.flush();
  policy.end();
}

template <class Policy>
__global__ void __launch_bounds__(kThreads) segment_finish_kernel(const __grid_constant__ Args a) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads, cells = a.cells();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.outer * cells; i += stride)
    Policy::finish(a, i / cells, i % cells);
}

template <class Policy>
cudaError_t run(cudaStream_t stream, const Args& a) {
  const size_t bytes = Policy::kInPlace ? a.outer * a.cells() * sizeof(typename Policy::Bits)
                                        : static_cast<size_t>(a.outer * a.workspace_bytes);
  cudaError_t status = cudaMemsetAsync(Policy::kInPlace ? a.out : a.workspace, 0, bytes, stream);
  Launch config;
  config.block = dim3(kThreads);
  const int64_t warps = a.outer * a.inner * a.runs;
  config.grid = dim3(static_cast<unsigned>((32 * warps + kThreads - 1) / kThreads));
  if (status == cudaSuccess && warps > 0) status = launch(stream, config, segment_atomics_kernel<Policy>, a);
  if (status != cudaSuccess || !Policy::kFinishes) return status;
  config.grid =
      dim3(static_cast<unsigned>(std::clamp<int64_t>((a.outer * a.cells() + kThreads - 1) / kThreads, 1, 132 * 8)));
  return launch(stream, config, segment_finish_kernel<Policy>, a);
}

}  // namespace

cudaError_t launch_segment_atomics(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                   const SegmentsBuffers& buffers) {
  Args a = {};
  a.data = buffers.data;
  a.ids = buffers.ids;
  a.ids_at = problem.ids;
  a.data_at = problem.data;
  a.out = buffers.out;
  a.workspace = buffers.workspace;
  a.workspace_bytes = buffers.workspace_bytes;
  a.outer = problem.rows.outer;
  a.length = problem.rows.length;
  a.inner = problem.rows.inner;
  a.segments = problem.segments;
  a.run = plan.rows;
  a.runs = plan.tiles;
  a.exact = plan.exact;
  a.keys = keys_of(problem);
  return dispatch_monoid(problem, [&](auto monoid) {
    using Monoid = decltype(monoid);
    using Bits = typename Monoid::Bits;
    if constexpr (std::is_same_v<Monoid, Sum<Float64>>) {
      return cudaErrorInvalidValue;  // the plan orders these
    } else if constexpr (std::is_same_v<Monoid, Sum<Float32>>) {
      return run<Exact<Float32>>(stream, a);
    } else if constexpr (std::is_same_v<Monoid, Sum<BFloat16>>) {
      return run<Exact<BFloat16>>(stream, a);
    } else if constexpr (std::is_same_v<Monoid, Sum<Float16>>) {
      return run<Exact<Float16>>(stream, a);
    } else {
      return run<Whole<Monoid, std::is_same_v<Monoid, Extreme<Bits>>>>(stream, a);
    }
  });
}

}  // namespace jaxgpuops::count
