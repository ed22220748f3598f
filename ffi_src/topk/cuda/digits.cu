// Top-k for k of hundreds to thousands, of rows that the shared memory of a block or of a cluster holds whole. It does
// the same for all data: radix select and radix sort.
//
// Each block loads its part of the row and counts the highest digits of the keys. The blocks of a cluster add up their
// counts, each those of some digits, and find the digit of the k-th key. Then they count the next digit of the keys
// that have it, until the k-th key is known, or until only a few more than k elements reach the digits that are known.
// The elements that reach them are listed in the order of their indices: counts of each warp and each block show where
// its elements go. Results in the order of indices are written at once. Others are listed in the first block of the
// cluster, which sorts them, stably, by digits of the difference to the largest key.
//
// Bytes moved: the input once, k results (value and index).
#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "sort/cuda/digits.cuh"
#include "topk/cuda/composite.cuh"
#include "topk/cuda/digits_shape.h"
#include "topk/cuda/kernels.h"

namespace jaxgpuops::topk {
namespace {

struct Digits : Call {
  uint32_t blocks;  // of a cluster
  uint32_t part;    // elements of a block
  uint32_t team_bytes;
  int64_t rows;
  uint32_t reach;  // the number of samples that shall reach the first guess; 0: no guess
};

// Some number that depends on i as if by chance, below `range`.
__device__ __forceinline__ uint32_t scatter(uint32_t i, uint32_t range) {
  i *= 0x9e3779b1u;
  i ^= i >> 15;
  i *= 0x85ebca77u;
  i ^= i >> 13;
  return __umulhi(i * 0xc2b2ae3du, range);
}

// The sum of the values of all lower threads of a team.
template <int kThreads>
__device__ __forceinline__ uint32_t sum_before_team(uint32_t value, uint32_t* sums) {
  if constexpr (kThreads == 32)
    return sum_up_to_lane(value) - value;
  else
    return sum_before<kThreads>(value, sums);
}

template <int kThreads>
constexpr size_t control_bytes = digits_control(kThreads);
template <int kThreads>
struct DigitsControl {
  alignas(16) uint32_t bins[kThreads * kDigitsBins];
  uint32_t sums[32], reaching[32], tying[32];                         // of the warps
  uint32_t of_block[kMaxDigitsBlocks], block_ties[kMaxDigitsBlocks];  // of the blocks
  uint32_t of_digit[kThreads == 32 ? 1 : sort::kDigits];
  uint32_t top;
  uint32_t digit, above, kept;  // the digit of the k-th key, elements with a higher one, and with this one
};

template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(std::max(kThreads, 256), kThreads == 512 ? 2 : 4)
    digits_kernel(const __grid_constant__ Digits a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr uint32_t kVector = 16 / sizeof(Key), kWarps = kThreads / 32, kBins = kThreads * kDigitsBins;
  constexpr uint32_t kRoom = kThreads * kItems;  // of the block's share of the list
  constexpr int kBits = 8 * sizeof(Key), kBinBits = std::min(kThreads == 512 ? 12 : kThreads == 256 ? 11 : 8, kBits);
  static_assert(kBins >= 1 << kBinBits);
  using S = DigitsControl<kThreads>;
  static_assert(sizeof(S) <= kBins * 4 + control_bytes<kThreads>);
  constexpr bool kWarp = kThreads == 32;  // each warp has its own row
  const uint32_t team = threadIdx.x / kThreads;
  unsigned char* const memory = dynamic_shared_memory() + team * a.team_bytes;
  S& s = *reinterpret_cast<S*>(memory);
  uint32_t* const list = reinterpret_cast<uint32_t*>(memory + kBins * 4 + control_bytes<kThreads>);
  uint32_t* const indices = list + kRoom;
  const uint32_t tid = threadIdx.x % kThreads, lane = tid % 32, warp = tid / 32;
  const uint32_t blocks = a.blocks, rank = kWarp ? 0 : blockIdx.x % blocks;
  const int64_t row = kWarp ? int64_t{blockIdx.x} * (kDigitsTeams) + team : blockIdx.x / blocks, inner = a.inner;
  if (kWarp && row >= a.rows) return;
  const uint32_t begin = min(rank * a.part, a.length), own = min(a.part, a.length - begin);
  const Key* const whole_row = static_cast<const Key*>(a.x) + row / inner * a.length * inner + row % inner;
  const Key* const x = whole_row + begin * inner;
  // Elements lie in shared memory at the same distance from a multiple of 16 bytes as in global memory.
  const uint32_t skipped = inner > 1 ? 0 : static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(Key));
  uint4* const held = reinterpret_cast<uint4*>(indices + kRoom);
  uint32_t* const marks = reinterpret_cast<uint32_t*>(held + a.part / kVector + 1);
  Key* const keys = reinterpret_cast<Key*>(held) + skipped;
  const uint32_t vectors = (skipped + own + kVector - 1) / kVector;
  const auto meet = [&] { kWarp ? __syncwarp() : __syncthreads(); };
  const auto sync = [&] {
    if (blocks > 1) {
      arrive_at_cluster_barrier();
      wait_at_cluster_barrier();
    } else {
      meet();
    }
  };
  const auto clear = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kDigitsBins / 4; ++i)
      reinterpret_cast<uint4*>(s.bins)[i * kThreads + tid] = uint4{0, 0, 0, 0};
    if (tid == 0) s.digit = ~0u, s.top = 0;
  };
  clear();
  meet();

  Key samples[kDigitsSamples];
  if (a.reach) {
#pragma unroll
    for (uint32_t i = 0; i < kDigitsSamples; ++i)
      samples[i] = __ldg(whole_row + scatter(i * kThreads + tid, a.length) * inner);
  }
  {
    const auto take = [&](uint32_t i, Key bits) {
      const Key key = encode(bits, a.order);
      keys[i] = key;
    };
    if (inner > 1) {
      constexpr int kLoads = 8;
#pragma unroll 1
      for (uint32_t i = tid; i < own; i += kLoads * kThreads) {
        Key bits[kLoads];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) bits[u] = __ldg(x + min(i + u * kThreads, own - 1) * inner);
#pragma unroll
        for (int u = 0; u < kLoads; ++u)
          if (i + u * kThreads < own) take(i + u * kThreads, bits[u]);
      }
    } else {
      const uint32_t head = skipped ? min(kVector - skipped, own) : 0, whole = (own - head) / kVector;
      const uint32_t loose = own - whole * kVector;
      if (tid < loose) {
        const uint32_t i = tid < head ? tid : whole * kVector + tid;
        take(i, x[i]);
      }
      const uint4* const from = reinterpret_cast<const uint4*>(x + head);
      uint4* const to = reinterpret_cast<uint4*>(keys + head);
      constexpr int kLoads = 4;
#pragma unroll 1
      for (uint32_t v = tid; v < whole; v += kLoads * kThreads) {
        uint4 words[kLoads];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) words[u] = __ldcs(from + min(v + u * kThreads, whole - 1));
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          if (v + u * kThreads >= whole) break;
          Key* const e = reinterpret_cast<Key*>(&words[u]);
#pragma unroll
          for (uint32_t j = 0; j < kVector; ++j) e[j] = encode(e[j], a.order);
          to[v + u * kThreads] = words[u];
        }
      }
    }
  }

  // Slot i of the part is element i - skipped. A mark is a bit of a slot: the element may be among the k best.
  const Key* const slots = reinterpret_cast<const Key*>(held);
  const uint32_t words = (skipped + own + 31) / 32;
  const auto for_marks = [&](uint32_t left, auto use) {
    for (; left; left &= left - 1) use(__ffs(static_cast<int>(left)) - 1);
  };

  // Finds the digit of the need-th key from the counts of `among` blocks, each of which adds up those of some digits.
  // Lower blocks and threads have higher digits.
  const auto find = [&](uint32_t need, uint32_t used, uint32_t among, uint32_t own_rank) {
    const auto meet_all = [&] { among > 1 ? sync() : meet(); };
    meet_all();
    const uint32_t share = max(used / among, 1u), each = (share + kThreads - 1) / kThreads;
    const bool has = tid * each < share && own_rank * share < used;
    const uint32_t highest = used - 1 - own_rank * share - tid * each;
    uint32_t sum = 0;
    if (has) {
#pragma unroll 1
      for (uint32_t j = 0; j < each; ++j) {
        uint32_t count = s.bins[highest - j];
        if (among > 1) {
          count = 0;
#pragma unroll 4
          for (uint32_t b = 0; b < among; ++b) count += load_in_cluster(&s.bins[highest - j], b);
          s.bins[highest - j] = count;
        }
        sum += count;
      }
    }
    uint32_t before = sum_before_team<kThreads>(sum, s.sums);
    if (among > 1) {
      if (tid == kThreads - 1)
        for (uint32_t b = 0; b < among; ++b) store_in_cluster(&s.of_block[own_rank], b, before + sum);
      sync();
      before += sum_of_warp(lane < own_rank ? s.of_block[lane] : 0);
    }
    if (has && before < need && before + sum >= need) {
      uint32_t digit = highest, count;
      while (count = s.bins[digit], before + count < need) before += count, --digit;
      for (uint32_t b = 0; b < among; ++b) {
        const uint32_t to = among > 1 ? b : rank;
        store_in_cluster(&s.digit, to, digit);
        store_in_cluster(&s.above, to, before);
        store_in_cluster(&s.kept, to, count);
      }
    }
    meet_all();
  };

  // A sample of the row gives a digit that more than k elements reach, almost certainly.
  uint32_t floor = 0;
  if (a.reach) {
#pragma unroll
    for (int i = 0; i < kDigitsSamples; ++i) atomicAdd(&s.bins[encode(samples[i], a.order) >> (kBits - kBinBits)], 1u);
    find(a.reach, 1u << kBinBits, 1, 0);
    floor = s.digit;
    meet();
    clear();
  }
  uint32_t need = a.k, prefix = 0, reached = 0;
  int bits = kBits;
  bool exact;
