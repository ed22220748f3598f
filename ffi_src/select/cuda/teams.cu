// select, teams: many rows of 16 or 32 bits. A row is read once, by the copy engine, to the shared memory of a team of
// one or two warps. A multiprocessor has one block of as many teams as have room. Each team takes one row after the
// other and waits for no other, so that some teams wait for their rows while others look for ranks.
//
// The team counts the elements in kBins parts of the row (words.cuh), whose range a sample of 32 elements tells.
// It finds the parts in which ranks fall, looks at the row once more, and lists the elements in these parts, some tens
// as a rule. The entries of the list are compared with each other. If a part has many elements, the team cuts it into
// parts of keys, for one rank after the other, until few elements or only equal ones are left. What takes a warp little
// time, both warps of a team do for themselves. A warp that is alone also partitions rows: it then writes the elements
// in their places.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/launch.cuh"
#include "select/cuda/quantile.cuh"
#include "select/cuda/words.cuh"

namespace jaxgpuops::select {
namespace {

constexpr int kBinBits = kSelectBinBits, kBins = 1 << kBinBits;
// The list has the place of the counts, and its second half is for the entries in order. Besides kMostListed elements,
// a list may have copies of one, at both ends of the row.
constexpr uint32_t kRoom = kBins / 4, kMostListed = kRoom - 16;

// What warps of a team tell each other: sums or ends of each warp, how many elements are listed, a place, and whether
// the row has a NaN.
constexpr int kMostTeam = 16;
struct Told {
  uint32_t of_warp[2 * kMostTeam], listed, at, has_nan;
};

// Waits until the phase of a barrier with this parity has ended. The block alone sees it, so that the L1 cache stays as
// it is, which acquiring for a whole cluster would clear.
__device__ __forceinline__ void wait_for_row(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

// Increments a counter in shared memory and returns what it was. (For atomicAdd(), the compiler would first add up what
// the lanes of a warp add, which takes longer if few do.)
__device__ __forceinline__ uint32_t count_one(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
  return before;
}

// Adds 1 to `count` if x is less than y, by three instructions.
__device__ __forceinline__ void count_less(uint64_t x, uint64_t y, uint32_t& count) {
  uint32_t borrow = 0;
  asm("{.reg.u32 low, high; sub.cc.u32 low, %1, %3; subc.cc.u32 high, %2, %4; subc.u32 %0, 0, 0;}"
      : "=r"(borrow)
      : "r"(static_cast<uint32_t>(x)), "r"(static_cast<uint32_t>(x >> 32)), "r"(static_cast<uint32_t>(y)),
        "r"(static_cast<uint32_t>(y >> 32)));
  count -= borrow;
}

// Finds the parts that ranks fall in, one for each lane. The warp has 2^kBinBits counts.
__device__ __forceinline__ PartOfRank find_ranks(const uint32_t* counts, uint32_t rank) {
  static_assert(kBins == kChunk);
  const uint32_t up_to = sum_counts(counts);
  int of = 0;  // the lane that has the counts
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (__shfl_sync(kEveryLane, up_to, of + step - 1) <= rank) of += step;
  const uint32_t lower = __shfl_sync(kEveryLane, up_to, max(of - 1, 0));
  PartOfRank found{0, 0, rank - (of ? lower : 0)};
#pragma unroll
  for (int i = 0; i < kLaneCounts; i += 4) {
    const uint4 pack = *reinterpret_cast<const uint4*>(counts + of * kLaneCounts + i);
    const uint32_t four[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (found.left >= found.size) found.left -= found.size, found.size = four[j], found.part = i + j;
  }
  found.part += of * kLaneCounts;
  return found;
}

// Elements become words of 32 bits: those of 16 bits are extended, floats to float32.
enum class Kind { kFloat32, kInt32, kFloat16, kBfloat16, kInt16 };

template <Kind kKind>
constexpr bool kIsFloat = kKind == Kind::kFloat32 || kKind == Kind::kFloat16 || kKind == Kind::kBfloat16;

// The most warps of a block. kAlone: whether a team is one warp, which needs fewer registers.
template <bool kAlone>
constexpr int kMostWarps = kAlone ? 32 : 24;

template <Kind kKind, bool kAlone>
__global__ void __launch_bounds__(32 * kMostWarps<kAlone>, 1)
    select_teams_kernel(const __grid_constant__ Select problem, const void* __restrict__ x_of_all,
                        const int32_t* __restrict__ ranks, const SelectResults results, uint32_t room,
                        int warps_of_team, bool same_ranks) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFloats = kIsFloat<kKind>, kLong = kKind == Kind::kFloat32 || kKind == Kind::kInt32;
  using T = std::conditional_t<kLong, uint32_t, uint16_t>;
  constexpr int kPack = 16 / sizeof(T), kPacks = 16 / kPack;  // a lane has kPacks packs of 16 bytes at a time
  __shared__ uint64_t copied[kMostWarps<kAlone>];
  __shared__ Told told_by_team[kMostWarps<kAlone>];
  const int team = kAlone ? 1 : warps_of_team;
  const int teams = blockDim.x / 32 / team, own_team = threadIdx.x / 32 / team;
  const uint32_t lane = threadIdx.x & 31, lower = (1u << lane) - 1;
  const uint32_t warps = team, warp = threadIdx.x / 32 - own_team * team, thread = warp * 32 + lane;  // in the team
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory() + own_team * (room + 4 * kBins));
  auto* const list = reinterpret_cast<uint64_t*>(counts);  // keys and indices
  auto* const held = reinterpret_cast<T*>(counts + kBins);
  const uint32_t counts_at = shared_address(counts);
  uint64_t* const barrier = copied + own_team;
  Told& told = told_by_team[own_team];
  const auto wait_for_team = [&] {
    if (team == 1)
      __syncwarp();
    else
      asm volatile("bar.sync %0, %1;" ::"r"(own_team), "r"(32 * team) : "memory");
  };
  const auto length = static_cast<uint32_t>(problem.rows.length), rows = static_cast<uint32_t>(problem.rows.count());
  const auto inner = static_cast<uint32_t>(problem.rows.inner);
  const auto wanted = static_cast<int>(problem.count);
  const bool descending = problem.order.invert != 0, is_signed = problem.order.ascending.order.flip != 0;
  const uint32_t flip = (is_signed ? 0x80000000 : 0) ^ (descending ? ~0u : 0u);
  const uint32_t sign_bits = is_signed ? 0x8000 : 0;

  const auto word_of = [&](uint32_t element) -> uint32_t {
    if constexpr (kKind == Kind::kFloat16) return word_of_half(element);
    if constexpr (kKind == Kind::kBfloat16) return element << 16;
    if constexpr (kKind == Kind::kInt16) return (element ^ sign_bits) - sign_bits;
    return element;
  };
  const auto key_of = [&](uint32_t word) -> uint32_t {
    if constexpr (!kFloats) return word ^ flip;
    const uint32_t number = __float_as_uint(__fadd_rn(__uint_as_float(word), 0.f));
    return number ^ (sign_mask(number) & 0x7fffffff) ^ flip;
  };
  const auto element_of = [&](uint32_t key) -> uint32_t {
    const uint32_t word = decode(key, KeyOrder{kFloats ? 0x7fffffffu : 0u, flip});
    if constexpr (kKind == Kind::kFloat16) return Float16::store(__uint_as_float(word));
    if constexpr (kKind == Kind::kBfloat16) return word >> 16;
    return word;
  };

  // Where a row lies: `past` elements after a multiple of 16 bytes, in so many packs. Packs that lie only partly in the
  // array are not copied by the copy engine; only the first and the last row have some.
  uint32_t past = 0, packs = 0, first_whole = 0, end_whole = 0;
  const T* x = nullptr;
  const auto start_copy = [&](uint32_t row) {
    x = static_cast<const T*>(x_of_all) + int64_t{row} * length;
    past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    packs = (past + length + kPack - 1) / kPack;
    first_whole = row == 0 && past > 0, end_whole = packs - (row == rows - 1 && (past + length) % kPack > 0);
    if (thread > 0) return;
    const uint32_t bytes = (end_whole - first_whole) * 16;
    order_with_copies();
    expect_copies(barrier, bytes);
    copy_bulk(held + first_whole * kPack, x - past + first_whole * kPack, bytes, barrier);
  };
  const auto clear_counts = [&] {
#pragma unroll 1
    for (uint32_t b = thread; b < kBins / 4; b += 32 * warps) reinterpret_cast<uint4*>(counts)[b] = uint4{0, 0, 0, 0};
    if (thread == 0) told.listed = told.has_nan = 0;
  };
  if (thread == 0) make_copy_barrier(barrier), make_barriers_visible();
  wait_for_team();
  // Lane r has rank number r, and what quantile r needs.
  uint32_t rank = static_cast<uint32_t>(problem.kth);
  Quantile<uint32_t> quantile;
  const auto load_ranks = [&](uint32_t outer, uint32_t column) {
    if (problem.kth >= 0) return;
    const int32_t* const own = ranks + ranks_at(problem.ranks, outer, column);
    if (lane < problem.quantiles) quantile.load(problem, results.shares, own, outer, column, lane);
    rank = 0;
    if (static_cast<int>(lane) < wanted)
      rank = static_cast<uint32_t>(problem.rank_of(own[lane * problem.ranks.axis_stride]));
  };
  if (same_ranks) load_ranks(0, 0);
  // Of quantiles, the last rank only shows whether there is a NaN, which the first count finds out.
  const uint32_t all = ((1u << wanted) - 1) >> (problem.quantiles > 0);
  uint32_t row = own_team * gridDim.x + blockIdx.x;
  if (row < rows) start_copy(row);
#pragma unroll 1
  for (int parity = 0; row < rows; parity ^= 1) {
    const uint32_t outer = inner == 1 ? row : row / inner, column = row - outer * inner;
    if (!same_ranks) load_ranks(outer, column);
    // Of lane r's rank: the part of the row that it falls in, how many elements that part has, and the number of the
    // wanted one among them.
    uint32_t part = 0, size = 0, left = 0;
    const uint32_t next = row + teams * gridDim.x;
    bool has_started = false;
    const auto start_next = [&] {
      has_started = true;
      if (next < rows) start_copy(next);
    };
    clear_counts();
    wait_for_row(barrier, parity);
    // Places before and after the row get copies of its first element.
    const uint32_t copies = packs * kPack - length;
    if (copies > 0) {
      const T first = first_whole ? x[0] : held[past];
      wait_for_team();
      const uint32_t p = lane < kPack ? 0 : packs - 1, at = p * kPack + lane % kPack;
      const bool in_row = at - past < length, is_copied = p >= first_whole && p < end_whole;
      if (thread < 2 * kPack && !(in_row && is_copied)) held[at] = in_row ? x[at - past] : first;
    }
    wait_for_team();
    const uint32_t first_word = word_of(held[past]);
    const uint32_t sampled = word_of(held[past + sampled_place(5, length, lane)]);
    const Cut cut = cut_of_sample<kBinBits>(sampled, key_of(sampled), kFloats, descending, flip);

    // Calls `visit` with words of the lane, with the number of the first one's pack, and whether the lane has them.
    // Each further pack is 32 packs behind.
    const auto for_words = [&](auto visit) {
      const auto* const from = reinterpret_cast<const uint4*>(held);
      const auto extend = [&](uint4 pack, uint32_t* word) {
        const uint32_t four[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kLong)
            word[i] = four[i];
          else
            word[2 * i] = word_of(four[i] & 0xffff), word[2 * i + 1] = word_of(four[i] >> 16);
        }
      };
      constexpr uint32_t kTurn = 32 * kPacks;  // packs that a warp takes at a time
      uint32_t start = warp * kTurn;
#pragma unroll 1
      for (; start + kTurn <= packs; start += warps * kTurn) {
        uint4 pack[kPacks];
#pragma unroll
        for (int i = 0; i < kPacks; ++i) pack[i] = from[start + 32 * i + lane];
        uint32_t word[16];
#pragma unroll
        for (int i = 0; i < kPacks; ++i) extend(pack[i], word + i * kPack);
        visit(word, start + lane, true);
      }
#pragma unroll 1
      for (start = packs / kTurn * kTurn + warp * 32; start < packs; start += warps * 32) {
        uint32_t word[kPack];
        extend(from[min(start + lane, packs - 1)], word);
        visit(word, start + lane, start + lane < packs);
      }
    };
    const auto count_parts = [&](auto counter, auto looks) {
      float most = -INFINITY;
      for_words([&](auto& word, uint32_t, bool has) {
        if (!has) return;
        constexpr int kOwn = sizeof(word) / 4;
        uint32_t at[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) at[i] = counter(word[i]);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) increment(at[i]);
        if (looks.value) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) most = largest_or_nan(most, __uint_as_float(word[i]));
        }
      });
      if (looks.value && most != most) told.has_nan = 1;
      if (copies > 0 && thread == 0) atomicAdd(counts + (counter(first_word) - counts_at) / 4, 0u - copies);
      wait_for_team();
    };
    const auto count_keys = [&](const Parts<uint32_t>& parts, auto looks) {
      const uint32_t base = counts_at - 4 * parts.base;
      count_parts([&](uint32_t word) { return counter_of(parts, base, key_of(word)); }, looks);
    };
    // Lists the elements of which `is_in` is true. Some entries may be no elements of the row; they sort behind all
    // others.
    const auto list_where = [&](auto is_in) {
      for_words([&](auto& word, uint32_t p, bool has) {
        constexpr int kOwn = sizeof(word) / 4;
        uint32_t set = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
          if (is_in(word[i])) set |= 1u << i;
        if (!has) set = 0;
#pragma unroll 1
        for (; set; set &= set - 1) {
          const int i = __ffs(static_cast<int>(set)) - 1;
          list[count_one(&told.listed)] = (p + i / kPack * 32) * kPack + i % kPack - past;
        }
      });
    };
    // Of the lane's rank. If all zeros have one sign, the place of a zero is kPlus, or one less for a negative one.
    constexpr uint32_t kPlus = ~0u;
    uint32_t found_key = 0, found_at = 0;
    // Finds the elements of ranks: in the sorted list, that of lane r's rank is number `target`. Calls read() when the
    // list has all that is needed of the row.
    const auto choose = [&](uint32_t of_ranks, uint32_t target, auto read) {
      wait_for_team();
      const uint32_t size = told.listed;
      for (uint32_t i = thread; i < size; i += 32 * warps) {
        const auto at = static_cast<uint32_t>(list[i]);
        const uint32_t word = word_of(held[past + min(at, length - 1)]);
        // Of quantiles, only the sign of a zero matters.
        const uint32_t low = problem.quantiles ? at << 1 | word >> 31 : at;
        list[i] = at < length ? uint64_t{key_of(word)} << 32 | low : ~uint64_t{0};
      }
      if (thread == 0) list[size] = ~uint64_t{0};  // entries are looked at in pairs
      wait_for_team();
      read();
#pragma unroll 1
      for (uint32_t start = 0; start < size; start += 32) {
        const uint64_t entry = list[min(start + lane, size - 1)];
        uint32_t before = 0;
#pragma unroll 4
        for (uint32_t j = 0; j < size; j += 2) {
          const auto two = *reinterpret_cast<const ulonglong2*>(list + j);
          count_less(two.x, entry, before), count_less(two.y, entry, before);
        }
        if (start + lane < size) list[kRoom + before] = entry;  // each warp of the team writes the same
      }
      __syncwarp();
      if (of_ranks >> lane & 1) {
        const uint64_t its = list[kRoom + target];
        found_key = static_cast<uint32_t>(its >> 32), found_at = static_cast<uint32_t>(its);
        if (problem.quantiles) found_at = kPlus - (found_at & 1);
      }
    };

    const auto first_count = [&](auto looks) {
      if (cut.by_value)
        count_parts([&](uint32_t word) { return scaled(cut.part_bits(word), counts_at - 4 * kMagicBits); }, looks);
      else
        count_keys(cut.by_key, looks);
    };
    if (kFloats && problem.quantiles > 0)
      first_count(std::bool_constant<kFloats>{});
    else
      first_count(std::false_type{});
    const bool has_nan = told.has_nan;

    // Parts in which ranks fall: `lists` has the first rank of each one that is listed, `many` all ranks of the others.
    uint32_t lists = 0, many = 0;
    if (wanted > 3) {
      const PartOfRank at = find_ranks(counts, rank);
      part = at.part, size = at.size, left = at.left;
      const bool is_open = !has_nan && (all >> lane & 1);
      const int first = __ffs(static_cast<int>(__match_any_sync(kEveryLane, is_open ? part : ~lane))) - 1;
      const bool is_few = is_open && first == static_cast<int>(lane) && size <= kSelectFew;
      const uint32_t up_to = sum_up_to_lane(is_few ? size : 0u);
      lists = __ballot_sync(kEveryLane, is_few && up_to <= kMostListed);
      many = __ballot_sync(kEveryLane, is_open && !(lists >> first & 1));
    } else {  // most often, all ranks fall in one part
      const uint32_t up_to = sum_counts(counts);
      uint32_t total = 0;
#pragma unroll 1
      for (uint32_t open = has_nan ? 0 : all; open;) {
        const int r = __ffs(static_cast<int>(open)) - 1;
        const uint32_t its_rank = shuffle_from(rank, r);
        const PartOfRank at = find_rank(counts, up_to, its_rank);
        const uint32_t distance = rank - (its_rank - at.left);
        const uint32_t same = open & __ballot_sync(kEveryLane, distance < at.size);
        if (same >> lane & 1) part = at.part, size = at.size, left = distance;
        open &= ~same;
        if (at.size <= kSelectFew && total + at.size <= kMostListed)
          lists |= 1u << r, total += at.size;
        else
          many |= same;
      }
    }
    wait_for_team();
    if (lists) {
      // The list has the elements of all these parts. Those of lower parts come first.
      uint32_t target = left;
#pragma unroll 1
      for (uint32_t to_do = lists; to_do;) {
        uint32_t its_part[4] = {~0u, ~0u, ~0u, ~0u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (to_do == 0) continue;
          const int r = __ffs(static_cast<int>(to_do)) - 1;
          its_part[i] = shuffle_from(part, r);
          const uint32_t its_size = shuffle_from(size, r);
          if (its_part[i] < part) target += its_size;
          to_do &= to_do - 1;
        }
        if (cut.by_value) {
#pragma unroll
          for (int i = 0; i < 4; ++i) its_part[i] += its_part[i] == ~0u ? 0 : kMagicBits;
          if (its_part[1] == ~0u)
            list_where([&](uint32_t word) { return cut.part_bits(word) == its_part[0]; });
          else if (its_part[2] == ~0u)
            list_where([&](uint32_t word) {
              const uint32_t at = cut.part_bits(word);
              return at == its_part[0] || at == its_part[1];
            });
          else
            list_where([&](uint32_t word) {
              const uint32_t at = cut.part_bits(word);
              return at == its_part[0] || at == its_part[1] || at == its_part[2] || at == its_part[3];
            });
        } else {
          list_where([&](uint32_t word) {
            const uint32_t at = cut.by_key(key_of(word));
            return at == its_part[0] || at == its_part[1] || at == its_part[2] || at == its_part[3];
          });
        }
      }
      // Then nothing more is needed of the row, unless ranks are left, or elements are wanted that a key does not tell.
      choose(all & ~many, target, [&] {
        if (problem.quantiles && many == 0) start_next();
      });
    }

    // Ranks whose parts have many elements, one after the other.
