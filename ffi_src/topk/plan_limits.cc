#include "topk/limits.h"

#include <algorithm>

#include "common/rounding.h"
#include "topk/cuda/buckets_shape.h"
#include "topk/cuda/columns_shape.h"
#include "topk/cuda/compare_shape.h"
#include "topk/cuda/few_shape.h"
#include "topk/cuda/held_shape.h"
#include "topk/cuda/rows_shape.h"
#include "topk/cuda/sieve_shape.h"
#include "topk/cuda/sort_shape.h"
#include "topk/cuda/stream_shape.h"
#include "topk/cuda/wave_shape.h"

namespace jaxgpuops::topk {
namespace {

// The most rows that all run at once, in the time of one row. For so few rows, the rows kernel takes the least time.
constexpr int64_t kFewRows = 4096;

// Whether the streaming kernel takes less time for rows of 32 bits of up to 8192 elements than sorting what is left of
// them above a threshold. With few rows, a block of it has more threads, and so a threshold for larger k.
bool streams_short(Rows rows, int64_t k, const Gpu& gpu) {
  if (rows.length > kMaxSortLength / 2) {
    const bool few = rows.inner > 1 || rows.count() <= (k <= 256 ? 2 : 1) * gpu.multiprocessors;
    return k <= (rows.length == kMaxSortLength && few ? 512 : 256) && (few || rows.length < 6000);
  }
  if (rows.length < kMaxSortLength / 4 || k <= kMaxRowsK) return false;
  if (rows.inner > 1) return k <= 128 && rows.count() <= 4 * gpu.multiprocessors;
  const bool whole = rows.length == kMaxSortLength / 2;
  if (k <= 72) return whole || rows.count() <= 2 * gpu.multiprocessors;
  return k <= 128 && rows.count() <= (whole ? 4 : 1) * gpu.multiprocessors / 2;
}

bool prefers_few_for_columns(Rows rows, int64_t k, int key_bytes) {
  // The columns kernel fills its lanes only if many columns lie side by side, and it does not take keys of 64 bits.
  // A block reads eight long columns together, if the columns kernel does not take them.
  const int64_t beside = key_bytes == 8 && k <= 4 ? 2 : 5;
  if (rows.length > kFewAlone && rows.inner >= beside && key_bytes >= 2 &&
      rows.count() >= (key_bytes == 2 ? 600 : 360) && (key_bytes == 8 || rows.length * key_bytes > kMaxColumnBytes))
    return rows.elements() > 1 << 22 || (key_bytes == 8 && k <= 4 && rows.count() >= 600);
  if (k <= 4 && key_bytes <= 2) return rows.length <= 1024;
  const bool longer = key_bytes == 8 || (k <= 4 && rows.inner < 16 && rows.count() >= 4096);
  return rows.length <= (k <= 4 ? 256 : 128) * (longer ? 2 : 1);
}

bool prefers_few_for_rows(Rows rows, int64_t k, int key_bytes) {
  const int64_t count = rows.count();
  if (key_bytes < 8) {  // the rows kernel is faster, except for very many very short rows, which tiles have
    const bool whole_vectors = rows.length * key_bytes % 16 == 0;
    const int64_t most = count < kFewTiled || whole_vectors ? 32 : std::min(64, 192 / key_bytes);
    const int64_t longest = count > (key_bytes == 1 ? 4 : 8) * kFewRows ? most : k <= 2 ? 24 : 16;
    if (key_bytes == 4 && k <= 4 && count <= kFewRows / 4 && rows.length > 64) return rows.length <= 320;
    return k <= 4 && count > kFewRows && rows.length <= longest;
  }
  const bool many = count >= 512 * k;
  if (k <= 4) return rows.length <= (many ? 4096 : 2048 / k);
  return rows.length > 16 && rows.length <= (many ? 512 : 192);
}

// Whether so few bytes are sorted whole in less time than other kernels take for any k.
bool sweeps_bytes(Rows rows) { return rows.length >= 1 << 15 && rows.length <= 5 << 15 && rows.elements() <= 9 << 16; }

bool prefers_digits_for_short_columns(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  const int64_t length = rows.length, count = rows.count();
  const bool crowded = count > 4 * gpu.multiprocessors, half = 2 * k >= length;
  if (k <= kMaxRowsK || length < 512 || key_bytes > 2) return false;
  if (length < 1024) return count > 2 * gpu.multiprocessors && !crowded;
  if (key_bytes == 1) return sorted ? length >= 2048 || !(half || crowded) : 4 * k <= length;
  return sorted ? length >= 2048 || !half || !crowded : !half;
}

// Whether the buckets kernels read columns in less time than the streaming kernels, which read columns one by one. They
// do if there is enough to read; few columns side by side need more than many, and keys of 64 bits need more than
// others. At the limits, both took equally long on an H200.
bool prefers_buckets_for_columns(Rows rows, int key_bytes) {
  const int64_t length = rows.length, elements = rows.elements();
  const bool wide = rows.inner >= 8, few = rows.count() <= 64;
  if (key_bytes == 2 && !wide) return length >= 1 << 18 && (few || rows.inner >= 5);
  if (key_bytes <= 2) return length >= 1 << 15 && elements >= 1 << 19 && (wide || few);
  if (key_bytes == 8) return wide ? length >= 1 << 16 && elements >= 3 << 18 : length >= 3 << 15 && few;
  if (!wide) return length >= 1 << 16 && elements >= 1 << 21;
  return length >= 1 << 14 && elements >= (length >= 1 << 15 ? 1 << 19 : 1 << 21);
}

}  // namespace

// Whether a block holds rows of 64 bits, of which others would compare, sort or stream more.
bool holds_wide(Rows rows, int64_t k) {
  if (rows.inner > 1 || k > kMaxRowsK || rows.length > max_rows_length(8)) return false;
  const int64_t least = k > 4 && rows.count() > kFewRows ? 96 : 256;  // where the few kernel would take shorter rows
  return rows.length >= 1024 || (rows.length >= std::max(least, 8 * k) && (k > 4 || rows.count() > kFewRows) &&
                                 (rows.length >= 512 || rows.elements() > 1 << 15));
}

// Whether sorting a row, or what is left of it above a threshold, is faster than the kernels that select. Those compare
// all candidates with each other, and use at least four lanes for a row, or a block for up to 64 columns.
bool sorts(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (rows.length > kMaxSortLength) return false;
  if (key_bytes == 8 && rows.length > kMaxSortLength / 2 && k <= kMaxStreamK / 2) return false;
  if (key_bytes == 4 && streams_short(rows, k, gpu)) return false;
  const bool few = rows.inner == 1 && rows.count() <= 2 * gpu.multiprocessors;
  if (key_bytes == 8) return k > 32 || rows.length < (few ? 1024 : 1536);
  if (k > kMaxRowsK) return true;
  if (rows.inner == 1) {
    if (rows.count() <= kFewRows && (key_bytes == 4 || (key_bytes == 2 && k <= 8))) return false;
    // The rows kernel reads narrow elements one by one if rows are not whole vectors.
    const bool odd = rows.length * key_bytes % 16 != 0;
    return rows.length <= 16 ||
           (k > 8 && rows.length <= (key_bytes == 4 ? 3 * k : std::max<int64_t>(5 * k, odd ? 128 : 64)));
  }
  if (rows.length <= 24 || rows.length <= 4 * k || (rows.inner <= 16 && rows.length <= 128)) return true;
  if (rows.inner >= 8 || rows.length > 512) return false;
  // If inner is small, a block of the columns kernel may use only a small part of its lanes; that costs time only if
  // there are many rows.
  const int64_t beside = kColumnWarps * 32 / column_lanes(rows.count(), rows.length, k);
  return rows.length <= 128 || (rows.outer > 1024 && 2 * rows.inner <= beside);
}

// Whether sorting each row by digits (kBlock of sort/plan.h) takes less time than the networks of the sort kernel. The
// networks win if they only have to sort a small selected part of the row.
bool sorts_by_digits(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (rows.inner > 1 || k <= kMaxRowsK || key_bytes > 4) return false;
  if (rows.length <= kMaxSortLength / 8 || rows.length > kMaxSortLength) return false;
  int64_t places = kMaxSortLength / 4;  // of the network for a whole row
  while (places < rows.length) places *= 2;
  const bool whole = 5 * k > places, few = rows.count() <= 2 * gpu.multiprocessors;
  if (key_bytes == 4 && rows.length <= 3 << 10 && rows.count() <= gpu.multiprocessors)
    return rows.length <= kMaxSortLength / 4 || 6 * k >= rows.length;
  if (key_bytes == 1) return whole || few || rows.length > kMaxSortLength / 4;
  if (rows.length <= kMaxSortLength / 4) return key_bytes == 2 && (whole || few);
  if (key_bytes == 2) return 10 * k > places || (few && rows.length <= kMaxSortLength / 2);
  return whole || (rows.length > kMaxSortLength / 2 && 4 * k >= rows.length);
}

// The same for columns: for many of them, the kernel of sorts reads and sorts several side by side.
bool sorts_columns_by_digits(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  const int64_t length = rows.length, count = rows.count();
  if (rows.inner == 1 || k <= kMaxRowsK || key_bytes > 4) return false;
  const bool crowded = count > 4 * gpu.multiprocessors, half = 2 * k >= length;
  if (length > kMaxSortLength) return false;
  if (length < kMaxSortLength / 4) return length >= kMaxSortLength / 8 && key_bytes <= 2 && crowded && half;
  if (key_bytes == 1 && crowded) return true;
  if (count <= gpu.multiprocessors)
    return key_bytes < 4 ? half || (3 * k >= length && count > 16) : half && length >= kMaxSortLength / 2;
  return (length < kMaxSortLength / 2 ? 3 : 6) * k >= length && (key_bytes < 4 || half || crowded);
}

// Whether teams of lanes that hold whole rows, and compare all elements with each other, take less time than other
// kernels. The limits are where it took about as long on an H200; that time depends on nothing but the rows.
bool compares_in_teams(Rows rows, int64_t k, int key_bytes, bool sorted) {
  const int64_t length = rows.length, count = rows.count();
  if (length > kMaxTeamCompare || (!sorted && k == length)) return false;
  const int64_t places = int64_t{1} << std::max(2, bits_for(length));  // of a team; empty ones take as long
  const int64_t pairs = count * places * length;
  const bool other = key_bytes == 8 || rows.inner > 1;  // networks do not take these, but the few kernel does
  if (k > 8 || (k > 4 && (other || length <= 16))) return pairs <= 1 << (length <= 16 ? 25 : length <= 64 ? 23 : 22);
  if (length <= 16) return count <= 2 * kFewRows;
  if (length <= 32) return pairs <= 1 << (other ? 19 : 17);
  return length <= 64 ? other && pairs <= 1 << 18 : key_bytes == 4 && !other && pairs <= 1 << 21;
}

// Whether the rows kernel takes columns in less time than others. It reads them element by element, so that the sectors
// of columns side by side are read several times. That costs little for few columns or small arrays.
bool holds_columns(Rows rows, int64_t k, int key_bytes) {
  const int64_t length = rows.length, elements = rows.elements();
  if (rows.inner == 1 || k > (key_bytes == 8 ? kMaxRowsK : kMostRowsK) || length > max_rows_length(key_bytes))
    return false;
  if (k > kMaxRowsK ? key_bytes == 1 || length < 2048 : length < (key_bytes <= 2 ? 512 : 192)) return false;
  const bool copied = key_bytes == 4 && length * key_bytes <= kMaxColumnBytes;  // by the columns kernel
  return elements <= (rows.inner < 8 ? 1 << 23 : copied ? 3 << 18 : 1 << 22);
}

// Whether it takes rows with k above kMaxRowsK in less time than those that sort, stream or select by digits. Bytes tie
// more often.
bool holds_many(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (rows.inner > 1 || k <= kMaxRowsK || k > kMostRowsK || key_bytes == 8) return false;
  const bool crowded = rows.count() > 4 * gpu.multiprocessors;
  return rows.length >= (key_bytes == 1 && !crowded ? 4097 : 2000) && rows.length <= max_rows_length(key_bytes);
}

// Whether comparing all elements of each row with each other, by blocks that share a row, takes less time than other
// kernels do. The limits are where it took about as long on an H200.
bool compares(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  if (rows.length > kMaxCompareLength) return false;
  const CompareShape shape = compare_shape(rows, key_bytes, sorted, gpu.multiprocessors);
  const int64_t places = rows.count() * shape.chunks * shape.chunk();  // lanes without an element take as long
  const int64_t pairs = places * std::max<int64_t>(rows.length, 64);
  const bool selects = key_bytes <= 4 && k <= kMaxRowsK && !sorts(rows, k, key_bytes, gpu);
  // For results in the order of indices, only the blocks of a cluster can share a row, so rows are not long. If k is
  // the length, nothing has to be compared.
  if (!sorted && (rows.length > 1024 || k == rows.length)) return false;
  if (rows.inner > 1 && key_bytes == 8 && k <= kMaxRowsK && rows.length >= std::max<int64_t>(256, 8 * k)) return false;
  if (rows.inner > 1 && selects && key_bytes == 4) return pairs <= 1 << (k > 32 ? 24 : 22);
  if (rows.inner > 1) return pairs <= 1 << (selects || key_bytes == 8 || k == rows.length ? 24 : 25);
  if (selects && key_bytes <= 2 && k > 16 && rows.length > 64 && rows.length <= 512) return places <= 1 << 15;
  if (selects)
    return k > 8 && rows.length <= (key_bytes == 4 ? 512 : 1024) && pairs <= (key_bytes == 4 ? 1 << 21 : 1 << 22);
  const bool few_bytes = key_bytes == 1 || (key_bytes == 2 && rows.length <= 20);  // quick to sort
  if (places > (k == rows.length ? 1 << 14 : rows.length > 64 || few_bytes ? 1 << 15 : 3 << 17)) return false;
  if (rows.length <= 1024) return true;
  if (key_bytes == 1) return false;  // digits are few
  if (key_bytes == 2) return rows.length <= 2048 && pairs <= 1 << 24;
  if (key_bytes == 4 && rows.length > kMaxSortLength / 2) return k > 512 && pairs <= 1 << 26;
  if (key_bytes == 4) return pairs <= (k <= 128 && rows.length >= 2048 ? 3 << 22 : 1 << 25);
  if (k <= 32) return pairs <= 1 << 23;
  return pairs <= (rows.length <= 4096 ? 1 << 25 : 1 << 26);
}

// Whether the streaming kernel, with a block for each column, takes less time than the columns kernel. Both times are
// estimates in nanoseconds, fitted to some hundred problems on an H200.
bool streams_columns(Rows rows, int key_bytes, const Gpu& gpu) {
  if (rows.length < 1024) return false;
  const bool narrow = key_bytes < 4;
  const double blocks = static_cast<double>(rows.outer * ceil_div(rows.inner, kColumnWarps));
  const double waves = std::max(1., blocks / static_cast<double>((narrow ? 2.3 : 1.) * gpu.multiprocessors));
  const double length = static_cast<double>(rows.length), count = static_cast<double>(rows.count());
  const double selected = narrow ? 15 * length * waves : 4000 + 1.65 * length * waves;
  const double streamed = std::max(7600., count * (narrow ? 20 + 0.0105 * length : 12 + 0.0095 * length));
  return streamed < selected;
}

// The longest rows that the held kernel takes. The wave kernels take less time for longer ones, if they are few.
int64_t longest_held(Rows rows, int key_bytes) {
  const bool few = rows.count() <= (key_bytes == 1 ? kMaxWaveRows / 4 : 4);
  return kMaxHeldLength * (key_bytes == 2 ? (few ? 2 : 4) : few ? 1 : 2);
}

// Whether the few kernel can take the problem.
bool takes_few(Rows rows, int64_t k) {
  return k <= kMaxFewK && rows.length <= kMaxFewLength && rows.count() < int64_t{1} << 31;
}

// Whether the few kernel takes less time than those that sort or select. The limits are where it took about as long on
// an H200.
bool prefers_few(Rows rows, int64_t k, int key_bytes) {
  return rows.inner > 1 ? prefers_few_for_columns(rows, k, key_bytes) : prefers_few_for_rows(rows, k, key_bytes);
}

bool has_clusters(const Gpu& gpu) { return gpu.max_cluster >= 16; }

// Whether there is a multiprocessor for each row. Then blocks have 512 threads, else 256.
bool has_few(Rows rows, int64_t k, const Gpu& gpu) { return (k > 256 ? 1 : 2) * rows.count() <= gpu.multiprocessors; }

// As many blocks for a row as fill the device, each with at least a tile to read.
int64_t most_slices(Rows rows, int64_t k, int key_bytes, int threads, const Gpu& gpu) {
  if (rows.length <= whole_row_elements(key_bytes, gpu.shared_bytes)) return 1;
  const int64_t blocks = (threads == 512 ? 1 : 2) * gpu.multiprocessors;
  return std::min(blocks / rows.count(), rows.length / std::max<int64_t>(tile_elements(key_bytes, threads), 2 * k));
}

// The blocks that would keep the device busy with a row, if these are many more than stream it: those of a cluster, if
// k is small. Else 0.
int64_t idle_blocks(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  // Blocks that share such rows would have too much to tell each other.
  if (key_bytes == 8 && k > 256 && rows.inner == 1 && rows.length <= 1 << 16) return 0;
  const int64_t slices = most_slices(rows, k, key_bytes, has_few(rows, k, gpu) ? 512 : 256, gpu);
  return slices > (has_clusters(gpu) && k <= 256 ? 2 * kStreamBlocks : 1) ? slices : 0;
}

// Whether the wave kernels take less time than those that hold or stream a row.
bool prefers_wave(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  if (k > 128 && key_bytes == 1 && rows.length > 1 << 20) return false;
  // The sieve has to wait more often, which takes little of its time if there is much to read.
  const bool sieves = has_clusters(gpu) && (key_bytes == 2 || key_bytes == 4);  // other GPUs have too little memory
  if (k > 128 && sieves && rows.elements() > 3 << 22) return false;
  if (sorted && key_bytes == 1 && sweeps_bytes(rows)) return false;
  if (rows.length * key_bytes < (key_bytes == 8 ? kMinWaveBytes / 2 : kMinWaveBytes)) return false;
  // If a row has few blocks, these have too much to tell each other.
  const int64_t most = 4 * rows.count() > kMaxWaveRows ? 8 : key_bytes == 8 ? 12 : kMaxWaveK;
  if (k > most * (gpu.multiprocessors / rows.count())) return false;
  const bool holds = has_clusters(gpu) && key_bytes <= 4 && k <= kMaxHeldK &&
                     rows.length <= longest_held(rows, key_bytes) &&
                     held_fits(held_shape(rows.count(), rows.length * key_bytes, gpu.multiprocessors), rows.count(),
                               rows.length, gpu.multiprocessors);
  return rows.count() <= (holds ? (key_bytes == 2 ? 0 : 4) : key_bytes >= 4 ? kMaxWaveRows : kMaxWaveRows / 4);
}

// Whether the sieve is faster than the streaming kernel for a smaller k than usual: where all rows are read at the same
// time, or rows are short.
bool sieves_short(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (k <= kMaxHeldK) return false;
  if (rows.count() <= gpu.multiprocessors) return true;
  if (2 * rows.count() <= 5 * gpu.multiprocessors) return rows.length * key_bytes <= 4 * kMaxWholeLength;
  return key_bytes == 2 && rows.length >= 1 << 15 && rows.length <= kMaxWholeLength;
}

// For rows of narrow keys that are too long for sorts_by_digits(): whether it takes less time to sort them by all of
// their digits than to select.
bool sorts_narrow(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (rows.inner > 1 || key_bytes > 2 || rows.length > 2 * kMaxSortLength) return false;
  const bool few = rows.count() <= gpu.multiprocessors;
  if (key_bytes == 1) return k > (few ? 127 : 256);
  return k > 256 && (few || 8 * k >= rows.length);
}

// Whether rows of narrow keys are so long, and few, that the passes of a sort over memory take less time than to
// select.
bool sweeps_narrow(Rows rows, int64_t k, int key_bytes) {
  const int64_t length = rows.length, elements = rows.elements();
  if (key_bytes > 2 || length <= kMaxSortLength) return false;
  if (key_bytes == 2 && rows.inner > 1) return rows.inner <= 16 && k > 256 && elements <= 1 << 18;
  if (rows.inner > 1) return false;
  if (key_bytes == 2) {
    if (length < kMinWholeLength) return k > kMostRowsK && elements <= (k > 1024 ? 1 << 18 : 1 << 17);
    const bool sieves = 16 * k <= length && length <= kMaxWholeLength;  // in one block
    return elements <= (sieves ? 1 << 17 : 1 << 18) && k > (sieves ? 1500 : 256);
  }
  if (length <= 2 * kMaxSortLength) return k > kMostRowsK && elements <= 1 << 18;
  if (sweeps_bytes(rows)) return true;
  if (k <= 64) return false;
  const int64_t most = length >= 1 << 19 && length < 1 << 22 && rows.count() <= 4 ? 1 << 22
                       : rows.count() <= 2                                        ? 1 << 20
                                                                                  : 3 << 18;
  return elements <= most;
}

// Whether the digits kernel takes less time than those that would sort, stream or divide. The limits are from some
// thousand random problems on an H200. Other kernels are faster where they find a good threshold by few elements: for
// small k, for sorted results of long rows, and for most rows of 32 bits.
bool prefers_digits(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  const int64_t length = rows.length, elements = rows.elements();
  const bool longer = length > (sorted || rows.inner > 1 ? kMaxSortLength : kMaxSortLength / 2);
  if (key_bytes == 8 || (k <= 64 && (rows.inner == 1 || !longer))) return false;
  if (rows.inner > 1 && !longer) return prefers_digits_for_short_columns(rows, k, key_bytes, sorted, gpu);
  if (rows.inner > 1) {
    const int64_t count = rows.count();
    if (!sorted && k > kMaxStreamK) return 3 * k <= length && elements <= 1 << 23;
    if (length <= 2 * kMaxSortLength && k > (key_bytes == 4 ? 512 : kMaxRowsK) && count <= (4 * k <= length ? 40 : 12))
      return true;
    if (key_bytes <= 2)
      return 8 * k <= length && (elements <= (key_bytes == 2 && rows.inner < 8 ? 1 << 22 : 1 << 21) ||
                                 (length <= 1 << 16 && (k > kMaxRowsK || (key_bytes == 1 && rows.inner < 8))));
    return (k > 512 || (k > kMaxRowsK && count <= 12)) && rows.inner <= 32 && length <= 1 << 16 && 4 * k <= length;
  }
  // A block would sort more bytes than it selects.
  if (!longer && key_bytes == 1 && sorted && rows.count() > 4 * gpu.multiprocessors)
    return length > kMaxSortLength * 3 / 4 && k > kMostRowsK && 16 * k <= length;
  if (!longer) return false;
  if (!sorted) {
    const bool few = rows.count() <= kMostWideClusters && elements <= 1 << 19 && length > kMaxSortLength;
    if ((3 * k > length && !few) || k <= (key_bytes == 4 ? 192 : 128)) return false;
    if (elements <= 1 << 22 && k > kMaxSieveK) return true;
    // The sieve takes about as long for a few short rows.
    const bool few_short = (2 * rows.count() <= gpu.multiprocessors && length <= 1 << 16) ||
                           (8 * rows.count() <= gpu.multiprocessors && length <= 1 << 17);
    if (key_bytes == 4)
      return length <= (8 * rows.count() <= gpu.multiprocessors   ? 1 << 17
                        : 4 * rows.count() <= gpu.multiprocessors ? 1 << 16
                        : 24 * k > length                         ? 1 << 15  // more than the sieve takes
                                                                  : 3 << 13);
    if (elements > 1 << 22 && 5 * k > length) return false;
    if (key_bytes == 2 && rows.count() <= kMostWideClusters && length <= 1 << 19) return true;
    return length <= 1 << 18 &&
           (key_bytes == 1 || few_short || length < kMinWholeLength || k > kMaxSieveK || 16 * k > length);
  }
  if (key_bytes == 1) {
    if (length <= 2 * kMaxSortLength) return 8 * k <= length;
    const bool fits = length <= (k > kMaxStreamK ? 1 << 17 : 1 << 16);
    return 16 * k <= length && (fits || (elements <= 1 << 22 && 2 * rows.count() <= gpu.multiprocessors));
  }
  if (length >= 2 * kMaxSortLength) {
    if (key_bytes == 4)
      return length < 1 << 15 && k > 1024 && 8 * k <= length && 4 * rows.count() <= gpu.multiprocessors;
    if (k > kMaxSieveK) return length <= 1 << 17 && 8 * k <= length;
    if (16 * k > length) return length < 1 << 15 && 7 * k <= length;  // more than the sieve takes
    return k > 256 && length > 5 << 14 && length <= 3 << 16 && 8 * rows.count() <= gpu.multiprocessors;
  }
  return key_bytes == 2 ? k <= 2048 : k > 512 && 4 * k <= length && 2 * rows.count() > 3 * gpu.multiprocessors;
}

// Whether few elements are sorted whole, if one launch or merges can sort them. That takes no longer for data in order
// or with ties, and hardly longer than to select from random data.
bool sorts_at_once(Rows rows, int64_t k, int key_bytes) {
  const int64_t length = rows.length, elements = rows.elements();
  if (elements > 1 << 18) return false;
  if (elements > 1 << 17) {
    if (key_bytes == 4) return k > kMaxSieveK && 16 * k >= length && rows.inner == 1;
    return key_bytes == 8 && k > kMaxStreamK && length > kMaxSortLength && rows.inner <= 8 &&
           (rows.inner > 1 || 16 * k >= length);
  }
  if (key_bytes == 8) return rows.inner <= 8 && k > (length >= 1 << 15 && rows.inner == 1 ? 384 : 1024);
  if (key_bytes < 4 || (rows.inner > 1 && length <= kMaxSortLength)) return false;
  const int64_t count = rows.count();
  if (length <= kMaxSortLength) return length > kMaxSortLength / 2 && k > (count <= 4 ? 512 : 1024) && count <= 10;
  if (length < 2 * kMaxSortLength && rows.inner == 1) return k > (elements <= 1 << 16 ? kMostRowsK : 256);
  return k > 1024 && 32 * k >= length;
}

// Whether results in the order of indices, of elements of 64 bits, are best found by reading a small array twice.
bool gathers_wide(Rows rows, int64_t k, int key_bytes, bool sorted) {
  return !sorted && key_bytes == 8 && k > 512 && rows.length > kMaxSortLength && rows.elements() <= 1 << 22;
}

// Whether the buckets kernels can take the problem.
bool takes_buckets(Rows rows, int64_t k, int key_bytes, bool sorted, const Gpu& gpu) {
  // For results in the order of indices, candidates that several blocks sort are divided and sorted twice. If these are
  // many, or a large part of the row, or if the array is small, it is faster to read it twice.
  if (gathers_wide(rows, k, key_bytes, sorted)) return false;
  if (!sorted && k > kMaxStreamK &&
      ((k > kMaxSieveK && rows.count() * k >= 1 << 15) || rows.elements() * key_bytes < 8 << 20 ||
       10 * k > rows.length))
    return false;
  // Columns side by side have a block each, and these must all run at the same time.
  return k <= kMaxBucketsK && rows.length >= 2 * k &&
         rows.inner <= (has_clusters(gpu) ? kMostBeside : kMostBeside / 8) &&
         rows.length * rows.inner < int64_t{1} << 32;
}

// Whether the buckets kernels are faster than the streaming kernel. That one leaves a part of the device idle if rows
// are few, and cuts its candidates to k again and again, which takes long if k is large.
bool prefers_buckets(Rows rows, int64_t k, int key_bytes, const Gpu& gpu) {
  if (idle_blocks(rows, k, key_bytes, gpu)) return true;
  if (rows.inner >= 8 && rows.length >= 1 << 15 && k > 128) return true;
  if (rows.inner > 1) return prefers_buckets_for_columns(rows, key_bytes);
  const bool short_rows = rows.length <= 2 * kMaxSortLength;
  if (key_bytes == 8) return false;
  // Most bytes tie, and those in order raise the threshold of a stream again and again.
  const bool once = rows.count() <= 2 * gpu.multiprocessors && rows.length >= 5 << 14 && rows.length <= 3 << 17;
  if (key_bytes == 1 && k > kMaxHeldK && k <= 512 && once) return true;
  if (key_bytes == 4) return k > 512 && short_rows && 2 * rows.count() <= 3 * gpu.multiprocessors;
  if (short_rows) return k > (rows.count() > gpu.multiprocessors && key_bytes == 2 ? 256 : 512);
  return k > (key_bytes == 2 ? 512 : 1024) && rows.length <= 5 * kMaxSortLength;
}

// Whether sorting the whole row takes no longer than selecting from it, although it needs several times the memory of
// the row: by the buckets kernels if they can take the problem (`divides`), else by kRadix, which reads the row once
// for each byte of a key and twice more. Arrays of a few hundred thousand elements are always sorted whole, and many
// rows of 16 bits only for a larger k.
bool sorts_whole(Rows rows, int64_t k, int key_bytes, bool divides) {
  if (rows.elements() <= (key_bytes == 8 ? 1 << 15 : key_bytes == 4 ? 1 << 17 : 1 << 19)) return true;
  const bool by_block = key_bytes == 4 && rows.length <= 2 * kMaxSortLength;
  if (divides && key_bytes >= 4) return (by_block ? 8 : 4) * k >= rows.length;
  if (divides && key_bytes == 2 && rows.inner == 1 && rows.count() >= 12 && rows.elements() >= 3 << 19)
    return 14 * k >= rows.length;
  return (key_bytes <= 2 || rows.length >= 1 << 19 ? 24 : 8) * k >= rows.length;
}

// Whether it takes less time to select the k-th element, to gather all up to it, and to sort them by digits, than to
// divide candidates or to sort the whole row. Each of the three has to wait for its blocks several times, so there must
// be many elements.
bool selects_first(Rows rows, int64_t k, int key_bytes) {
  const int64_t chosen = rows.count() * k, elements = rows.elements(), length = rows.length;
  const bool many = rows.count() >= (key_bytes == 8 ? 40 : 128);  // then they may be shorter
  const bool large = 4 * k >= length;  // the whole row would be sorted; else candidates would be divided
  if ((rows.inner > 1 && (key_bytes != 4 || !large)) || k <= kMaxStreamK ||
      length < (!many || key_bytes < 4 ? 1 << 16
                : key_bytes == 4       ? (1 << 14) + 1
                                       : 1 << 14))
    return false;
  if (key_bytes == 8) {
    if (chosen < (large || many ? 1 << 17 : 3 << 17)) return false;
    return 2 * k <= length ? elements > 1 << 18 : elements >= 1 << 22 && 4 * k <= 3 * length;
  }
  if (elements < (key_bytes == 4 ? 3 << 20 : 1 << 22) && (large || key_bytes < 4)) return false;
  if (key_bytes == 4) return chosen >= 1 << 19 && 2 * k <= length;
  return chosen >= 1 << 18 && 8 * k <= length && length >= (key_bytes == 1 ? 1 << 19 : 1 << 16);
}

// Whether columns are better transposed to rows, where other kernels take them. Kernels that read columns one by one
// read each sector several times, and those for rows find better thresholds.
bool turns_columns(Rows rows, int64_t k, int key_bytes, bool sorted, Algorithm in_place, Algorithm of_rows) {
  const int64_t length = rows.length, bytes = rows.elements() * key_bytes;
  const bool once =
      of_rows == Algorithm::kRows || of_rows == Algorithm::kHeld || of_rows == Algorithm::kWave ||
      (of_rows == Algorithm::kSieve && (k >= kMinSieveK || rows.count() <= 64 || length <= kMaxWholeLength));
  const bool large = rows.inner >= 8 && rows.elements() >= 1 << 22 && length > kMaxSortLength;
  switch (in_place) {
    case Algorithm::kBuckets:
      return (large && k > kMaxStreamK && key_bytes <= 2) || (once && bytes <= (key_bytes <= 2 ? 1 << 26 : 1 << 25));
    case Algorithm::kDigits:
      if (large && key_bytes > 1 && k > kMaxRowsK) return true;
      if (rows.inner >= 32 && rows.elements() >= 1 << 22 && length >= kMaxSortLength / 2 && key_bytes == 2) return true;
      return once && length > kMaxSortLength && (sorted || of_rows != Algorithm::kSieve);
    case Algorithm::kStream:
      if (large && k > kMaxRowsK) return true;
      return length >= kMaxSortLength / 2 &&
             (once || of_rows == Algorithm::kSort || (of_rows == Algorithm::kStream && rows.inner >= 8));
    case Algorithm::kRows: return once && rows.inner >= 32 && length >= kMaxSortLength / 2;
    // Narrow columns are copied to shared memory element by element.
    case Algorithm::kColumns: return once && length >= 1024 && key_bytes <= 2;
    case Algorithm::kSort:
      return rows.inner >= 8 && rows.elements() >= 1 << 20 && length >= kMaxSortLength / 4 && key_bytes <= 4;
    default: return false;
  }
}

}  // namespace jaxgpuops::topk
