// Gradients of softmax and log_softmax from x and the cotangent, for rows that a block holds: the forward result, which
// nothing else needs, is made on the way and stays in registers. Both arrays are read once, and the gradient is written
// once.
//
// A lane has two vectors of a row, so that it runs little code, which is most of the time of a small problem. The
// forward result is rounded as it would be in memory, and sums are added up in the order of rows_kernel, so the bits
// are those of the two kernels whose place this one takes.
//
// Rows that no cluster holds: gradient_split.cuh.
#include "softmax/cuda/gradient_split.cuh"

namespace jaxgpuops::softmax {
namespace {

// How a row is divided into spans, and these among lanes, in the kernel whose sums these are: see row_engine/plan.h.
struct Spans {
  int count, lane_bits, vector_bits;
};

struct GradientParameters {
  const void *x, *cotangent;
  void* out;
  int64_t rows;
  int length;
  bool aligned;              // every vector of every row is aligned
  int block_rows, row_bits;  // 2^row_bits lanes share a row; or a block of fewer has one
  Spans forward, backward;
};

constexpr int kUnits = kGradientVectors;
static_assert(kUnits == 2);

// Returns the number of vector j of this lane among the vectors of the block: those of a warp, or of the lanes that
// share a row, are neighbours.
__device__ __forceinline__ int vector_of(int row_bits, int j) {
  const int bits = min(row_bits, 5);
  return ((threadIdx.x >> bits << 1 | j) << bits) | (threadIdx.x & ((1 << bits) - 1));
}

// Merges a number of each vector over its span: first those of vectors that one lane of rows_kernel has there, one
// after the other, then those of its lanes. All threads get the result of their span, and whether `*any` is true in the
// block.
template <class Acc, class Add>
__device__ __forceinline__ Acc merged(Acc* shared, const Acc (&mine)[kUnits], int row_bits, const Spans& spans, Add add,
                                      bool* any = nullptr) {
  constexpr int kTogether = kOnlyVectors - 1;
#pragma unroll
  for (int j = 0; j < kUnits; ++j) shared[vector_of(row_bits, j)] = mine[j];
  if (any) {
    *any = __syncthreads_or(*any);
  } else {
    __syncthreads();
  }
  const int lanes = 1 << spans.lane_bits, size = lanes << spans.vector_bits, begin = vector_of(row_bits, 0) & -size;
  const int end = min(static_cast<int>(blockDim.x) * kUnits, begin + size), first = begin + (threadIdx.x & (lanes - 1));
  Acc all = shared[first];
#pragma unroll 1
  for (int from = first + lanes; from < end; from += kTogether * lanes) {
    Acc more[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) more[t] = from + t * lanes < end ? shared[from + t * lanes] : Acc(0);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) all = from + t * lanes < end ? add(all, more[t]) : all;
  }
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit < spans.lane_bits) all = add(all, shuffle_xor(all, 1 << bit));
  return all;
}

// The same for sums, not inlined: the code of sums that few rows have.
template <class Acc>
__device__ __noinline__ Acc merged_sum(Acc* shared, Acc a, Acc b, int row_bits, const Spans& spans) {
  const Acc mine[kUnits] = {a, b};
  return merged(shared, mine, row_bits, spans, [](Acc a, Acc b) { return a + b; });
}

// Returns the statistics of the row, given those of the thread's span.
template <class P>
__device__ __forceinline__ Stat<P> merged_spans(Stat<P> stat, int row_bits, const Spans& spans) {
  __shared__ Stat<P> of_spans[kMaxBlockWarps];
  if (spans.count == 1) return stat;
  const int bits = spans.lane_bits + spans.vector_bits, vector = vector_of(row_bits, 0);
  if ((vector & ((1 << bits) - 1)) == 0) of_spans[vector >> bits] = stat;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return row_engine::merge_lanes<P>(lane < spans.count ? of_spans[lane] : Stat<P>::none());
}

