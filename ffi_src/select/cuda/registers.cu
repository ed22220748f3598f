// select, registers: rows of up to kMostRegisterSelect elements of 16 or 32 bits, also for partitions of 32 bits. A row
// is read once, from memory to the registers of a block, where each thread has up to 32 elements.
//
// One table of counts serves all ranks: the block counts the elements in kBins parts of the row. Parts are equally wide
// as numbers, from a little before the least of 32 sampled elements to a little behind the largest one; the first and
// the last part also have what lies beyond. They are equally wide as keys if a part would have much of the sample, as
// of numbers with very different exponents, and if elements are integers. Threads find the parts in which the ranks
// fall, and mark them. In a second pass over its registers, each thread looks up the marks of its elements, and lists
// those in marked parts, of which there are some tens as a rule. The entries of a list are compared with each other. If
// a part has many elements, the block cuts it into parts of keys again, for one rank after the other, until few
// elements or only equal ones are left.
#include <cuda_runtime.h>

#include "common/cuda/launch.cuh"
#include "select/cuda/held.cuh"
#include "select/cuda/quantile.cuh"
#include "select/cuda/words.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kVectors = kRegisterSelect / 4;  // a thread has this many times four neighbouring elements
// The parts of a row of a block of that many threads: the lists of more parts are shorter.
template <int kThreads>
constexpr int kPartBits = kThreads > 256 ? 11 : kBinBits;

// The key of some number. For quantiles it stands for the last element of a row that has no NaN.
constexpr uint32_t kNoNan = 0x80000001;

