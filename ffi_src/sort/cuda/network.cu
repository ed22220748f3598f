// Sorts rows of 33 to 4096 elements of up to 32 bits in registers, by the networks of topk/cuda/sort_team.cuh. A thread
// has 32 words of a row. Its team is a part of a warp, for rows along any axis, or a block for contiguous rows of more
// than 1024 elements.
//
// Without indices, keys alone are sorted: equal keys are equal elements, except for NaNs and for -0 beside 0. If a row
// has such elements, it is read once more, and they are written to their places in the order of the row. A network
// sorts two rows of 8 or 16 bits at once: it compares both halves of a word in one instruction. In a part of a warp,
// threads then remember which elements are zeros, so that only rows with NaNs are read once more.
//
// With indices, a word has the top bits of the range of keys and, below them, the index. Neighbours whose words have
// the same bits of the key may be in the wrong order; they change places in a few rounds by their whole keys. If these
// are not enough, the row is sorted by the lower bits of keys, and then by the upper ones.
//
// Bytes moved: every element is read once, and every result is written once. Blocks of columns read whole sectors.
#include "common/cuda/intrinsics.cuh"
#include "sort/cuda/kernels.h"
#include "sort/cuda/raised.cuh"
#include "topk/cuda/sort_team.cuh"

namespace jaxgpuops::sort {
namespace {

constexpr int kEach = kNetworkEach;
constexpr int kMendRounds = 6;
constexpr int kVector = 4;

struct NetworkArgs {
  const void* x;
  void* values;      // null if only indices are wanted
  int32_t* indices;  // null if only values are wanted
  int64_t outer, inner;
  uint32_t length, team, tiles;  // tiles: blocks of an outer index
  uint32_t pitch, order_at;      // see NetworkShape
  bool vectors;                  // for pairs of rows: they consist of whole, aligned vectors of kVector elements
  SortOrder order;               // the largest key comes first
};

// Where place p of a sorted row is in shared memory: lanes have neighbouring runs of kEach, and no two meet in a bank.
__device__ __forceinline__ uint32_t padded(uint32_t place) { return place + place / kEach; }

// The row of a team.
template <class Key, bool kBlock>
struct TeamRow {
  topk::SortTeam<kEach, kBlock> team;
  const Key* x;
  int64_t step;
  uint32_t length, n;  // n: the length, or 0 if there is no row for the team
  uint32_t* words;     // in shared memory

  __device__ __forceinline__ uint32_t slot(int j) const { return team.t + j * team.size; }
};

// Where the zeros and the NaNs of a sorted row begin.
struct Equals {
  uint32_t zeros, nans;
};

// Writes the zeros and NaNs of a row to their places, in the order of their indices, by write(place, bits). Elements
// may be the upper parts of keys.
template <class Key, class Element, bool kBlock, class Write>
__device__ __forceinline__ void place_equals(const TeamRow<Element, kBlock>& row, Equals to, const SortOrder& order,
                                             Write write) {
  // Of a block, each warp has a part of the row.
  const uint32_t lanes = kBlock ? 32 : row.team.size, lane = threadIdx.x & (lanes - 1), own = threadIdx.x & 31 & ~lane;
  const uint32_t begin = (row.team.t - lane) * kEach, end = min(row.length, begin + lanes * kEach);
  const uint32_t mates = (kEveryLane >> (32 - lanes)) << own, before = (1u << (threadIdx.x & 31)) - 1;
  const uint32_t zero = sort_key(Key{0}, order);
  const uint32_t nan = sort_key(static_cast<Key>(order.ascending.nan_above + 1), order);
  const auto visit = [&](auto put) {
    constexpr int kTogether = 8;
#pragma unroll 1
    for (uint32_t first = begin; first < end; first += kTogether * lanes) {
      const uint32_t last = min(row.n, end);
      Key bits[kTogether];
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const uint32_t place = first + u * lanes + lane;
        bits[u] = place < last ? Key{row.x[place * row.step]} << 8 * (sizeof(Key) - sizeof(Element)) : Key{0};
      }
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const bool is_there = first + u * lanes + lane < last;
        const uint32_t key = sort_key(bits[u], order);
        put(bits[u], is_there && key == zero, is_there && key == nan);
      }
    }
  };
  if constexpr (kBlock) {
    __shared__ Equals counts[kNetworkThreads / 32];
    Equals count = {0, 0};
    visit([&](Key, bool is_zero, bool is_nan) { count.zeros += is_zero, count.nans += is_nan; });
    count = {sum_of_warp(count.zeros), sum_of_warp(count.nans)};
    if (lane == 0) counts[threadIdx.x / 32] = count;
    __syncthreads();
    for (uint32_t w = 0; w < threadIdx.x / 32; ++w) to.zeros += counts[w].zeros, to.nans += counts[w].nans;
  }
  visit([&](Key bits, bool is_zero, bool is_nan) {
    const uint32_t with_zero = __ballot_sync(kEveryLane, is_zero) & mates;
    const uint32_t with_nan = __ballot_sync(kEveryLane, is_nan) & mates;
    if (is_zero) write(padded(to.zeros + __popc(with_zero & before)), bits);
    if (is_nan) write(padded(to.nans + __popc(with_nan & before)), bits);
    to.zeros += __popc(with_zero), to.nans += __popc(with_nan);
  });
}

