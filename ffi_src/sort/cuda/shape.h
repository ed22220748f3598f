// The geometry of the radix sorts, on which the plan and the kernels must agree.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rounding.h"
#include "common/rows.h"

namespace jaxgpuops::sort {

// ---- Rows that a thread holds ---------------------------------------------------------------------------------------

constexpr int64_t kMaxShortLength = 8, kLeastShortColumns = 32;
constexpr int kShortThreads = 256;
constexpr uint32_t kShortTile = 2048;  // the most elements of a block's tile

// How many outer indices the tile of a block has: a multiple of 16, so that each tile begins at a whole vector of 16
// bytes. If there are few, tiles are small, so that many multiprocessors have one. 0: there are no tiles, and each
// thread reads a row from global memory. That is so if fewer elements than the whole row are wanted.
constexpr int64_t kShortSpread = 256;  // tiles
constexpr int64_t short_tile_outers(const Rows& rows, int64_t k) {
  const int64_t few = ceil_div(ceil_div(rows.outer, kShortSpread), 16) * 16;
  return k < rows.length ? 0 : std::min<int64_t>(kShortTile / (rows.length * rows.inner) / 16 * 16, few);
}
constexpr int64_t short_blocks(const Rows& rows, int64_t k) {
  const int64_t outers = short_tile_outers(rows, k);
  return outers ? (rows.outer + outers - 1) / outers : (rows.count() + kShortThreads - 1) / kShortThreads;
}

// ---- Rows that networks sort ----------------------------------------------------------------------------------------

constexpr int kNetworkThreads = 256, kNetworkEach = 32;  // the most threads of a block; elements of a thread
constexpr int kNetworkBlocks = 3;                        // of a multiprocessor
constexpr int64_t kMostWarpLength = 32 * kNetworkEach, kMostNetworkLength = 4096;  // of rows of a warp; of any

struct NetworkShape {
  NetworkShape(const Rows& rows, bool indices, bool pairs) {
    while (team * kNetworkEach < rows.length) team *= 2;
    threads = team > 32 ? team : kNetworkThreads;
    teams = threads / team;
    tiles = ceil_div(rows.inner, pairs ? 2 * teams : teams);
    // Threads with neighbouring columns, and then those of the next rows, meet in no bank.
    pitch = team * (kNetworkEach + 1);
    if (rows.inner > 1) pitch += (32 + std::max<int64_t>(1, 32 / teams) - team) % 32;
    order_at = teams * pitch;
    shared_bytes = 4 * (order_at + (indices ? threads * (kNetworkEach / 2 + 1) : 0));
    blocks = rows.inner > 1 ? rows.outer * tiles : ceil_div(ceil_div(rows.outer, pairs ? 2 : 1), teams);
  }

