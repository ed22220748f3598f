// Rows (inner == 1) of the row engine: a team of lanes, a block or a cluster holds a row in registers, which is read
// once and written once. The sweeps over split rows are the same kernel.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda/between.cuh"
#include "common/cuda/bulk_copy.cuh"
#include "row_engine/cuda/parts.cuh"

namespace jaxgpuops::row_engine {

// True for operations whose result does not depend on the order of elements, nor on where they are.
template <class P>
constexpr bool kAnyOrder = P::kSums == 0 && !P::kMasked && !P::kDecoded && !P::kHole && !P::kOutput;

// Whether rows of 16 bits that are not aligned are shifted by with_words().
template <class P>
constexpr bool kShiftsAtOnce = P::kHole;

// Whether there are kernels for RowPlan::single.
template <class P>
constexpr bool kSingle =
    sizeof(typename P::Element::Bits) >= 4 && P::kOutput && P::kOperands == 1 && !P::kMasked && !P::kDecoded;

// The part of a span that a lane has. Unit j holds kWidth elements, from element(j) on. With kAsked, the lane first
// checks whether the span is whole; if it is, no unit needs a check of its own. (Long rows with results do without that
// check, since ptxas then moved all stores to the end, which took up to 7 % longer.) With kRagged, the last vector of
// an aligned row may have fewer elements. With kElements, those of rows that are not aligned are loaded and stored one
// by one. With kOneShift, see with_words().
template <class P, int kVectors, bool kAligned, bool kAsked, bool kRagged = false, bool kElements = false,
          bool kOneShift = kShiftsAtOnce<P> && sizeof(typename P::Element::Bits) == 2>
class Span {
 public:
  using Bits = typename P::Element::Bits;
  static constexpr int kWidth = 16 / sizeof(Bits);

  __device__ explicit Span(int lane_bits)
      : lane_bits(lane_bits),
        lanes(1 << lane_bits),
        slot(threadIdx.x & (lanes - 1)),
        team(threadIdx.x % 32 & ~(lanes - 1)) {}

  __device__ int element(int j) const { return (j * lanes + slot) * kWidth; }
  __device__ int size() const { return kVectors * lanes * kWidth; }
  // The byte at which unit j of an aligned span begins. If the number of lanes is a variable, this is one product for
  // each unit, so no unit waits for another. (Adding from unit to unit took ten more instructions before the last
  // load.)
  template <class T>
  __device__ auto* unit_at(T* from, int j) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
    using Unit = std::conditional_t<std::is_const_v<T>, const Pack, Pack>;
    Byte* const mine = reinterpret_cast<Byte*>(from) + static_cast<uint64_t>(static_cast<unsigned>(slot)) * 16;
    return reinterpret_cast<Unit*>(mine + static_cast<uint64_t>(static_cast<unsigned>(lanes)) * (16 * j));
  }