// P is the policy of the forward pass, Q that of its derivative.
template <class P, class Q, Op op>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) gradient_kernel(const __grid_constant__ GradientParameters p) {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kWidth = 16 / sizeof(Bits);
  auto* const shared = reinterpret_cast<Acc*>(dynamic_shared_memory());
  const int vectors = blockDim.x * kUnits;
  const int64_t row = int64_t{blockIdx.x} * p.block_rows + (threadIdx.x >> p.row_bits);
  int at[kUnits];  // in the row
#pragma unroll
  for (int j = 0; j < kUnits; ++j) at[j] = (vector_of(p.row_bits, j) & ((kUnits << p.row_bits) - 1)) * kWidth;
  const int length = row < p.rows ? p.length : 0;
  const auto load = [&](const void* array, Bits pad, int j) {
    const Bits* const from = static_cast<const Bits*>(array) + row * p.length + at[j];
    Pack pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(pack, i, pad);
    if (p.aligned) {
      if (at[j] < length) pack = row_engine::load_pack(reinterpret_cast<const Pack*>(from));
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (at[j] + i < length) set<Bits>(pack, i, from[i]);
    }
    return pack;
  };

  typename P::Args known = {};
  known.op = op;
  known.scale.factor = 1;
  const Unscaled<typename P::Args> args(known);
  row_engine::Held<P, 1, true> forward[kUnits];
  row_engine::Held<Q, 1, true> backward[kUnits];  // the cotangent, and the forward result
#pragma unroll
  for (int j = 0; j < kUnits; ++j) forward[j].raw[0][0] = load(p.x, P::pad(args, 0), j);
#pragma unroll
  for (int j = 0; j < kUnits; ++j) backward[j].raw[0][0] = load(p.cotangent, Bits{}, j);

  const auto plus = [](Acc a, Acc b) { return a + b; };
  Acc each[kUnits];
  Stat<P> stat;
#pragma unroll
  for (int j = 0; j < kUnits; ++j) each[j] = forward[j].peak(args);
  stat.of[0] = merged(shared, each, p.row_bits, p.forward, [](Acc a, Acc b) { return P::larger(a, b); });
  const auto shift = P::guard(stat.peak());
#pragma unroll
  for (int j = 0; j < kUnits; ++j) each[j] = forward[j].sum(args, 0, shift, 0, kWidth);
  stat.sum(0) = merged(shared + vectors, each, p.row_bits, p.forward, plus);
  const typename P::Row plain = {1};
  const auto final = P::finish(args, plain, merged_spans<P>(stat, p.row_bits, p.forward));
  Acc values[kUnits][kWidth];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[j][i] = P::output(args, plain, final, forward[j].x(args, 0, i), Acc(0));
    backward[j].raw[1][0] = row_engine::packed<Element>(values[j]);
  }

  typename Q::Args of_result = {};
  of_result.scale.factor = 1;
  of_result.transpose = true;
  const typename Q::Row unscaled = {1};
  Q::with_args(of_result, [&](const auto& known) {
    // The sums after the first are of rows with a likely element: see Tangent.
    bool likely = false;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (Q::kTails) likely |= Q::add(known, 2, Acc(0), Acc(1), backward[j].y(0, i), Acc(0)) != 0;
    Stat<Q> sums = {};
#pragma unroll
    for (int j = 0; j < kUnits; ++j) each[j] = backward[j].sum(known, 0, Acc(0), 0, kWidth);
    sums.sum(0) = merged(shared + 2 * vectors, each, p.row_bits, p.backward, plus, Q::kTails ? &likely : nullptr);
    if (likely) {
#pragma unroll
      for (int k = 1; k < Q::kSums; ++k) {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) each[j] = backward[j].sum(known, k, Acc(0), 0, kWidth);
        sums.sum(k) = merged_sum(shared + (2 + k) * vectors, each[0], each[1], p.row_bits, p.backward);
      }
    }
    const auto total = Q::finish(known, unscaled, merged_spans<Q>(sums, p.row_bits, p.backward));
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        values[j][i] = Q::output(known, unscaled, total, backward[j].x(known, 0, i), backward[j].y(0, i));
  });
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const Pack pack = row_engine::packed<Element>(values[j]);
    Bits* const to = static_cast<Bits*>(p.out) + row * p.length + at[j];
    if (p.aligned) {
      if (at[j] < length) row_engine::store_pack(reinterpret_cast<Pack*>(to), pack);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (at[j] + i < length) to[i] = get<Bits>(pack, i);
    }
  }
}

template <class P, class Q, Op op>
cudaError_t launch_kernel(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers) {
  const auto bits = [](int64_t n) {
    int bits = 0;
    while (int64_t{1} << bits < n) ++bits;
    return bits;
  };
  GradientParameters p = {};
  p.x = buffers.y;
  p.cotangent = buffers.x;
  p.out = buffers.out;
  p.rows = problem.rows.outer;
  p.length = static_cast<int>(problem.rows.length);
  p.backward = {static_cast<int>(plan.spans), plan.lane_bits, bits(plan.vectors)};
  p.forward = p.backward;
  if (P::kLarge && plan.spans > 1) p.forward = {static_cast<int>((plan.spans + 1) / 2), plan.lane_bits, bits(8)};
  p.row_bits = plan.spans > 1 ? bits(32 * kMaxBlockWarps) : plan.lane_bits + p.backward.vector_bits - 1;
  p.block_rows = std::max(plan.threads() >> p.row_bits, 1);
  const auto past_vector = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  p.aligned = past_vector(p.x) + past_vector(p.cotangent) + past_vector(p.out) == 0 &&
              problem.rows.length * plan.traits.item_bytes % 16 == 0;
  const int64_t blocks = (p.rows + p.block_rows - 1) / p.block_rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Launch launched;
  launched.grid = dim3(static_cast<unsigned>(blocks));
  launched.block = dim3(plan.threads());
  launched.shared_bytes = (2 + Q::kSums) * plan.threads() * kUnits * sizeof(typename P::Acc);
  return launch(stream, launched, gradient_kernel<P, Q, op>, p);
}

template <class E>
cudaError_t launch_of(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                      void* workspace) {
  if (plan.algorithm == RowAlgorithm::kRowsSplit) return launch_split<E>(stream, plan, problem, buffers, workspace);
  using P = Softmax<E, false>;
  if (problem.op == Op::kSoftmaxJvp)
    return launch_kernel<P, SoftmaxTangent<E>, Op::kSoftmax>(stream, plan, problem, buffers);
  return launch_kernel<P, LogSoftmaxTangent<E, false>, Op::kLogSoftmax>(stream, plan, problem, buffers);
}

}  // namespace

cudaError_t launch_gradient(cudaStream_t stream, const RowPlan& plan, const Problem& problem, const Buffers& buffers,
                            void* workspace) {
  if (plan.algorithm == RowAlgorithm::kEmpty) return cudaSuccess;
  switch (problem.dtype) {
    case DType::kFloat16: return launch_of<Float16>(stream, plan, problem, buffers, workspace);
    case DType::kBFloat16: return launch_of<BFloat16>(stream, plan, problem, buffers, workspace);
    case DType::kFloat32: return launch_of<Float32>(stream, plan, problem, buffers, workspace);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace jaxgpuops::softmax