// Zeros of a row: bit j says that the thread's word j is one, and that it is -0.
struct Zeros {
  uint32_t all, negative;
};

// Calls write(place) for each -0 of a sorted row, in which zeros begin at `at`, in the order of their indices. If
// `vectors`, kVector neighbouring words of a thread are neighbours in the row; else word j of neighbouring threads is.
// For a team that is a part of a warp.
template <class Team, class Write>
__device__ __forceinline__ void place_negative_zeros(const Team& team, const Zeros& zeros, bool vectors, uint32_t at,
                                                     Write write) {
  const uint32_t own = threadIdx.x & 31 & ~team.t, mates = (kEveryLane >> (32 - team.size)) << own;
  const uint32_t before = (1u << (threadIdx.x & 31)) - 1;
#pragma unroll 1
  for (int first = 0; first < kEach; first += kVector) {
    uint32_t with[kVector], place = at;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      with[i] = __ballot_sync(kEveryLane, zeros.all >> (first + i) & 1) & mates;
      place += __popc(with[i] & before);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (zeros.negative >> (first + i) & 1) write(vectors ? place : at + __popc(with[i] & before));
      place += zeros.all >> (first + i) & 1;
      at += __popc(with[i]);
    }
  }
}

// Returns the indices of a sorted row, whose elements are in shared memory. `places`: shared memory for indices of 16
// bits, padded as words are.
template <class Key>
__device__ __forceinline__ void sort_indices(const TeamRow<Key, false>& row, const SortOrder& order, uint16_t* places,
                                             uint32_t (&index)[kEach]) {
  constexpr bool kWide = sizeof(Key) == 4;
  const auto& team = row.team;
  const int index_bits = 31 - __clz(static_cast<int>(kEach * team.size)), digit_bits = 32 - index_bits;
  const uint32_t mask = (1u << index_bits) - 1;
  const auto key_at = [&](uint32_t at) { return sort_key(static_cast<Key>(row.words[at]), order); };
  Key low = 0;
  int range = 8 * sizeof(Key), shift = 0;
  if constexpr (kWide) {
    Key high = 0;
    low = ~Key{0};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (row.slot(j) >= row.n) continue;
      const Key key = key_at(row.slot(j));
      low = min(low, key), high = max(high, key);
    }
    low = team.reduce(low, [](Key a, Key b) { return min(a, b); });
    high = team.reduce(high, [](Key a, Key b) { return max(a, b); });
    range = 32 - __clz(static_cast<int>(high - low));
    shift = max(0, range - digit_bits);
  }
  bool guesses = kWide && __any_sync(kEveryLane, shift > 0), digits = false, known = false;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t slot = row.slot(j);
      index[j] = 0;
      if (slot >= row.n) continue;
      const uint32_t at = known ? places[slot + slot / kEach * 2] : slot;
      index[j] = static_cast<uint32_t>(key_at(at) - low) >> shift << index_bits | (mask - slot);
    }
    team.sort(index);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      index[j] = mask - (index[j] & mask);
      if (known && team.t * kEach + j < row.n) index[j] = places[index[j] + index[j] / kEach * 2];
    }
    if constexpr (!kWide) return;
    if (!guesses && !digits) return;
    if (guesses) {
      Key key[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) key[j] = team.t * kEach + j < row.n ? key_at(index[j]) : Key{0};
      if (topk::mend<kMendRounds>(team, key, index)) return;
      guesses = false, digits = true, shift = 0;
      continue;
    }
    shift += digit_bits;
    if (!__any_sync(kEveryLane, shift < range)) return;
    known = true;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t place = team.t * kEach + j;
      if (place < row.n) places[place + place / kEach * 2] = static_cast<uint16_t>(index[j]);
    }
    __syncwarp();
  }
}