  // Loads the first `left` elements at `from`; the others become `pad`. If the array may end after them (`last`),
  // nothing beyond them is read; otherwise the load may read on to the end of the 16 bytes.
  __device__ void load(const Bits* from, int left, bool last, Bits pad, Pack (&units)[kVectors]) const {
    Pack padding;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set<Bits>(padding, i, pad);
    const int whole = kRagged ? left & -kWidth : left;  // kRagged: only elements of whole vectors
    if constexpr (kAligned && kAsked) {
      if (left >= size()) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) units[j] = load_pack(unit_at(from, j));
      } else {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) units[j] = element(j) < whole ? load_pack(unit_at(from, j)) : padding;
      }
    } else if constexpr (kAligned) {
      const Pack* const mine = reinterpret_cast<const Pack*>(from) + static_cast<unsigned>(slot);
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        units[j] = element(j) < whole ? load_pack(mine + static_cast<unsigned>(j * lanes)) : padding;
    } else if constexpr (kElements) {
      load_elements(from, left, pad, units);
      return;
    } else {
      // Lanes load aligned windows of 16 bytes, each the one after its neighbour's. Then each lane puts its elements
      // together from its own window and the next one.
      const int shift = reinterpret_cast<uintptr_t>(from) & 15;
      const auto* windows = reinterpret_cast<const Pack*>(reinterpret_cast<uintptr_t>(from) - shift);
      const int end = left > 0 ? left * static_cast<int>(sizeof(Bits)) + shift : 0;
      const int whole = last ? end & ~15 : end;  // bytes of windows that are loaded as such
      const auto window = [&](int w) { return w * 16 < whole ? load_pack(windows + w) : padding; };
#pragma unroll
      for (int j = 0; j < kVectors; ++j) units[j] = window(j * lanes + slot);
      Pack beyond = window(kVectors * lanes);
      if (whole < end) {
        Pack part = padding;
        const int begin = max(shift - whole, 0) / static_cast<int>(sizeof(Bits));
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i)
          if (i >= begin && whole + i * static_cast<int>(sizeof(Bits)) < end)
            set<Bits>(part, i, reinterpret_cast<const Bits*>(windows + whole / 16)[i]);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (j * lanes + slot == whole / 16) units[j] = part;
        if (kVectors * lanes == whole / 16) beyond = part;
      }
      if constexpr (kAnyOrder<P>) {
        keep_windows(left, shift / static_cast<int>(sizeof(Bits)), beyond, pad, units);
        return;
      }
      const int next_lane = team | ((slot + 1) & (lanes - 1));
      if (kOneShift && lanes == 32) {
        with_words(shift, [&](auto words) {
          put_together<decltype(words)::value>(shift, next_lane, beyond, used(left), units);
        });
      } else {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          Pack next = units[j];
          if (slot == 0) next = j + 1 < kVectors ? units[j + 1 < kVectors ? j + 1 : j] : beyond;
          next = shuffle_from(next, next_lane);
          units[j] = between<sizeof(Bits), 15>(units[j], next, shift);
        }
      }
    }
    if constexpr (kAligned && kRagged) {
      if (whole < left) {
        Pack part = padding;
#pragma unroll
        for (int i = 0; i < kWidth - 1; ++i)
          if (whole + i < left) set<Bits>(part, i, from[whole + i]);
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (element(j) == whole) units[j] = part;
      }
    }
    if constexpr (!kAligned || P::kMasked) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int rest = left - element(j);
        if (rest <= 0) {
          units[j] = padding;
        } else if (rest < kWidth) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            if (i >= rest) set<Bits>(units[j], i, pad);
        }
      }
    }
  }

  __device__ void store(Bits* to, int left, Pack (&units)[kVectors]) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) store_aligned(to, left, j, units[j]);
    } else if constexpr (kElements) {
      store_elements(to, left, units);
    } else {
      store_shifted(to, left, units);
    }
  }

  __device__ __forceinline__ void load_elements(const Bits* from, int left, Bits pad, Pack (&units)[kVectors]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int e = element(j) + i;
        set<Bits>(units[j], i, e < left ? from[e] : pad);
      }
  }

  __device__ __forceinline__ void store_elements(Bits* to, int left, Pack (&units)[kVectors]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (const int e = element(j) + i; e < left) to[e] = get<Bits>(units[j], i);
  }

  // Stores unit j of an aligned span.
  __device__ void store_aligned(Bits* to, int left, int j, Pack unit) const {
    Pack* const mine = reinterpret_cast<Pack*>(to) + static_cast<unsigned>(slot);
    if (element(j) < left) store_pack(mine + static_cast<unsigned>(j * lanes), unit);
  }

  // How many units `left` elements take.
  __device__ int used(int left) const { return (left + lanes * kWidth - 1) / kWidth >> lane_bits; }

  const int lane_bits, lanes, slot, team;

 private:
  // If a warp has one row, all its lanes shift by the same number of bytes. Then whole words are not moved by
  // instructions, but named by the code, of which there is one form for each number of words. (Gradients of
  // cross-entropy of 16 bits took up to a fifth less time; of float32, a tenth more.)
  template <class F>
  static __device__ __forceinline__ void with_words(int bytes, F f) {
    switch (bytes / 4) {
      case 0: return f(std::integral_constant<int, 0>());
      case 1: return f(std::integral_constant<int, 1>());
      case 2: return f(std::integral_constant<int, 2>());
      default: return f(std::integral_constant<int, 3>());
    }
  }
  // Makes vectors, which begin `shift` bytes after windows begin, of windows. kWords: whole words of these bytes.
  template <int kWords>
  __device__ __forceinline__ void put_together(int shift, int next_lane, const Pack& beyond, int used,
                                               Pack (&units)[kVectors]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (may_end<P, kVectors>(j) && j >= used) break;
      uint32_t word[8];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        word[w] = units[j].word[w];
        word[4 + w] = 0;
        if (w > kWords) continue;
        const uint32_t first = j + 1 < kVectors ? units[j + 1 < kVectors ? j + 1 : j].word[w] : beyond.word[w];
        word[4 + w] = shuffle_from(slot == 0 ? first : word[w], next_lane);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        units[j].word[i] = funnel_right(word[kWords + i], word[kWords + i + 1], 8 * (shift & 3));
    }
  }
  // Makes windows of vectors: a window begins with the last bytes of one vector, from byte `at` on.
  template <int kWords>
  __device__ __forceinline__ void take_apart(int at, int previous_lane, int used, Pack (&units)[kVectors]) const {
#pragma unroll
    for (int j = kVectors - 1; j >= 0; --j) {
      if (may_end<P, kVectors>(j - 1) && j > used) continue;
      uint32_t word[8];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        word[4 + w] = units[j].word[w];
        word[w] = 0;
        if (w < kWords) continue;
        const uint32_t last = units[j > 0 ? j - 1 : 0].word[w];
        word[w] = shuffle_from(slot == 31 && j > 0 ? last : word[4 + w], previous_lane);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) units[j].word[i] = funnel_right(word[kWords + i], word[kWords + i + 1], 8 * (at & 3));
    }
  }

  // Where the order of elements does not matter, windows stay where they are: the elements of the first one that belong
  // to the span before are replaced by those that the span has in the window after its last one.
  __device__ __forceinline__ void keep_windows(int left, int tail, const Pack& beyond, Bits pad,
                                               Pack (&units)[kVectors]) const {
    if (slot == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i < tail) set<Bits>(units[0], i, get<Bits>(beyond, i));
    }
    if (left >= size()) return;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int rest = left + tail - element(j);
      // (For few rows that many warps share, this question alone took up to a tenth of the time.)
      if (kAsked && rest >= kWidth && (j > 0 || slot > 0)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        if (i >= rest || (j == 0 && slot == 0 && i < tail && left <= size() - tail + i)) set<Bits>(units[j], i, pad);
    }
  }

  __device__ void store_shifted(Bits* to, int left, Pack (&units)[kVectors]) const {
    const int shift = reinterpret_cast<uintptr_t>(to) & 15, tail = shift / static_cast<int>(sizeof(Bits));
    const int end = min(left, size());
    if (slot == lanes - 1) {  // only this lane needs the window after the last one, which belongs to the next span
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int e = element(kVectors - 1) + i;
        if (i >= kWidth - tail && e < end) to[e] = get<Bits>(units[kVectors - 1], i);
      }
    }
    const int previous_lane = team | ((slot - 1) & (lanes - 1));
    if (kOneShift && lanes == 32) {
      if (shift != 0)
        with_words(16 - shift, [&](auto words) {
          take_apart<decltype(words)::value>(16 - shift, previous_lane, used(end), units);
        });
    } else {
#pragma unroll
      for (int j = kVectors - 1; j >= 0; --j) {
        Pack previous = units[j];
        if (slot == lanes - 1 && j > 0) previous = units[j > 0 ? j - 1 : 0];
        previous = shuffle_from(previous, previous_lane);
        units[j] = between<sizeof(Bits), 16>(previous, units[j], 16 - shift);
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (may_end<P, kVectors>(j - 1) && j > used(end)) break;
      const int e = element(j) - tail;  // element of the window
      if (e >= 0 && e + kWidth <= end) {
        store_pack(reinterpret_cast<Pack*>(to + e), units[j]);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (e + i >= 0 && e + i < end) to[e + i] = get<Bits>(units[j], i);
      }
    }
  }
};

