// Sums of float64 in many segments: the form of atomics.cu for wide numbers. A number is an integer of 53 bits times a
// power of two. The smallest and the largest place of that power in the call say which accumulators of `width` bits a
// sum has: two or three for usual numbers, some fifty if they range from the least to the largest. A number is cut at
// the accumulators' borders into up to three pieces. Accumulators have 64 bits, so that none overflows if it gets a
// piece of each row. So sums are exact, whatever the order of additions is, and rounded once.
//
// The accumulators of a sum lie in one sector or a few. Two neighbouring lanes add the pieces of a number, so that the
// atomic units of L2 get both at once. Numbers of a warp's hot segment are added up in registers first.
//
// Passes: the range of places, clearing of more accumulators than usual, additions, and rounding. Bytes moved: numbers
// are read twice, ids once; one or two sectors for each number between L2 and its atomic units; accumulators are
// cleared and read once.
#include "segments/cuda/atomics_rows.cuh"
#include "segments/cuda/exact.cuh"

namespace jaxgpuops::segments {
namespace {

// What a call's workspace begins with; then come the ranges of the blocks of segment_range_kernel.
struct Window {
  uint32_t low, bins, stride;  // the least place, and the accumulators and words of a sum
};
constexpr int kRangesAt = 64, kUsualBins = 3;

__device__ Window* window_of(const Args& a) { return reinterpret_cast<Window*>(a.workspace); }
__device__ uint2* ranges_of(const Args& a) { return reinterpret_cast<uint2*>(a.workspace + kRangesAt); }
__device__ uint64_t* words_of(const Args& a, int64_t o) {
  return reinterpret_cast<uint64_t*>(a.workspace + o * a.workspace_bytes + kWideHeadBytes);
}

// Calls f(o, first, step) for each outer index of which the thread has a share: the places first, first + step, ..
template <class F>
__device__ __forceinline__ void each_share(const Args& a, F f) {
  const uint32_t blocks = gridDim.x, outer = static_cast<uint32_t>(min(a.outer, int64_t{blocks}));
  const uint32_t own = blocks / outer, step = blocks / own;
  if (blockIdx.x >= own * step) return;
  for (int64_t o = blockIdx.x / own; o < a.outer; o += step)
    f(o, int64_t{blockIdx.x % own * kThreads + threadIdx.x}, int64_t{own * kThreads});
}
__device__ __forceinline__ void clear_words(const Args& a, uint32_t stride) {
  each_share(a, [&](int64_t o, int64_t first, int64_t step) {
    auto* const words = reinterpret_cast<uint4*>(words_of(a, o));
#pragma unroll 4
    for (int64_t i = first; i < a.cells() * stride / 2; i += step) words[i] = {0, 0, 0, 0};
  });
}

// Folds the ranges of all threads of a block: x is the smallest place, y the largest. Thread 0 gets the result.
__device__ uint2 range_of_block(uint2 range) {
  __shared__ uint2 of_warp[kThreads / 32];
  const auto fold = [](uint2 r) {
    r.x = fold_lanes(r.x, [](uint32_t x, uint32_t y) { return min(x, y); });
    r.y = fold_lanes(r.y, [](uint32_t x, uint32_t y) { return max(x, y); });
    return r;
  };
  range = fold(range);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = range;
  __syncthreads();
  return fold(of_warp[threadIdx.x % (kThreads / 32)]);
}

constexpr uint2 kNoRange = {kMostDoublePlace, 0};

// Also clears as many accumulators as usual numbers need.
__global__ void __launch_bounds__(kThreads) segment_range_kernel(const __grid_constant__ Args a) {
  let_dependents_start();
  uint2 range = kNoRange;
  each_share(a, [&](int64_t o, int64_t first, int64_t step) {
    const auto* from = static_cast<const uint2*>(a.data) + a.data_at(o) + first;
    constexpr uint32_t kMost = Parts<Float64>::kMostExponent;
    constexpr int kLoads = 8;
#pragma unroll 1
    for (int64_t left = a.length * a.inner - first; left > 0; left -= kLoads * step, from += kLoads * step) {
      uint2 bits[kLoads];  // low words and high words
#pragma unroll
      for (int k = 0; k < kLoads; ++k) bits[k] = k * step < left ? from[k * step] : uint2{0, 0};
#pragma unroll
      for (const uint2& own : bits) {
        const uint32_t exponent = own.y >> (Parts<Float64>::kMantissa - 32) & kMost;
        const bool has = exponent != kMost && ((own.y << 1) | own.x) != 0;
        const uint32_t place = max(exponent, 1u) - 1;
        range.x = has ? min(range.x, place) : range.x;
        range.y = has ? max(range.y, place) : range.y;
      }
    }
  });
  clear_words(a, wide_stride(kUsualBins));
  range = range_of_block(range);
  if (threadIdx.x == 0) ranges_of(a)[blockIdx.x] = range;
}

// Finds the window of all ranges. `blocks`: how many there are.
__global__ void __launch_bounds__(kThreads) segment_window_kernel(const __grid_constant__ Args a, int blocks) {
  let_dependents_start();
  wait_for_predecessor();
  uint2 range = kNoRange;
#pragma unroll 2
  for (int i = threadIdx.x; i < blocks; i += kThreads) {
    const uint2 own = ranges_of(a)[i];
    range.x = min(range.x, own.x);
    range.y = max(range.y, own.y);
  }
  range = range_of_block(range);
  Window window = {min(range.x, range.y)};
  window.bins = (range.y - window.low + Parts<Float64>::kMantissa) / a.exact.width + 1;
  window.stride = wide_stride(static_cast<int>(window.bins));
  if (blockIdx.x == 0 && threadIdx.x == 0) *window_of(a) = window;
  if (window.bins > kUsualBins) clear_words(a, window.stride);
}

struct Wide {
  using Bits = uint64_t;
  static constexpr bool kFromEnds = false, kInPlace = false;
  static constexpr int kBlocks = 3;  // that a multiprocessor holds at least
  static constexpr int kSteps = 4;