template <int kParts>
struct Shared {
  uint32_t counts[kParts];
  uint64_t list[kMostRanks][kSelectFew];  // keys and indices
  uint8_t marks[kParts];                  // 128 and the number of a list, of a part that has one
  Cut cut;
  // For each rank: the part that has its element, how many elements are in that part, and the number of its element
  // among them; and the entries of its list.
  uint32_t rank[kMostRanks], part[kMostRanks], size[kMostRanks], left[kMostRanks], listed[kMostRanks];
  uint32_t ends;  // a bit for each rank that is the last of the row: the last one of the largest elements
  uint32_t many;  // a bit for each rank whose part has more elements than a list
  uint32_t largest, last_of_largest, least, most, chosen;
  uint32_t sums[16];  // of the counts of each warp's parts
  Quantiles<uint32_t> quantiles;
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    select_registers_kernel(const __grid_constant__ Select problem, const void* __restrict__ x_of_all,
                            const int32_t* __restrict__ ranks, const SelectResults results, uint32_t stride) {
  constexpr int kWarps = kThreads / 32, kElements = 4 * kVectors, kGroups = kVectors * kWarps;
  constexpr int kParts = 1 << kPartBits<kThreads>;
  __shared__ __align__(16) Shared<kParts> shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const auto wanted = static_cast<int>(problem.count);
  const uint32_t row = blockIdx.x, inner = static_cast<uint32_t>(problem.rows.inner);  // blocks are less than 2^31
  const uint32_t outer = inner == 1 ? row : row / inner, column = row - outer * inner;
  const bool partitions = problem.kth >= 0, is_short = problem.bits == 16;
  const int64_t start = stride == 1 ? int64_t{row} * length : int64_t{outer} * length * inner + column;
  const auto* const x = static_cast<const uint32_t*>(x_of_all) + (is_short ? 0 : start);
  const auto* const shorts = static_cast<const uint16_t*>(x_of_all) + (is_short ? start : 0);
  const WordOrder order(problem);
  const bool is_float = order.is_float, descending = problem.order.invert != 0;
  // No element sorts behind this word, which stands for those behind the row's end.
  const uint32_t pad = !is_float ? ~order.flip : descending ? 0xff800000 : 0x7fffffff;

  // What is made of these again in each pass takes no registers between the passes.
  uint32_t flip = order.flip, of_floats = is_float ? ~0u : 0, own_start = threadIdx.x * 4;
  float zero = 0;
  const auto forget = [&] { asm volatile("" : "+r"(flip), "+r"(of_floats), "+f"(zero), "+r"(own_start)); };
  forget();
  // The sum turns -0 into 0, and any NaN into one whose key is the largest.
  const auto add_zero = [&](uint32_t word) { return __float_as_uint(__fadd_rn(__uint_as_float(word), zero)); };
  const auto key_of_float = [&](uint32_t word) {
    const uint32_t number = add_zero(word);
    return number ^ (sign_mask(number) & 0x7fffffff) ^ flip;
  };
  const auto key_of_integer = [&](uint32_t word) { return word ^ flip; };
  const auto key_of = [&](uint32_t word) {
    const uint32_t number = (add_zero(word) & of_floats) | (word & ~of_floats);
    return number ^ (sign_mask(number) & (of_floats >> 1)) ^ flip;
  };
  const auto element_at = [&](uint32_t at) { return is_short ? shorts[at * stride] : x[at * stride]; };
  const auto word_at = [&](uint32_t at) { return is_short ? order.word_of_short(element_at(at)) : element_at(at); };
  const auto index_of = [&](int i) { return own_start + i / 4 * kThreads * 4 + i % 4; };

  uint32_t sampled = 0;
  if (warp == 0) {
    const uint32_t at = sampled_place(5, length, lane);
    sampled = element_at(at);
  }
  uint32_t own[kElements];
  const int from_own = static_cast<int>(length - own_start);  // elements from the thread's first one on
  if (is_short) {
    const bool whole = stride == 1 && length % 4 == 0 && reinterpret_cast<uintptr_t>(shorts) % 8 == 0;
    const auto* const from = reinterpret_cast<const uint2*>(shorts) + threadIdx.x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint2 four{};
      if (whole && v * kThreads * 4 < from_own) four = __ldg(from + v * kThreads);
      own[4 * v] = four.x & 0xffff, own[4 * v + 1] = four.x >> 16;
      own[4 * v + 2] = four.y & 0xffff, own[4 * v + 3] = four.y >> 16;
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (index_of(i) < length) own[i] = shorts[index_of(i) * stride];
    }
    order.extend(own);
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      if (index_of(i) >= length) own[i] = pad;
  } else {
    const bool whole = stride == 1 && length % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const auto* const from = reinterpret_cast<const uint4*>(x) + threadIdx.x;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint4 four{pad, pad, pad, pad};
      if (whole && v * kThreads * 4 < from_own) four = __ldg(from + v * kThreads);
      own[4 * v] = four.x, own[4 * v + 1] = four.y, own[4 * v + 2] = four.z, own[4 * v + 3] = four.w;
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (index_of(i) < length) own[i] = x[index_of(i) * stride];
    }
  }
  const auto clear_counts = [&] {
#pragma unroll
    for (int b = threadIdx.x; b < kParts / 4; b += kThreads)
      reinterpret_cast<uint4*>(shared.counts)[b] = uint4{0, 0, 0, 0};
  };
  clear_counts();
