// The geometry of the compare kernel that the plan and the launch must agree on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/rows.h"

namespace jaxgpuops::topk {

constexpr int64_t kMaxCompareLength = 8192;
constexpr int64_t kMaxCompared = 1 << 26;             // elements in all: their offsets have 32 bits
constexpr int64_t kMaxCompareBlocks = (1 << 16) - 1;  // of a grid of three dimensions
constexpr int64_t kMaxTeamCompare = 128;              // elements of a row that a team of lanes holds
constexpr int kTeamThreads = 128;                     // threads of a block of such teams
constexpr int kCompareThreads = 512;                  // the most threads of a block
constexpr int kCompareEach = 2;                       // elements that a lane ranks at a time
constexpr int kCompareSlices = 8;                     // the most blocks of a cluster
constexpr int kCompareParts = 16;                     // the most teams that share the comparisons of the same elements
constexpr int kCompareLeast = 32;                     // elements that each of them compares with, at least

// A tile is a few rows, or columns side by side, that a block loads. Its rows are cut into chunks, each of which a team
// of lanes ranks: kCompareEach elements a lane. If the chunks of a tile are too many for a block, several blocks load
// it, and each ranks a slice of its chunks.
struct CompareShape {
  bool in_teams = false;  // teams of lanes hold whole rows (compare_team.cu)
  int threads = 256;      // threads of a block
  int lanes = 32;         // lanes of a team, a power of two
  int64_t chunks = 1;     // chunks of a row
  int64_t rows = 1;       // rows of a tile
  int64_t own = 1;        // chunks of a slice
  int64_t slices = 1;     // slices of a tile
  int parts = 1;          // teams that share a chunk, a power of two: each compares it with a part of the row
  int64_t pitch = 0;      // words from one row to the next in shared memory
  int64_t blocks = 0;
  size_t shared_bytes = 0;

  int64_t chunk() const { return kCompareEach * lanes; }
};

// Of rows that teams hold. Two elements a lane are better than lanes of several warps.
inline CompareShape compare_team_shape(Rows rows) {
  CompareShape shape;
  shape.in_teams = true;
  shape.lanes = 4;
  while (shape.lanes < rows.length) shape.lanes *= 2;
  if (shape.lanes == 64) shape.lanes = 32;
  shape.threads = kTeamThreads;
  shape.rows = shape.threads / shape.lanes;
  shape.blocks = (rows.count() + shape.rows - 1) / shape.rows;
  return shape;
}

inline CompareShape compare_shape(Rows rows, int key_bytes, bool sorted, int64_t multiprocessors) {
  CompareShape shape;
  const auto chunks = [&](int64_t lanes) { return (rows.length + kCompareEach * lanes - 1) / (kCompareEach * lanes); };
  // Fewer lanes, if a fifth of them would have nothing to do.
  const auto idle = [&](int64_t lanes) { return chunks(lanes) * kCompareEach * lanes; };
  while (shape.lanes > 4 && 4 * idle(shape.lanes) > 5 * rows.length && idle(shape.lanes / 2) < idle(shape.lanes))
    shape.lanes /= 2;
  shape.chunks = chunks(shape.lanes);
  const int64_t all = rows.count() * shape.chunks;
  while (shape.parts < kCompareParts && 2 * shape.parts * all * shape.lanes <= kCompareThreads * multiprocessors &&
         2 * shape.parts * kCompareLeast <= rows.length)
    shape.parts *= 2;
  if (shape.parts == kCompareParts) shape.threads = kCompareThreads;
  shape.own = shape.threads / shape.lanes / shape.parts;
  // The elements of a slice are whole words of a bitmap.
  shape.own = std::max<int64_t>(shape.own, 32 / shape.chunk());
  const int64_t beside = rows.inner == 1 ? rows.outer : rows.inner;
  shape.rows = std::clamp<int64_t>(shape.own / shape.chunks, 1, beside);
  shape.slices = (shape.rows * shape.chunks + shape.own - 1) / shape.own;
  if (!sorted && shape.slices > kCompareSlices) {
    shape.own = (shape.chunks + kCompareSlices - 1) / kCompareSlices;
    shape.slices = (shape.chunks + shape.own - 1) / shape.own;
  }
  const int64_t word = key_bytes == 8 ? 8 : 4, vectors = (rows.length + 3) / 4 * 4 * word / 16;
  shape.pitch = (vectors | 1) * 16 / word;  // so that rows begin in different banks
  const int64_t bits = (shape.rows * shape.chunks * shape.chunk() + 31) / 32;
  shape.shared_bytes = static_cast<size_t>(shape.rows * shape.pitch * word + 4 * shape.own * shape.chunk() + 8 * bits);
  shape.blocks = (rows.inner == 1 ? 1 : rows.outer) * ((beside + shape.rows - 1) / shape.rows) * shape.slices;
  return shape;
}

}  // namespace jaxgpuops::topk
