// select for rows that no block holds, by the steps of select.cuh. If several blocks share a row, a first kernel finds
// intervals from a sample, while they fetch the start of their slices to the L2 cache; they run at the same time. Each
// reads its slice, counts the keys below each interval, and keeps those in an interval, a few of a hundred, in shared
// memory. It counts the latter in tables, and adds these to the row's tables in the workspace; the last block to finish
// finds the next intervals and tells the others. In the end few elements, or only equal ones, are left for each rank.
// If few are left, the blocks list them. If only equal ones are left, each block counts those of its slice. Then a
// block for each rank finds the wanted one, in the list or in the slice that has it. Where there are many rows, each
// has one block, which takes the sample, too, and tells nobody.
//
// So the row is read once. Of an interval of one key, as where most elements are equal, blocks only count the elements.
// Blocks that have no room for what is in the intervals, as where the row is sorted, or of a row of which a rank is not
// in its first interval, read their slices again for each step and for the lists, from the L2 cache as far as it goes.
#include <cuda_runtime.h>

#include "common/cuda/bulk_copy.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/residents.cuh"
#include "count/cuda/select.cuh"

namespace jaxgpuops::count {
namespace {

constexpr int kThreads = kLongThreads, kWarps = kThreads / 32;
// A sample of a row has 2^11 elements, or 2^13 if blocks would have no room for what is in wider intervals: of rows of
// a length, if a block has a larger part. The threads of a block that does nothing else, and the few elements of the
// sample that are sorted.
constexpr int kSmallSampleBits = 11, kLargeSampleBits = 13, kSampleThreads = 1024, kPilot = 1 << 7;
constexpr int64_t kLargeSampled = 1 << 22, kLargePart = 1 << 16;
// What blocks fetch to the L2 cache while the sample is taken.
constexpr uint32_t kMostAhead = 96 << 10;
static_assert(kLongBinBits == 9 && kMostKeptSteps <= 32);
// What stands first in a row's workspace.
template <class T>
struct Head {
  Found<T> found;
  uint32_t finished;  // how many blocks have finished the step
  uint32_t step;      // the last step whose results are in `found`
  uint32_t listed[kMostRanks];
  uint32_t last_of_largest;  // the last index of a largest key
};

template <class T>
struct Args {
  Select problem;
  const T* x;
  const int32_t* ranks;
  T* values;
  int32_t* indices;
  char* workspace;  // heads and tables of all rows, and then lists
  SelectPlan plan;
  int64_t first_row;

  __device__ char* own(int64_t row) const { return workspace + row * plan.list_at; }
  __device__ Head<T>& head(int64_t row) const { return *reinterpret_cast<Head<T>*>(own(row)); }
  __device__ uint32_t* tables(int64_t row) const { return reinterpret_cast<uint32_t*>(own(row) + plan.table_at); }
  __device__ bool alone() const { return plan.slices == 1; }  // whether a row has one block
  // The list of a rank: the indices of the elements that are left, or how many equal elements each slice has.
  __device__ uint32_t* list(int64_t row, int r) const {
    return reinterpret_cast<uint32_t*>(own(problem.rows.count())) + (row * problem.count + r) * plan.list_size;
  }
};

// A slice of a row, as the aligned vectors of 16 bytes that the row touches. Elements in them that are not of the row
// are replaced by copies of the row's first element, in the first vector, and of its last one.
template <class T>
struct Slice {
  using Word = typename Found<T>::Word;
  // A thread reads 16 elements at a time (8 of 64 bits).
  static constexpr int kPack = 16 / sizeof(T), kPacks = sizeof(T) < 4 ? sizeof(T) : 4, kElements = kPacks * kPack;
  static constexpr int kStep = kPacks * kThreads;
  struct alignas(16) Pack {
    T element[kPack];
  };
  using Keys = Word[kPacks][kPack];

  const T* x;  // the row
  uint32_t length;
  const Pack* from;  // the first vector
  uint32_t packs;    // how many there are, of which those from `whole` to `end_whole` have elements of the row only
  uint32_t whole, end_whole;
  uint32_t start;          // the number of the first element, modulo 2^32
  uint32_t past;           // where the row begins in its first vector
  uint32_t before, after;  // how many copies the slice has
  Pack* edges;             // the first and the last vector, in shared memory

  __device__ Slice(const T* row, int64_t elements, int64_t slice, int64_t slice_packs, Pack* edges)
      : x(row), length(static_cast<uint32_t>(elements)), edges(edges) {
    past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    const int64_t all = (past + elements + kPack - 1) / kPack, begin = slice * slice_packs;
    const int64_t end = min(begin + slice_packs, all);
    from = reinterpret_cast<const Pack*>(row - past) + begin;
    packs = static_cast<uint32_t>(max(end - begin, int64_t{0}));
    before = begin == 0 ? past : 0;
    after = packs > 0 && end == all ? static_cast<uint32_t>(all * kPack - past - elements) : 0;
    whole = before > 0, end_whole = packs - (after > 0);
    start = static_cast<uint32_t>(begin * kPack) - past;
    if (threadIdx.x < 2 * kPack) {
      const uint32_t e = threadIdx.x % kPack, p = threadIdx.x < kPack ? 0 : packs - 1, index = start + p * kPack + e;
      edges[threadIdx.x / kPack].element[e] = row[index + kPack < kPack ? 0 : min(index, length - 1)];
    }
  }
  __device__ int steps() const { return static_cast<int>((packs + kStep - 1) / kStep); }

  // Vector i of a thread in a step, and the number in the row of element e of it, if it is of the row.
  __device__ __forceinline__ uint32_t pack_of(int step, int i) const {
    return step * kStep + i * kThreads + threadIdx.x;
  }
  __device__ __forceinline__ uint32_t at(int step, int i, int e) const { return start + pack_of(step, i) * kPack + e; }

