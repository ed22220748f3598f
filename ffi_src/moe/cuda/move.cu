// dispatch copies each token to its rows, and scales it if asked. combine adds up the weighted rows of each token.
//
// Bytes moved: each token, or row, is read once, and each result is written once. Both kernels go through the tokens in
// order: in the order of rows, the tokens of neighbouring rows could lie further apart than L2 reaches. A thread of
// combine loads its units from several rows before it adds, so that these loads overlap. A unit is a vector of 16
// bytes, or less if rows are not multiples of that; neighbouring threads have neighbouring units. Sums are in float32
// (float64 for float64) and in the order of choices, so that every run gives the same bits. Without scales, dispatch
// copies bytes for any dtype.
#include <type_traits>

#include "common/cuda/dispatch.cuh"
#include "common/cuda/element.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/combine_vjp.cuh"
#include "moe/cuda/launch.h"
#include "moe/cuda/rows.cuh"

namespace jaxgpuops::moe {
namespace {

constexpr int kThreads = 256;  // threads of a block of dispatch
constexpr int kCombineThreads = 128;
constexpr int kColumns = 4;                // units of a row that a thread has if units are small
constexpr int kAhead = 4;                  // rows whose indices, or elements, a thread loads before it uses them
constexpr int64_t kManyThreads = 1 << 17;  // with so many threads, each may do more work
constexpr int64_t kWideRow = 96;           // if a token has so many threads or more, no block has several tokens
constexpr int64_t kMostLines = 65535;      // of the second dimension of a grid

// The number of a block, and that of its line, in a grid as Shares has it.
__device__ __forceinline__ uint32_t line_of_grid() { return blockIdx.z * gridDim.y + blockIdx.y; }
__device__ __forceinline__ uint64_t block_of_grid() { return uint64_t{line_of_grid()} * gridDim.x + blockIdx.x; }

// The units of a token that a thread has: the n-th is `first + n * threads`, if that is below `units`.
struct Place {
  int64_t token;  // counted over all outer indices
  uint32_t first;