#pragma unroll 1
  while (true) {
    const int above_bits = bits, digit_bits = min(bits, kBinBits);
    bits -= digit_bits;
    const uint32_t used = 1u << digit_bits;
    meet();
    if (above_bits == kBits) {  // each thread marks eight elements
#pragma unroll 1
      for (uint32_t o = tid; o < words * 4; o += kThreads) {
        alignas(16) Key e[8];
        if constexpr (sizeof(Key) == 1) {
          *reinterpret_cast<uint2*>(e) = reinterpret_cast<const uint2*>(held)[min(o, 2 * vectors - 1)];
        } else {
#pragma unroll
          for (uint32_t v = 0; v < 8 / kVector; ++v)
            reinterpret_cast<uint4*>(e)[v] = held[min(o * (8 / kVector) + v, vectors - 1)];
        }
        uint32_t hits = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) hits |= static_cast<uint32_t>(e[j] >> (kBits - kBinBits) >= floor) << j;
        if (o * 8 < skipped) hits &= ~0u << min(skipped - o * 8, 8u);
        const int left = static_cast<int>(skipped + own) - static_cast<int>(o * 8);
        if (left < 8) hits &= left > 0 ? (1u << left) - 1 : 0;
        reinterpret_cast<uint8_t*>(marks)[o] = static_cast<uint8_t>(hits);
        for_marks(hits, [&](int j) { atomicAdd(&s.bins[slots[o * 8 + j] >> (kBits - kBinBits)], 1u); });
      }
    } else {
#pragma unroll 1
      for (uint32_t w = tid; w < words; w += kThreads) {
        uint32_t kept = marks[w];
        for_marks(kept, [&](int j) {
          const uint32_t key = slots[w * 32 + j], high = key >> above_bits;
          if (high < prefix) kept ^= 1u << j;
          if (high == prefix) atomicAdd(&s.bins[key >> bits & (used - 1)], 1u);
        });
        marks[w] = kept;
      }
    }
    find(need, used, blocks, rank);
    if (s.digit == ~0u) {  // the sample misled, which happens hardly ever
      floor = 0;
      bits = kBits;
      sync();
      clear();
      continue;
    }
    need -= s.above;
    prefix = prefix << digit_bits | s.digit;
    reached = a.k - need + s.kept;
    exact = s.kept != need && !(bits > 0 && reached <= kRoom * blocks);
    if (!exact || bits == 0) break;
    sync();  // all threads have read the digit
    clear();
  }
  const uint32_t least = prefix << bits;
  if (exact) reached = a.k;

  // The elements that reach the least key are listed. If not all that equal it are needed, the first `need` of them
  // are.
  const uint32_t per_warp = (words + kThreads - 1) / kThreads * 32;
  const uint32_t from = min(warp * per_warp, words), to = min(from + per_warp, words);
  uint32_t more = 0, ties = 0;