  // Loads the keys of a step, and returns how many of the thread's vectors are of the slice: others have zeros.
  __device__ __forceinline__ int load(const SortOrder& order, int step, Keys& key) const {
    Pack pack[kPacks];
    int count = kPacks;
    if (pack_of(step, 0) >= whole && pack_of(step, kPacks - 1) < end_whole) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) pack[i] = from[pack_of(step, i)];
    } else {
      count = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const uint32_t p = pack_of(step, i);
        count += p < packs;
        pack[i] = {};
        if (p < packs) pack[i] = *(p < whole ? edges : p < end_whole ? from + p : edges + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < kPack; ++e) key[i][e] = sort_key(pack[i].element[e], order);
    }
    return count;
  }
};

// Adds one to `count` if key + addend has a carry, and returns the sum: two instructions.
__device__ __forceinline__ uint32_t add_counting(uint32_t key, uint32_t addend, uint32_t& count) {
  uint32_t sum;
  asm("add.cc.u32 %0, %2, %3; addc.u32 %1, %1, 0;" : "=&r"(sum), "+r"(count) : "r"(key), "r"(addend));
  return sum;
}
__device__ __forceinline__ unsigned long long add_counting(unsigned long long key, unsigned long long addend,
                                                           uint32_t& count) {
  unsigned long long sum;
  asm("add.cc.u64 %0, %2, %3; addc.u32 %1, %1, 0;" : "=&l"(sum), "+r"(count) : "l"(key), "l"(addend));
  return sum;
}

// Appends a bit to a set: whether distance + addend has a carry.
__device__ __forceinline__ void append_carry(uint32_t distance, uint32_t addend, uint32_t& set) {
  asm("{.reg.u32 sum; add.cc.u32 sum, %1, %2; addc.u32 %0, %0, %0;}" : "+r"(set) : "r"(distance), "r"(addend));
}
__device__ __forceinline__ void append_carry(unsigned long long distance, unsigned long long addend, uint32_t& set) {
  asm("{.reg.u64 sum; add.cc.u64 sum, %1, %2; addc.u32 %0, %0, %0;}" : "+r"(set) : "l"(distance), "l"(addend));
}

// Counts keys in the parts of the tables in use: all, or only those from `low` to `low + span`. `count`: how many
// vectors have keys.
template <class T>
__device__ __forceinline__ void count_vectors(uint32_t* tables, const Found<T>& found, uint32_t used,
                                              const typename Slice<T>::Keys& key, int count, bool all) {
  using Word = typename Found<T>::Word;
  for_bits(used, [&](int t) {
    const Parts<Word> parts = found.parts[t];
    const Word low = all ? 0 : found.low[t], span = all ? ~Word{0} : found.span[t];
    const uint32_t counts = shared_address(tables) + 4 * ((t << kLongBinBits) - static_cast<uint32_t>(parts.base));
#pragma unroll
    for (int i = 0; i < Slice<T>::kPacks; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < Slice<T>::kPack; ++e)
        if (key[i][e] - low <= span) increment(counter_of(parts, counts, key[i][e]));
    }
  });
}

// What a warp keeps of its part of a slice, in shared memory: the keys that are in an interval, in the order of steps,
// lanes and elements, and for each step and lane a set of the elements, of which the first one has the highest bit.
template <class T>
struct Kept {
  using Word = typename Found<T>::Word;
  static constexpr int kElements = Slice<T>::kElements;
  static_assert(kElements <= 16);

  T* keys;
  uint16_t* sets;
  uint32_t room, size;
  int steps;  // how many steps there are sets for
  bool lost;  // whether there was no room for all

  // Keeps the keys of a step that are in a set, or returns false. The whole warp calls this.
  __device__ __forceinline__ bool keep(const typename Slice<T>::Keys& key, uint32_t set, int step) {
    const uint32_t own = __popc(set), up_to = sum_up_to_lane(own), total = shuffle_from(up_to, 31);
    if (lost || size + total > room || step >= steps) {
      lost = true;
      return total == 0;
    }
    sets[step * 32 + (threadIdx.x & 31)] = static_cast<uint16_t>(set);
    T* to = keys + size + up_to - own;
#pragma unroll
    for (int i = 0; i < Slice<T>::kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < Slice<T>::kPack; ++e)
        if (set >> (kElements - 1 - (i * Slice<T>::kPack + e)) & 1) *to++ = static_cast<T>(key[i][e]);
    }
    size += total;
    return true;
  }

  // Adds one to the count of each that is between the ends of a table in use.
  __device__ __forceinline__ void count(uint32_t* tables, const Found<T>& found, uint32_t used) const {
    __syncwarp();
    for_bits(used, [&](int t) {
      const Parts<Word> parts = found.parts[t];
      const Word low = found.low[t], span = found.span[t];
      uint32_t* const counts = tables + (t << kLongBinBits);
#pragma unroll 4
      for (uint32_t i = threadIdx.x & 31; i < size; i += 32)
        if (keys[i] - low <= span) atomicAdd(counts + parts.between_ends(keys[i]), 1u);
    });
  }

  // Returns how many keys are from `first` to `first + last`; `steps_of` gets a bit for each step that has any. The
  // whole warp calls this, if none is lost.
  __device__ __forceinline__ uint32_t count_between(const Slice<T>& slice, Word first, Word last,
                                                    uint32_t& steps_of) const {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t begin = 0, all = 0;
    steps_of = 0;
#pragma unroll 1
    for (int step = 0; step < slice.steps(); ++step) {
      const uint32_t end = begin + sum_of_warp(__popc(sets[step * 32 + lane]));
      uint32_t of_step = 0;
#pragma unroll 1
      for (uint32_t i = begin + lane; i < end; i += 32) of_step += keys[i] - first <= last;
      of_step = sum_of_warp(of_step);
      if (of_step) steps_of |= 1u << step;
      all += of_step, begin = end;
    }
    return all;
  }

  // Calls `visit(key, at)` for the elements that the lane itself has put there in some steps. The whole warp calls
  // this.
  template <class Visit>
  __device__ __forceinline__ void each(const Slice<T>& slice, uint32_t of_steps, Visit visit) const {
    const T* from = keys;
#pragma unroll 1
    for (int step = 0; of_steps >> step; ++step) {
      uint32_t set = sets[step * 32 + (threadIdx.x & 31)];
      const uint32_t own = __popc(set), total = sum_of_warp(own);
      if (!(of_steps >> step & 1)) {
        from += total;
        continue;
      }
      const T* key = from + sum_up_to_lane(own) - own;
      from += total;
#pragma unroll 1
      while (set) {
        const int element = kElements - 32 + __clz(static_cast<int>(set));
        visit(Word{*key++}, slice.at(step, element / Slice<T>::kPack, element % Slice<T>::kPack));
        set ^= 1u << (kElements - 1 - element);
      }
    }
  }
};

