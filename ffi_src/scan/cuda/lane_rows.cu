// Many rows of 33 to 128 elements, for cumulative calls and recurrences without segments, but no logsumexps: a lane has
// a row. A block copies its rows, which follow each other in memory, to shared memory as they are. Each lane steps over
// its row there, and replaces it by the results, which go back the same way. So lanes exchange nothing, and no vector
// is shifted, wherever rows begin. Operands are read once, results written once.
//
// Rows are folded in the order of rows.cuh: a run, which one lane has there, is four packs, and prefixes of runs are
// made of blocks of 2^bit runs.
#include <cstdint>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.cuh"
#include "scan/cuda/cumulative.h"
#include "scan/cuda/dispatch.cuh"
#include "scan/cuda/kernels.h"
#include "scan/cuda/recurrences.h"
#include "scan/cuda/runs.h"

namespace jaxgpuops::scan {
namespace {

struct LaneRows {
  const void *x, *a;
  void* out;
  const void* h0;
  int64_t rows;
  int length, of_block, image_bytes;  // rows of a block; shared memory of an operand
  bool aligned, wide_h0, backward;
  Options options;
};

constexpr int kMostRunBits = 2;  // log2 of the most runs of a row

// kPacked: rows are whole packs; after each line of shared memory, 16 bytes are left free, so that lanes do not meet in
// a bank.
template <class Policy, bool kPacked>
struct LaneRow {
  using Element = typename Policy::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using State = typename Policy::State;
  static constexpr int kBytes = sizeof(Bits), n = 16 / kBytes, kRun = 4 * n;
  static constexpr bool kPair = Policy::kOperands == 2;

  const LaneRows& p;
  unsigned char* const memory = dynamic_shared_memory();

  __device__ static int padded(int byte) { return kPacked ? byte + (byte >> kLineBits << 4) : byte; }

  __device__ void copy_in(int operand, const void* data, int64_t first, int count) const {
    const Bits* const from = static_cast<const Bits*>(data) + first;
    unsigned char* const to = memory + operand * p.image_bytes;
    const int whole = p.aligned ? count / n : 0;
    for (int i = threadIdx.x; i < whole; i += blockDim.x) copy_async(to + padded(16 * i), from + i * n);
    for (int i = whole * n + static_cast<int>(threadIdx.x); i < count; i += blockDim.x)
      *reinterpret_cast<Bits*>(to + padded(i * kBytes)) = from[i];
  }

  __device__ void copy_out(int64_t first, int count) const {
    Bits* const to = static_cast<Bits*>(p.out) + first;
    const int whole = p.aligned ? count / n : 0;
    for (int i = threadIdx.x; i < whole; i += blockDim.x)
      *reinterpret_cast<Pack*>(to + i * n) = *reinterpret_cast<const Pack*>(memory + padded(16 * i));
    for (int i = whole * n + static_cast<int>(threadIdx.x); i < count; i += blockDim.x)
      to[i] = *reinterpret_cast<const Bits*>(memory + padded(i * kBytes));
  }

  // Element k of the row, in the direction of the scan; `begin` is where the row begins.
  template <bool kBackward>
  __device__ Bits* element(int operand, int begin, int k) const {
    const int at = begin + (kBackward ? p.length - 1 - k : k) * kBytes;
    return reinterpret_cast<Bits*>(memory + operand * p.image_bytes + at);
  }
  template <bool kBackward>
  __device__ Pack* pack(int operand, int begin, int k) const {
    const int at = begin + (kBackward ? p.length - n - k : k) * kBytes;
    return reinterpret_cast<Pack*>(memory + operand * p.image_bytes + padded(at));
  }

  // Steps over n positions from position k on, of which `count` exist, and replaces them by their results.
  template <bool kBackward>
  __device__ void step_over(int begin, int k, int count, State& state, const Options& o) const {
    In<Acc> in[n] = {};
    read<kBackward>(begin, k, count, in);
    Acc results[n];
#pragma unroll
    for (int i = 0; i < n; ++i) results[i] = Policy::step(state, in[i], o).first;
    if constexpr (kPacked) {
      Pack own = pack_of<Element>(results);
      if (kBackward) own = reversed<Bits>(own);
      *pack<kBackward>(0, begin, k) = own;
    } else if (count >= n) {
#pragma unroll
      for (int i = 0; i < n; ++i) *element<kBackward>(0, begin, k + i) = Element::store(results[i]);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i < count) *element<kBackward>(0, begin, k + i) = Element::store(results[i]);
    }
  }

  // Reads n elements from position k on, of which `count` exist.
  template <bool kBackward>
  __device__ void read(int begin, int k, int count, In<Acc> (&in)[n]) const {
    const auto one = [&](int operand, auto put) {
      if constexpr (kPacked) {
        Pack own = *pack<kBackward>(operand, begin, k);
        if (kBackward) own = reversed<Bits>(own);
#pragma unroll
        for (int i = 0; i < n; ++i) put(i, Element::load(get<Bits>(own, i)));
      } else if (count >= n) {
#pragma unroll
        for (int i = 0; i < n; ++i) put(i, Element::load(*element<kBackward>(operand, begin, k + i)));
      } else {
#pragma unroll
        for (int i = 0; i < n; ++i)
          if (i < count) put(i, Element::load(*element<kBackward>(operand, begin, k + i)));
      }
    };
    one(0, [&](int i, Acc value) { in[i].x = value; });
    if constexpr (kPair) one(1, [&](int i, Acc value) { in[i].a = value; });
  }