// The threads that share a row: a team of lanes (the row is one span), a block or a cluster, or (split) many blocks.
// kStatistics: a cluster of small blocks, which writes statistics only. kAny: the parameters say which of these; it is
// for operations that are not worth two kernels.
enum class Sharing { kTeam, kBlocks, kStatistics, kAny };

// True for operations of one array, with results or with statistics only.
template <class P>
constexpr bool kOftenStatistics = P::kOutput && P::kOperands == 1;

// True for operations with a kernel for statistics of short rows (lean_rows_kernel).
template <class P>
constexpr bool kLean = P::kOperands == 1 && P::kSums > 0 && P::kFast && !P::kHole;

// True for operations that prefetch later rows into the L2 cache (RowPlan::ahead). With two arrays that was slower.
template <class P>
constexpr bool kAhead = P::kOutput && P::kOperands == 1 && P::kFast;

// True if a team of lanes holds a row in few registers and writes results.
template <class P, int kVectors, Sharing kSharing>
constexpr bool kFewUnits = kSharing == Sharing::kTeam && kVectors == kOnlyVectors && P::kOutput && P::kAlong;

// The least number of blocks of kPartWarps per multiprocessor, for __launch_bounds__. Kernels for statistics only, and
// kernels whose rows have few units, need many blocks to keep the memory busy. 0 leaves the choice to ptxas, which uses
// more registers with 1.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kMostResident = 4;  // a block has 1024 threads
#else
constexpr int kMostResident = 6;
#endif
template <class P, int kVectors, Sharing kSharing, bool kAligned>
constexpr int kRowsResident = kSharing == Sharing::kStatistics               ? std::min(kMostResident, 5)
                              : kAligned && kFewUnits<P, kVectors, kSharing> ? kMostResident
                                                                             : 0;