#pragma unroll 1
    for (uint32_t to_do = many; to_do;) {
      const int r = __ffs(static_cast<int>(to_do)) - 1;
      const uint32_t its_part = shuffle_from(part, r), its_rank = shuffle_from(rank, r);
      // The ranks that fall in the same part; in the end, those for which only elements of key `first` are left.
      uint32_t same = to_do & __ballot_sync(kEveryLane, part == its_part);
      uint32_t first = 0, span = 0;
      if (!cut.by_value) cut.by_key.bounds<uint32_t>(its_part, first, span);
#pragma unroll 1
      for (bool in_part = cut.by_value; in_part || span > 0; in_part = false) {
        uint32_t least = ~0u, most = 0, some = 0, every = ~0u;  // the latter: bits that words have
        for_words([&](auto& word, uint32_t, bool has) {
          if (!has) return;
#pragma unroll
          for (uint32_t its : word) {
            const uint32_t key = key_of(its);
            if (in_part ? cut.part_bits(its) - kMagicBits == its_part : key - first <= span) {
              least = min(least, key), most = max(most, key);
              if (kFloats && kAlone) some |= its, every &= its;
            }
          }
        });
        least = ~largest_of_warp(~least), most = largest_of_warp(most);
        wait_for_team();  // no warp reads the list or the words of the last turn any more
        if (warps > 1) {
          if (lane == 0) told.of_warp[2 * warp] = least, told.of_warp[2 * warp + 1] = most;
          wait_for_team();
          const uint32_t of = min(lane, warps - 1);
          least = ~largest_of_warp(~told.of_warp[2 * of]), most = largest_of_warp(told.of_warp[2 * of + 1]);
        }
        first = least, span = most - least;
        if (kFloats && kAlone && span == 0 && first == key_of(0)) {
          some = __reduce_or_sync(kEveryLane, some), every = __reduce_and_sync(kEveryLane, every);
          if (problem.quantiles && some == every && (same >> lane & 1)) found_at = kPlus - (some >> 31);
        }
        if (span == 0) break;
        const auto parts = Parts<uint32_t>::between<uint32_t>(kBinBits, first, first + span);
        clear_counts();
        wait_for_team();
        count_keys(parts, std::false_type{});
        const PartOfRank at = find_rank(counts, sum_counts(counts), its_rank);
        wait_for_team();
        const uint32_t distance = rank - (its_rank - at.left);
        same &= __ballot_sync(kEveryLane, distance < at.size);
        if (same >> lane & 1) left = distance;
        parts.bounds<uint32_t>(at.part, first, span);
        if (span == 0 || at.size > kSelectFew) continue;
        list_where([&](uint32_t word) { return key_of(word) - first <= span; });
        choose(same, left, [] {});
        to_do &= ~same;
        same = 0;
        break;
      }
      to_do &= ~same;
      if (same == 0) continue;
      // Only equal elements are left. Those that their key does not tell are counted.
      if (same >> lane & 1) found_key = first;
      if (problem.quantiles && !(kFloats && first == key_of(0))) continue;
      if (__any_sync(kEveryLane, found_at >= kPlus - 1 && (same >> lane & 1))) continue;
      // Each warp has a share of the packs, which it looks through in order.
      const uint32_t share = (packs + warps * 32 - 1) / (warps * 32) * 32, begin = warp * share;
      const uint32_t end = min(begin + share, packs);
      const auto equal_at = [&](uint32_t p) {
        uint32_t equal = 0;
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          const uint32_t i = p * kPack + e - past;
          if (p < end && i < length && key_of(word_of(held[past + i])) == first) equal |= 1u << e;
        }
        return equal;
      };
      uint32_t before = 0;
      if (warps > 1) {
        uint32_t own = 0;
        for (uint32_t p = begin + lane; p < end; p += 32) own += __popc(equal_at(p));
        own = sum_of_warp(own);
        wait_for_team();
        if (lane == 0) told.of_warp[warp] = own;
        wait_for_team();
        before = sum_of_warp(lane < warp ? told.of_warp[min(lane, warps - 1)] : 0);
      }
      for_bits(same, [&](int q) {
        uint32_t its_left = shuffle_from(left, q) - before, at = ~0u;  // wraps if earlier warps have the element
#pragma unroll 1
        for (uint32_t start = begin; start < end; start += 32) {
          uint32_t equal = equal_at(start + lane);
          const uint32_t own = __popc(equal), up_to = sum_up_to_lane(own), sum = shuffle_from(up_to, 31);
          if (its_left >= sum) {
            its_left -= sum;
            continue;
          }
          uint32_t skip = its_left - (up_to - own);
          const bool has = skip < own;
          if (has)
            for (; skip; --skip) equal &= equal - 1;
          const uint32_t i = (start + lane) * kPack + __ffs(static_cast<int>(equal)) - 1 - past;
          at = shuffle_from(i, __ffs(static_cast<int>(__ballot_sync(kEveryLane, has))) - 1);
          break;
        }
        if (warps > 1) {
          if (lane == 0 && at != ~0u) told.at = at;
          wait_for_team();
          at = told.at;
          wait_for_team();
        }
        if (static_cast<int>(lane) == q) found_at = at;
      });
    }

    if (kAlone && problem.kth >= 0) {
      // The partition. The elements before the chosen one and those behind it go to their places in turns of 32, in
      // which each group lies together.
      const uint32_t middle_key = shuffle_from(found_key, 0), middle = shuffle_from(found_at, 0);
      const auto kth = static_cast<uint32_t>(problem.kth);
      const auto for_places = [&](auto put) {
        constexpr uint32_t kAhead = 8;
        uint32_t before = 0;
#pragma unroll 1
        for (uint32_t start = lane; start - lane < length; start += 32 * kAhead) {
          T element[kAhead];
#pragma unroll
          for (uint32_t j = 0; j < kAhead; ++j) element[j] = held[past + min(start + 32 * j, length - 1)];
#pragma unroll
          for (uint32_t j = 0; j < kAhead; ++j) {
            const uint32_t at = start + 32 * j, key = key_of(word_of(element[j]));
            const bool is_first = key < middle_key || (key == middle_key && at < middle);
            const unsigned lanes = __ballot_sync(kEveryLane, at < length && is_first);
            const uint32_t up_to = before + __popc(lanes & lower);
            before += __popc(lanes);
            const uint32_t others = at == middle ? kth : kth + (at < middle) + at - up_to;
            if (at < length) put(is_first ? up_to : others, at, element[j]);
          }
        }
      };
      auto* const values = static_cast<T*>(results.values);
      int32_t* const indices = results.indices;
      const int64_t to = int64_t{row} * length;
      if (values) for_places([&](uint32_t place, uint32_t, T element) { values[to + place] = element; });
      if (indices) for_places([&](uint32_t place, uint32_t at, T) { indices[to + place] = static_cast<int32_t>(at); });
      wait_for_team();
      start_next();
      row = next;
      continue;
    }
    // The key tells the element, but for zeros, and for NaNs if these differ.
    const bool is_told = !kFloats || (found_key != key_of(0) && (problem.quantiles || found_key != ~0u));
    uint32_t element = 0;
    if (static_cast<int>(lane) < wanted) {
      const uint32_t minus = (kPlus - found_at) << (8 * sizeof(T) - 1);
      element = is_told ? element_of(found_key) : found_at >= kPlus - 1 ? minus : held[past + found_at];
    }
    wait_for_team();
    if (!has_started) start_next();
    if (warp > 0) {
    } else if (problem.quantiles) {
      const uint32_t high = shuffle_from(element, static_cast<int>(problem.upper(min(lane, uint32_t{kMostRanks} - 1)))),
                     last = has_nan ? element_of(~0u) : 0;
      if (lane < problem.quantiles)
        static_cast<T*>(results.values)[quantile_at(row, lane, problem.quantiles, results.beside)] =
            static_cast<T>(quantile.of(problem, element, high, last));
    } else if (static_cast<int>(lane) < wanted) {
      const int64_t to = (int64_t{outer} * wanted + lane) * inner + column;
      static_cast<T*>(results.values)[to] = static_cast<T>(element);
      results.indices[to] = static_cast<int32_t>(found_at);
    }
    row = next;
  }
