// The kernels of a radix sort in passes over memory, by a digit of eight bits at a time from the lowest up: of whole
// rows (sweep.cu), or of the segments of rows (sweep_segments.cu), which stand in place of rows below. A first kernel
// counts all digits; then one pass sorts by each digit. A pass in which all elements of a row have the same digit is
// skipped, which the first kernel decides.
//
// In a pass a block takes a tile of a row, sorts it by the digit in shared memory, and writes each group of equal
// digits to where it belongs. It learns these positions by decoupled look-back: each tile publishes its digit counts as
// soon as it has them, and soon after their sums over all tiles before it. The first pass makes the indices, or reads
// the numbers that are carried instead. The last pass does not write keys that are not wanted.
//
// Bytes moved: the keys are read once for counting; each pass reads and writes keys and indices once. The algorithm is
// that of Adinets and Merrill, "Onesweep" (2022).
#pragma once

#include "common/cuda/launch.cuh"
#include "sort/cuda/counts.cuh"
#include "sort/cuda/digits.cuh"
#include "sort/cuda/kernels.h"

namespace jaxgpuops::sort {
namespace {

// A tile of a segment: the part of it that lies between two multiples of the length of a tile.
struct Piece {
  uint32_t begin, end;   // in the row
  uint32_t first, last;  // where its segment begins and ends; `last` is 0 if the elements are in no segment

  __device__ __forceinline__ uint32_t number(uint32_t tile) const { return begin / tile - first / tile; }
  __device__ __forceinline__ uint32_t count(uint32_t tile) const { return (last - 1) / tile - first / tile + 1; }
};

// ---- Counts ---------------------------------------------------------------------------------------------------------

struct CountArgs {
  const void* x;
  RowHead* heads;
  uint32_t* counts;  // [row][pass][digit]: how many elements have this digit; after counting: how many have a lower one
  uint32_t* status;  // the status words of pass_kernel, which count_kernel sets to zero
  const Piece* pieces;     // of segments; null: rows are sorted
  const uint32_t* needed;  // of Buffers
  int64_t rows, length, tiles;
  int64_t elements;  // elements that a block counts
  int64_t inner;     // from one element of a row to the next
  SortOrder order;
};

template <class Key, bool kSegments, bool kColumns = false>
__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ CountArgs a) {
  constexpr int kPasses = sizeof(Key);
  __shared__ uint32_t counts[kPasses * kDigits], active;
  __shared__ bool last;
  for (int c = threadIdx.x; c < kPasses * kDigits; c += kCountThreads) counts[c] = 0;
  let_dependents_start();
  if (!kSegments && a.needed != nullptr && *a.needed == 0) {
    wait_for_predecessor();
    return;
  }
  int64_t blocks, row, begin, end, length = a.length;
  const Key* x = static_cast<const Key*>(a.x);
  if constexpr (kSegments) {
    wait_for_predecessor();  // which finds the pieces
    const Piece piece = a.pieces[blockIdx.x];
    if (piece.begin == piece.end || piece.last == 0) return;
    const auto tile = static_cast<uint32_t>(a.elements);
    blocks = piece.count(tile);
    row = blockIdx.x - piece.number(tile);
    begin = piece.begin, end = piece.end, length = piece.last - piece.first;
    x += blockIdx.x / a.tiles * a.length;
  } else {
    blocks = (length + a.elements - 1) / a.elements;
    row = blockIdx.x / blocks;
    begin = blockIdx.x % blocks * a.elements, end = min(begin + a.elements, length);
    x += kColumns ? row / a.inner * length * a.inner + row % a.inner : row * length;
  }
  const int64_t step = kColumns ? a.inner : 1;
  __syncthreads();

  const auto count = [&](Key bits) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p)
      atomicAdd(counts + p * kDigits + digit_of<Key>(word_of(bits, a.order), digits_of<Key>(p, a.order)), 1u);
  };
  constexpr int kUnroll = 8;
  int64_t at = begin + threadIdx.x;
  for (; at + (kUnroll - 1) * kCountThreads < end; at += kUnroll * kCountThreads) {
    Key bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) bits[u] = x[(at + u * kCountThreads) * step];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) count(bits[u]);
  }