// The state of a thread in rows_kernel. The functions are the phases of the kernel, in the order in which they run.
// kAligned: every row begins at a multiple of 16 bytes. Results have the same bits either way.
template <class P, int kVectors, Sharing kSharing, bool kAligned, bool kElements>
struct RowsThread {
  using Element = typename P::Element;
  using Bits = typename Element::Bits;
  using Acc = typename Element::Acc;
  using Lane = Held<P, kVectors, true>;
  static constexpr int kWidth = Lane::kWidth;
  static constexpr bool kWholeWarps = kSharing == Sharing::kBlocks || kSharing == Sharing::kStatistics;
  static constexpr bool kAsked = kSharing == Sharing::kTeam || kSharing == Sharing::kStatistics;
  // Kernels of statistics take a row alone that is aligned, but not whole vectors. (With results they were up to 7 %
  // slower for that.)
  static constexpr bool kRagged =
      P::kOperands == 1 && !P::kMasked &&
      (kSharing == Sharing::kStatistics || (kSharing == Sharing::kBlocks && P::kFast && !P::kOutput));
  // Kernels that write no results load the elements of a row before the values that row() reads, except for the value
  // that decides whether the elements are read at all. (In the other order the elements came later, because the
  // compiler used one register for such a value and for their address.)
  static constexpr bool kElementsFirst = P::kHole && kSharing == Sharing::kStatistics;

  const Parameters<P>& p;
  const bool team = kSharing == Sharing::kTeam || (kSharing == Sharing::kAny && p.spans == 1);
  const int warp = threadIdx.x / 32, block_warps = blockDim.x / 32;
  const int lane_bits = kWholeWarps ? 5 : p.lane_bits;
  // In a cluster, blocks send their statistics to the blocks that need them, and wait only for those.
  const bool cluster = kSharing == Sharing::kStatistics || (!team && p.cluster);
  uint64_t* const stats_there = reinterpret_cast<uint64_t*>(dynamic_shared_memory());
  Stat<P>* const stats = reinterpret_cast<Stat<P>*>(dynamic_shared_memory() + kRowsBarrierBytes);
  int64_t outer;
  int number = 0, block = 0;  // number of the thread's span in the row, and of its block among the blocks of the row
  bool exists;
  int64_t first, at;  // the span's first element, in the row and in the array
  typename P::Row row = {};
  // Numbers of elements of the span: those that exist, those of them that are not masked, and those that belong to the
  // statistics.
  int here, unmasked, wanted;
  Lane lane;
  bool masks = false;
  Acc plain = Acc(0);     // what this thread adds to the plain sum (P::kPlainSum)
  Acc own_peak = Acc(0);  // the peak of the span
  int hole = -1;          // j * kWidth + i if the hole is element i of unit j; -1 if there is none