// Says that the block has finished. What its threads wrote before is seen by blocks that learn that from the number,
// which one thread of each counts up; so one thread orders memory for all.
template <class T>
__device__ __forceinline__ uint32_t count_finished(Head<T>& head) {
  __threadfence();
  return atomicAdd(&head.finished, 1u) + 1;
}

// Whether the calling block is the last of its row to finish. The last one sees what the others have written.
template <class T>
__device__ __forceinline__ bool is_last(const Args<T>& a, Head<T>& head) {
  __shared__ bool last;
  __syncthreads();
  if (a.alone()) return true;
  if (threadIdx.x == 0) {
    last = count_finished(head) == a.plan.slices;
    if (last) head.finished = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Returns when all blocks of the row have finished, if the calling block `waits` for that; else at once.
template <class T>
__device__ __forceinline__ void wait_for_all(const Args<T>& a, Head<T>& head, bool waits) {
  __syncthreads();
  if (a.alone()) return;
  if (threadIdx.x == 0) {
    count_finished(head);
    while (waits && load_relaxed(&head.finished) < a.plan.slices) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Copies what was found last to shared memory. Loads go past the L1 cache, which may have old words.
template <class T>
__device__ __forceinline__ void load_found(const Head<T>& head, Found<T>& found) {
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&found)[w] = __ldcg(reinterpret_cast<const uint32_t*>(&head.found) + w);
  __syncthreads();
}

// Tells the other blocks of the row what the last one has found in a step.
template <class T>
__device__ __forceinline__ void tell_found(const Args<T>& a, Head<T>& head, const Found<T>& found, uint32_t step) {
  __syncthreads();
  if (a.alone()) return;
#pragma unroll 1
  for (uint32_t w = threadIdx.x; w < sizeof(found) / 4; w += kThreads)
    reinterpret_cast<uint32_t*>(&head.found)[w] = reinterpret_cast<const uint32_t*>(&found)[w];
  __syncthreads();
  if (threadIdx.x > 0) return;
  __threadfence();
  store_relaxed(&head.step, step);
}

template <class T>
__device__ __forceinline__ void wait_for_found(Head<T>& head, Found<T>& found, uint32_t step) {
  if (threadIdx.x == 0) {
    while (load_relaxed(&head.step) < step) {
    }
    __threadfence();
  }
  __syncthreads();
  load_found(head, found);
}

// What a block needs in shared memory to choose from a list.
template <class Word>
struct Choice {
  Word low, span;
  uint32_t count, left, listed, chosen;
  uint32_t list[kSelectFew];
};

// Returns the index of number `left` of the `count` elements of a list whose keys are from `low` to `low + span`. The
// whole block calls this. `counts`: room for as many words as the block has threads.
template <class Word, class T>
__device__ __forceinline__ uint32_t choose_in_block(const T* keys, const uint32_t* indices, uint32_t size, Word low,
                                                    Word span, uint32_t count, uint32_t left, uint32_t* counts,
                                                    Choice<Word>& choice) {
  using Full = std::conditional_t<sizeof(Word) == 8, uint64_t, uint32_t>;
  static_assert(kThreads == kChunk && kLongBinBits == 9);
  bool by_index = false;  // only equal keys are left
  Word key = 0;
  const auto number_of = [&](uint32_t i) { return by_index ? Word{indices[i]} : Word{keys[i]}; };
  const auto is_in = [&](uint32_t i) { return number_of(i) - low <= span && (!by_index || keys[i] == key); };
#pragma unroll 1
  while (count > kSelectFew) {
    if (span == 0) by_index = true, key = low, low = 0, span = 0xffffffff;
    const auto parts = Parts<Word>::template between<Full>(kLongBinBits, low, low + span);
    __syncthreads();  // no thread reads the counts any more
    counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < size; i += kThreads)
      if (is_in(i)) atomicAdd(counts + parts.between_ends(number_of(i)), 1u);
    __syncthreads();
    if (threadIdx.x < 32) {
      const PartOfRank at = find_rank(counts, sum_counts(counts), left);
      Word first, last;
      parts.template bounds<Full>(at.part, first, last);
      if (threadIdx.x == 0) {
        choice.low = max(first, low), choice.span = min(first + last, low + span) - choice.low;
        choice.count = at.size, choice.left = at.left;
      }
    }
    __syncthreads();
    low = choice.low, span = choice.span, count = choice.count, left = choice.left;
  }
  if (threadIdx.x == 0) choice.listed = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < size; i += kThreads)
    if (is_in(i)) choice.list[atomicAdd(&choice.listed, 1u)] = i;
  __syncthreads();
  if (threadIdx.x < count) {
    const uint32_t own = choice.list[threadIdx.x];
    uint32_t before = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
      const uint32_t i = choice.list[j];
      before += keys[i] < keys[own] || (keys[i] == keys[own] && indices[i] < indices[own]);
    }
    if (before == left) choice.chosen = indices[own];
  }
  __syncthreads();
  return choice.chosen;
}