  const Args& a;
  int64_t o;
  int column;
  Window window = {};
  uint32_t hot = kNone;
  int64_t sums[kUsualBins] = {};  // if there are no more accumulators: of the lane's rows in the hot segment

  __device__ Wide(const Args& args, int64_t row, int own) : a(args), o(row), column(own) {}

  __device__ void begin(Bits) { window = *window_of(a); }
  __device__ bool peek(uint32_t) const { return false; }

  // Where accumulator `bin` of the lane's column is.
  __device__ int64_t place_of(uint32_t id, uint32_t bin) const { return (id * a.inner + column) * window.stride + bin; }
  __device__ void add_to(int64_t place, int64_t value) const {
    auto* const word = reinterpret_cast<unsigned long long*>(words_of(a, o) + place);
    if (value) atomicAdd(word, static_cast<unsigned long long>(value));
  }

  __device__ void add(uint32_t id, Bits bits, bool of_hot, bool) {
    constexpr int kPieces = 3;
    const Parts<Float64> parts(bits);
    bool has = id != kNone && !parts.special && parts.integer;
    const uint32_t above = has ? parts.place - window.low : 0, bin = above * a.exact.reciprocal >> kWidePlaceBits;
    const int width = a.exact.width;
    const int64_t mask = (int64_t{1} << width) - 1;
    const uint64_t integer = has ? parts.integer : 0;
    const int up = above - bin * width;  // less than `width`, which is less than 64
    int64_t piece[kPieces];
    piece[0] = static_cast<int64_t>(integer << up) & mask;
    piece[1] = static_cast<int64_t>(integer >> (width - up)) & mask;
    piece[2] = static_cast<int64_t>(integer >> min(2 * width - up, 63));
#pragma unroll
    for (int64_t& own : piece)
      if (parts.negative) own = -own;
    const bool is_hot = of_hot && has;
    if (window.bins <= kUsualBins) {
#pragma unroll
      for (int b = 0; b < kUsualBins; ++b)
#pragma unroll
        for (int k = 0; k <= b; ++k)
          if (is_hot && bin + k == b) sums[b] += piece[k];
    } else {
      unsigned left = __ballot_sync(kEveryLane, is_hot);
      while (left) {
        const int leader = __ffs(left) - 1, team = 1 << a.team_bits;
        const uint32_t first = __shfl_sync(kEveryLane, bin, leader);
        const bool same = is_hot && bin == first && column % team == leader % team;
        left &= ~__ballot_sync(kEveryLane, same);
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          const int64_t total = sum_of_lanes(same ? piece[k] : 0);
          if (static_cast<int>(threadIdx.x % 32) == leader) add_to(place_of(id, first + k), total);
        }
      }
    }
    has &= !is_hot;
    const int64_t place = place_of(id, bin);
    // In two turns, two neighbouring lanes add the first two pieces of a number.
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int from = 16 * turn + static_cast<int>(threadIdx.x % 32) / 2;
      const bool of_pair = __shfl_sync(kEveryLane, has, from);
      const int64_t at = shuffle_from(place, from);
      const int64_t lower = shuffle_from(piece[0], from), upper = shuffle_from(piece[1], from);
      if (of_pair) add_to(at + threadIdx.x % 2, threadIdx.x % 2 ? upper : lower);
    }
    if (has) add_to(place + 2, piece[2]);
    if (id != kNone && parts.special)
      atomicOr(reinterpret_cast<unsigned long long*>(words_of(a, o) + place_of(id, window.stride - 1)),
               static_cast<unsigned long long>(parts.special));
  }
  __device__ void flush() {
    if (hot == kNone) return;
#pragma unroll
    for (int b = 0; b < kUsualBins; ++b) {
      for (int lanes = 1 << a.team_bits; lanes < 32; lanes *= 2) sums[b] += shuffle_xor(sums[b], lanes);
      if ((threadIdx.x & 31) >> a.team_bits == 0) add_to(place_of(hot, b), sums[b]);
      sums[b] = 0;
    }
  }
  __device__ void end() {}