  // If rows are wide, the blocks of a line of the grid have the parts of a token; else a block has several tokens.
  __device__ __forceinline__ Place(bool wide, uint32_t threads) {
    const uint64_t thread = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (wide) {
      token = line_of_grid();
      first = static_cast<uint32_t>(thread);
    } else {
      token = quotient(static_cast<int64_t>(thread), threads);
      first = static_cast<uint32_t>(thread - token * threads);
    }
  }
};

// ---- dispatch -------------------------------------------------------------------------------------------------------

// What dispatch writes to a row: its token, or the token times the assignment's weight.
struct Copied {
  __device__ __forceinline__ int factor(const MoveProblem&, int64_t) const { return 1; }
  template <class V>
  __device__ __forceinline__ V operator()(const V& v, int) const {
    return v;
  }
};

template <class Element>
struct Scaled {
  const void* weights;
  __device__ __forceinline__ typename Element::Acc factor(const MoveProblem& p, int64_t at) const {
    return Weight<Element>::load(p, weights, at).number(p);
  }
  template <class V>
  __device__ __forceinline__ V operator()(V v, typename Element::Acc factor) const {
#pragma unroll
    for (auto& bits : v.bits) bits = Element::store(factor * Element::load(bits));
    return v;
  }
};

// The first blocks copy tokens, the others search for rows that have no token.
template <class V, int kEach, class Made>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ MoveProblem p, uint32_t units, uint32_t threads, bool wide, uint64_t blocks,
                    Made made, const V* __restrict__ x, const int32_t* __restrict__ row_of_assignment,
                    const int32_t* __restrict__ assignment_of_row, V* __restrict__ out) {
  const uint64_t block = block_of_grid();
  if (block >= blocks) return fill(p, block - blocks, assignment_of_row, units, out);
  const Place at(wide, threads);
  if (at.first >= threads || at.token >= p.outer * p.tokens) return;
  const auto choices = static_cast<uint32_t>(p.choices), rows = static_cast<uint32_t>(p.rows);
  const Shift shift = shift_of(p, at.token);
  const int64_t a = at.token * choices, weight = a + shift.weight;
  row_of_assignment += a + shift.index;
  x += at.token * units + at.first;
  out += shift.row * units + at.first;
  V token[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n)
    if (at.first + n * threads < units) token[n] = x[n * threads];
#pragma unroll 1
  for (uint32_t j = 0; j < choices; j += kAhead) {
    uint32_t row[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) row[i] = j + i < choices ? row_of_assignment[j + i] : ~0u;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row[i] >= rows) continue;  // skips assignments without a row, too: their -1 is a large number here
      const auto factor = made.factor(p, weight + j + i);
#pragma unroll
      for (int n = 0; n < kEach; ++n)
        if (at.first + n * threads < units) out[int64_t{row[i]} * units + n * threads] = made(token[n], factor);
    }
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------

// W: float16 or bfloat16 like Element, or the type of the sums. It is not chosen by a branch as for other kernels,
// since that took 3 to 5 %, also without weights.
template <class Element, class W, int kVector, int kEach, int kTogether>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ MoveProblem p, uint32_t units, uint32_t threads, bool wide,
                   const Vector<Element, kVector>* __restrict__ y, const int32_t* __restrict__ index,
                   const W* __restrict__ weights, Vector<Element, kVector>* __restrict__ out) {
  using Acc = typename Element::Acc;
  const auto number = [](W weight) -> Acc {
    if constexpr (std::is_same_v<W, Acc>)
      return weight;
    else
      return Element::load(weight);
  };
  const Place at(wide, threads);
  if (at.first >= threads || at.token >= p.outer * p.tokens) return;
  const auto choices = static_cast<uint32_t>(p.choices);
  const Shift shift = shift_of(p, at.token);
  const int64_t a = at.token * choices;
  const int32_t* const rows = index + a + shift.index;
  if (weights) weights += a + shift.weight;
  y += shift.row * units + at.first;
  out += at.token * units + at.first;
  const auto within = [&](int c) { return at.first + c * threads < units; };
  Acc sums[kEach][kVector] = {};
#pragma unroll 1
  for (uint32_t j = 0; j < choices; j += kTogether) {
    Vector<Element, kVector> v[kTogether][kEach];
    W scale[kTogether];
    bool there[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int32_t row = j + n < choices ? rows[j + n] : -1;
      there[n] = row >= 0;
#pragma unroll
      for (int c = 0; c < kEach; ++c)
        if (there[n] && within(c)) v[n][c] = y[static_cast<uint32_t>(row) * uint64_t{units} + c * threads];
      scale[n] = there[n] && weights ? weights[j + n] : W{1};  // narrow weights are never null
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (!there[n]) continue;
#pragma unroll
      for (int c = 0; c < kEach; ++c)
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[c][i] += number(scale[n]) * Element::load(v[n][c].bits[i]);
    }
  }
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    if (!within(c)) continue;
    Vector<Element, kVector> result;
#pragma unroll
    for (int i = 0; i < kVector; ++i) result.bits[i] = Element::store(sums[c][i]);
    out[c * threads] = result;
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

// Returns the alignment in bytes, up to 16, that both arrays and all of their rows have.
int alignment(int64_t row_bytes, const void* a, const void* b) {
  const uintptr_t all =
      static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  int bytes = 16;
  while (all % bytes) bytes /= 2;
  return bytes;
}

// Calls f with the element class of a float dtype, including float8, which with_float() lacks.
template <class F>
cudaError_t with_any_float(DType dtype, F f) {
  return is_float8(dtype) ? with_float8(dtype, f) : with_float(dtype, f);
}

// Calls f with an element class and the number of elements that it loads together: as many as 16 bytes hold, or one.
template <class F>
cudaError_t dispatch_vector(DType dtype, bool whole, F f) {
  return with_any_float(dtype, [&](auto element) {
    constexpr int kVector = 16 / sizeof(typename decltype(element)::Bits);
    return whole ? f(element, std::integral_constant<int, kVector>()) : f(element, std::integral_constant<int, 1>());
  });
}

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

// How blocks of at most `most` threads share tokens of `units` units, `each` of which belong to a thread: see Place.
struct Shares {
  int64_t threads, parts = 1, block, blocks;
  bool wide;

  Shares(const MoveProblem& p, int64_t units, int64_t each, int64_t most)
      : threads(ceil_div(units, each)),
        block(most),
        blocks(ceil_div(p.outer * p.tokens * threads, most)),
        wide(threads >= kWideRow) {
    if (!wide) return;
    parts = ceil_div(threads, most);
    block = ceil_div(ceil_div(threads, parts), 32) * 32;
    blocks = p.outer * p.tokens * parts;
  }

  // A grid of these blocks and some more. Threads of wide rows find their place without a division.
  dim3 grid(int64_t more = 0) const {
    if (!wide) return grid_of(blocks + more);
    const int64_t lines = ceil_div(blocks + more, parts), planes = ceil_div(lines, kMostLines);
    return dim3(static_cast<unsigned>(parts), static_cast<unsigned>(ceil_div(lines, planes)),
                static_cast<unsigned>(planes));
  }
};

template <class V, class Made>
cudaError_t dispatch(cudaStream_t stream, const MoveProblem& p, int64_t units, Made made, const void* x,
                     const int32_t* row_of_assignment, const int32_t* assignment_of_row, void* out) {
  const auto start = [&](auto each) {
    const Shares shares(p, units, each, kThreads);
    return launch(stream, {shares.grid(fill_blocks(p, shares.block)), grid_of(shares.block)},
                  dispatch_kernel<V, each, Made>, p, units, shares.threads, shares.wide, shares.blocks, made,
                  static_cast<const V*>(x), row_of_assignment, assignment_of_row, static_cast<V*>(out));
  };
  // A thread that has one small unit does too little work, unless it writes that unit to many rows.
  if constexpr (sizeof(V) < 16)
    if (units > 2 && p.choices <= 4) return start(std::integral_constant<int, kColumns>());
  return start(std::integral_constant<int, 1>());
}

}  // namespace