  int64_t team = 1;         // threads that share a row: a part of a warp, or a block
  int64_t threads, teams;   // of a block
  int64_t tiles;            // blocks of an outer index
  int64_t pitch, order_at;  // in words of shared memory: from row to row, and where the indices are
  int64_t shared_bytes, blocks;
};

// Of rows whose segments a network sorts, a warp holds one or several, and a block at most so many times as much as a
// warp. Threads have as many places as there is room for in the registers of kNetworkEach words.
constexpr int kMostSegmentWarps = 8;
constexpr int64_t kLeastNetworked = 33;  // elements of a row
constexpr int64_t kMostTogether = kMostWarpLength / kLeastNetworked;
constexpr int64_t segment_warp_places(int key_bytes) { return key_bytes == 8 ? kMostWarpLength / 2 : kMostWarpLength; }
// A thread has one key more than places.
constexpr int64_t segment_network_bytes(int key_bytes, int64_t threads) {
  return threads * (key_bytes == 8 ? 8 * (kNetworkEach / 2 + 1) : 4 * (kNetworkEach + 1));
}

// ---- Rows that a block holds ----------------------------------------------------------------------------------------

// Elements of a thread: fewer in short rows, so that most warps of the smallest block have some, and in few rows, whose
// blocks have more threads then.
constexpr int block_items(int key_bytes, int64_t length, bool few) {
  if (key_bytes < 8 && length <= 6 * 256) return 6;
  return key_bytes == 8 || length <= (few ? 4096 : 2048) ? 8 : 16;
}

// Shared memory of block_kernel: the counts of each warp, the keys, and indices of 16 bits.
constexpr int64_t block_shared_bytes(int key_bytes, int threads, int items) {
  return threads / 32 * 1024 + threads * items * (std::max(key_bytes, 4) + 2) + 64;
}

// Segments of longer rows: a block holds one of up to so many elements, or of twice as many.
constexpr int64_t kBlockSegments = 4096;

// ---- Segments of rows that a block holds ----------------------------------------------------------------------------

// Threads of a block, and elements of a thread. Few rows have more threads.
struct SegmentsBlock {
  int threads, items;
};
constexpr SegmentsBlock segments_block(int key_bytes, int64_t length, bool few) {
  if (length <= 1024) return {256, 4};
  if (key_bytes == 8 || (few && length > 4096 && length <= 8192)) return {1024, 8};
  return length <= 4096 ? SegmentsBlock{512, 8} : length <= 8192 ? SegmentsBlock{512, 16} : SegmentsBlock{1024, 16};
}
// Shared memory of segments_kernel: the counts of each warp, numbers of segments, keys, and indices of 16 bits.
constexpr int64_t segments_shared_bytes(int key_bytes, int threads, int items) {
  return threads / 32 * 1028 + 4096 + threads * items * (std::max(key_bytes, 4) + 2) + 64;
}

// ---- Segments of few elements ---------------------------------------------------------------------------------------

constexpr int kCompareThreads = 256;
constexpr int64_t kMostCompared = 64 * kCompareThreads;  // elements of a row

// What a block of compare_kernel has: `each` elements of a row, of which a block has one of the `chunks`, or `together`
// whole rows. So many `lanes` compare an element with others.
struct CompareShape {
  uint32_t lanes, each, chunks, together;
};

// `shared`: all rows have the same offsets. All blocks run at the same time, since each first finds the segments.
inline CompareShape compare_shape(const Rows& rows, bool shared) {
  constexpr int64_t kBlocks = 528, kLeast = 16;
  const int64_t length = rows.length, wanted = std::max(kLeast, rows.elements() / kBlocks);
  uint32_t lanes = 1;
  while (lanes < kCompareThreads / kLeast && 2 * lanes * std::min(wanted, length) <= kCompareThreads) lanes *= 2;
  if (shared && 2 * length <= wanted) {
    const auto together = static_cast<uint32_t>(wanted / length);
    return {lanes, static_cast<uint32_t>(together * length), 1, together};
  }
  const auto chunks = static_cast<uint32_t>((length - 1) / wanted + 1);
  return {lanes, static_cast<uint32_t>((length - 1) / chunks + 1), chunks, 1};
}

// Of many short rows with the same segments, a block has `together` at a time, and a thread so many elements of them.
constexpr int64_t kMostShared = 256;  // elements of a row
constexpr int kManyEach = 8;

// The keys of a row, or of several.
inline int64_t compare_shared_bytes(const Rows& rows, const CompareShape& shape, int64_t element_bytes) {
  return (rows.length * shape.together + 4) * std::max<int64_t>(element_bytes, 4);
}

// ---- Longer ones ----------------------------------------------------------------------------------------------------

constexpr int kSweepThreads = 384;
// Tiles of a sweep. If there are few elements in all, smaller ones spread them over more multiprocessors. GPUs whose
// shared memory is too small for the large ones have small ones, too. If huge ones are no more than there are
// multiprocessors, each of these has one, and tiles exchange counts.
enum SweepTiles { kHugeTiles, kLargeTiles, kSmallTiles, kTinyTiles };
constexpr int sweep_threads(SweepTiles tiles) { return tiles == kHugeTiles ? 2 * kSweepThreads : kSweepThreads; }
constexpr int sweep_blocks(int key_bytes, SweepTiles tiles, bool indices) {  // that a multiprocessor holds at least
  if (tiles == kHugeTiles) return 1;
  return tiles == kLargeTiles && (key_bytes == 8 || indices) ? 2 : 3;
}
constexpr int sweep_items(int key_bytes, SweepTiles tiles, bool indices) {  // elements of a thread
  if (key_bytes == 1) return 16;                                            // there is one pass
  if (tiles > kLargeTiles) return tiles == kTinyTiles ? 4 : 8;
  return key_bytes < 8 ? 23 : indices ? 16 : 20;
}
constexpr int64_t sweep_tile(int key_bytes, SweepTiles tiles, bool indices) {
  return sweep_threads(tiles) * sweep_items(key_bytes, tiles, indices);
}
constexpr int64_t sweep_shared_bytes(int key_bytes, SweepTiles tiles, bool indices) {
  return sweep_threads(tiles) / 32 * 1024 +
         sweep_tile(key_bytes, tiles, indices) * (std::max(key_bytes, 4) + (indices ? 4 : 0));
}

// How many of all `elements` a block of count_kernel counts: fewer if there would not be two blocks for each
// multiprocessor.
constexpr int64_t kCountStep = 1 << 12, kMostCountSteps = 8;
constexpr int64_t count_elements(int64_t elements, int multiprocessors) {
  const int64_t steps = elements / (2 * multiprocessors * kCountStep) + 1;
  return kCountStep * (steps < kMostCountSteps ? steps : kMostCountSteps);
}

// If all tiles of a row tell each other their counts, groups of neighbouring tiles add theirs up, too, so that a tile
// reads the sums of all groups and the counts of its own group only.
constexpr int64_t sweep_group(int64_t tiles) { return tiles <= 64 ? 8 : 16; }

// The state of a row, or of a segment, at the front of the workspace. It is set to zero before every sort.
struct RowHead {
  uint32_t tickets[8];  // used in the first row only: for each pass, how many tiles blocks have taken
  uint32_t counted;     // how many blocks have finished counting in this row
  uint32_t active;      // bit p: the digits of pass p differ, so the pass has to run
  uint32_t any;         // in the first row only: the bits of all rows
  uint32_t padding[5];
};

// The offset of each part of a workspace, and its total size in bytes. All passes but the last write to two buffers of
// keys, and of indices, in turn. If whole rows are wanted, the results serve as the second buffer; if there are only
// two passes, none is needed.
//
// Segments are sorted in pieces: parts of tiles, which end where a segment ends, too. Each may be the first of a
// segment.
struct SweepShape {
  SweepShape(int64_t rows, int64_t length, int64_t k, int key_bytes, bool values, bool indices, SweepTiles size,
             int64_t offsets = 0)
      : passes(key_bytes), tiles((length - 1) / sweep_tile(key_bytes, size, indices) + 1 + offsets) {
    group = sweep_group(tiles), groups = offsets ? 0 : (tiles - 1) / group + 1;
    const int64_t heads = offsets ? rows * tiles : rows;
    counts = aligned(heads * static_cast<int64_t>(sizeof(RowHead)));
    status = counts + heads * passes * 1024;
    sums = status + rows * tiles * passes * 1024;
    pieces = sums + rows * groups * passes * 1024;
    keys = pieces + (offsets ? aligned(rows * tiles * 16) : 0);
    this->indices = keys + aligned(rows * length * key_bytes);
    more_keys = this->indices + (indices ? aligned(rows * length * 4) : 0);
    more_indices = more_keys + (passes <= 2 || (values && k == length) ? 0 : aligned(rows * length * key_bytes));
    bytes = more_indices + (passes <= 2 || !indices || k == length ? 0 : aligned(rows * length * 4));
  }