template <class Key, bool kIndices, bool kColumns, bool kBlock>
__global__ void __launch_bounds__(kNetworkThreads, kNetworkBlocks)
    network_kernel(const __grid_constant__ NetworkArgs a) {
  auto* const shared = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const uint32_t own = kBlock ? 0 : threadIdx.x / a.team, teams = kBlock ? 1 : kNetworkThreads / a.team, n = a.length;
  TeamRow<Key, kBlock> row{{a.team, threadIdx.x & (a.team - 1), reinterpret_cast<uint4*>(shared)},
                           nullptr,
                           a.inner,
                           n,
                           n,
                           shared + own * a.pitch};
  const auto& team = row.team;
  // Columns are copied by threads that have neighbouring ones, each every a.team-th element of one.
  const uint32_t c = kColumns ? threadIdx.x & (teams - 1) : own, r = kColumns ? threadIdx.x / teams : team.t;
  int64_t first;  // of the elements that the thread copies
  bool copies;
  if constexpr (kColumns) {
    const int64_t outer = blockIdx.x / a.tiles,
                  column = int64_t{blockIdx.x - static_cast<uint32_t>(outer) * a.tiles} * teams;
    const int64_t base = outer * n * a.inner;
    copies = column + c < a.inner;
    first = base + column + c + r * a.inner;
    row.x = static_cast<const Key*>(a.x) + base + column + own;
    if (column + own >= a.inner) row.n = 0;
  } else {
    const int64_t number = int64_t{blockIdx.x} * teams + own;
    copies = number < a.outer;
    first = number * n + r;
    row.x = static_cast<const Key*>(a.x) + number * n;
    if (!copies) row.n = 0;
  }
  const int64_t step = kColumns ? a.team * a.inner : a.team;
  const int team_bits = 31 - __clz(static_cast<int>(a.team));
  // How many elements the thread copies, and how many of its slots are of the row.
  const int to_copy = copies && r < n ? static_cast<int>((n - r + a.team - 1) >> team_bits) : 0;
  const int there = team.t < row.n ? static_cast<int>((row.n - team.t + a.team - 1) >> team_bits) : 0;
  const auto each = [&](auto* at, auto use) {
#pragma unroll
    for (int j = 0; j < kEach; ++j, at += step)
      if (j < to_copy) use(j, at);
  };
  uint32_t* const copied = shared + c * a.pitch + padded(r);  // the row that the thread copies from or to
  const auto sync = [] { kColumns || kBlock ? __syncthreads() : __syncwarp(); };

  uint32_t words[kEach];
  const Key* const from = static_cast<const Key*>(a.x) + first;
#pragma unroll
  for (int j = 0; j < kEach; ++j) words[j] = 0;
  each(from, [&](int j, const Key* at) { words[j] = *at; });
  if (kIndices || kColumns) {
    each(from, [&](int j, const Key*) { copied[j << team_bits] = words[j]; });
    sync();
  }
  const auto write = [&](auto* to) {
    sync();
    each(to + first, [&](int j, auto* at) {
      *at = static_cast<std::remove_reference_t<decltype(*at)>>(copied[padded(j << team_bits)]);
    });
  };
  uint32_t* const sorted = row.words + team.t * (kEach + 1);
  if constexpr (kIndices) {
    auto* const places = reinterpret_cast<uint16_t*>(shared + a.order_at + own * (a.team * (kEach / 2 + 1)));
    sort_indices(row, a.order, places, words);
    if (a.values) {
      uint32_t bits[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) bits[j] = row.words[min(words[j], n - 1)];
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kEach; ++j) sorted[j] = bits[j];
      write(static_cast<Key*>(a.values));
    }
    sync();
#pragma unroll
    for (int j = 0; j < kEach; ++j) sorted[j] = words[j];
    write(a.indices);
  } else {
    if constexpr (kColumns) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) words[j] = j < there ? row.words[row.slot(j)] : 0;
      __syncwarp();
    }
    uint32_t differ = 0;  // whether elements have other bits than their keys give back
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const auto bits = static_cast<Key>(words[j]);
      const Key key = sort_key(bits, a.order);
      const bool is_there = j < there;
      if (is_there) differ |= key ^ encode(bits, a.order.ascending.order) ^ static_cast<Key>(a.order.invert);
      words[j] = is_there ? key : 0;
    }
    team.sort(words);
    const bool has_equals = team.any(differ != 0);
    Equals to = {0, 0};
    if (has_equals) {
      const uint32_t zero = sort_key(Key{0}, a.order);
      const uint32_t nan = sort_key(static_cast<Key>(a.order.ascending.nan_above + 1), a.order);
#pragma unroll
      for (int j = 0; j < kEach; ++j) to.zeros += words[j] > zero, to.nans += words[j] > nan;
      to = {team.sum(to.zeros, 0), team.sum(to.nans, 1)};
      team.sync();
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      sorted[j] = decode(static_cast<Key>(words[j] ^ static_cast<Key>(a.order.invert)), a.order.ascending.order);
    if (has_equals) {
      team.sync();
      place_equals<Key>(row, to, a.order, [&](uint32_t place, Key bits) { row.words[place] = bits; });
    }
    write(static_cast<Key*>(a.values));
  }
}

