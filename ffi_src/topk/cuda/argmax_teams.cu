// The form "teams" of argmax.cu.
#include "common/cuda/warp.cuh"
#include "topk/cuda/argmax.cuh"

namespace jaxgpuops::topk {
namespace {

struct TeamCall {
  const void* x;
  int32_t* indices;
  void* values;  // null where only indices are wanted
  uint32_t rows, length;
  int lane_bits;
  bool whole;  // rows are whole vectors, which are aligned
};

// Shifts by 32 bits or more give 0.
__device__ __forceinline__ uint32_t shift_left(uint32_t bits, int by) {
  uint32_t shifted;
  asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(bits), "r"(by));
  return shifted;
}
__device__ __forceinline__ uint32_t shift_right(uint32_t bits, int by) {
  uint32_t shifted;
  asm("shr.u32 %0, %1, %2;" : "=r"(shifted) : "r"(bits), "r"(by));
  return shifted;
}

// The row lies in aligned windows of 16 bytes, of which a lane has kEach. What they hold before and after the row is
// replaced by an element of rank 0.
template <class Key, int kEach>
__global__ void __launch_bounds__(kArgmaxRowThreads)
    argmax_teams(const __grid_constant__ TeamCall a, const __grid_constant__ Ranks<Key> ranks) {
  constexpr int kSize = sizeof(Key), kVector = 16 / kSize, kWords = kPairs<Key> ? kVector / 2 : kVector;
  using W = Word<Key>;
  const int bits = a.lane_bits, lanes = 1 << bits, lane = threadIdx.x & (lanes - 1);
  const uint32_t own = blockIdx.x * (kArgmaxRowThreads >> bits) + (threadIdx.x >> bits);
  const uint32_t row = smaller(own, a.rows - 1);  // a team without a row reads the last one
  const Key* const from = static_cast<const Key*>(a.x) + uint64_t{row} * a.length;
  const int head = a.whole ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16);
  const int end = head + static_cast<int>(a.length) * kSize;  // bytes from the first window on
  const auto* const windows = reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(from) - head) + lane;
  uint4 window[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int begin = 16 * (j * lanes + lane);
    window[j] = uint4{};
    if (begin + 16 <= end || (begin < end && row + 1 < a.rows)) {
      window[j] = __ldg(windows + j * lanes);
    } else if (begin < end) {  // the array may end within this window
      Key elements[kVector] = {};
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (begin + e * kSize >= head && begin + e * kSize < end)
          elements[e] = reinterpret_cast<const Key*>(windows + j * lanes)[e];
      memcpy(&window[j], elements, 16);
    }
  }

  W rank[kEach][kWords];
  const uint64_t least = uint64_t{ranks.least} * (kSize == 1 ? 0x01010101u : kSize == 2 ? 0x00010001u : 1u);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    uint32_t word[4] = {window[j].x, window[j].y, window[j].z, window[j].w};
    if (!a.whole || (j + 1) * lanes * 16 > end) {
      const int left = 8 * (end - 16 * (j * lanes + lane));  // bits of the row from this window on
      const int before = lane == 0 ? 8 * head : 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t mask = shift_right(~0u, max(32 * (k + 1) - left, 0));
        if (j == 0) mask &= shift_left(~0u, max(before - 32 * k, 0));
        const auto fill = static_cast<uint32_t>(kSize == 8 && k % 2 ? least >> 32 : least);
        word[k] = (word[k] & mask) | (fill & ~mask);
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kSize == 8) {
        rank[j][w] = ranks(static_cast<uint64_t>(word[2 * w + 1]) << 32 | word[2 * w]);
      } else if constexpr (kSize == 1) {
        rank[j][w] = ranks((w % 2 ? word[w / 2] : word[w / 2] << 8) & 0xff00ff00);
      } else {
        rank[j][w] = ranks(word[w]);
      }
    }
  }

  // The lane's best rank, and the first place that has it.
  W best = 0;
  if constexpr (kPairs<Key>) {
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) pair = __vmaxu2(pair, rank[j][w]);
    best = larger(pair >> 16, pair & 0xffff);
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j)
#pragma unroll
      for (int w = 0; w < kWords; ++w) best = larger(best, rank[j][w]);
  }
  uint32_t place = 0;
#pragma unroll
  for (int j = kEach - 1; j >= 0; --j)
#pragma unroll
    for (int e = kVector - 1; e >= 0; --e) {
      if constexpr (kPairs<Key>) {
        const W pair = rank[j][kSize == 1 ? e / 4 * 2 + e % 2 : e / 2];
        const bool high = kSize == 1 ? e / 2 % 2 : e % 2;
        if ((high ? pair >> 16 : pair & 0xffff) == best) place = j * kVector + e;
      } else {
        if (rank[j][e] == best) place = j * kVector + e;
      }
    }
  Candidate<Key> c = {best, (place / kVector * lanes + lane) * kVector + place % kVector - head / kSize};
  if constexpr (kPairs<Key>) {  // rows are shorter than 2^16
    uint32_t both = static_cast<uint32_t>(c.key) << 16 | ((0xffff - c.index) & 0xffff);
    if (bits == 5) {
      both = largest_of_warp(both);
    } else {
      for (int d = 1; d < lanes; d *= 2) both = larger(both, shuffle_xor(both, d));
    }
    c = {both >> 16, 0xffff - (both & 0xffff)};
  } else if (bits == 5) {
    merge_team(c, 32);
  } else {
    for (int d = 1; d < lanes; d *= 2) c.merge({shuffle_xor(c.key, d), shuffle_xor(c.index, d)});
  }
  if (c.key == 0) c.index = 0;  // all elements have rank 0, and so has what replaced others
  if (lane != 0 || own != row) return;
  a.indices[row] = static_cast<int32_t>(c.index);
  if (a.values) static_cast<Key*>(a.values)[row] = from[c.index];
}

}  // namespace

cudaError_t launch_argmax_teams(cudaStream_t stream, const ArgmaxShape& shape, const ArgProblem& problem,
                                const Argmax& a) {
  const auto length = static_cast<uint32_t>(a.length), bytes = length * problem.key_bits / 8;
  const bool whole = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  const TeamCall call = {a.x, a.indices, a.values, static_cast<uint32_t>(a.outer), length, shape.lane_bits, whole};
  const int64_t teams = kArgmaxRowThreads >> shape.lane_bits;
  const Launch blocks = {dim3(static_cast<unsigned>((a.outer + teams - 1) / teams)), dim3(kArgmaxRowThreads)};
  return dispatch_key(problem.key_bits, [&](auto key) {
    using Key = decltype(key);
    const auto kernel = shape.each == 1   ? argmax_teams<Key, 1>
                        : shape.each == 2 ? argmax_teams<Key, 2>
                        : shape.each == 4 ? argmax_teams<Key, 4>
                                          : argmax_teams<Key, 8>;
    return launch(stream, blocks, kernel, call, Ranks<Key>(problem.order));
  });
}

}  // namespace jaxgpuops::topk
