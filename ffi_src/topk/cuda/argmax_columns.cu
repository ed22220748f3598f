// The form "columns" of argmax.cu.
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

// The shape of a block: `beside` threads read the vectors of one row of columns, and `deep` such groups read `deep`
// rows, which are a step. If `beside` is 0, the block's rows are one run of vectors without a gap; a step is `threads`
// of them.
//
// If lines are not whole vectors, positions that are `period` apart begin equally far from one. Then a block has such
// positions only, and reads aligned windows of 16 bytes: its first columns may lie before a line, its last ones after
// it.
struct ColumnsCall {
  uint32_t tiles, beside, deep, threads, period;
  bool narrow;  // see merge_narrow()
};

// The best of a warp's candidates for column i, for lane i, if a vector has all kInner columns once or several times.
// Then its places belong to the same columns in all threads, which need no shared memory. (Where all threads left their
// candidates there, 8388608 x 2 float16 took 16.3 us; they take 13.8.)
// `step` is the positions of a step; `before`, those of the first vector that come before the block's first position.
template <class Key, uint32_t kInner>
__device__ __forceinline__ Candidate<Key> best_of_narrow(const Places<Key>& places, uint32_t before, uint32_t step,
                                                         bool active) {
  constexpr uint32_t kVector = Places<Key>::kVector;
  Candidate<Key> mine = {0, ~0u};
#pragma unroll
  for (uint32_t column = 0; column < kInner; ++column) {
    Candidate<Key> best = {0, ~0u};
#pragma unroll
    for (uint32_t e = 0; e < kVector; e += kInner) {
      Candidate<Key> c = places.at(e + column);
      c.index = c.index * step + threadIdx.x * (kVector / kInner) + e / kInner - before;
      if (active) best.merge(c);
    }
    merge_team(best, 32);
    if (threadIdx.x % 32 == column) mine = best;
  }
  return mine;
}

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
  // The block's positions are begin, begin + period, ..
  const uint32_t period = call.period, turn = period == 1 ? 0 : part % period;
  const uint32_t begin = period == 1 ? part * a.slice : part / period * a.slice * period + turn;
  const uint32_t count = begin < a.length ? smaller(a.slice, (a.length - begin + period - 1) / period) : 0;
  const Key* x = static_cast<const Key*>(a.x) + (static_cast<int64_t>(outer) * a.length + begin) * inner;
  let_dependents_start();

  // The thread reads vectors v, v + stride, .. up to `end`.
  const uint4* body;
  uint32_t v, stride, end, pitch, misaligned = 0, depth = 0, column = 0, width = call.beside * kVector, skipped = 0;
  bool last = false;
  if (call.beside) {
    depth = call.deep == 1 ? 0 : thread / call.beside;
    column = (thread - depth * call.beside) * kVector;
    const auto before = period == 1 ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
    body = reinterpret_cast<const uint4*>(x - before + tile * width + column);
    v = depth;
    stride = call.deep;
    pitch = period == 1 ? inner / kVector : inner * period / kVector;
    const uint32_t at = tile * width + column;
    end = at < inner + before && depth < call.deep ? count : 0;
    // Nothing beyond the array is read: the last window may be a part of one.
    last = period > 1 && at + kVector > inner + before && outer + 1 == a.outer &&
           begin + (count - 1) * period + 1 == a.length;
    if (last && end) --end;
    skipped = before;
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

  if (last && v + 1 == count) {
    const Key* const line = x + static_cast<int64_t>(v) * period * inner;
    Elements elements;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      const uint32_t of_line = tile * width + column + e - skipped;  // wraps around before the line
      elements.of[e] = of_line < inner ? line[of_line] : ranks.least;
    }
    places.see(bits_as<uint4>(elements), ranks, s);
  }

  if (call.beside && call.deep == 1) {
    if (end == 0) return;
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      Candidate<Key> c = places.at(e);
      c.index = begin + c.index * period;
      const uint32_t of_line = tile * width + column + e - skipped;
      if (of_line < inner) finish(a, outer, of_line, part, c);
    }
    return;
  }

  auto* all = reinterpret_cast<Candidate<Key>*>(dynamic_shared_memory());
  if (call.narrow) {
    const uint32_t before = misaligned / inner, step = call.threads * kVector / inner, warps = blockDim.x / 32;
    const bool active = thread < call.threads;
    if (active && v == end && (misaligned + static_cast<int64_t>(count) * inner) % kVector) edge();
    constexpr uint32_t kFour = kVector < 4 ? kVector : 4, kEight = kVector < 8 ? kVector : 8;
    const Candidate<Key> best = inner == 2   ? best_of_narrow<Key, 2>(places, before, step, active)
                                : inner == 4 ? best_of_narrow<Key, kFour>(places, before, step, active)
                                             : best_of_narrow<Key, kEight>(places, before, step, active);
    if (thread % 32 < inner) all[thread % 32 * warps + thread / 32] = best;
    __syncthreads();
    if (thread >= inner) return;
    Candidate<Key> c = all[thread * warps];
    for (uint32_t w = 1; w < warps; ++w) c.merge(all[thread * warps + w]);
    c.index += begin;
    return finish(a, outer, thread, part, c);
  }
  const uint32_t rows = call.beside ? call.deep : call.threads * kVector / inner;  // rows in a step
  if (thread < call.threads) {
    uint32_t steps_before = 0;
    if (!call.beside) {
      const int64_t elements = misaligned + static_cast<int64_t>(count) * inner;
      if (v == end && elements % kVector) edge();
      // If the block's elements begin inside a vector, the first thread's first places lie before them. It skips these
      // in the first step; later they are the end of the step before.
      uint32_t place = thread * kVector;
      steps_before = place < misaligned;
      place = (steps_before ? place + call.threads * kVector : place) - misaligned;
      depth = place / inner;
      column = place - depth * inner;
    }
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) {
      Candidate<Key> c = places.at(e);
      c.index = begin + ((larger(c.index, steps_before) - steps_before) * rows + depth) * period;
      all[spaced<kVector>(depth * width + column)] = c;
      if (++column == width) {
        column = 0;
        if (++depth == rows) depth = steps_before = 0;
      }
    }
  }
  merge_rows<kVector>(all, width, smaller(rows, count), thread, blockDim.x);
  for (uint32_t c = thread; c < width; c += blockDim.x) {
    const uint32_t of_line = tile * width + c - skipped;
    if (of_line < inner) finish(a, outer, of_line, part, all[spaced<kVector>(c)]);
  }
}

}  // namespace

cudaError_t launch_argmax_columns(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                  const Argmax& a) {
  const dim3 blocks(static_cast<unsigned>(a.outer * shape.tiles * a.slices));
  const auto threads = static_cast<uint32_t>(shape.threads);
  const ColumnsCall call = {static_cast<uint32_t>(shape.tiles),  static_cast<uint32_t>(shape.beside),
                            static_cast<uint32_t>(shape.deep),   threads,
                            static_cast<uint32_t>(shape.period), shape.narrow};
  const auto shared = static_cast<size_t>(argmax_shared_bytes(problem.rows, problem.key_bits / 8, shape));
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return launch(stream, {blocks, dim3((threads + 31) / 32 * 32), shared}, argmax_columns<Key>, a,
                  Ranks<Key>(problem.order), call);
  });
}

}  // namespace jaxgpuops::topk