// kVector elements.
template <class Element>
using Vector = std::conditional_t<sizeof(Element) == 1, uint32_t, uint2>;

// Joins vectors of two rows to words that have an element of each, and parts them again.
__device__ __forceinline__ void join(const uint2 (&two)[2], uint32_t* words) {
  words[0] = __byte_perm(two[0].x, two[1].x, 0x5410), words[1] = __byte_perm(two[0].x, two[1].x, 0x7632);
  words[2] = __byte_perm(two[0].y, two[1].y, 0x5410), words[3] = __byte_perm(two[0].y, two[1].y, 0x7632);
}
__device__ __forceinline__ void part(const uint32_t* words, uint2 (&two)[2]) {
  two[0] = {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410)};
  two[1] = {__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)};
}
// Elements of 8 bits are the upper halves of those of 16.
__device__ __forceinline__ void join(const uint32_t (&two)[2], uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) words[i] = __byte_perm(two[0], two[1], 0x4000 + i * 0x1010) & 0xff00ff00;
}
__device__ __forceinline__ void part(const uint32_t* words, uint32_t (&two)[2]) {
  const uint32_t low = __byte_perm(words[0], words[1], 0x7351), high = __byte_perm(words[2], words[3], 0x7351);
  two[0] = __byte_perm(low, high, 0x5410), two[1] = __byte_perm(low, high, 0x7632);
}

// Sorts elements of 8 and 16 bits without indices: a network sorts two rows at once, each in one half of its words.
// Elements of 8 bits are the upper parts of halves. Two columns are neighbours.
template <class Element, bool kColumns, bool kBlock>
__global__ void __launch_bounds__(kNetworkThreads, kNetworkBlocks) pairs_kernel(const __grid_constant__ NetworkArgs a) {
  using Key = uint16_t;
  constexpr int kRaised = 8 * (sizeof(Key) - sizeof(Element));
  constexpr uint32_t kBoth = 0x00010001, kSigns = kBoth << 15;
  auto* const shared = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const uint32_t own = kBlock ? 0 : threadIdx.x / a.team, teams = kBlock ? 1 : kNetworkThreads / a.team, n = a.length;
  const topk::SortTeam<kEach, kBlock, false, topk::Halves> team{a.team, threadIdx.x & (a.team - 1),
                                                                reinterpret_cast<uint4*>(shared)};
  // The elements of two rows, and how many each has: 0 if there is no such row.
  struct Pair {
    const Element* x;
    int64_t apart, step;
    uint32_t there[2];
  };
  const auto pair_of = [&](uint32_t number) -> Pair {
    const auto* const x = static_cast<const Element*>(a.x);
    if constexpr (kColumns) {
      const uint32_t outer = blockIdx.x / a.tiles;
      const int64_t column = 2 * (int64_t{blockIdx.x - outer * a.tiles} * teams + number);
      return {x + outer * n * a.inner + column, 1, a.inner, {column < a.inner ? n : 0, column + 1 < a.inner ? n : 0}};
    }
    const int64_t row = 2 * (int64_t{blockIdx.x} * teams + number);
    return {x + row * n, n, 1, {row < a.outer ? n : 0, row + 1 < a.outer ? n : 0}};
  };
  // Columns are copied by threads that have neighbouring ones, each every a.team-th element of two.
  const uint32_t c = kColumns ? threadIdx.x & (teams - 1) : own, r = kColumns ? threadIdx.x / teams : team.t;
  const Pair copied = pair_of(c);
  uint32_t* const copied_words = shared + c * a.pitch;
  uint32_t* const row_words = shared + own * a.pitch;
  const auto sync = [] { kColumns || kBlock ? __syncthreads() : __syncwarp(); };

  uint32_t words[kEach];
  const bool vectors = !kColumns && a.vectors;
  if (vectors) {
#pragma unroll
    for (int j = 0; j < kEach; j += kVector) {
      const uint32_t place = (r + j / kVector * team.size) * kVector;
      Vector<Element> two[2] = {};
      if (place < copied.there[0]) two[0] = *reinterpret_cast<const Vector<Element>*>(copied.x + place);
      if (place < copied.there[1]) two[1] = *reinterpret_cast<const Vector<Element>*>(copied.x + n + place);
      join(two, words + j);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t place = r + j * team.size;
      const Element* const at = copied.x + place * copied.step;
      words[j] = place < copied.there[0] ? at[0] << kRaised : 0;
      if (place < copied.there[1]) words[j] |= static_cast<uint32_t>(at[copied.apart]) << (16 + kRaised);
    }
  }
  if constexpr (kColumns) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) copied_words[padded(r + j * team.size)] = words[j];
    sync();