#pragma unroll
  for (int b = threadIdx.x; b < kParts / 4; b += kThreads) reinterpret_cast<uint32_t*>(shared.marks)[b] = 0;
  const int32_t* const own_ranks = partitions ? nullptr : ranks + ranks_at(problem.ranks, outer, column);
  if (threadIdx.x < problem.quantiles)
    shared.quantiles.own[threadIdx.x].load(problem, results.shares, own_ranks, outer, column, threadIdx.x);
  if (warp == 0) {
    uint32_t rank;
    const bool has = own_rank(problem, length, own_ranks, rank);
    if (is_short) sampled = order.word_of_short(sampled);
    const uint32_t with_part = __ballot_sync(kEveryLane, has), key = key_of(sampled);
    const Cut cut = cut_of_sample<kPartBits<kThreads>>(sampled, key, is_float, descending, flip);
    if (lane < kMostRanks) shared.rank[lane] = rank, shared.listed[lane] = 0;
    if (lane == 0) {
      shared.cut = cut;
      shared.ends = ((1u << wanted) - 1) & ~with_part;
      shared.many = shared.last_of_largest = 0;
      shared.largest = problem.quantiles && shared.ends == 1u << (wanted - 1) ? kNoNan : 0;
    }
  }
  __syncthreads();

  const Cut& cut = shared.cut;
  const bool by_value = cut.by_value;
  const uint32_t ends = shared.ends;
  // Whether the last rank only has to show whether there is a NaN.
  const bool only_nans = problem.quantiles && ends == 1u << (wanted - 1);
  // Calls `visit` with the number of each element of the thread that may be in the row.
  const auto for_own = [&](auto visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (static_cast<uint32_t>(v * kThreads * 4) >= length) break;
#pragma unroll
      for (int i = 4 * v; i < 4 * v + 4; ++i) visit(i);
    }
  };
  const auto count_keys = [&](const Parts<uint32_t> parts) {
    const uint32_t counts = shared_address(shared.counts) - 4 * parts.base;
    forget();
    if (is_float)
      for_own([&](int i) { increment(counter_of(parts, counts, key_of_float(own[i]))); });
    else
      for_own([&](int i) { increment(counter_of(parts, counts, key_of_integer(own[i]))); });
  };
  if (by_value) {
    const Cut now = cut;
    const uint32_t counts = shared_address(shared.counts) - 4 * kMagicBits;
    for_own([&](int i) { increment(scaled(now.part_bits(own[i]), counts)); });
  } else {
    count_keys(cut.by_key);
  }
  uint32_t highest = 0;
  if (ends) {
    forget();
    if (is_float && !descending) {
      float most = -INFINITY;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (static_cast<uint32_t>(v * kThreads * 4) >= length) break;
        float of_four = most;
#pragma unroll
        for (int i = 4 * v; i < 4 * v + 4; ++i) of_four = largest_or_nan(of_four, __uint_as_float(own[i]));
        const uint32_t at = index_of(4 * v);
        if (at + 3 < length) {
          most = of_four;
        } else {
#pragma unroll
          for (int j = 0; j < 3; ++j)
            if (at + j < length) most = largest_or_nan(most, __uint_as_float(own[4 * v + j]));
        }
      }
      if (only_nans) {
        if (most != most) shared.largest = ~0u;
      } else {
        highest = key_of(__float_as_uint(most));
      }
    } else {
      for_own([&](int i) {
        if (index_of(i) < length) highest = max(highest, key_of(own[i]));
      });
    }
    if (!only_nans) {
      const uint32_t of_warp = largest_of_warp(highest);
      if (lane == 0) atomicMax(&shared.largest, of_warp);
    }
  }
  __syncthreads();

  // Each thread has some neighbouring parts, and looks for ranks in them.
  constexpr int kOwnParts = kParts / kThreads;
  uint32_t count[kOwnParts], own_sum = 0;
#pragma unroll
  for (int i = 0; i < kOwnParts; ++i) own_sum += count[i] = shared.counts[threadIdx.x * kOwnParts + i];
  const uint32_t up_to = sum_up_to_lane(own_sum);
  if (lane == 31) shared.sums[warp] = up_to;
  __syncthreads();
  uint32_t before = up_to - own_sum;
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w)
    if (w < warp) before += shared.sums[w];