#pragma unroll 1
  for (uint32_t w = from + lane; w < to; w += 32) {
    uint32_t kept = marks[w];
    for_marks(kept, [&](int j) {
      const uint32_t key = slots[w * 32 + j];
      if (key < least) kept ^= 1u << j;
      if (exact && key == least) ++ties;
    });
    marks[w] = kept;
    more += __popc(kept);
  }
  more = sum_of_warp(more - ties);
  ties = sum_of_warp(ties);
  if (lane == 0) s.reaching[warp] = more, s.tying[warp] = ties;
  meet();
  const uint32_t warp_more = lane < kWarps ? s.reaching[lane] : 0, warp_ties = lane < kWarps ? s.tying[lane] : 0;
  more = sum_of_warp(lane < warp ? warp_more : 0);
  ties = sum_of_warp(lane < warp ? warp_ties : 0);
  if constexpr (!kWarp)
    if (blocks > 1) {
      const uint32_t all = sum_of_warp(warp_more), all_ties = sum_of_warp(warp_ties);
      if (warp == 0 && lane < blocks) {
        store_in_cluster(&s.of_block[rank], lane, all);
        store_in_cluster(&s.block_ties[rank], lane, all_ties);
      }
      sync();
      more += sum_of_warp(lane < rank ? s.of_block[lane] : 0);
      ties += sum_of_warp(lane < rank ? s.block_ties[lane] : 0);
    }
  // Puts an element to a place of the list.
  const auto put = [&](uint32_t place, uint32_t word, uint32_t index) {
    constexpr uint32_t kShare = kItems > 0 ? kRoom : 1;
    if (blocks > 1) {
      store_in_cluster(list + place % kShare, place / kShare, word);
      store_in_cluster(indices + place % kShare, place / kShare, index);
    } else {
      list[place] = word;
      indices[place] = index;
    }
  };
  uint32_t top = 0;
  const int64_t results = row / inner * a.k * inner + row % inner;
