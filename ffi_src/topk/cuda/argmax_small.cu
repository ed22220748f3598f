// The form "small" of argmax.cu.
#include "common/cuda/small.cuh"
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

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

}  // namespace

cudaError_t launch_argmax_small(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                const Argmax& a) {
  const Rows cut = argmax_cut(problem.rows, a.slices);
  const SmallCall call = {a.x, a.indices, a.values, SmallColumns(cut, shape.column_bits, shape.lane_bits)};
  const SmallSlices slices = {Quotient(a.slices), a.slices, a.slice, a.slices * a.slice - a.length, a.workspace};
  const Launch blocks = {dim3(static_cast<unsigned>(shape.tiles)), dim3(static_cast<unsigned>(shape.threads))};
  const bool few = argmax_small_each(problem.rows, problem.key_bits / 8) == kSmallEach;
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    return launch(stream, blocks, few ? argmax_small<Key, kSmallEach> : argmax_small<Key, kArgmaxEach>, call,
                  Ranks<Key>(problem.order), slices);
  });
}

}  // namespace jaxgpuops::topk