#pragma unroll 1
  for (; at < end; at += kCountThreads) count(x[at * step]);

  if constexpr (!kSegments) {
    wait_for_predecessor();  // the predecessor sets the workspace to zero
    // Sets this block's share of the status words, by which tiles communicate later, to zero.
    const int64_t words = a.tiles * kPasses * kDigits, share = (words + blocks - 1) / blocks, from = begin / a.elements;
    uint32_t* const status = a.status + row * words;
#pragma unroll 2
    for (int64_t w = from * share + threadIdx.x; w < min((from + 1) * share, words); w += kCountThreads) status[w] = 0;
  }
  __syncthreads();

  uint32_t* const all = a.counts + row * kPasses * kDigits;
  if (!add_to_row<kPasses>(counts, all, &a.heads[row].counted, blocks, last)) return;
  sum_counts<kPasses>(counts, all, length, active, [&](uint32_t p) { return turn_of<Key>(p, a.order); });
  // At least one pass must run, since it copies the elements to the results.
  if (threadIdx.x > 0) return;
  const uint32_t own = active ? active : 1;
  a.heads[row].active = own;
  if (!kSegments && (own & ~__ldcg(&a.heads->any))) atomicOr(&a.heads->any, own);
}

// ---- Passes ---------------------------------------------------------------------------------------------------------

constexpr int kLook = 4, kSmallLook = 8;  // status words that a thread loads at once

struct PassArgs {
  const void* x;
  const int32_t* carried;  // numbers that the first pass takes for indices; null: it makes indices
  void* keys[2];           // buffers: all passes but the last write to the two in turn
  int32_t* indices[2];     // buffers of indices, used in turn like those of keys
  void* values;            // where the last pass writes the sorted elements; null: not wanted
  int32_t* last_indices;   // where the last pass writes the indices
  int64_t k;               // the last pass writes only the first k of each row
  RowHead* heads;
  const Piece* pieces;     // of segments; null: rows are sorted
  const uint32_t* needed;  // of Buffers
  uint32_t* counts;
  uint32_t* status;  // [row][pass][tile][digit]; of segments [pass][piece][digit]
  uint32_t* sums;    // [row][pass][group][digit], if tiles exchange their counts
  int64_t length, tiles, group, groups;
  uint32_t inner;  // from one element of a row of x, or of the results, to the next
  int pass;
  bool tickets;    // whether there may be more blocks than run at the same time
  bool exchanges;  // whether all tiles of a row tell each other their counts, and no kernel has counted digits
  SortOrder order;
};

template <class Key, int kThreads, int kItems>
struct PassShared {
  static constexpr int kTile = kThreads * kItems;
  uint32_t counts[kThreads / 32 * kDigits];
  Word<Key> words[kTile];
  int32_t indices[kTile];  // must be the last member: calls without indices allocate shared memory only up to here
};

// Elements in no segment stay where they are.
template <class Key>
__device__ __forceinline__ void keep(const PassArgs& a, int64_t base, const Piece& piece) {
  for (uint32_t i = piece.begin + threadIdx.x; i < piece.end; i += kSweepThreads) {
    if (a.values) static_cast<Key*>(a.values)[base + i] = static_cast<const Key*>(a.x)[base + i];
    if (a.last_indices) a.last_indices[base + i] = static_cast<int32_t>(i);
  }
}