#pragma unroll 1
  for (uint32_t start = from; start < to; start += 32) {
    const uint32_t w = min(start + lane, to - 1), hits = start + lane < to ? marks[w] : 0;
    if (!__any_sync(kEveryLane, hits)) continue;
    uint32_t equal = 0;
    if (exact)
      for_marks(hits,
                [&](int j) { equal |= static_cast<uint32_t>(slots[w * 32 + j] == static_cast<Key>(least)) << j; });
    const uint32_t both = __popc(hits & ~equal) | __popc(equal) << 16, up_to = sum_up_to_lane(both);
    const uint32_t all = shuffle_from(up_to, 31);
    uint32_t m = more + ((up_to - both) & 0xffff), t = ties + ((up_to - both) >> 16);
    for_marks(ties >= need ? hits & ~equal : hits, [&](int j) {
      const uint32_t place = m + min(t, need);
      const bool is_tie = equal >> j & 1, wanted = !is_tie || t < need;
      is_tie ? ++t : ++m;
      if (!wanted) return;
      const Key key = slots[w * 32 + j];
      const uint32_t index = begin + w * 32 + j - skipped;
      if constexpr (kItems > 0) {
        put(place, uint32_t{key}, index);
        top = max(top, uint32_t{key});
      } else {
        static_cast<Key*>(a.values)[results + place * inner] = decode(key, a.order);
        a.indices[results + place * inner] = static_cast<int32_t>(index);
      }
    });
    more += all & 0xffff;
    ties += all >> 16;
  }
  if constexpr (kItems > 0) {
    top = largest_of_warp(top);
    if (lane == 0) atomicMax(&s.top, top);
    sync();
    top = blocks > 1 ? largest_of_warp(lane < blocks ? load_in_cluster(&s.top, lane) : 0) : s.top;
    const int sorted_bits = 32 - __clz(static_cast<int>(top - least));
    if (sorted_bits == 0) sync();  // all blocks have read
    const uint32_t first = warp * 32 * kItems + lane, place = rank * kRoom + first;
    const bool live = place - lane < reached;
    // Places behind the list have the last digit in every pass, so that they stay behind it.
    uint32_t words[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = place + i * 32 < reached ? top - list[first + i * 32] : ~0u;
    uint32_t* const counts = s.bins + warp * sort::kDigits;
#pragma unroll 1
    for (int shift = 0; shift < sorted_bits; shift += sort::kDigitBits) {
      const auto digit = [&](int i) { return words[i] >> shift & (sort::kDigits - 1); };
      uint32_t own_indices[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) own_indices[i] = indices[first + i * 32];
      reinterpret_cast<uint4*>(counts)[lane] = reinterpret_cast<uint4*>(counts)[32 + lane] = uint4{0, 0, 0, 0};
      __syncwarp();
      if (live) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) atomicAdd(counts + digit(i), 1u);
      }
      meet();
      // Each of the first threads adds up the counts of some digits: of all warps, then of all blocks.
      constexpr uint32_t kEach = std::max<uint32_t>(sort::kDigits / kThreads, 1);
      const bool has = tid * kEach < sort::kDigits;
      uint32_t* const of_digits = s.bins + tid * kEach;
      uint32_t before = 0, all[kEach] = {}, sum = 0;
      if (has) {
#pragma unroll
        for (uint32_t e = 0; e < kEach; ++e)
#pragma unroll
          for (uint32_t w = 0; w < kWarps; ++w) all[e] += of_digits[w * sort::kDigits + e];
      }
      if constexpr (!kWarp)
        if (blocks > 1) {
          if (has) s.of_digit[tid] = all[0];
          sync();
          all[0] = 0;
          if (has) {
#pragma unroll 4
            for (uint32_t b = 0; b < blocks; ++b) {
              const uint32_t count = load_in_cluster(&s.of_digit[tid], b);
              all[0] += count;
              if (b < rank) before += count;
            }
          }
        }
#pragma unroll
      for (uint32_t e = 0; e < kEach; ++e) sum += all[e];
      before += sum_before_team<kThreads>(sum, s.sums);
      if (has) {
#pragma unroll
        for (uint32_t e = 0; e < kEach; ++e) {
          uint32_t last = before - 1;  // the place of the last element before those of the warp and the digit
          before += all[e];
#pragma unroll
          for (uint32_t w = 0; w < kWarps; ++w) {
            const uint32_t count = of_digits[w * sort::kDigits + e];
            of_digits[w * sort::kDigits + e] = last;
            last += count;
          }
        }
      }
      meet();
      if (live) {
        const uint32_t after = sort::lanes_after(), up_to_this = sort::lanes_up_to_this(), ones = after | up_to_this;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const uint32_t d = digit(i), same = sort::lanes_with(d, ones), to = counts[d] + __popc(same & up_to_this);
          __syncwarp();
          if ((same & after) == 0) counts[d] = to;
          put(to, words[i], own_indices[i]);
          __syncwarp();
        }
      }
      sync();
