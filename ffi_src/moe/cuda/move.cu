// dispatch copies each token to its rows, and scales it if asked. combine adds up the weighted rows of each token.
//
// Bytes moved: each token, or row, is read once, and each result is written once. Both go by tokens: rows of one expert
// may be more tokens apart than L2 holds. Loads in flight hide the latency of memory: a thread of combine loads its
// units from several rows before it adds. A unit is a vector of 16 bytes, or less where rows are not multiples of that;
// neighbouring threads have neighbouring units. Sums are in float32 (float64 for float64) and in the order of choices,
// so that every run gives the same bits. Without scales, dispatch copies bytes for any dtype.
#include "common/cuda/dispatch.cuh"
#include "common/cuda/element.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/warp.cuh"
#include "moe/cuda/launch.h"

namespace jaxgpuops::moe {
namespace {

constexpr int kThreads = 256;
constexpr int kGradientThreads = 128;   // at most, of a block of combine's gradient
constexpr int kColumns = 4;             // units of a row that a thread has, if they are small
constexpr int kAhead = 4;               // rows that a thread knows, or loads, before it goes on
constexpr int64_t kManyRows = 1 << 11;  // rows that are enough for blocks that have several
constexpr int64_t kFilled = 32;         // rows that a warp looks through for those that have no token

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Most calls are small enough for a 32-bit division, which is much faster than one of 64 bits.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b, bool narrow) {
  return narrow ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// The units of a row that a thread has: the n-th is `first + n * threads`, if that is below `units`.
struct Place {
  int64_t line, outer, first;  // `line` counts the rows, or tokens, of all outer indices

  __device__ __forceinline__ Place(int64_t lines, int64_t threads, bool narrow) {
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    line = quotient(thread, threads, narrow);
    first = thread - line * threads;
    outer = quotient(line, lines, narrow);
  }
};

// Writes zeros to the rows that have no token. `block` is the number of the block among those that do so.
template <class V>
__device__ __forceinline__ void fill(const MoveProblem& p, int64_t block, const IndexMap& map, const int32_t* index,
                                     int64_t units, V* out) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (block * (blockDim.x / 32) + threadIdx.x / 32) * kFilled, line = first + lane;
  const int64_t o = line / p.rows;
  unsigned empty = __ballot_sync(kEveryLane, o < p.outer && index[map(o) + line - o * p.rows] < 0);
  for (; empty; empty &= empty - 1) {
    V* const row = out + (first + __ffs(empty) - 1) * units;
    for (int64_t u = lane; u < units; u += 32) row[u] = V{};
  }
}

int64_t fill_blocks(const MoveProblem& p, int64_t threads) {
  return ceil_div(p.outer * p.rows, threads / 32 * kFilled);
}

// ---- dispatch -------------------------------------------------------------------------------------------------------

// Neighbouring elements that are loaded and stored together.
template <class Element, int kVector>
struct alignas(kVector * sizeof(typename Element::Bits)) Vector {
  typename Element::Bits bits[kVector];
};

// What a row gets of its token: the same, or the token times the assignment's weight.
struct Copied {
  __device__ __forceinline__ int factor(int64_t) const { return 1; }
  template <class V>
  __device__ __forceinline__ V operator()(const V& v, int) const {
    return v;
  }
};

template <class Element>
struct Scaled {
  const typename Element::Acc* weights;
  __device__ __forceinline__ typename Element::Acc factor(int64_t at) const { return weights[at]; }
  template <class V>
  __device__ __forceinline__ V operator()(V v, typename Element::Acc factor) const {
#pragma unroll
    for (auto& bits : v.bits) bits = Element::store(factor * Element::load(bits));
    return v;
  }
};

// The first blocks have tokens, the others look for rows without any.
template <class V, int kEach, class Made>
__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(MoveProblem p, int64_t units, int64_t threads, int64_t blocks, bool narrow, Made made,
                    const V* __restrict__ x, const int32_t* __restrict__ row_of_assignment,
                    const int32_t* __restrict__ assignment_of_row, V* __restrict__ out) {
  if (blockIdx.x >= blocks) return fill(p, blockIdx.x - blocks, p.other, assignment_of_row, units, out);
  const Place at(p.tokens, threads, narrow);
  if (at.outer >= p.outer) return;
  const int32_t choices = static_cast<int32_t>(p.choices);
  const int64_t a = (at.line - at.outer * p.tokens) * choices, weight = p.weight(at.outer) + a;
  row_of_assignment += p.index(at.outer) + a;
  x += at.line * units + at.first;
  out += at.outer * p.rows * units + at.first;
  V token[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n)
    if (at.first + n * threads < units) token[n] = x[n * threads];
  for (int32_t j = 0; j < choices; j += kAhead) {
    int32_t row[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) row[i] = j + i < choices ? row_of_assignment[j + i] : -1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row[i] < 0 || row[i] >= p.rows) continue;
      const auto factor = made.factor(weight + j + i);
#pragma unroll
      for (int n = 0; n < kEach; ++n)
        if (at.first + n * threads < units) out[row[i] * units + n * threads] = made(token[n], factor);
    }
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------

template <class Element, int kVector, int kEach, int kTogether>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(MoveProblem p, int64_t threads, bool narrow, const Vector<Element, kVector>* __restrict__ y,
                   const int32_t* __restrict__ index, const typename Element::Acc* __restrict__ weights,
                   Vector<Element, kVector>* __restrict__ out) {
  using Acc = typename Element::Acc;
  const Place at(p.tokens, threads, narrow);
  if (at.outer >= p.outer) return;
  const int64_t units = p.inner / kVector;
  const int32_t choices = static_cast<int32_t>(p.choices);
  const int64_t a = (at.line - at.outer * p.tokens) * choices;
  const int32_t* const rows = index + p.index(at.outer) + a;
  if (weights) weights += p.weight(at.outer) + a;
  y += at.outer * p.rows * units + at.first;
  out += at.line * units + at.first;
  const auto within = [&](int c) { return at.first + c * threads < units; };
  Acc sums[kEach][kVector] = {};
  for (int32_t j = 0; j < choices; j += kTogether) {
    Vector<Element, kVector> v[kTogether][kEach];
    Acc scale[kTogether];
    bool there[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int32_t row = j + n < choices ? rows[j + n] : -1;
      there[n] = row >= 0;
#pragma unroll
      for (int c = 0; c < kEach; ++c)
        if (there[n] && within(c)) v[n][c] = y[row * units + c * threads];
      scale[n] = there[n] && weights ? weights[j + n] : Acc{1};
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (!there[n]) continue;
#pragma unroll
      for (int c = 0; c < kEach; ++c)
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[c][i] += scale[n] * Element::load(v[n][c].bits[i]);
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

// ---- the gradient of combine ----------------------------------------------------------------------------------------

// A block has a token and up to kRows of its rows of y. For each of these it adds up the product with the token's
// cotangent, and writes the scaled cotangent; kTurns units of a thread are loaded before the first of them is used.
// Other blocks write zeros to rows that have no assignment. A thread has as many elements of a row as a vector, and
// they are a vector if `inner` is a multiple of its length; else they are apart, so that neighbouring threads have
// neighbouring elements. The order of additions depends on `inner` and the dtype alone, even if rows are not aligned to
// vectors.
template <class Element, int kRows, int kTurns>
__global__ void __launch_bounds__(kGradientThreads)
    combine_vjp_kernel(MoveProblem p, bool whole, int64_t blocks, const typename Element::Bits* __restrict__ y,
                       const typename Element::Bits* __restrict__ ct, const int32_t* __restrict__ row_of_assignment,
                       const int32_t* __restrict__ assignment_of_row, const typename Element::Acc* __restrict__ weights,
                       typename Element::Bits* __restrict__ dy, typename Element::Acc* __restrict__ dw) {
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  constexpr int kVector = 16 / sizeof(Bits);
  using V = Vector<Element, kVector>;
  __shared__ Acc sums[kRows][kGradientThreads / 32];
  if (blockIdx.x >= blocks) {
    const int64_t block = blockIdx.x - blocks;
    return whole ? fill(p, block, p.other, assignment_of_row, p.inner / kVector, reinterpret_cast<V*>(dy))
                 : fill(p, block, p.other, assignment_of_row, p.inner, dy);
  }
  const int64_t units = (p.inner + kVector - 1) / kVector;
  const bool apart = p.inner % kVector != 0;
  const auto element = [&](int64_t u, int i) { return apart ? u + i * units : u * kVector + i; };
  const auto read = [&](const Bits* line, int64_t u) {
    V v = {};
    if (whole) {
      v = reinterpret_cast<const V*>(line)[u];
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (element(u, i) < p.inner) v.bits[i] = line[element(u, i)];
    }
    return v;
  };
  const auto write = [&](Bits* line, int64_t u, const V& v) {
    if (whole) {
      reinterpret_cast<V*>(line)[u] = v;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (element(u, i) < p.inner) line[element(u, i)] = v.bits[i];
    }
  };

  const int32_t choices = static_cast<int32_t>(p.choices), parts = (choices + kRows - 1) / kRows;
  const int64_t token = blockIdx.x / parts, o = token / p.tokens, t = token - o * p.tokens;
  const int32_t j = static_cast<int32_t>(blockIdx.x - token * parts) * kRows;
  row_of_assignment += p.index(o) + t * choices;
  weights += p.weight(o) + t * choices;
  y += o * p.rows * p.inner;
  dy += o * p.rows * p.inner;
  ct += token * p.inner;
  int64_t row[kRows];
  Acc scale[kRows], dot[kRows] = {};
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    row[n] = j + n < choices ? row_of_assignment[j + n] : -1;
    scale[n] = j + n < choices ? weights[j + n] : Acc{0};
  }
  for (int64_t first = threadIdx.x; first < units; first += kTurns * blockDim.x) {
    V own[kTurns], v[kTurns][kRows];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t u = first + turn * blockDim.x;
      if (u >= units) break;
      own[turn] = read(ct, u);
#pragma unroll
      for (int n = 0; n < kRows; ++n)
        if (row[n] >= 0) v[turn][n] = read(y + row[n] * p.inner, u);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t u = first + turn * blockDim.x;
      if (u >= units) break;
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        if (row[n] < 0) continue;
        V scaled;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const Acc c = Element::load(own[turn].bits[i]);
          dot[n] += c * Element::load(v[turn][n].bits[i]);
          scaled.bits[i] = Element::store(scale[n] * c);
        }
        write(dy + row[n] * p.inner, u, scaled);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    dot[n] = sum_of_lanes(dot[n]);
    if (threadIdx.x % 32 == 0) sums[n][threadIdx.x / 32] = dot[n];
  }
  __syncthreads();
  const int n = threadIdx.x;
  if (n < kRows && j + n < choices) {
    Acc total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += sums[n][warp];
    dw[token * choices + j + n] = total;
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

// The same as with_float(), and also for float8.
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

bool narrow_of(int64_t threads) { return threads < int64_t{1} << 32; }

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

template <class V, class Made>
cudaError_t dispatch(cudaStream_t stream, const MoveProblem& p, int64_t units, Made made, const void* x,
                     const int32_t* row_of_assignment, const int32_t* assignment_of_row, void* out) {
  const auto start = [&](auto each) {
    const int64_t threads = ceil_div(units, each), blocks = ceil_div(p.outer * p.tokens * threads, kThreads);
    return launch(stream, {grid_of(blocks + fill_blocks(p, kThreads)), dim3(kThreads)}, dispatch_kernel<V, each, Made>,
                  p, units, threads, blocks, narrow_of(blocks * kThreads), made, static_cast<const V*>(x),
                  row_of_assignment, assignment_of_row, static_cast<V*>(out));
  };
  // A thread with one small unit does too little, unless it writes it to many rows.
  if constexpr (sizeof(V) < 16)
    if (units > 2 && p.choices <= 4) return start(std::integral_constant<int, kColumns>());
  return start(std::integral_constant<int, 1>());
}

}  // namespace

cudaError_t launch_dispatch(cudaStream_t stream, const MoveProblem& p, const void* x, const int32_t* row_of_assignment,
                            const int32_t* assignment_of_row, const void* weights, void* out) {
  if (p.outer * p.rows * p.inner == 0) return cudaSuccess;
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
    const Scaled<Element> made{static_cast<const typename Element::Acc*>(weights)};
    return dispatch<Vector<Element, vector>>(stream, p, p.inner / vector, made, x, row_of_assignment, assignment_of_row,
                                             out);
  });
}

cudaError_t launch_combine(cudaStream_t stream, const MoveProblem& p, const void* y, const int32_t* index,
                           const void* weights, void* out) {
  if (p.outer * p.tokens * p.inner == 0) return cudaSuccess;
  const bool whole = alignment(p.inner * bytes_of(p.dtype), y, out) == 16;
  return dispatch_vector(p.dtype, whole, [&](auto element, auto vector) {
    using Element = decltype(element);
    using V = Vector<Element, vector>;
    const int64_t units = p.inner / vector;
    const auto start = [&](auto each, auto together) {
      const int64_t threads = ceil_div(units, each), blocks = ceil_div(p.outer * p.tokens * threads, kThreads);
      return launch(stream, {grid_of(blocks), dim3(kThreads)}, combine_kernel<Element, vector, each, together>, p,
                    threads, narrow_of(blocks * kThreads), static_cast<const V*>(y), index,
                    static_cast<const typename Element::Acc*>(weights), static_cast<V*>(out));
    };
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, kAhead> ahead;
    if constexpr (vector > 1)
      return p.choices > 2 ? start(two, ahead) : start(two, two);
    else
      return units > 2 ? start(std::integral_constant<int, kColumns>(), ahead)
                       : start(std::integral_constant<int, 1>(), ahead);
  });
}

cudaError_t launch_combine_vjp(cudaStream_t stream, const MoveProblem& p, const void* y, const void* ct,
                               const int32_t* row_of_assignment, const int32_t* assignment_of_row, const void* weights,
                               void* dy, void* dw) {
  if (p.outer == 0 || p.rows * p.inner == 0 && p.assignments() == 0) return cudaSuccess;
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  const bool whole = alignment(row_bytes, y, dy) == 16 && alignment(row_bytes, ct, ct) == 16;
  // The threads of a row depend on sizes alone, since they decide the order of additions.
  const int64_t units = std::max<int64_t>(ceil_div(row_bytes, 16), 1), turns = ceil_div(units, kGradientThreads);
  const int64_t threads = ceil_div(ceil_div(units, turns), 32) * 32;
  return with_any_float(p.dtype, [&](auto element) {
    const auto start = [&](auto rows, auto turns) {
      using Element = decltype(element);
      using Bits = typename Element::Bits;
      using Acc = typename Element::Acc;
      const int64_t blocks = p.outer * p.tokens * ceil_div(p.choices, rows);
      return launch(stream, {grid_of(blocks + fill_blocks(p, threads)), dim3(static_cast<unsigned>(threads))},
                    combine_vjp_kernel<Element, rows, turns>, p, whole, blocks, static_cast<const Bits*>(y),
                    static_cast<const Bits*>(ct), row_of_assignment, assignment_of_row,
                    static_cast<const Acc*>(weights), static_cast<Bits*>(dy), static_cast<Acc*>(dw));
    };
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    using Four = std::integral_constant<int, 4>;
    // Where tokens are few, blocks have a row each, so that there are more of them.
    return p.choices > 1 && p.outer * p.assignments() > kManyRows ? start(Two(), One()) : start(One(), Four());
  });
}

}  // namespace jaxgpuops::moe