template <class Key, bool kIndices, SweepTiles kTiles, bool kExchanges, bool kSegments = false>
__global__ void __launch_bounds__(sweep_threads(kTiles), sweep_blocks(sizeof(Key), kTiles, kIndices))
    pass_kernel(const __grid_constant__ PassArgs a) {
  constexpr int kItems = sweep_items(sizeof(Key), kTiles, kIndices);
  constexpr int kPasses = sizeof(Key), kThreads = sweep_threads(kTiles), kTile = kThreads * kItems;
  auto& shared = *reinterpret_cast<PassShared<Key, kThreads, kItems>*>(dynamic_shared_memory());
  __shared__ uint32_t warps[kDigits / 32], ticket;
  __shared__ volatile Digits digits;
  // For each digit: the position of its elements in the row minus that in the tile.
  __shared__ int32_t shift_of[kDigits];
  const bool exchanges = kExchanges && a.exchanges;
  if (!kSegments && a.needed != nullptr && *a.needed == 0) {
    wait_for_predecessor();
    return;
  }
  // The pass before has waited for the kernel that counts before it let this one start.
  if (!kSegments && !exchanges && a.pass > 0 && !(__ldcg(&a.heads->any) >> a.pass & 1)) {
    wait_for_predecessor();
    return;
  }
  clear_counts(shared.counts);
  set_digits<Key>(digits, a.pass, a.order);
  // The kernel that sets the words of an exchange to zero has already waited for the kernel that makes `x`.
  const bool begins = exchanges && a.pass == 0;
  if (a.tickets || (a.pass == 0 && !begins)) wait_for_predecessor();
  if (a.tickets && threadIdx.x == 0) ticket = atomicAdd(&a.heads->tickets[a.pass], 1u);
  __syncthreads();
  // Neighbouring blocks have neighbouring tiles, whose short runs meet in the same sectors of the L2 cache.
  const auto tiles = static_cast<uint32_t>(a.tiles), number = a.tickets ? ticket : blockIdx.x;
  // Of segments: the number of the first piece is that of the segment, and positions are counted from where it begins.
  uint32_t row = number / tiles, tile = number - row * tiles, there;
  int64_t base = row * a.length, begin = int64_t{tile} * kTile;
  Piece piece = {};
  if constexpr (kSegments) {
    piece = a.pieces[number];
    there = piece.end - piece.begin;
    tile = piece.number(kTile);
    row = number - tile;
    base += piece.first;
    begin = piece.begin - piece.first;
  } else {
    there = static_cast<uint32_t>(min(int64_t{kTile}, a.length - begin));
  }
  const bool sorts = !kSegments || (there > 0 && piece.last > 0);
  const uint32_t active = exchanges ? (1u << kPasses) - 1 : sorts ? __ldcg(&a.heads[row].active) : 0;
  const uint32_t this_pass = 1u << a.pass;
  if (!begins) wait_for_predecessor();
  let_dependents_start();
  if constexpr (kSegments)
    if (piece.last == 0 && a.pass == 0) keep<Key>(a, int64_t{number / tiles} * a.length, piece);
  if (!(active & this_pass)) return;
  const bool is_first = !(active & (this_pass - 1)), is_last = active < 2 * this_pass;
  const int to = __popc(active >> a.pass) % 2 == 1 ? 0 : 1;  // 0 for the last pass, whose buffers may be the results
  const uint32_t first = threadIdx.x / 32 * 32 * kItems + threadIdx.x % 32;
  const int64_t at = base + begin + first;
  // Columns are read and written in place if tiles are small. Between the first and the last pass they are rows.
  constexpr bool kColumns = kExchanges && kTiles > kLargeTiles;
  int64_t x_at = at;
  uint32_t from_step = 1;
  if (kColumns && is_first && a.inner > 1) {
    const uint32_t outer = row / a.inner;
    x_at = (outer * a.length + begin + first) * a.inner + row - outer * a.inner;
    from_step = a.inner;
  }
  const Key* const from_keys =
      is_first ? static_cast<const Key*>(a.x) + x_at : static_cast<const Key*>(a.keys[1 - to]) + at;
  const int32_t* const from_indices = kIndices ? (is_first ? a.carried : a.indices[1 - to]) + at : nullptr;
  const bool makes_indices = is_first && a.carried == nullptr;
  const uint32_t turn = turn_of<Key>(a.pass, a.order);

  Word<Key> words[kItems];
  int32_t index[kIndices ? kItems : 1];
  // `whole`: there is a whole tile, so that nothing has to be compared.
  const auto is_there = [&](int i) { return first + i * 32 < there; };
  const auto load = [&](auto whole) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) words[i] = whole || is_there(i) ? from_keys[i * 32 * from_step] : Key{0};
    if constexpr (kIndices) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        index[i] = static_cast<int32_t>(piece.first + begin + first + i * 32);
        if (!makes_indices && (whole || is_there(i))) index[i] = from_indices[i * 32];
      }
    }
  };
  const bool is_whole = there == kTile;
  is_whole ? load(std::true_type{}) : load(std::false_type{});