#pragma unroll
    for (int j = 0; j < kEach; ++j) words[j] = row_words[padded(team.t + j * team.size)];
    __syncwarp();
  }
  // -0 and NaNs have other bits than their keys give back.
  const ArgOrder& rules = a.order.ascending;
  const auto both = [](uint64_t half) { return static_cast<uint32_t>(half & 0xffff) * kBoth; };
  const uint32_t sign = both(rules.sign), magnitude = both(rules.order.magnitude);
  const uint32_t turn = both(rules.order.flip ^ a.order.invert), to_nan = both(0x7fff - rules.nan_above);
  uint32_t differ = 0;
  if (sign) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t other = words[j] ^ sign;  // a half is 0 if the element is -0
      differ |= (((words[j] & ~sign) + to_nan) | ((other - kBoth) & ~other)) & kSigns;
    }
  }
  const bool has_equals = team.any(differ != 0);
  // Changes the bits of negative numbers.
  const auto mirror = [&](uint32_t word) { return word ^ ((word >> 15 & kBoth) * 0xffff & magnitude); };
  __shared__ Zeros kept[2][kBlock ? 1 : kNetworkThreads];  // of both rows: registers are for words
  bool rereads = true;
  if (has_equals) {
    if constexpr (!kBlock) {
      uint32_t nans = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) nans |= (words[j] & ~sign) + to_nan;
      rereads = team.any((nans & kSigns) != 0);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        Zeros zeros = {};
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const auto bits = static_cast<Key>(words[j] >> 16 * half);
          zeros.all |= (static_cast<Key>(bits << 1) == 0) << j, zeros.negative |= (bits == static_cast<Key>(sign)) << j;
        }
        kept[half][threadIdx.x] = zeros;
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      words[j] = sort_key(static_cast<Key>(words[j]), a.order) |
                 static_cast<uint32_t>(sort_key(static_cast<Key>(words[j] >> 16), a.order)) << 16;
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) words[j] = mirror(words[j]) ^ turn;
  }
  // How many of the thread's words are of the rows: the others come last.
  const uint32_t steps = vectors ? kVector * team.size : team.size;
  const uint32_t begin = vectors ? kVector * team.t : team.t;
  const int own_words = begin < n ? static_cast<int>((n - begin + steps - 1) / steps) * (vectors ? kVector : 1) : 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (j >= own_words) words[j] = 0;
  team.sort(words);
  Equals to[2] = {};
  if (has_equals) {
    const uint32_t zero = sort_key(Key{0}, a.order);
    const uint32_t nan = sort_key(static_cast<Key>(rules.nan_above + 1), a.order);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t key = words[j] >> 16 * half & 0xffff;
        to[half].zeros += key > zero, to[half].nans += key > nan;
      }
      to[half] = {team.sum(to[half].zeros, 0), team.sum(to[half].nans, 1)};
      team.sync();
    }
  }
  uint32_t* const sorted = row_words + team.t * (kEach + 1);