#pragma unroll 1
  for (int r = 0; r < wanted; ++r) {
    uint32_t left = shared.rank[r] - before;
    if (left >= own_sum || (ends >> r & 1)) continue;
    int part = threadIdx.x * kOwnParts;
    uint32_t size = count[0];
#pragma unroll
    for (int i = 1; i < kOwnParts; ++i)
      if (left >= size) left -= size, size = count[i], part = threadIdx.x * kOwnParts + i;
    shared.part[r] = part, shared.size[r] = size, shared.left[r] = left;
    if (size <= kSelectFew)
      shared.marks[part] = 128 + r;  // of ranks in the same part, the last one gives its list
    else
      atomicOr(&shared.many, 1u << r);
  }
  __syncthreads();

  // Lists a set of the thread's elements, whose bits go from the highest one down.
  const auto list_all = [&](uint32_t set, auto list_of) {
#pragma unroll 1
    while (set) {
      const int i = __clz(static_cast<int>(set));
      const uint32_t at = index_of(i);
      set ^= 0x80000000u >> i;
      if (at >= length) continue;
      const uint32_t word = word_at(at), key = key_of(word), r = list_of(word, key);
      shared.list[r][atomicAdd(&shared.listed[r], 1u)] = uint64_t{key} << 32 | at;
    }
  };
  const uint32_t many = shared.many;
  if ((many | ends) != (1u << wanted) - 1) {
    uint32_t set = 0;  // a bit for each element that goes to a list
    const auto look_up = [&](auto address_of) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (static_cast<uint32_t>(v * kThreads * 4) >= length) {
          set <<= 4;
          continue;
        }
#pragma unroll
        for (int i = 4 * v; i < 4 * v + 4; ++i) {
          int32_t mark;
          asm volatile("ld.shared.s8 %0, [%1];" : "=r"(mark) : "r"(address_of(own[i])));
          set = __funnelshift_l(static_cast<uint32_t>(mark), set, 1);
        }
      }
    };
    const Cut now = cut;
    const uint32_t marks = shared_address(shared.marks);
    forget();
    if (by_value)
      look_up([&](uint32_t word) { return now.part_bits(word) + (marks - kMagicBits); });
    else if (is_float)
      look_up([&](uint32_t word) { return now.by_key(key_of_float(word)) + marks; });
    else
      look_up([&](uint32_t word) { return now.by_key(key_of_integer(word)) + marks; });
    list_all(set, [&](uint32_t word, uint32_t key) {
      return shared.marks[by_value ? now.part_bits(word) - kMagicBits : now.by_key(key)] & 127;
    });
  }
  if (ends && !only_nans && highest == shared.largest) {
    uint32_t last = 0;
    forget();
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      if (key_of(own[i]) == highest && index_of(i) < length) last = index_of(i);
    if (last) atomicMax(&shared.last_of_largest, last);
  }
  __syncthreads();

  // Returns the element that has a key, if that tells it: see tells_element().
  const auto element_of = [&](uint32_t key) {
    const uint32_t word = decode(key, KeyOrder{of_floats >> 1, flip});
    return is_short && order.is_half ? uint32_t{Float16::store(__uint_as_float(word))}
           : is_short && is_float    ? word >> 16
                                     : word;
  };
  const auto put = [&](int64_t to, uint32_t element) {
    if (is_short)
      static_cast<uint16_t*>(results.values)[to] = static_cast<uint16_t>(element);
    else
      static_cast<uint32_t*>(results.values)[to] = element;
  };
  const auto write = [&](int r, uint32_t at, uint32_t key) {
    if (partitions) {
      shared.chosen = at;
      return;
    }
    const bool is_told = !is_float || (key != key_of(0) && (problem.quantiles || key != ~0u));
    const uint32_t element = is_told ? element_of(key) : element_at(at);
    if (problem.quantiles) {
      shared.quantiles.taken[r] = element;
      return;
    }
    put((int64_t{outer} * wanted + r) * inner + column, element);
    results.indices[(int64_t{outer} * wanted + r) * inner + column] = static_cast<int32_t>(at);
  };
  // Calls `visit` for each entry of a list, with the number of smaller entries, and its index. A warp calls this.
  const auto for_list = [&](int r, auto visit) {
    const uint32_t size = shared.listed[r];
    const uint64_t* const list = shared.list[r];
    for (uint32_t i = lane; i < size; i += 32) {
      const uint64_t entry = list[i];
      uint32_t before = 0;
#pragma unroll 4
      for (uint32_t j = 0; j < size; ++j) before += list[j] < entry;
      visit(before, static_cast<uint32_t>(entry), static_cast<uint32_t>(entry >> 32));
    }
  };
  const uint32_t part_of_lane = lane < wanted && !(ends >> lane & 1) ? shared.part[lane] : ~0u;
#pragma unroll 1
  for (int r = warp; r < wanted; r += kWarps) {
    if (ends >> r & 1) {
      if (lane == 0) write(r, shared.last_of_largest, shared.largest);
      continue;
    }
    const uint32_t part = shared.part[r], with = __ballot_sync(kEveryLane, part_of_lane == part);
    if ((many >> r & 1) || shared.marks[part] != 128 + r) continue;
    for_list(r, [&](uint32_t before, uint32_t at, uint32_t key) {
      for_bits(with, [&](int q) {
        if (shared.left[q] == before) write(q, at, key);
      });
    });
  }

  // Ranks whose parts have many elements, one after the other.