  __device__ __forceinline__ explicit RowsThread(const Parameters<P>& p) : p(p) {
    if (team) {
      outer = int64_t{blockIdx.x} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    } else if (cluster) {
      // A cluster has a power of two of blocks, so a shift replaces the division, which would be computed in floats.
      outer = blockIdx.x >> p.block_bits;
      block = blockIdx.x & (p.blocks - 1);
    } else {
      // The second sweep takes the last rows first, which are still in the cache.
      const unsigned index = p.phase == Phase::kFinish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      outer = index / static_cast<unsigned>(p.blocks);
      block = index % static_cast<unsigned>(p.blocks);
    }
    if (!team) number = block * block_warps + warp;
    exists = !team || outer < p.columns;
  }

  // (This is a function, because as a member it made ptxas keep more numbers in registers, and some kernels spilled.)
  __device__ __forceinline__ auto span() const {
    return Span<P, kVectors, kAligned, kAsked, kRagged, kElements>(lane_bits);
  }

  __device__ __forceinline__ bool writes() const {
    return P::kOutput && kSharing != Sharing::kStatistics && p.out != nullptr;
  }
  __device__ __forceinline__ int receivers() const { return writes() ? p.blocks : 1; }

  __device__ __forceinline__ int left(int64_t end) const {  // elements of the span before `end`
    if (team) return exists ? static_cast<int>(end) : 0;
    return static_cast<int>(max(int64_t{0}, min(end - first, static_cast<int64_t>(span().size()))));
  }

  // Loads the elements of the span and the values that row() reads.
  __device__ __forceinline__ void load() {
    bool skipped = false;
    if constexpr (kElementsFirst) {
      skipped = !P::counts(p.args, outer, 0);
    } else if (exists) {
      if constexpr (P::kHole) {
        row = P::begun(p.args, outer, 0, p.length, 1);
      } else {
        row = P::row(p.args, outer, 0, p.length, 1);
      }
    }
    first = int64_t{number} * span().size();
    here = left(p.length);
    unmasked = P::kMasked ? left(p.extras.limit(outer, p.length)) : here;
    if constexpr (!kElementsFirst) skipped = exists && P::skip(row);
    wanted = skipped ? 0 : unmasked;
    const int64_t length =
        // A length of 32 bits makes the multiplication below take fewer instructions.
        kSharing == Sharing::kTeam ? static_cast<uint32_t>(p.length) : p.length;
    at = outer * length + first;
#pragma unroll
    for (int o = 0; o < P::kOperands; ++o)
      span().load(static_cast<const Bits*>(p.operands[o]) + at, wanted, outer + 1 == p.columns, P::pad(p.args, o),
                  lane.raw[o]);
    if constexpr (kElementsFirst) row = P::begun(p.args, outer, 0, p.length, 1);
    // (All teams have as many elements, so that this does not depend on the lane.)
    if constexpr (P::kHole && (kSharing == Sharing::kTeam || kSharing == Sharing::kBlocks))
      lane.used = span().used(kSharing == Sharing::kTeam ? static_cast<int>(p.length) : here);
  }

  // Prepares the exchange of statistics in a cluster, while loads are in flight.
  __device__ __forceinline__ void open_exchange() {
    if (threadIdx.x == 0 && block < receivers()) {
      make_copy_barrier(stats_there);
      make_barriers_visible_to_cluster();
    }
    arrive_at_cluster_start();  // the shared memory of a block does not exist until the block has begun
  }

  // Prefetches the block's part of a later row into the L2 cache, in one piece. Without that, memory is sometimes idle
  // while one block ends and the next begins, and it is not read in its best order.
  __device__ __forceinline__ void prefetch_later_row() {
    if constexpr (kSharing == Sharing::kBlocks && kAligned && kAhead<P>) {
      if (threadIdx.x == 0 && p.ahead > 0 && outer + p.ahead < p.columns) {
        const int64_t then = (outer + p.ahead) * p.length + first;
        const int64_t bytes = min(p.length - first, int64_t{block_warps} * span().size()) * int64_t{sizeof(Bits)};
        if (bytes > 0) prefetch_bulk(static_cast<const Bits*>(p.operands[0]) + then, static_cast<uint32_t>(bytes));
      }
    }
  }

