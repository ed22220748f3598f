// Sums of many rows (inner == 1) of four or eight elements of 16 bits: a thread reads vectors, each of which has whole
// rows, and adds up the elements of a row one after the other, as the expression does that XLA has for fewer rows
// (lax/_reduce.py). One read. (XLA's kernel reads elements one by one: 5993813 x 4 bfloat16 took 29 us.) Works on any
// GPU.
#include "reduce/cuda/dispatch.cuh"

namespace jaxgpuops::reduce {
namespace {

constexpr int kThreads = 256, kEach = 4;  // vectors of a thread

template <class P>
struct PackedSums {
  const void* x;
  int64_t rows;
  bool aligned;  // x, to vectors
  bool pairs;    // two results are a word
  typename P::Args args;
};

template <class P, int kLength>
__global__ void __launch_bounds__(kThreads) packed_sums_kernel(const __grid_constant__ PackedSums<P> p) {
  using E = typename P::Element;
  using Bits = typename P::Bits;
  constexpr int kRows = 16 / sizeof(Bits) / kLength;  // of a vector
  const auto* const x = static_cast<const Bits*>(p.x);
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kEach) + threadIdx.x;
  Pack packs[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t row = (first + j * kThreads) * kRows;
    if (p.aligned && row + kRows <= p.rows) {
      packs[j] = row_engine::load_pack(reinterpret_cast<const Pack*>(x + row * kLength));
    } else {
#pragma unroll
      for (int i = 0; i < kRows * kLength; ++i)
        set<Bits>(packs[j], i, row + i / kLength < p.rows ? x[row * kLength + i] : Bits(0));
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t row = (first + j * kThreads) * kRows;
    typename P::Final final[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = E::load(get<Bits>(packs[j], r * kLength));
#pragma unroll
      for (int i = 1; i < kLength; ++i) sum = sum + E::load(get<Bits>(packs[j], r * kLength + i));
      final[r] = P::finish(p.args, {}, row_engine::Stat<P>{{sum}});
    }
    if (kRows == 2 && p.pairs && row + 2 <= p.rows) {
      reinterpret_cast<uint32_t*>(p.args.out)[row / 2] = pair_of<E>(final[0].value, final[kRows - 1].value);
      continue;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (row + r < p.rows) P::write_row(p.args, row + r, {}, final[r]);
  }
}

}  // namespace

cudaError_t launch_packed(cudaStream_t stream, const Problem& problem, const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) {
    using P = Sum<decltype(element), false>;
    if constexpr (sizeof(typename P::Bits) == 2) {
      const Rows& rows = problem.rows;
      const auto is_multiple = [](const void* pointer, int of) {
        return reinterpret_cast<uintptr_t>(pointer) % of == 0;
      };
      const PackedSums<P> p = {buffers.x, rows.outer, is_multiple(buffers.x, 16),
                               !problem.wide_result && is_multiple(buffers.out, 4),
                               parameters_of<P>(problem, buffers).args};
      const int64_t each = kThreads * kEach * (8 / rows.length), blocks = (rows.outer + each - 1) / each;
      if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
      Launch launched;
      launched.grid = dim3(static_cast<unsigned>(blocks));
      launched.block = dim3(kThreads);
      return launch(stream, launched, rows.length == 4 ? packed_sums_kernel<P, 4> : packed_sums_kernel<P, 8>, p);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace jaxgpuops::reduce