  int passes;
  int64_t tiles;          // tiles, or pieces, of a row
  int64_t group, groups;  // tiles of a group, and groups of a row
  // Offsets of the parts; RowHeads are at 0.
  int64_t counts, status, sums, pieces, keys, indices, more_keys, more_indices;
  int64_t bytes;
};

// ---- Few elements: a tile for each multiprocessor -------------------------------------------------------------------

constexpr int kSplitThreads = 512;
constexpr int kMostSplitItems = 4;  // elements of a thread: a power of two, which is at least least_split_items()
constexpr int least_split_items(int key_bytes) { return key_bytes == 8 ? 2 : 1; }
constexpr int kMostBuckets = 128;  // of a row
// Samples of a row for each of its buckets. Where comparisons or many passes sort buckets, their lengths matter more.
constexpr int split_samples(int key_bytes, int items) { return key_bytes == 4 && items <= 2 ? 8 : 16; }
// Whether blocks sort their buckets by digits, or by comparisons.
constexpr bool sorts_by_digits(int key_bytes, int items) { return key_bytes == 4 && items > 1; }
// The most elements of a bucket that a block sorts: three or four times as many as in a tile, and so in the mean
// bucket. Of 10^4 rows of 128 buckets that are drawn at random, less than one has a longer bucket.
constexpr int64_t split_most(int key_bytes, int items) {
  return (split_samples(key_bytes, items) == 8 ? 4 : 3) * int64_t{kSplitThreads} * items;
}
constexpr int64_t split_shared_bytes(int key_bytes, int items) {
  const int64_t of_tile = int64_t{kSplitThreads} * items * (key_bytes + 5);
  const int64_t of_samples = split_samples(key_bytes, items) * kMostBuckets * key_bytes;
  const int64_t of_bucket =
      split_most(key_bytes, items) * (2 * key_bytes + (sorts_by_digits(key_bytes, items) ? 8 : 7));
  return kSplitThreads / 32 * 1024 + std::max({of_tile, of_samples, of_bucket}) + (6 << 10);
}

// Parcels of the splitters, the words of each exchange of counts, and a parcel for each element.
struct SplitShape {
  SplitShape(int64_t rows, int64_t length, int key_bytes, int items)
      : tiles(ceil_div(length, int64_t{kSplitThreads} * items)),
        group(sweep_group(tiles)),
        groups(ceil_div(tiles, group)) {
    const int64_t parcel = key_bytes == 8 ? 16 : 8;
    exchanges = rows * kMostBuckets * parcel;
    exchange_bytes = rows * (groups + tiles) * 1024;
    parcels = exchanges + (key_bytes + 1) * exchange_bytes;
    bytes = parcels + rows * length * parcel;
  }