// Returns the index of number `left` of the elements of a list, which are up to kSelectFew. A warp calls this.
template <class T>
__device__ __forceinline__ uint32_t choose_in_warp(const T* __restrict__ x, const SortOrder& order,
                                                   const uint32_t* list, uint32_t size, uint32_t left) {
  constexpr int kOwn = kSelectFew / 32;
  const uint32_t lane = threadIdx.x & 31;
  typename Found<T>::Word key[kOwn];
  uint32_t at[kOwn], before[kOwn] = {}, chosen = 0;
  // Places behind the list get its last element.
#pragma unroll
  for (int i = 0; i < kOwn; ++i) at[i] = __ldcg(list + min(i * 32 + lane, size - 1));
#pragma unroll
  for (int i = 0; i < kOwn; ++i) key[i] = sort_key(x[at[i]], order);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
    for (uint32_t j = i * 32; j < min(size, i * 32 + 32u); ++j) {
      const auto its = shuffle_from(key[i], j % 32);
      const uint32_t its_at = shuffle_from(at[i], j % 32);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) before[own] += its < key[own] || (its == key[own] && its_at < at[own]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const unsigned lanes = __ballot_sync(kEveryLane, before[i] == left);
    if (lanes) chosen = shuffle_from(at[i], __ffs(static_cast<int>(lanes)) - 1);
  }
  return chosen;
}

// Returns the index of number `left` of the elements from `begin` to `end` that have a key. The whole block calls this;
// there is room for kWarps + 1 words at `sums`.
template <class T>
__device__ __forceinline__ uint32_t find_equal(const T* __restrict__ x, const SortOrder& order, T key, int64_t begin,
                                               int64_t end, uint32_t left, uint32_t* sums) {
  constexpr int kAhead = sizeof(T) == 8 ? 8 : 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  // Each warp counts in its part, and then all share the part that has the element.
  for (;;) {
    const int64_t part = (end - begin + kThreads - 1) / kThreads * 32, from = begin + warp * part;
    const int64_t to = min(from + part, end);
    uint32_t own = 0;
#pragma unroll kAhead
    for (int64_t at = from + lane; at < to; at += 32) own += sort_key(x[at], order) == key;
    own = sum_of_warp(own);
    __syncthreads();  // all threads are past their last use of `sums`
    if (lane == 0) sums[warp] = own;
    __syncthreads();
    const uint32_t up_to = sum_up_to_lane(lane < kWarps ? sums[lane] : 0);
    const int of = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > left))) - 1;
    if (of > 0) left -= shuffle_from(up_to, of - 1);
    begin += of * part;
    end = min(begin + part, end);
    if (part > 32) continue;
    if (warp == 0) {
      const bool is_equal = begin + lane < end && sort_key(x[begin + lane], order) == key;
      const unsigned lanes = __ballot_sync(kEveryLane, is_equal);
      if (is_equal && __popc(lanes & ((1u << lane) - 1)) == left) sums[kWarps] = static_cast<uint32_t>(begin) + lane;
    }
    __syncthreads();
    return sums[kWarps];
  }
}

// What a block needs in shared memory for a sample, besides tables.
struct Sample {
  uint32_t few[kPilot];
  uint32_t ranks, coarse;  // a bit for each rank; for each of which a part has much of the sample
  // For each rank: the places in the sorted sample where its interval begins and ends, the parts that these fall in,
  // and the least or largest element of the sample in that part.
  uint32_t place[2 * kMostRanks], first[2 * kMostRanks], last[2 * kMostRanks], bound[2 * kMostRanks];
  Parts<uint32_t> parts[kMostRanks];
};

// Finds the first intervals of a row from a sample. A sort of the sample would take as long as all else, and only the
// elements at two places of it are wanted for each rank: a step like those of the row itself finds them, from intervals
// that a few elements of the sample give. The whole block calls this. `counts`: tables of zeros.
template <int kOfBlock, int kSampleBits, class T>
__device__ __forceinline__ void find_first_tables(const Select& problem, const T* x, const int32_t* ranks_of_row,
                                                  Sample& shared, uint32_t* counts, Found<T>& found) {
  constexpr int kBins = 1 << kLongBinBits, kSamples = 1 << kSampleBits, kOwn = kSamples / kOfBlock;
  constexpr int kEach = kSamples / kPilot;
  const auto length = static_cast<uint32_t>(problem.rows.length);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  uint32_t rank = 0;
  const bool has = warp == 0 && own_rank(problem, length, ranks_of_row, rank);
  uint32_t own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    own[i] = sampled_word(kSampleBits, problem.order, x, length, i * kOfBlock + threadIdx.x);
  if (threadIdx.x % kEach == 0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) shared.few[(i * kOfBlock + threadIdx.x) / kEach] = own[i];
  }
  __syncthreads();
  int from = 0, to = 0;
  if (warp == 0) {
    uint32_t sorted[kPilot / 32];
#pragma unroll
    for (int i = 0; i < kPilot / 32; ++i) sorted[i] = shared.few[i * 32 + lane];
    sort_in_warp(sorted);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPilot / 32; ++i) shared.few[lane * (kPilot / 32) + i] = sorted[i];
    __syncwarp();
    if (has) {
      from = place_in_sample(kSamples, rank, length, 4, -1), to = place_in_sample(kSamples, rank, length, 4, 1);
      uint32_t low, high;
      const auto sampled = [&](int i) { return shared.few[i]; };
      find_interval<uint32_t>(kPilot, max(from, 0), min(to, kSamples - 1), kSamples, 4, sampled, low, high);
      shared.parts[lane] = Parts<uint32_t>::template between<uint32_t>(kLongBinBits, low, high);
      shared.place[2 * lane] = max(from, 0), shared.place[2 * lane + 1] = min(to, kSamples - 1);
      shared.bound[2 * lane] = ~0u, shared.bound[2 * lane + 1] = 0;
    }
    const uint32_t ranks = __ballot_sync(kEveryLane, has);
    if (lane == 0) shared.ranks = ranks, shared.coarse = 0;
  }
  __syncthreads();
  const uint32_t ranks = shared.ranks;