#pragma unroll
      for (int i = 0; i < kItems; ++i) words[i] = list[first + i * 32];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t to = place + i * 32;
      if (to >= a.k) break;
      static_cast<Key*>(a.values)[results + to * inner] = decode(static_cast<Key>(top - words[i]), a.order);
      a.indices[results + to * inner] = static_cast<int32_t>(indices[first + i * 32]);
    }
  }
#endif
}

template <class Key, int kThreads, int kItems>
cudaError_t start(cudaStream_t stream, const Launch& config, const Digits& a) {
  const auto kernel = digits_kernel<Key, kThreads, kItems>;
  if (config.cluster > 8) {
    const cudaError_t status = allow_cluster(reinterpret_cast<const void*>(kernel), config.cluster);
    if (status != cudaSuccess) return status;
  }
  return launch(stream, config, kernel, a);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Launch& config, const Digits& a, int threads, int items) {
  constexpr int kItems = kDigitsItems;
  if (threads == 32)
    return items == 16  ? start<Key, 32, 16>(stream, config, a)
           : items == 4 ? start<Key, 32, 4>(stream, config, a)
                        : start<Key, 32, 0>(stream, config, a);
  if (threads == 256) return items ? start<Key, 256, kItems>(stream, config, a) : start<Key, 256, 0>(stream, config, a);
  return items ? start<Key, 512, kItems>(stream, config, a) : start<Key, 512, 0>(stream, config, a);
}

}  // namespace

cudaError_t launch_digits(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  Digits a = {call_of(problem, buffers)};
  a.blocks = static_cast<uint32_t>(plan.digits.blocks);
  a.part = static_cast<uint32_t>(plan.digits.part);
  a.reach = static_cast<uint32_t>(plan.digits.reach);
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(std::max(plan.digits.threads, 256));
  a.team_bytes = static_cast<uint32_t>(plan.digits.shared_bytes / (plan.digits.threads == 32 ? kDigitsTeams : 1));
  a.rows = problem.rows.count();
  config.shared_bytes = plan.digits.shared_bytes;
  config.cluster = plan.digits.blocks;
  config.packed = true;
  switch (problem.key_bits) {
    case 8: return run<uint8_t>(stream, config, a, plan.digits.threads, plan.digits.items);
    case 16: return run<uint16_t>(stream, config, a, plan.digits.threads, plan.digits.items);
    case 32: return run<uint32_t>(stream, config, a, plan.digits.threads, plan.digits.items);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxgpuops::topk