#endif
}

}  // namespace

cudaError_t launch_select_teams(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results) {
  Launch config;
  config.grid = dim3(static_cast<unsigned>(plan.blocks));
  config.block = dim3(plan.threads);
  config.shared_bytes = plan.shared_bytes;
  // Whether all rows have the same ranks and shares.
  const auto is_same = [](const IndexMap& map) {
    return std::all_of(map.stride, map.stride + map.groups, [](int64_t stride) { return stride == 0; });
  };
  const auto all_same = [&](const Broadcast& its) { return is_same(its.outer) && is_same(its.inner); };
  const bool same_ranks = all_same(problem.ranks) && (problem.quantiles == 0 || all_same(problem.shares));
  const ArgOrder& rules = problem.order.ascending;
  const bool is_float = rules.sign != 0, is_half = is_float && rules.nan_above == 0x7c00;
  const auto run = [&](auto alone) {
    constexpr bool kAlone = alone.value;
    const auto kernel =
        problem.bits == 32
            ? (is_float ? select_teams_kernel<Kind::kFloat32, kAlone> : select_teams_kernel<Kind::kInt32, kAlone>)
        : is_half  ? select_teams_kernel<Kind::kFloat16, kAlone>
        : is_float ? select_teams_kernel<Kind::kBfloat16, kAlone>
                   : select_teams_kernel<Kind::kInt16, kAlone>;
    return launch(stream, config, kernel, problem, x, ranks, results, static_cast<uint32_t>(plan.table_at), plan.team,
                  same_ranks);
  };
  return plan.team == 1 ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace jaxgpuops::select