  // Applies masks and biases, and leaves out the hole.
  __device__ __forceinline__ void prepare() {
    masks = P::kMasked && p.extras.masks();
    if constexpr (P::kMasked) {
      for (auto& word : lane.masks) word = 0;
      if (masks) {
        const int64_t stride = p.extras.where_at.axis_stride;
        const uint8_t* where =
            p.extras.where && exists ? p.extras.where + p.extras.where_at.outer(outer) + first * stride : nullptr;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const int e = span().element(j) + i;
            if (e >= here) continue;
            if (e >= unmasked || (where && !where[e * stride])) lane.mask(j, i);
          }
      }
    }
    if constexpr (P::kDecoded) {
      const int64_t stride = p.extras.bias_at.axis_stride;
      const Bits* bias = p.extras.bias && here > 0  // spans past the end of the row have no elements
                             ? static_cast<const Bits*>(p.extras.bias) + p.extras.bias_at.outer(outer) + first * stride
                             : nullptr;
      lane.decode(p.args, row, bias != nullptr, [&](int j, int i) {
        const int e = span().element(j) + i;
        return Element::load(bias[min(e, here - 1) * stride]);
      });
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (span().element(j) + i >= wanted) lane.z[j][i] = P::lowest();
    }
    if (masks) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          if (lane.masked(j, i)) lane.leave_out(p.args, j, i);
    }
    if constexpr (P::kPlainSum) {
      if (P::add_plain(p.args)) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          Acc of_unit = Acc(0);
#pragma unroll
          for (int i = 0; i < kWidth; ++i)
            if (span().element(j) + i < wanted) of_unit += lane.x(p.args, j, i);
          plain += of_unit;
        }
      }
    }
    if constexpr (P::kHole) {
      const int64_t element = exists ? P::hole(row) - first : -1;
      if (element >= 0 && element < here) {
        const int vector = static_cast<int>(element) / kWidth;
        if ((vector & (span().lanes - 1)) == span().slot)
          hole = (vector >> lane_bits) * kWidth + static_cast<int>(element) % kWidth;
      }
      if (hole >= 0) {
        lane.leave_out_one(p.args, hole);
      }
    }
  }

  // Returns the statistics of the span.
  __device__ __forceinline__ Stat<P> measure() {
    Stat<P> stat;
    Acc peak = Acc(0);
    if constexpr (P::kPeak) {
      peak = lane.peak(p.args);
      if constexpr (kWholeWarps) {
        peak = peak_of_warp<P>(peak);
      } else {
        peak = merged_peak<P>(peak, 0, lane_bits);
      }
      stat.of[0] = own_peak = peak;
    }
    P::with_sum_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int k = 0; k < P::kSums; ++k) {
        const bool is_plain = P::kPlainSum && k == P::kSums - 1;
        stat.sum(k) = is_plain ? plain : sum_and_keep<P>(args, k, lane, peak);
      }
    });
    // Issues the loads whose addresses row() has read. Here neither the first loads of row() nor the sums wait for
    // them. (Before the sums, they took up to a tenth longer, since the exponentials then waited for them.)
    if constexpr (P::kHole) {
      if (exists) row = P::completed(p.args, row, outer, 0, p.length, 1);
    }