#pragma unroll 1
  for (uint32_t to_do = many; to_do;) {
    const int r = __ffs(static_cast<int>(to_do)) - 1;
    const uint32_t part = shared.part[r];
    // The ranks that fall in the same part; in the end, those for which only elements of key `first` are left.
    uint32_t same = 0;
    for_bits(to_do, [&](int q) { same |= shared.part[q] == part ? 1u << q : 0u; });
    uint32_t first = 0, span = 0;
    if (!by_value) cut.by_key.bounds<uint32_t>(part, first, span);
#pragma unroll 1
    for (bool in_part = by_value; in_part || span > 0; in_part = false) {
      __syncthreads();
      if (threadIdx.x == 0) shared.least = ~0u, shared.most = 0, shared.listed[r] = 0;
      clear_counts();
      __syncthreads();
      uint32_t least = ~0u, most = 0;
      const Cut now = cut;
      forget();
      for_own([&](int i) {
        const uint32_t key = key_of(own[i]);
        if (in_part ? now.part_bits(own[i]) - kMagicBits == part : key - first <= span)
          least = min(least, key), most = max(most, key);
      });
      least = ~largest_of_warp(~least), most = largest_of_warp(most);
      if (lane == 0) atomicMin(&shared.least, least), atomicMax(&shared.most, most);
      __syncthreads();
      first = shared.least, span = shared.most - first;
      if (span == 0) break;
      const auto parts = Parts<uint32_t>::between<uint32_t>(kBinBits, first, first + span);
      count_keys(parts);
      __syncthreads();
      if (warp == 0) {
        const PartOfRank at = find_rank(shared.counts, sum_counts(shared.counts), shared.rank[r]);
        if (lane == 0) shared.part[r] = at.part, shared.size[r] = at.size, shared.left[r] = at.left;
      }
      __syncthreads();
      parts.bounds<uint32_t>(shared.part[r], first, span);
      const uint32_t below = shared.rank[r] - shared.left[r], of_part = shared.size[r];
      for_bits(same, [&](int q) { same ^= shared.rank[q] - below < of_part ? 0u : 1u << q; });
      __syncthreads();  // all threads have read what is left for rank r
      if (threadIdx.x < kMostRanks && (same >> threadIdx.x & 1))
        shared.left[threadIdx.x] = shared.rank[threadIdx.x] - below;
      if (span == 0 || shared.size[r] > kSelectFew) continue;
      forget();
      uint32_t set = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (key_of(own[i]) - first <= span) set |= 0x80000000u >> i;
      list_all(set, [&](uint32_t, uint32_t) { return r; });
      __syncthreads();
      if (warp == 0)
        for_list(r, [&](uint32_t before, uint32_t at, uint32_t key) {
          for_bits(same, [&](int q) {
            if (before == shared.left[q]) write(q, at, key);
          });
        });
      to_do &= ~same;
      same = 0;
      break;
    }
    if (same == 0) continue;

    // Only equal elements are left.
    if (problem.quantiles && first != key_of(0)) {
      to_do &= ~same;
      const uint32_t r = threadIdx.x;
      if (r < kMostRanks && (same >> r & 1)) shared.quantiles.taken[r] = element_of(first);
      continue;
    }
    // They are counted in groups of 128 neighbours, four in each lane of a warp.
    to_do &= ~same;
    __syncthreads();
    uint32_t equal = 0;  // a bit for each element of the thread
    forget();
#pragma unroll
    for (int i = 0; i < kElements; ++i)
      if (key_of(own[i]) == first && index_of(i) < length) equal |= 1u << i;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t count = sum_of_warp(__popc(equal >> 4 * v & 15));
      if (lane == 0) shared.counts[v * kWarps + warp] = count;
    }
    __syncthreads();
    for_bits(same, [&](int q) {
      uint32_t left = shared.left[q];
      int group = -1;
#pragma unroll 1
      for (int start = 0; group < 0 && start < kGroups; start += 32) {
        const uint32_t count = start + lane < kGroups ? shared.counts[start + lane] : 0, sum = sum_up_to_lane(count);
        const unsigned above = __ballot_sync(kEveryLane, sum > left);
        const int of = above ? __ffs(static_cast<int>(above)) - 1 : 31;
        left -= shuffle_from(sum, of) - (above ? shuffle_from(count, of) : 0);
        if (above) group = start + of;
      }
      if (group < 0 || group % kWarps != warp) return;
      uint32_t of_lane = equal >> group / kWarps * 4 & 15;
      const uint32_t before = sum_up_to_lane(__popc(of_lane)) - __popc(of_lane);
      if (left - before >= static_cast<uint32_t>(__popc(of_lane))) return;
      for (uint32_t skip = left - before; skip; --skip) of_lane &= of_lane - 1;
      write(q, index_of(group / kWarps * 4 + __ffs(static_cast<int>(of_lane)) - 1), first);
    });
  }
  if (problem.quantiles) {
    __syncthreads();
    const uint32_t j = threadIdx.x;
    if (j < problem.quantiles)
      put(quantile_at(row, j, problem.quantiles, results.beside), shared.quantiles(problem, j));
  }
  if (!partitions) return;

  // The partition. Elements before the chosen one are counted in groups of 128 neighbours. All elements go to their
  // places in shared memory, and from there to memory.
  __syncthreads();
  const uint32_t middle = shared.chosen, middle_key = key_of(x[middle]), kth = static_cast<uint32_t>(problem.kth);
  uint32_t firsts = 0;  // a bit for each element
  forget();
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const uint32_t key = key_of(own[i]), at = index_of(i);
    if (at < length && (key < middle_key || (key == middle_key && at < middle))) firsts |= 1u << i;
  }
  // Each byte counts the elements of a vector, or those up to the lane: of even vectors and of odd ones.
  static_assert(kVectors == 8);
  const uint32_t pairs = firsts - (firsts >> 1 & 0x55555555), fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333);
  uint32_t own_counts[2] = {fours & 0x0f0f0f0f, fours >> 4 & 0x0f0f0f0f};
  uint32_t before_own[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) before_own[odd] = sum_up_to_lane(own_counts[odd]) - own_counts[odd];
  if (lane == 31) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      shared.counts[v * kWarps + warp] = (before_own[v % 2] + own_counts[v % 2]) >> v / 2 * 8 & 255;
  }
  __syncthreads();
  constexpr int kWords = (kGroups + 31) / 32;
  uint32_t before_group[kWords], sum = 0;  // a lane has every 32nd group
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t count = w * 32 + lane < kGroups ? shared.counts[w * 32 + lane] : 0,
                   up_to_lane = sum_up_to_lane(count);
    before_group[w] = sum + up_to_lane - count;
    sum += shuffle_from(up_to_lane, 31);
  }
  auto* const out = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