#pragma unroll
  for (int i = 0; i < kItems; ++i) words[i] = word_of(static_cast<Key>(words[i]), a.order);
  if (!is_whole) {
    const Word<Key> last = last_word<Key>(a.pass, a.order);
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (!is_there(i)) words[i] = last;
  }
  if (begins) wait_for_predecessor();

  const int64_t row_pass = int64_t{row} * kPasses + a.pass;
  const uint32_t own_digit = threadIdx.x ^ turn;
  uint32_t* const status =
      a.status + (kSegments ? int64_t{a.pass} * gridDim.x + row : row_pass * a.tiles) * kDigits + own_digit;
  uint32_t* const sums = a.sums + row_pass * a.groups * kDigits + own_digit;
  const auto group = static_cast<uint32_t>(a.group);
  uint32_t before = 0, own = 0;
  const auto publish = [&](uint32_t count) {
    constexpr uint32_t kOfWarp =
        32 * kItems;  // only warps that have elements count, and only they have slots past the end
    own = count - (threadIdx.x == kDigits - 1 ? (there + kOfWarp - 1) / kOfWarp * kOfWarp - there : 0);
    if (tile == 0 && !exchanges) {
      before = a.counts[row_pass * kDigits + own_digit];
      store_relaxed(status, kSum | (before + own));
    } else {
      exchanges ? tell(status, sums, tile, group, own) : store_relaxed(status + int64_t{tile} * kDigits, own + 1);
    }
  };
  const uint32_t begin_of_digit = place_by_digit<kThreads, kItems>(
      shared.counts, warps, digits, turn, first - threadIdx.x % 32 < there,
      [&](int i, const Digits& digits) { return digit_of<Key>(words[i], digits); }, publish,
      [&](int i, uint32_t place) {
        shared.words[place] = words[i];
        if constexpr (kIndices) shared.indices[place] = index[i];
      });
  if (exchanges) {
    uint32_t all = 0;
    if (threadIdx.x < kDigits) {
      add_groups(sums, tiles, group, tile / group, all, before);
      before += sum_in_group(status, tile, group);
    }
    before += sum_before(all, warps);  // the elements of lower digits in all tiles, too
  }
  if (threadIdx.x < kDigits) {
    constexpr int kAhead = kTiles <= kLargeTiles ? kLook : kSmallLook;
    if (tile > 0 && !exchanges) before = sum_of_tiles_before<kAhead>(status, tile, own);
    shift_of[own_digit] = static_cast<int32_t>(before - begin_of_digit);
  }
  __syncthreads();

  const auto wanted = static_cast<uint32_t>(is_last ? a.k : a.length);  // of a row
  uint32_t to_step = 1;
  if constexpr (!kSegments) base = int64_t{row} * wanted;
  if (kColumns && is_last && a.inner > 1) {
    const uint32_t outer = row / a.inner;
    base = int64_t{outer} * wanted * a.inner + row - outer * a.inner;
    to_step = a.inner;
  }
  Key* to_keys = static_cast<Key*>(is_last ? a.values : a.keys[to]);
  int32_t* to_indices = is_last ? a.last_indices : a.indices[to];
  const bool writes_keys = !kIndices || to_keys != nullptr;
  to_keys += base;
  to_indices += base;
  const Digits again = read_anew(digits);
  const auto store = [&](int i, bool whole) {
    const uint32_t place = threadIdx.x + i * kThreads;
    const Word<Key> word = shared.words[place];
    const uint32_t to = place + shift_of[digit_of<Key>(word, again)];
    if (!whole && (place >= there || (!kSegments && to >= wanted))) return;
    if (writes_keys) to_keys[to * to_step] = static_cast<Key>(word);
    if constexpr (kIndices) to_indices[to * to_step] = shared.indices[place];
  };
  if (is_whole && (kSegments || wanted == a.length)) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) store(i, true);
  } else {
#pragma unroll 4
    for (int i = 0; i < kItems; ++i) store(i, false);
  }
}

// ---- Elements by their counts ---------------------------------------------------------------------------------------

constexpr int kFillThreads = 256;

struct FillArgs {
  const uint8_t* x;
  uint8_t* values;
  const uint32_t* counts;  // [row][key]: how many elements have a lower key
  const Piece* pieces;     // of segments, each of which has a block; null: rows are sorted
  int64_t length, k, tiles;
  uint32_t blocks;  // of a row
  SortOrder order;
};