#pragma unroll
    for (int k = 0; k < P::kSums; ++k) stat.sum(k) = merged_sum(stat.sum(k), 0, lane_bits);
    return stat;
  }

  // For a split row (kPartial): stores the statistics for a later kernel.
  __device__ __forceinline__ void leave(Stat<P> stat) {
    let_dependents_start();
    if (p.unit_warps == 1) {
      if (threadIdx.x % 32 == 0 && number < p.spans) *stat_at(p, outer, number, 0) = stat;
    } else {
      if (threadIdx.x % 32 == 0) stats[warp] = stat;
      __syncthreads();
      stat = merge_by_warp<P>([&](int u) { return stats[u]; }, min(block_warps, p.spans - block * block_warps));
      if (threadIdx.x == 0) *stat_at(p, outer, block, 0) = stat;
    }
    wait_for_predecessor();
  }

  // Merges the statistics of all spans of a row. Returns false if this warp has nothing left to do.
  __device__ __forceinline__ bool merge(Stat<P>& stat) {
    if (cluster) {
      const int rank = threadIdx.x % 32;
      // Waits for all loads of row(), since other blocks may overwrite what they read once they go on.
      if constexpr (P::kHole) row = shuffle_from(row, 0);
      wait_at_cluster_barrier();
      if (number < p.spans && rank < receivers()) copy_to_block(&stats[number], stats_there, rank, stat);
      if (block >= receivers() || (!writes() && warp != 0)) return false;
      if (threadIdx.x == 0) expect_copies(stats_there, p.spans * static_cast<int>(sizeof(Stat<P>)));
      wait_for_copies(stats_there, 0);
    } else {
      if (threadIdx.x % 32 == 0 && number < p.spans) stats[number] = stat;
      __syncthreads();
    }
    if (!writes() && warp != 0) return false;
    const auto get = [&](int u) { return stats[u]; };
    if constexpr (kSharing == Sharing::kStatistics) {
      static_assert(kMaxCluster * kPartWarps <= 4 * 32);
      stat = merge_few_by_warp<P>(get, p.spans);
    } else if (sizeof(Acc) == 8 && p.spans <= 32) {  // shuffles and maxima of float64 take long
      stat = merge_by_team<P>(get, p.spans);
    } else {
      stat = merge_by_warp<P>(get, p.spans);
    }
    return true;
  }

  __device__ __forceinline__ typename P::Final finish(const Stat<P>& stat) const {
    const typename P::Final final = P::finish(p.args, row, stat);
    if (exists && number == 0 && span().slot == 0) P::write_row(p.args, outer, row, final);
    return final;
  }

  __device__ __forceinline__ void write(const typename P::Final& final) {
    // A cluster writes each unit before it works on the next one: if rows are few, all clusters write at the same time
    // anyway. A team writes all units together, because other teams compute meanwhile; but not if it has few registers
    // and a unit is at least 64 bytes of the row.
    const bool team_at_once = kAligned && kFewUnits<P, kVectors, kSharing> && lane_bits >= 2;
    const bool at_once = kAligned && cluster;
    Bits* const out = static_cast<Bits*>(p.out) + at;
    lane.forget();
    const Acc factor = factor_of<P>(final, own_peak);
    P::with_args(p.args, [&](const auto& args) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (lane.ends_before(j)) break;
        Acc value[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          value[i] = result_of<P>(args, row, final, factor, lane, j, i);
          if constexpr (P::kMasked) value[i] = lane.masked(j, i) ? P::masked_output(args) : value[i];
        }
        lane.raw[0][j] = packed<Element>(value);
        if (team_at_once && span().element(j) < here) store_pack(span().unit_at(out, j), lane.raw[0][j]);
        if (at_once) span().store_aligned(out, here, j, lane.raw[0][j]);
      }
    });
    if (!team_at_once && !at_once) span().store(out, here, lane.raw[0]);
    if constexpr (P::kHole) {  // this overwrites the hole, which a lane of the same warp has written
      if (!kAligned) __syncwarp();
      if (hole >= 0)
        out[span().element(hole / kWidth) + hole % kWidth] = Element::store(P::hole_output(p.args, row, final));
    }
  }
};

template <class P, int kVectors, Sharing kSharing, bool kAligned, bool kElements = false>
__global__ void __launch_bounds__(32 * (kRowsResident<P, kVectors, kSharing, kAligned> ? kPartWarps : kMaxBlockWarps),
                                  kRowsResident<P, kVectors, kSharing, kAligned>)
    rows_kernel(const __grid_constant__ Parameters<P> p) {
  RowsThread<P, kVectors, kSharing, kAligned, kElements> thread(p);
  thread.load();
  if (thread.cluster) thread.open_exchange();
  thread.prefetch_later_row();
  thread.prepare();
  typename P::Final final;
  if (!thread.team && kSharing != Sharing::kStatistics && P::kOutput && p.phase == Phase::kFinish) {
    let_dependents_start();
    if constexpr (P::kKeeps)
      if (P::keeps(p.args)) thread.measure();
    wait_for_predecessor();
    final = *final_at(p, thread.outer, 0);
  } else {
    Stat<P> stat = thread.measure();
    if (!thread.team) {
      if (kSharing != Sharing::kStatistics && p.phase == Phase::kPartial) return thread.leave(stat);
      if (!thread.merge(stat)) return;
    }
    final = thread.finish(stat);
  }
  if (thread.writes()) thread.write(final);
}