#pragma unroll 1
  for (int result = 0; result < 2; ++result) {
    auto* to = static_cast<uint32_t*>(result == 0 ? results.values : results.indices);
    if (to == nullptr) continue;
    to += int64_t{row} * length;
    forget();
    asm volatile("" : "+r"(firsts), "+r"(before_own[0]), "+r"(before_own[1]));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (static_cast<uint32_t>(v * kThreads * 4) >= length) break;
      uint32_t before = shuffle_from(before_group[v * kWarps / 32], (v * kWarps + warp) % 32);
      before += before_own[v % 2] >> v / 2 * 8 & 255;
#pragma unroll
      for (int i = 4 * v; i < 4 * v + 4; ++i) {
        const uint32_t at = index_of(i), is_first = firsts >> i & 1;
        const uint32_t others = at == middle ? kth : kth + (at < middle) + at - before;
        if (at < length) out[is_first ? before : others] = result == 0 ? own[i] : at;
        before += is_first;
      }
    }
    __syncthreads();
    if (length % 4 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      for (uint32_t i = threadIdx.x; i < length / 4; i += kThreads)
        __stcs(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(out)[i]);
    } else {
      for (uint32_t i = threadIdx.x; i < length; i += kThreads) to[i] = out[i];
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_select_registers(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                    const int32_t* ranks, const SelectResults& results) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(problem.rows.count()));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  const auto kernel = plan.threads == 64    ? select_registers_kernel<64>
                      : plan.threads == 128 ? select_registers_kernel<128>
                      : plan.threads == 256 ? select_registers_kernel<256>
                                            : select_registers_kernel<512>;
  return launch(stream, config, kernel, problem, x, ranks, results,
                static_cast<uint32_t>(plan.turns ? 1 : problem.rows.inner));
}

}  // namespace jaxgpuops::select