// A thread writes vectors of 16 elements.
template <bool kSegments>
__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ FillArgs a) {
  __shared__ uint32_t ends[kDigits];  // for each key, how many elements have it or a lower one
  int64_t row = blockIdx.x / a.blocks, base = row * a.k, low = 0, high = a.k, length = a.length;
  wait_for_predecessor();
  let_dependents_start();
  if constexpr (kSegments) {
    const Piece piece = a.pieces[blockIdx.x];
    base = blockIdx.x / a.tiles * a.length;
    if (piece.last == 0) {  // elements in no segment stay where they are
      for (int64_t i = piece.begin + threadIdx.x; i < piece.end; i += kFillThreads) a.values[base + i] = a.x[base + i];
      return;
    }
    if (piece.begin == piece.end) return;
    row = blockIdx.x - piece.number(sweep_tile(1, kLargeTiles, false));
    base += piece.first;
    low = piece.begin - piece.first, high = piece.end - piece.first, length = piece.last - piece.first;
  }
  ends[threadIdx.x] = threadIdx.x + 1 < kDigits ? a.counts[row * kDigits + threadIdx.x + 1] : length;
  __syncthreads();
  uint8_t* const to = a.values + base;
  const auto fill = [&](int64_t place) {
    const auto begin = static_cast<uint32_t>(max(place, low)), end = static_cast<uint32_t>(min(place + 16, high));
    if (place >= high || end <= begin) return;
    uint32_t key = 0;  // of the first element: the least key up to which there are more elements than before it
#pragma unroll
    for (uint32_t step = kDigits / 2; step > 0; step /= 2)
      if (ends[key + step - 1] <= begin) key += step;
    const auto element = [&] {
      return static_cast<uint8_t>(decode(static_cast<uint8_t>(key ^ a.order.invert), a.order.ascending.order));
    };
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = element() * 0x01010101u;
    if (place + 16 > ends[key] || end - begin < 16) {
#pragma unroll 1
      for (uint32_t at = begin; at < end; ++at) {
        while (ends[key] <= at) ++key;
        to[at] = element();
      }
    } else {
      *reinterpret_cast<uint4*>(to + place) = uint4{words[0], words[1], words[2], words[3]};
    }
  };
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 16);  // of the first vector
  if constexpr (kSegments) {
    for (int64_t place = (low + before) / 16 * 16 - before + threadIdx.x * 16; place < high; place += kFillThreads * 16)
      fill(place);
  } else {
    const int64_t block = blockIdx.x - row * a.blocks;
    fill((block * kFillThreads + threadIdx.x) * 16 - before);
  }
}

// Whether elements are made of their counts, not moved.
inline bool counts_bytes(const Problem& problem, const Buffers& buffers) {
  return problem.key_bits == 8 && !buffers.indices && problem.order.ascending.sign == 0;
}

// ---- Launches -------------------------------------------------------------------------------------------------------

// The arguments of all passes.
inline PassArgs pass_args(const SweepShape& shape, const Plan& plan, const Problem& problem, const Buffers& buffers) {
  auto* const workspace = static_cast<unsigned char*>(buffers.workspace);
  const bool whole = problem.k == problem.rows.length;
  PassArgs a = {};
  a.x = buffers.x;
  a.carried = buffers.carried;
  a.needed = buffers.needed;
  a.values = buffers.values;
  a.last_indices = buffers.indices;
  a.k = problem.k;
  a.keys[0] = whole && a.values ? a.values : workspace + shape.more_keys;
  a.keys[1] = workspace + shape.keys;
  a.indices[0] = whole ? a.last_indices : reinterpret_cast<int32_t*>(workspace + shape.more_indices);
  a.indices[1] = reinterpret_cast<int32_t*>(workspace + shape.indices);
  a.heads = reinterpret_cast<RowHead*>(workspace);
  a.counts = reinterpret_cast<uint32_t*>(workspace + shape.counts);
  a.status = reinterpret_cast<uint32_t*>(workspace + shape.status);
  a.sums = reinterpret_cast<uint32_t*>(workspace + shape.sums);
  a.pieces = reinterpret_cast<const Piece*>(workspace + shape.pieces);
  a.length = problem.rows.length;
  a.tiles = shape.tiles;
  a.group = shape.group;
  a.groups = shape.groups;
  a.inner = static_cast<uint32_t>(problem.rows.inner);
  a.tickets = plan.tickets;
  a.order = problem.order;
  return a;
}

}  // namespace
}  // namespace jaxgpuops::sort
