// The forms "strided", "sheets" and "planes" of argmax.cu.
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

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

// The same for elements of 8 or 16 bits, of which a thread has those of a word: neighbouring columns. (One by one, they
// take an instruction each to load, and three times as many to compare.) A word that is not aligned is put together
// from two; if kWhole, all are aligned. The array begins and ends at multiples of 4 bytes.
template <class Key, bool kWhole>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_words(const __grid_constant__ Argmax a, const Ranks<Key> ranks, uint32_t tiles) {
  constexpr uint32_t kBatch = 8, kColumns = 4 / sizeof(Key);
  const uint32_t inner = static_cast<uint32_t>(a.inner), width = blockDim.x, deep = blockDim.y;
  const uint32_t unit = blockIdx.x / a.slices, part = blockIdx.x - unit * a.slices, depth = threadIdx.y;
  const uint32_t outer = unit / tiles, word = (unit - outer * tiles) * width + threadIdx.x;
  const uint32_t column = smaller(word * kColumns, inner - kColumns);  // the last words may overlap
  const uint32_t begin = part * a.slice, end = smaller(begin + a.slice, a.length);
  let_dependents_start();
  Places<Key, 1> places;
#pragma unroll
  for (uint32_t& step : places.steps) step = begin + depth;
  const int64_t step = static_cast<int64_t>(deep) * inner;
  const Key* x =
      static_cast<const Key*>(a.x) + (static_cast<int64_t>(outer) * a.length + begin + depth) * inner + column;
  const auto load = [](const Key* from) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    const auto* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    const uint32_t low = __ldg(words);
    if (kWhole) return low;
    return __funnelshift_r(low, __ldg(words + (address & 3 ? 1 : 0)), 8 * static_cast<uint32_t>(address & 3));
  };
  const auto look = [&](uint32_t i, auto all_there) {
    uint32_t loaded[kBatch][1];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (all_there || i + u * deep < end) loaded[u][0] = load(x + u * step);
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (all_there || i + u * deep < end) places.see(loaded[u], ranks, i + u * deep);
  };
  uint32_t i = begin + depth;
  for (; i + (kBatch - 1) * deep < end; i += kBatch * deep, x += kBatch * step) look(i, std::true_type());
  if (i < end) look(i, std::false_type());
  auto* const all = reinterpret_cast<Candidate<Key>*>(dynamic_shared_memory());
  const uint32_t mine = threadIdx.x * kColumns;
  if (deep > 1) {
#pragma unroll
    for (uint32_t c = 0; c < kColumns; ++c) all[depth * width * kColumns + mine + c] = places.at(c);
    merge_rows<1>(all, width * kColumns, smaller(deep, end - begin), depth * width + threadIdx.x, width * deep);
  }
  if (depth != 0 || word * kColumns >= inner) return;
#pragma unroll
  for (uint32_t c = 0; c < kColumns; ++c) finish(a, outer, column + c, part, deep > 1 ? all[mine + c] : places.at(c));
}

// A thread has all of a vector of columns, with many loads in flight.
template <class Key>
__global__ void __launch_bounds__(kArgmaxPlaneThreads)
    argmax_planes(const __grid_constant__ Argmax a, const Ranks<Key> ranks, uint32_t tiles) {
  constexpr uint32_t kVector = 16 / sizeof(Key), kBatch = 8;
  const uint32_t inner = static_cast<uint32_t>(a.inner), pitch = inner / kVector;
  const uint32_t outer = blockIdx.x / tiles, vector = (blockIdx.x - outer * tiles) * blockDim.x + threadIdx.x;
  if (vector >= pitch) return;
  const uint4* x = static_cast<const uint4*>(a.x) + static_cast<int64_t>(outer) * a.length * pitch + vector;
  Places<Key> places;
  uint4 loaded[kBatch];
#pragma unroll 1
  for (uint32_t i = 0; i < a.length; i += kBatch) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (i + u < a.length) loaded[u] = __ldcs(x + static_cast<int64_t>(i + u) * pitch);
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (i + u < a.length) places.see(loaded[u], ranks, i + u);
  }
  const uint32_t column = vector * kVector;
  if (a.values) {
#pragma unroll
    for (uint32_t e = 0; e < kVector; ++e) write<Key>(a, outer, column + e, places.steps[e]);
    return;
  }
  auto* indices = reinterpret_cast<uint2*>(a.indices + static_cast<int64_t>(outer) * inner + column);
#pragma unroll
  for (uint32_t e = 0; e < kVector; e += 2) indices[e / 2] = make_uint2(places.steps[e], places.steps[e + 1]);
}

}  // namespace

cudaError_t launch_argmax_strided(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                  const Argmax& a) {
  Launch blocks = {dim3(static_cast<unsigned>(a.outer * shape.tiles * a.slices)),
                   dim3(static_cast<unsigned>(shape.beside), static_cast<unsigned>(shape.deep))};
  blocks.shared_bytes = static_cast<size_t>(argmax_shared_bytes(problem.rows, problem.key_bits / 8, shape));
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    if constexpr (sizeof(Key) <= 2) {
      if (shape.form == ArgmaxForm::kStrided && shape.columns > 1) {
        const bool whole = problem.rows.inner % shape.columns == 0;
        return launch(stream, blocks, whole ? argmax_words<Key, true> : argmax_words<Key, false>, a,
                      Ranks<Key>(problem.order), static_cast<uint32_t>(shape.tiles));
      }
    }
    const auto kernel = shape.form == ArgmaxForm::kPlanes   ? argmax_planes<Key>
                        : shape.form == ArgmaxForm::kSheets ? argmax_strided<Key, argmax_sheet_columns(sizeof(Key))>
                                                            : argmax_strided<Key, 1>;
    return launch(stream, blocks, kernel, a, Ranks<Key>(problem.order), static_cast<uint32_t>(shape.tiles));
  });
}

}  // namespace jaxgpuops::topk