  template <bool kBackward>
  __device__ void go(int row, State initial, const Options& o) const {
    const auto combine = [&](const State& l, const State& r) { return Policy::combine(l, r, p.options); };
    const int begin = row * p.length * kBytes;
    if constexpr (kExact<Policy>) {
#pragma unroll 1
      for (int k = 0; k < p.length; k += n) step_over<kBackward>(begin, k, p.length - k, initial, o);
      return;
    }
    State blocks[kMostRunBits], before = Policy::identity(p.options);  // blocks of 2^bit runs, and all runs before
#pragma unroll 1
    for (int r = 0; r * kRun < p.length; ++r) {
      const int first = r * kRun;
      State packs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packs[j] = before;
        if (first + (j + 1) * n >= p.length) continue;  // nothing follows
        In<Acc> in[n] = {};
        read<kBackward>(begin, first + j * n, n, in);
        packs[j] = Policy::first(in[0], o);
#pragma unroll
        for (int i = 1; i < n; ++i) Policy::step(packs[j], in[i], o);
      }
      const State start = combine(initial, before), two = combine(packs[0], packs[1]);
      State states[4] = {start, combine(start, packs[0]), combine(start, two), combine(start, combine(two, packs[2]))};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = first + j * n, count = p.length - k;
        if (count <= 0) break;
        step_over<kBackward>(begin, k, count, states[j], o);
      }
      State own = combine(two, combine(packs[2], packs[3])), block = own;
      before = own;
      bool carry = true;
#pragma unroll
      for (int bit = 0; bit < kMostRunBits; ++bit) {
        if (r >> bit & 1) {
          before = combine(blocks[bit], before);
          if (carry) block = before;
        } else {
          if (carry) blocks[bit] = block;
          carry = false;
        }
      }
    }
  }

  __device__ State initial(int64_t row) const {
    if constexpr (Policy::kInitial) {
      if (p.h0) {
        if constexpr (is_float(Element::kDType) && kBytes < sizeof(float))
          if (p.wide_h0) return Policy::initial(static_cast<const float*>(p.h0)[row], p.options);
        return Policy::initial(Element::load(static_cast<const Bits*>(p.h0)[row]), p.options);
      }
    }
    return Policy::identity(p.options);
  }
};

template <class Policy, bool kPacked>
__global__ void __launch_bounds__(kLaneRowsThreads) scan_lane_rows(const __grid_constant__ LaneRows p) {
  using Work = LaneRow<Policy, kPacked>;
  const Work work{p};
  const int64_t row = int64_t{blockIdx.x} * p.of_block, first = row * p.length;
  const int rows = static_cast<int>(min(int64_t{p.of_block}, p.rows - row)), count = rows * p.length;
  const int own = static_cast<int>(threadIdx.x);
  work.copy_in(0, p.x, first, count);
  if constexpr (Work::kPair) work.copy_in(1, p.a, first, count);
  commit_async_copies();
  wait_for_async_copies<0>();
  __syncthreads();
  if (own < rows) {
    const auto initial = work.initial(row + own);
    with_call<Policy>(p.options, [&](const Options& o) {
      if (p.backward) {
        work.template go<true>(own, initial, o);
      } else {
        work.template go<false>(own, initial, o);
      }
    });
  }
  __syncthreads();
  work.copy_out(first, count);
}

template <class Policy>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Parameters& p) {
  LaneRows s{};
  s.x = p.operands[0];
  s.a = p.operands[1];
  s.out = p.results[0];
  s.h0 = p.h0;
  s.rows = p.columns;
  s.length = static_cast<int>(p.length);
  s.of_block = static_cast<int>(plan.block_columns);
  s.image_bytes = plan.span_bytes;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  s.aligned = aligned(s.x) && aligned(s.a) && aligned(s.out);
  s.wide_h0 = p.wide_h0;
  s.backward = p.backward;
  s.options = p.options;
  const Launch shape{dim3(p.strips), dim3(plan.threads()), static_cast<size_t>(plan.stage_bytes)};
  const bool packed = p.length * sizeof(typename Policy::Element::Bits) % 16 == 0;
  return launch(stream, shape, packed ? scan_lane_rows<Policy, true> : scan_lane_rows<Policy, false>, s);
}

}  // namespace

cudaError_t launch_lane_rows(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const Parameters p = parameters_of(plan, problem, buffers, nullptr);
  const auto narrow = [&](auto f) { return problem.dtype == DType::kBFloat16 ? f(BFloat16{}) : f(Float16{}); };
  if (problem.kind == Kind::kLinear) return narrow([&](auto e) { return run<Linear<decltype(e)>>(stream, plan, p); });
  if (bytes_of(problem.dtype) == 1) return run<AnyOperator<Integer<uint8_t>>>(stream, plan, p);
  if (!is_float(problem.dtype)) return run<AnyOperator<Integer<uint16_t>>>(stream, plan, p);
  return narrow([&](auto e) {
    using E = decltype(e);
    switch (problem.op) {
      case Op::kSum: return run<Cumulative<Sum<E>, false>>(stream, plan, p);
      case Op::kProd: return run<Cumulative<Product<E>, false>>(stream, plan, p);
      default: return run<Cumulative<Extreme<E>, false>>(stream, plan, p);
    }
  });
}

}  // namespace jaxgpuops::scan