cudaError_t launch_dispatch(cudaStream_t stream, const MoveProblem& p, const void* x, const int32_t* row_of_assignment,
                            const int32_t* assignment_of_row, const void* weights, void* out) {
  if (p.outer * p.rows * p.inner == 0) return cudaSuccess;
  if (p.inner > UINT32_MAX) return cudaErrorInvalidValue;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const int bytes = alignment(row_bytes, x, out);
  const auto copy = [&](auto unit) {
    using V = decltype(unit);
    return dispatch<V>(stream, p, row_bytes / static_cast<int64_t>(sizeof(V)), Copied{}, x, row_of_assignment,
                       assignment_of_row, out);
  };
  if (!weights) {
    switch (bytes) {
      case 16: return copy(uint4{});
      case 8: return copy(uint2{});
      case 4: return copy(uint32_t{});
      case 2: return copy(uint16_t{});
      default: return copy(uint8_t{});
    }
  }
  return dispatch_vector(p.dtype, bytes == 16, [&](auto element, auto vector) {
    using Element = decltype(element);
    const Scaled<Element> made{weights};
    return dispatch<Vector<Element, vector>>(stream, p, p.inner / vector, made, x, row_of_assignment, assignment_of_row,
                                             out);
  });
}

cudaError_t launch_combine(cudaStream_t stream, const MoveProblem& p, const void* y, const int32_t* index,
                           const void* weights, void* out) {
  if (p.outer * p.tokens * p.inner == 0) return cudaSuccess;
  if (p.inner > UINT32_MAX) return cudaErrorInvalidValue;
  const bool whole = alignment(p.inner * bytes_of(p.dtype), y, out) == 16;
  return dispatch_vector(p.dtype, whole, [&](auto element, auto vector) {
    using Element = decltype(element);
    using V = Vector<Element, vector>;
    const int64_t units = p.inner / vector;
    const auto start = [&](auto each, auto together) {
      const Shares shares(p, units, each, kCombineThreads);
      const auto with = [&](auto weight) {
        using W = decltype(weight);
        return launch(stream, {shares.grid(), grid_of(shares.block)},
                      combine_kernel<Element, W, vector, each, together>, p, units, shares.threads, shares.wide,
                      static_cast<const V*>(y), index, static_cast<const W*>(weights), static_cast<V*>(out));
      };
      if constexpr (sizeof(typename Element::Bits) == 2)
        if (p.narrow) return with(typename Element::Bits{});
      return with(typename Element::Acc{});
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, kAhead> ahead;
    if constexpr (vector > 1) {
      if (p.choices <= 2) return start(two, two);
      // If there are few blocks, time goes into waiting for loads, so a thread should issue all its loads at once.
      if constexpr (sizeof(typename Element::Bits) > 1)
        if (p.choices > kAhead && 4 * p.outer * p.tokens * units <= kManyThreads)
          return start(one, std::integral_constant<int, 2 * kAhead>());
      return start(one, ahead);
    } else {
      return units > 2 ? start(std::integral_constant<int, kColumns>(), ahead) : start(one, ahead);
    }
  });
}

cudaError_t launch_combine_vjp(cudaStream_t stream, const MoveProblem& p, const void* y, const void* ct,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                               void* dy, void* dw) {
  if (p.outer == 0 || p.rows * p.inner == 0 && p.assignments() == 0) return cudaSuccess;
  if (p.inner > UINT32_MAX) return cudaErrorInvalidValue;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const bool whole = alignment(row_bytes, y, dy) == 16 && alignment(row_bytes, ct, ct) == 16;
  // The number of threads of a row depends on sizes alone, since it decides the order of additions. Together they take
  // the whole row at a time, or equal parts of it.
  const int64_t units = std::max<int64_t>(ceil_div(row_bytes, 16), 1),
                times = ceil_div(units, kUnits * kGradientThreads);
  const int64_t threads = ceil_div(ceil_div(units, kUnits * times), 32) * 32;
  // If there are few tokens, several blocks share the rows of a token.
  const int64_t least = ceil_div(p.choices, kGradientRows);
  const int64_t shared = kManyThreads / std::max<int64_t>(p.outer * p.tokens * threads, 1);
  const int64_t each = ceil_div(p.choices, std::clamp(shared, least, p.choices)), parts = ceil_div(p.choices, each);
  return with_any_float(p.dtype, [&](auto element) {
    const auto start = [&](auto whole, auto by_row) {
      using Element = decltype(element);
      using Bits = typename Element::Bits;
      const int64_t blocks = p.outer * (by_row ? p.rows : p.tokens * parts);
      const int64_t more = by_row ? ceil_div(p.outer * p.assignments(), threads) : fill_blocks(p, threads);
      return launch(stream, {grid_of(blocks + more), grid_of(threads)}, combine_vjp_kernel<Element, whole, by_row>, p,
                    blocks, parts, each, static_cast<const Bits*>(y), static_cast<const Bits*>(ct), row_of_assignment,
                    assignment_of_row, weights, static_cast<Bits*>(dy), dw);
    };
    if (!whole) return start(std::false_type(), std::false_type());
    if constexpr (sizeof(typename decltype(element)::Bits) > 1)  // others load no row early
      if (each == 1 && parts > 1) return start(std::true_type(), std::true_type());
    return start(std::true_type(), std::false_type());
  });
}

}  // namespace jaxgpuops::moe