#pragma unroll 1
  for (bool again = false;; again = true) {
    for_bits(ranks, [&](int r) {
      const Parts<uint32_t> its = shared.parts[r];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        increment(counter_of(its, shared_address(counts + r * kBins) - 4 * its.base, own[i]));
    });
    __syncthreads();
#pragma unroll 1
    for (int end = warp; end < 2 * kMostRanks; end += kOfBlock / 32) {
      const int r = end / 2;
      if (!(ranks >> r & 1)) continue;
      const PartOfRank at = find_rank(counts + r * kBins, sum_counts(counts + r * kBins), shared.place[end]);
      if (lane > 0) continue;
      shared.parts[r].template bounds<uint32_t>(at.part, shared.first[end], shared.last[end]);
      if (at.size > kSamples / 32 && shared.last[end] > 0) atomicOr(&shared.coarse, 1u << r);
    }
    __syncthreads();
    for_bits(ranks, [&](int r) {
      const uint32_t low = shared.first[2 * r], high = shared.first[2 * r + 1];
      const uint32_t low_span = shared.last[2 * r], high_span = shared.last[2 * r + 1];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (own[i] - low <= low_span) atomicMin(shared.bound + 2 * r, own[i]);
        if (own[i] - high <= high_span) atomicMax(shared.bound + 2 * r + 1, own[i]);
      }
    });
    __syncthreads();
    if (again || shared.coarse == 0) break;

    // As where the first interval goes through zero, near which floating-point numbers are dense: what is between the
    // two places is cut once more.
    if (warp == 0 && (ranks & shared.coarse) >> lane & 1) {
      shared.parts[lane] =
          Parts<uint32_t>::template between<uint32_t>(kLongBinBits, shared.bound[2 * lane], shared.bound[2 * lane + 1]);
      shared.bound[2 * lane] = ~0u, shared.bound[2 * lane + 1] = 0;
    }
#pragma unroll 1
    for (int b = threadIdx.x; b < static_cast<int>(problem.count) * kBins; b += kOfBlock) counts[b] = 0;
    __syncthreads();
  }
  if (warp > 0) return;
  typename Found<T>::Word low = 0, high = 0;
  if (has) widen_interval<T>(kSamples, from, to, shared.bound[2 * lane], shared.bound[2 * lane + 1], low, high);
  set_tables<true>(kSamples, kLongBinBits, static_cast<int>(problem.count), length, has, rank, low, high, found);
}