  int64_t tiles;          // of a row
  int64_t group, groups;  // tiles of a group, and groups of a row
  int64_t exchanges, exchange_bytes, parcels, bytes;
};

// ---- Few elements, and segments -------------------------------------------------------------------------------------

constexpr int kSmallMergeTileBits = 10, kMergeTileBits = 12;  // logarithms of the lengths of tiles
constexpr int kMergeFanBits = 2;                              // logarithm of the runs that are merged at once
constexpr int kMergeThreads = 256;                            // of a block that merges runs
constexpr int kShortMergeTile = 3 << 10;                      // the length of the longest tile if segments are short
// The same if a network sorts it, and the logarithm of twice the distance of such tiles.
constexpr int kNetworkTile = 5 << 10, kNetworkTileBits = 13;
constexpr int merge_tile_items(int tile) { return tile == 1 << kSmallMergeTileBits ? 4 : 8; }  // of a thread
constexpr int merge_tile_threads(int tile) { return tile / merge_tile_items(tile); }
constexpr int merge_tile_blocks(int tile) {  // of a multiprocessor, at least
  return tile == kShortMergeTile ? 4 : 1024 / merge_tile_threads(tile);
}
// The length of the longest tile. Tiles of segments begin two to the step_bits places apart; half of such a tile of
// 4096 places would mostly be empty if segments are short.
constexpr int merge_tile(const Rows& rows, int64_t offsets, int tile_bits, bool network) {
  if (network) return tile_bits == kNetworkTileBits ? kNetworkTile : 1 << tile_bits;
  return offsets > 0 && rows.length <= 224 * offsets ? kShortMergeTile : 1 << tile_bits;
}

// How many merges follow the sort of tiles, and the halves of the workspace that they read and write in turn. Each half
// has a key and an index for each element. Only merges that others follow write to the workspace.
struct MergeShape {
  MergeShape(int64_t rows, int64_t length, int key_bytes, int tile_bits, bool segments)
      : step_bits(segments && length > int64_t{1} << tile_bits ? tile_bits - 1 : tile_bits),
        tiles(((length - 1) >> step_bits) + 1) {
    while (int64_t{1} << levels * kMergeFanBits < tiles) ++levels;
    indices = aligned(rows * length * (key_bytes == 8 ? 8 : 4));
    half = indices + aligned(rows * length * 4);
    across = half * std::min(levels, 2);
    bytes = across + (segments ? aligned(rows * tiles * 8) : 0);
  }

  int step_bits;         // logarithm of the distance of tiles: of segments, half of the longest tile
  int64_t tiles;         // of a row
  int levels = 0;        // merges
  int64_t indices;       // offset of the indices in a half
  int64_t half, across;  // bytes of a half, and where the segments are that have elements in two tiles
  int64_t bytes;
};

// How many places a part of a merge has, and how many parts a block. In most parts of many segments nothing is left to
// do, so they have more places, and blocks of many elements have more parts.
constexpr int64_t merge_each(const Rows& rows, bool segments) {
  return segments && rows.elements() > 1 << 19 ? 1024 : kMergeThreads;
}
constexpr int64_t merge_parts(const Rows& rows, bool segments) {
  return segments ? std::clamp<int64_t>(rows.elements() >> 20, 1, 32) : 1;
}

// ---- Columns that become rows ---------------------------------------------------------------------------------------

// Offsets in front of the sort's own workspace: the transposed elements are at 0, the transposed results follow.
struct TurnShape {
  TurnShape(Rows rows, int64_t k, int key_bytes, bool values, bool indices) {
    const int64_t wanted = rows.count() * k;
    this->values = aligned(rows.elements() * key_bytes);
    this->indices = this->values + (values ? aligned(wanted * key_bytes) : 0);
    bytes = this->indices + (indices ? aligned(wanted * 4) : 0);
  }

  int64_t values, indices;
  int64_t bytes;
};

}  // namespace jaxgpuops::sort