#pragma unroll
  for (int j = 0; j < kEach; ++j) sorted[j] = mirror(words[j] ^ turn);
  if (has_equals) {
    const Pair pair = pair_of(own);
    auto* const halves = reinterpret_cast<Key*>(row_words);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      team.sync();
      if constexpr (!kBlock) {
        if (!rereads) {
          place_negative_zeros(team, kept[half][threadIdx.x], vectors, half ? to[1].zeros : to[0].zeros,
                               [&](uint32_t place) { halves[2 * padded(place) + half] = static_cast<Key>(sign); });
          continue;
        }
      }
      const TeamRow<Element, kBlock> row{
          {team.size, team.t, team.buffer}, pair.x + half * pair.apart, pair.step, n, pair.there[half], row_words};
      place_equals<Key>(row, to[half], a.order, [&](uint32_t place, Key bits) { halves[2 * place + half] = bits; });
    }
  }
  sync();
  Element* const results = static_cast<Element*>(a.values) + (copied.x - static_cast<const Element*>(a.x));
  if (vectors) {
#pragma unroll
    for (int j = 0; j < kEach; j += kVector) {
      const uint32_t place = (r + j / kVector * team.size) * kVector;
      if (place >= copied.there[0]) break;
      Vector<Element> two[2];
      part(copied_words + padded(place), two);
      *reinterpret_cast<Vector<Element>*>(results + place) = two[0];
      if (copied.there[1]) *reinterpret_cast<Vector<Element>*>(results + n + place) = two[1];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t place = r + j * team.size;
    if (place >= copied.there[0]) break;
    const uint32_t word = copied_words[padded(place)];
    Element* const at = results + place * copied.step;
    at[0] = static_cast<Element>(word >> kRaised);
    if (copied.there[1]) at[copied.apart] = static_cast<Element>(word >> (16 + kRaised));
  }
}

template <class Element>
cudaError_t run_pairs(cudaStream_t stream, const Launch& config, bool columns, bool block, const NetworkArgs& a) {
  if (columns) return launch(stream, config, pairs_kernel<Element, true, false>, a);
  if constexpr (sizeof(Element) == 2)
    if (block) return launch(stream, config, pairs_kernel<Element, false, true>, a);
  return launch(stream, config, pairs_kernel<Element, false, false>, a);
}

template <class Key>
cudaError_t run(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  const auto [outer, length, inner] = problem.rows;
  const NetworkShape shape(problem.rows, problem.indices, plan.pairs);
  SortOrder order = problem.key_bits == 8 ? raised(problem.order, 8) : problem.order;
  order.invert = ~order.invert;
  const uint64_t vector_bytes = kVector * problem.key_bits / 8;
  const bool vectors = length % kVector == 0 && reinterpret_cast<uintptr_t>(buffers.x) % vector_bytes == 0 &&
                       reinterpret_cast<uintptr_t>(buffers.values) % vector_bytes == 0;
  const NetworkArgs a{buffers.x,
                      buffers.values,
                      buffers.indices,
                      outer,
                      inner,
                      static_cast<uint32_t>(length),
                      static_cast<uint32_t>(shape.team),
                      static_cast<uint32_t>(shape.tiles),
                      static_cast<uint32_t>(shape.pitch),
                      static_cast<uint32_t>(shape.order_at),
                      vectors,
                      order};
  const Launch config{dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                      static_cast<size_t>(plan.shared_bytes)};
  if (plan.pairs)
    return problem.key_bits == 8 ? run_pairs<uint8_t>(stream, config, inner > 1, false, a)
                                 : run_pairs<uint16_t>(stream, config, inner > 1, shape.team > 32, a);
  if constexpr (sizeof(Key) == 4)
    if (shape.team > 32) return launch(stream, config, network_kernel<Key, false, false, true>, a);
  if constexpr (sizeof(Key) == 4)
    if (!problem.indices)
      return launch(stream, config,
                    inner > 1 ? network_kernel<Key, false, true, false> : network_kernel<Key, false, false, false>, a);
  return launch(stream, config,
                inner > 1 ? network_kernel<Key, true, true, false> : network_kernel<Key, true, false, false>, a);
}

}  // namespace

cudaError_t launch_network(cudaStream_t stream, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  return problem.key_bits <= 16 ? run<uint16_t>(stream, plan, problem, buffers)
                                : run<uint32_t>(stream, plan, problem, buffers);
}

}  // namespace jaxgpuops::sort