// Finds the first intervals of a row that several blocks share, and clears its counts.
template <class T, int kSampleBits>
__global__ void __launch_bounds__(kSampleThreads) select_sample_kernel(const __grid_constant__ Args<T> a) {
  __shared__ Sample shared;
  __shared__ __align__(16) uint32_t counts[kMostRanks << kLongBinBits];
  let_dependents_start();
  const uint32_t row = blockIdx.x, inner = static_cast<uint32_t>(a.problem.rows.inner), outer = row / inner;
  const int all_bins = static_cast<int>(a.problem.count) << kLongBinBits;
  const T* const x = a.x + row * a.problem.rows.length;
  const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, row - outer * inner);
  Head<T>& head = a.head(row);
  for (int b = threadIdx.x; b < all_bins; b += kSampleThreads) counts[b] = a.tables(row)[b] = 0;
  if (threadIdx.x < kMostRanks) head.listed[threadIdx.x] = 0;
  if (threadIdx.x == 0) head.finished = head.step = head.last_of_largest = 0;
  find_first_tables<kSampleThreads, kSampleBits>(a.problem, x, ranks, shared, counts, head.found);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) select_long_kernel(const __grid_constant__ Args<T> a) {
  using Word = typename Found<T>::Word;
  using Own = Slice<T>;
  __shared__ Found<T> found;
  __shared__ uint32_t left_of[kMostRanks], sums[kWarps + 1], last_of_largest, lost;
  __shared__ uint32_t sum_of[kMostRanks], place_of[kMostRanks];  // of the counts of a table; in a list
  __shared__ uint32_t single_count[kMostRanks];  // how many elements of the slice have the only key of an interval
  __shared__ Word single_key[kMostRanks];
  __shared__ uint32_t steps_of[kMostRanks][kWarps];  // the steps in which a warp has elements of a list
  __shared__ Choice<Word> choice;
  __shared__ Sample sample;
  // Tables of counts, and what warps keep; in the end, the keys of a list and their indices.
  auto* const counts = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const auto slices = static_cast<uint32_t>(a.plan.slices), in_launch = blockIdx.x / slices;
  const int64_t row = a.first_row + in_launch, slice = blockIdx.x - in_launch * slices;
  const auto inner = static_cast<uint32_t>(a.problem.rows.inner), outer = static_cast<uint32_t>(row) / inner;
  const uint32_t column = static_cast<uint32_t>(row) - outer * inner;
  const auto wanted = static_cast<int>(a.problem.count);
  __shared__ typename Own::Pack edges[2];
  const Own own(a.x + row * a.problem.rows.length, a.problem.rows.length, slice, a.plan.slice_packs, edges);
  const T* const x = own.x;
  const SortOrder order = one_flip<T>(a.problem.order);
  const int all_bins = wanted << kLongBinBits;
  Head<T>& head = a.head(row);
  uint32_t* const tables = a.tables(row);
  // The sample's kernel leaves the memory nearly idle.
  if (threadIdx.x == 0 && own.whole < own.end_whole)
    prefetch_bulk(own.from + own.whole, min((own.end_whole - own.whole) * 16, kMostAhead));
  Kept<T> kept;
  kept.room = a.plan.kept, kept.steps = a.plan.kept_steps, kept.size = 0, kept.lost = false;
  T* const all_keys = reinterpret_cast<T*>(counts + all_bins);
  kept.keys = all_keys + warp * kept.room;
  kept.sets = reinterpret_cast<uint16_t*>(all_keys + kWarps * kept.room) + warp * kept.steps * 32;
  if (threadIdx.x < kMostRanks) left_of[threadIdx.x] = 0;
  if (threadIdx.x == 0) last_of_largest = lost = 0;
  const auto clear_counts = [&] {
#pragma unroll 1
    for (int b = threadIdx.x; b < all_bins; b += kThreads) counts[b] = 0;
  };
  clear_counts();
  if (a.alone()) {
    if (threadIdx.x < kMostRanks) head.listed[threadIdx.x] = 0;
    if (threadIdx.x == 0) head.last_of_largest = 0;
    const int32_t* const ranks = a.ranks + ranks_at(a.problem.ranks, outer, column);
    find_first_tables<kThreads, kSmallSampleBits>(a.problem, x, ranks, sample, counts, found);
    __syncthreads();
    clear_counts();
    __syncthreads();
  } else {
    wait_for_predecessor();
    load_found(head, found);
  }
  const uint32_t ends = found.ends;
  uint32_t to_do = ((1u << wanted) - 1) & ~ends;  // a bit for each rank that needs a step
  Word highest = 0;                               // the thread's largest key
  int highest_step = -1;                          // the last step in which it is
  // Tables whose first interval is a single key, as where most elements are equal: a thread counts these, and there is
  // no need to keep them.
  const uint32_t singles = __ballot_sync(kEveryLane, (found.used >> lane & 1) && found.span[lane] == 0);
  if (warp == 0 && (singles >> lane & 1)) single_key[lane] = found.low[lane];
  bool has_all = true;  // whether the block keeps all keys that it will need
#pragma unroll 1
  for (uint32_t step = 1; step == 1 || to_do; ++step) {
    const bool first = step == 1;
    const uint32_t used = found.used, ranges = first ? used & ~singles : used;
    if (warp == 0 && (used >> lane & 1)) {
      const auto uncount = [&](uint32_t copied, uint32_t copies) {
        if (copies == 0) return;
        const Word key = sort_key(x[copied], order), low = found.low[lane];
        if (key - low <= found.span[lane] || (first && key < low))
          atomicAdd(counts + (lane << kLongBinBits) + found.parts[lane](key), 0u - copies);
      };
      uncount(0, own.before);
      uncount(own.length - 1, own.after);
    }
    const Word of_zero = sort_key(T{0}, order);
#pragma unroll 1
    for (int at = 0; (first || !has_all) && at < own.steps(); ++at) {
      typename Own::Keys key;
      const int count = own.load(order, at, key);
      // If a rank is not in its first interval, the parts may begin below the next one.
      const bool counts_all = first ? kept.lost : !found.missed;
      if (first && ends) {
        Word most = 0;
#pragma unroll
        for (int i = 0; i < Own::kPacks; ++i) {
          if (i >= count) continue;
#pragma unroll
          for (int e = 0; e < Own::kPack; ++e) most = max(most, key[i][e]);
        }
        if (count > 0 && most >= highest) highest = most, highest_step = at;
      }
      if (first) {
        // The keys that are in an interval of more than one key, the first of them as the highest bit.
        uint32_t set = 0;
        const int others = Own::kElements - count * Own::kPack;
        const uint32_t all = ((1u << Own::kElements) - 1) & ~((1u << others) - 1);
        for_bits(kept.lost ? singles : used, [&](int t) {
          const Word least = found.low[t], span = found.span[t];
          uint32_t from_least = 0, outside = 0;
#pragma unroll
          for (int i = 0; i < Own::kPacks; ++i)
#pragma unroll
            for (int e = 0; e < Own::kPack; ++e)
              append_carry(add_counting(key[i][e], Word{0} - least, from_least), ~span, outside);
          if (span) set |= ~outside & all;
          // How many are below the interval, and equal to its only key.
          uint32_t sums = least ? Own::kElements - from_least - (of_zero < least ? others : 0) : 0;
          if (span == 0) sums += __popc(~outside & all) << 16;
          sums = sum_of_warp(sums);
          if (lane > 0) return;
          if (sums & 0xffff) atomicAdd(counts + (t << kLongBinBits), sums & 0xffff);
          if (sums >> 16) atomicAdd(counts + (t << kLongBinBits) + 1, sums >> 16);
        });
        if (!kept.lost && kept.keep(key, set, at)) continue;
      }
      count_vectors(counts, found, ranges, key, count, counts_all);
    }
    if (first) {
      if (kept.lost && lane == 0) lost = 1;
      if (ends) {
        const Word of_warp = largest_of_lanes(highest);
        if (lane == 0) atomicMax(&found.largest, of_warp);
      }
    }
    if (has_all) kept.count(counts, found, ranges);
    __syncthreads();
    if (first && threadIdx.x < kMostRanks && (singles >> threadIdx.x & 1))
      single_count[threadIdx.x] = counts[(threadIdx.x << kLongBinBits) + 1];
    for_bits(a.alone() ? 0 : used, [&](int t) {
#pragma unroll 1
      for (int b = (t << kLongBinBits) + 2 * threadIdx.x; b < (t + 1) << kLongBinBits; b += 2 * kThreads) {
        const uint64_t both = counts[b] | uint64_t{counts[b + 1]} << 32;
        if (both) atomicAdd(reinterpret_cast<unsigned long long*>(tables + b), both);
      }
    });
    if (first && ends && threadIdx.x == 0 && !a.alone()) atomicMax(&head.found.largest, found.largest);
    if (is_last(a, head)) {
      static_assert(kThreads == 512);
      if (threadIdx.x < kMostRanks) sum_of[threadIdx.x] = 0;
      __syncthreads();
      for_bits(used, [&](int t) {
        const int b = (t << kLongBinBits) + threadIdx.x;
        uint32_t count = a.alone() ? counts[b] : __ldcg(tables + b);
        if (!a.alone()) tables[b] = 0;
        if (!first && threadIdx.x == 0) count = 0;  // what is below the interval was counted before
        counts[b] = count;
        const uint32_t sum = sum_of_warp(count);
        if (lane == 0) atomicAdd(sum_of + t, sum);
      });
      if (threadIdx.x == 0) {
        found.more = 0;
        if (!a.alone()) found.largest = __ldcg(&head.found.largest);
      }
      __syncthreads();
      if (first && warp == 0 && (used >> lane & 1)) {
        // All other elements are above the interval.
        counts[(lane << kLongBinBits) + found.parts[lane].last_part()] += own.length - sum_of[lane];
      }
      __syncthreads();
#pragma unroll 1
      for (int r = warp; r < wanted; r += kWarps) {
        if (!(to_do >> r & 1)) continue;
        find_part<kLongFew>(kLongBinBits, counts, nullptr, found, r);
        __syncwarp();
        if (lane > 0) continue;
        // Other steps count what is in the interval only.
        found.rank[r] = found.left[r];
        const uint32_t t = found.table[r];
        const Word low = found.low[t], span = found.span[t];
        if (first) {
          if (found.first[r] - low > span) found.missed = 1;
        } else {
          const Word begin = max(found.first[r], low), end = min(found.first[r] + found.last[r], low + span);
          found.first[r] = begin, found.last[r] = end - begin;
        }
      }
      __syncthreads();
      if (warp == 0) {
        choose_tables(found);
        if (found.used >> lane & 1) {
          const Word low = found.first[lane], span = found.last[lane];
          found.parts[lane] = Parts<Word>::template between<T>(kLongBinBits, low, low + span);
          found.low[lane] = low, found.span[lane] = span;
        }
      }
      tell_found(a, head, found, step);
    } else {
      wait_for_found(head, found, step);
    }
    has_all = !lost && !found.missed;
    to_do = found.more;
    if (to_do) clear_counts();
    __syncthreads();
  }

  if (warp == 0) {
    const int r = lane;
    if (r < wanted && (ends >> r & 1)) found.first[r] = found.largest, found.last[r] = 0, found.size[r] = 0;
    __syncwarp();
    choose_lists(found, wanted);
  }
  __syncthreads();
  const bool has_list = lane < wanted && !(ends >> lane & 1) && found.table[lane] == lane;
  const uint32_t lists = __ballot_sync(kEveryLane, has_list);
  // Lists of elements that are counted already, and all lists that are counts of slices instead.
  bool is_counted = false;
  for_bits(has_list && found.last[lane] == 0 ? singles : 0, [&](int t) {
    if (found.first[lane] != single_key[t]) return;
    is_counted = true;
    if (warp == 0) left_of[lane] = single_count[t];
  });
  const uint32_t open = lists & ~__ballot_sync(kEveryLane, is_counted);
  const uint32_t by_slice = lists & __ballot_sync(kEveryLane, is_counted || (has_list && found.size[lane] > kLongFew));
  if (threadIdx.x < kMostRanks && (open >> threadIdx.x & 1)) {
    const Word first = found.first[threadIdx.x], last = found.last[threadIdx.x];
    if (own.before && sort_key(x[0], order) - first <= last) atomicAdd(left_of + threadIdx.x, 0u - own.before);
    if (own.after && sort_key(x[own.length - 1], order) - first <= last)
      atomicAdd(left_of + threadIdx.x, 0u - own.after);
  }
  if (has_all) {
    uint32_t with_any = 0;  // a bit for each list that gets any elements of the warp
    for_bits(open, [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      uint32_t of_steps;
      const uint32_t left = kept.count_between(own, first, last, of_steps);
      if (left == 0) return;
      with_any |= 1u << r;
      if (lane == 0) atomicAdd(left_of + r, left), steps_of[r][warp] = of_steps;
    });
    __syncthreads();
    if (threadIdx.x < kMostRanks && ((lists & ~by_slice) >> threadIdx.x & 1) && left_of[threadIdx.x] > 0)
      place_of[threadIdx.x] = atomicAdd(head.listed + threadIdx.x, left_of[threadIdx.x]);
    __syncthreads();
    for_bits(with_any & ~by_slice, [&](int r) {
      const Word first = found.first[r], last = found.last[r];
      kept.each(own, steps_of[r][warp], [&](Word key, uint32_t at) {
        if (key - first <= last && at < own.length) a.list(row, r)[atomicAdd(place_of + r, 1u)] = at;
      });
    });
  }
  // What was read last is still in the L2 cache. If the block needs no elements but those it has, only a step with a
  // largest one is read again.
  const bool reads = !has_all && open;
  const bool has_largest = ends && highest == found.largest && highest_step >= 0;
#pragma unroll 1
  for (int step = reads ? own.steps() - 1 : highest_step; (reads || has_largest) && step >= 0; --step) {
    typename Own::Keys key;
    const int count = own.load(order, step, key);
    bool has[Own::kPacks];
#pragma unroll
    for (int i = 0; i < Own::kPacks; ++i) has[i] = i < count;
    // The last turn finds the last of the largest keys.
    for_bits((has_largest && step == highest_step ? 1u << kMostRanks : 0) | (reads ? open : 0), [&](int r) {
      const bool is_end = r == kMostRanks;
      const Word first = is_end ? highest : found.first[r], last = is_end ? 0 : found.last[r];
      uint32_t is_left = keys_between(key, has, first, last);
      if (!is_end && (by_slice >> r & 1)) {
        if (is_left) atomicAdd(left_of + r, __popc(is_left));
        return;
      }
      for (; is_left; is_left &= is_left - 1) {
        const int place = __ffs(static_cast<int>(is_left)) - 1;
        const uint32_t at = own.at(step, place / Own::kPack, place % Own::kPack);
        if (at >= own.length) continue;
        if (is_end)
          atomicMax(&last_of_largest, at);
        else
          a.list(row, r)[atomicAdd(head.listed + r, 1u)] = at;
      }
    });
    if (!reads) break;
  }
  __syncthreads();
  if (ends && threadIdx.x == 0) atomicMax(&head.last_of_largest, last_of_largest);
  if (threadIdx.x < wanted && (by_slice >> threadIdx.x & 1)) a.list(row, threadIdx.x)[slice] = left_of[threadIdx.x];
  // Each rank is chosen by one block.
  wait_for_all(a, head, slice < wanted);
  if (slice >= wanted) return;

  auto* const key_of = reinterpret_cast<T*>(counts);
  auto* const at_of = reinterpret_cast<uint32_t*>(key_of + kLongFew);
  int of_list = -1;
  const auto write = [&](int r, uint32_t at) {
    const int64_t to = (int64_t{outer} * wanted + r) * inner + column;
    a.values[to] = x[at];
    a.indices[to] = static_cast<int32_t>(at);
  };
  // A warp chooses for a rank of which few elements are left.
  const auto is_few = [&](int r) { return !((ends | by_slice) >> r & 1) && found.size[r] <= kSelectFew; };
#pragma unroll 1
  for (int r = warp; r < wanted; r += kWarps) {
    const auto table = found.table[r];
    if (r % slices != slice || (ends >> r & 1) || !is_few(table)) continue;
    const uint32_t at = choose_in_warp(x, order, a.list(row, table), found.size[r], found.left[r]);
    if (lane == 0) write(r, at);
  }
#pragma unroll 1
  for (int turn = 0; turn < wanted * wanted; ++turn) {
    // Ranks with the same list come one after the other.
    const int table = turn / wanted, r = turn - table * wanted;
    const bool is_end = ends >> r & 1;
    if (r % slices != slice || static_cast<int>(is_end ? r : found.table[r]) != table || is_few(table)) continue;
    const uint32_t* const list = a.list(row, table);
    const uint32_t size = found.size[r];
    uint32_t left = found.left[r], at = 0;
    if (is_end) {
      at = __ldcg(&head.last_of_largest);
    } else if (!(by_slice >> table & 1)) {
      if (of_list != table) {
        __syncthreads();  // no thread reads the list before any more
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
          at_of[i] = __ldcg(list + i);
          key_of[i] = sort_key(x[at_of[i]], order);
        }
        __syncthreads();
        of_list = table;
      }
      at = choose_in_block<Word>(key_of, at_of, size, found.first[r], found.last[r], size, left, at_of + kLongFew,
                                 choice);
    } else {
      // Finds the slice that has the wanted element.
      of_list = -1;
      __syncthreads();
      int64_t slice_of = 0;
#pragma unroll 1
      for (int64_t start = 0; start < a.plan.slices; start += kThreads) {
        const int64_t s = start + threadIdx.x;
        uint32_t total = 0;
        const uint32_t own = s < a.plan.slices ? __ldcg(list + s) : 0, before = sum_before(own, at_of, kWarps, total);
        if (left >= before && left - before < own) counts[0] = static_cast<uint32_t>(s), counts[1] = left - before;
        __syncthreads();
        if (left < total) {
          slice_of = counts[0], left = counts[1];
          break;
        }
        left -= total;
      }
      constexpr int kPack = Own::kPack;
      const int64_t begin = max(slice_of * a.plan.slice_packs * kPack - own.past, int64_t{0});
      const int64_t end = min((slice_of + 1) * a.plan.slice_packs * kPack - own.past, int64_t{own.length});
      at = find_equal(x, order, static_cast<T>(found.first[r]), begin, end, left, sums);
    }
    if (threadIdx.x == 0) write(r, at);
  }
}

}  // namespace

cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, void* values, int32_t* indices, void* workspace) {
  return dispatch_key(problem.bits, [&](auto width) {
    using T = decltype(width);
    static_assert(sizeof(Head<T>) <= kLongHeadBytes);
    const int64_t rows = problem.rows.count();
    Args<T> a{problem, static_cast<const T*>(x),      ranks, static_cast<T*>(values),
              indices, static_cast<char*>(workspace), plan,  0};
    const auto kernel = select_long_kernel<T>;
    Launch config;
    config.block = dim3(kThreads);
    config.shared_bytes = plan.shared_bytes;
    cudaError_t error = cudaSuccess;
    int64_t together = rows;  // rows of a launch
    if (plan.slices > 1) {
      const bool large = problem.rows.length >= kLargeSampled && plan.slice_packs * (128 / problem.bits) > kLargePart;
      error = launch(stream, {dim3(static_cast<unsigned>(rows)), dim3(kSampleThreads)},
                     large ? select_sample_kernel<T, kLargeSampleBits> : select_sample_kernel<T, kSmallSampleBits>, a);
      if (error != cudaSuccess) return error;
      config.overlap = plan.overlap;
      static Residents residents;
      int fitting = 0;
      error = residents.count(reinterpret_cast<const void*>(kernel), config, &fitting);
      if (error != cudaSuccess) return error;
      // If the device cannot run that many blocks at the same time, a row gets fewer blocks, or rows take turns.
      a.plan.slices = std::min<int64_t>(plan.slices, fitting);
      a.plan.slice_packs = (plan.slice_packs * plan.slices + a.plan.slices - 1) / a.plan.slices;
      together = fitting / a.plan.slices;
      config.together = true;
    }
    for (; a.first_row < rows && error == cudaSuccess; a.first_row += together) {
      config.grid = dim3(static_cast<unsigned>(std::min(together, rows - a.first_row) * a.plan.slices));
      error = launch(stream, config, kernel, a);
    }
    return error;
  });
}

}  // namespace jaxgpuops::count