  __device__ static void finish(const Args& a, int64_t o, int64_t cell) {
    const Window window = *window_of(a);
    uint64_t* const words = words_of(a, o) + cell * window.stride;
    uint64_t& result = static_cast<uint64_t*>(a.out)[o * a.cells() + cell];
    const uint64_t what = words[window.stride - 1];
    if (what) {
      result = bits_as<uint64_t>(static_cast<double>(special_sum(static_cast<uint32_t>(what))));
    } else if (window.bins <= kUsualBins) {
      uint64_t own[kUsualBins];
#pragma unroll
      for (int b = 0; b < kUsualBins; ++b) own[b] = words[b];
      result = rounded_sum<Float64>(own, 1, kUsualBins, a.exact.width, window.low);
    } else {
      result = rounded_sum<Float64>(words, 1, static_cast<int>(window.bins), a.exact.width, window.low);
    }
  }
};

}  // namespace

cudaError_t launch_segment_wide_sums(cudaStream_t stream, const SegmentsPlan& plan, const Segments& problem,
                                     const SegmentsBuffers& buffers) {
  const Args a(plan, problem, buffers);
  Launch config;
  config.block = dim3(kThreads);
  const int64_t blocks = std::min<int64_t>(a.outer * a.length * a.inner / kThreads + 1, kWideRangeBlocks);
  config.grid = dim3(static_cast<unsigned>(blocks));
  cudaError_t status = launch(stream, config, segment_range_kernel, a);
  config.overlap = plan.overlap;
  config.grid = dim3(kWideRangeBlocks);
  if (status == cudaSuccess) status = launch(stream, config, segment_window_kernel, a, static_cast<int>(blocks));
  const int64_t warps = a.outer * a.runs * a.chunks;
  config.grid = dim3(static_cast<unsigned>((32 * warps + kThreads - 1) / kThreads));
  if (status == cudaSuccess && warps > 0) status = launch(stream, config, segment_atomics_kernel<Wide>, a);
  config.grid = dim3(blocks_for(a.outer * a.cells()));
  if (status == cudaSuccess) status = launch(stream, config, segment_finish_kernel<Wide>, a);
  return status;
}

}  // namespace jaxgpuops::segments
