// The form "packed" of argmax.cu.
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

template <class Key>
struct PackedCall {
  const Key* x;
  int32_t* indices;
  Key* values;  // null where only indices are wanted
  uint32_t rows;
};

// A vector of 16 bytes holds two or four rows, all of which one thread has: one load and one store.
template <class Key, int kLength>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_packed(const __grid_constant__ PackedCall<Key> a, const __grid_constant__ Ranks<Key> ranks) {
  constexpr int kVector = 16 / sizeof(Key), kRows = kVector / kLength;
  const uint32_t first = (blockIdx.x * kArgmaxThreads + threadIdx.x) * kRows;
  if (first >= a.rows) return;
  const Key* const from = a.x + uint64_t{first} * kLength;
  const bool whole = first + kRows <= a.rows;
  uint4 vector = {};
  if (whole) {
    vector = __ldg(reinterpret_cast<const uint4*>(from));
  } else {  // the array ends within the vector
    Key elements[kVector] = {};
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (first + e / kLength < a.rows) elements[e] = from[e];
    memcpy(&vector, elements, 16);
  }
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  const auto rank = [&](int e) {
    const uint32_t word = words[e * sizeof(Key) / 4];
    if constexpr (sizeof(Key) == 1) {  // the elements of a word with even numbers, or those with odd ones, are a pair
      const uint32_t pair = ranks((e % 2 ? word : word << 8) & 0xff00ff00);
      return e / 2 % 2 ? pair >> 16 : pair & 0xffff;
    } else {
      const uint32_t pair = ranks(word);
      return e % 2 ? pair >> 16 : pair & 0xffff;
    }
  };
  alignas(16) int32_t found[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    uint32_t best = rank(r * kLength);
    found[r] = 0;
#pragma unroll
    for (int i = 1; i < kLength; ++i) {
      const uint32_t other = rank(r * kLength + i);
      if (other > best) best = other, found[r] = i;
    }
  }
  int32_t* const to = a.indices + first;
  if (!whole) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (first + r < a.rows) to[r] = found[r];
  } else {
    using Indices = std::conditional_t<kRows == 4, uint4, uint2>;
    Indices all;
    memcpy(&all, found, sizeof(all));
    *reinterpret_cast<Indices*>(to) = all;
  }
  if (!a.values) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < a.rows) a.values[first + r] = from[r * kLength + found[r]];
}

}  // namespace

cudaError_t launch_argmax_packed(cudaStream_t stream, const ArgProblem& problem, const Argmax& a) {
  const auto run = [&](auto key, auto length) {
    using Key = decltype(key);
    constexpr int kLength = decltype(length)::value;
    const PackedCall<Key> call = {static_cast<const Key*>(a.x), a.indices, static_cast<Key*>(a.values),
                                  static_cast<uint32_t>(a.outer)};
    constexpr int64_t kRows = kArgmaxThreads * (16 / sizeof(Key) / kLength);  // of a block
    const Launch blocks = {dim3(static_cast<unsigned>((a.outer + kRows - 1) / kRows)), dim3(kArgmaxThreads)};
    return launch(stream, blocks, argmax_packed<Key, kLength>, call, Ranks<Key>(problem.order));
  };
  if (problem.key_bits == 8) return run(uint8_t{}, std::integral_constant<int, 4>());
  return a.length == 2 ? run(uint16_t{}, std::integral_constant<int, 2>())
                       : run(uint16_t{}, std::integral_constant<int, 4>());
}

}  // namespace jaxgpuops::topk