// Whether an operation has rows_together_kernel.
template <class P>
constexpr bool kTogether = P::kOutput && P::kOperands == 1 && !P::kMasked && !P::kHole;

// A few long rows, as a cooperative launch: blocks leave the statistics of what they hold in the workspace, wait for
// all others, and merge what belongs to their row, in the order of merge_kernel. One read, one write.
template <class P, int kVectors, Sharing kSharing, bool kAligned>
__global__ void __launch_bounds__(32 * kPartWarps, together_resident(sizeof(typename P::Element::Bits)))
    rows_together_kernel(const __grid_constant__ Parameters<P> p) {
  RowsThread<P, kVectors, kSharing, kAligned, false> thread(p);
  thread.load();
  thread.leave(thread.measure());
  cooperative_groups::this_grid().sync();
  const auto stat = [&](int u) { return *stat_at(p, thread.outer, u, 0); };
  const auto final = thread.finish(p.units <= kMostFlatParts ? merge_few_by_warp<P, kMostFlatParts / 32>(stat, p.units)
                                                             : merge_few_by_warp<P, kMaxFlatSpans / 32>(stat, p.units));
  thread.write(final);
}

// ---- Statistics of short rows ---------------------------------------------------------------------------------------

// Statistics of rows of 4, 8, 16, 32 or 64 vectors: 2 to 32 lanes share a row, and each has two vectors. The row is
// read once.
//
// With two vectors in a lane and not four, the work on a row after it has been loaded takes half as long, but there are
// twice as many warps, and some work is the same for every warp. That part is small here: all lanes have the same
// number of elements, only numbers are written, addresses follow from the thread's number, and the number of lanes is a
// constant (as a variable it took a tenth more instructions, and 3 % of the time of rows of 512 bytes), unless rows are
// not aligned, which is rare (kLaneBits < 0).
template <class P, int kLaneBits>
__global__ void __launch_bounds__(32 * kMaxBlockWarps) lean_rows_kernel(const __grid_constant__ Parameters<P> p) {
  using Bits = typename P::Element::Bits;
  using Lane = Held<P, kLeanVectors, true>;
  const auto args = P::of_statistics(p.args);
  constexpr bool kAligned = kLaneBits >= 0;
  const int lane_bits = kAligned ? kLaneBits : p.lane_bits;
  const unsigned lanes = 1u << lane_bits, slot = threadIdx.x & (lanes - 1);
  const int64_t outer = uint64_t{blockIdx.x} * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool exists = outer < p.columns;

  // Unit j of thread t (of all threads) is vector kLeanVectors * t - slot + j * lanes. A thread without a row reads
  // the first row of its block.
  const unsigned mine = exists ? kLeanVectors * threadIdx.x - slot : slot;
  const auto* const from = static_cast<const unsigned char*>(p.operands[0]) +
                           (uint64_t{blockIdx.x} * (kLeanVectors * blockDim.x) + mine) * 16;
  Lane lane;
#pragma unroll
  for (int j = 0; j < kLeanVectors; ++j) {
    const auto* const unit = from + lanes * (16 * j);
    if constexpr (kAligned) {
      lane.raw[0][j] = load_pack(reinterpret_cast<const Pack*>(unit));
    } else {
#pragma unroll
      for (int i = 0; i < Lane::kWidth; ++i) set<Bits>(lane.raw[0][j], i, reinterpret_cast<const Bits*>(unit)[i]);
    }
  }

  Stat<P> stat = {};
  if constexpr (P::kPeak) stat.of[0] = merged_peak<P>(lane.peak(args), 0, lane_bits);
  const auto shift = P::guard(stat.peak());  // not used if the operation has no peak
  P::with_sum_args(args, [&](const auto& known) { stat.sum(0) = lane.sum(known, 0, shift, 0, Lane::kWidth); });
  stat.sum(0) = merged_sum(stat.sum(0), 0, lane_bits);
  if (!exists || slot != 0) return;
  const typename P::Row row = P::row(args, outer, 0, p.length, 1);
  P::write_row(args, outer, row, P::finish(args, row, stat));
}

}  // namespace jaxgpuops::row_engine
