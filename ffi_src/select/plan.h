// The geometry of the CUDA kernels. Plans are pure functions of the problem, so that Python can ask for them where
// there is no GPU.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "select/select.h"

namespace jaxgpuops::select {

enum class Selecting {
  kEmpty,      // nothing to write
  kThread,     // rows of a few elements, each in the registers of a thread
  kWarp,       // rows of up to kMostWarpSelect elements, by a warp each
  kTeams,      // longer rows, each in the shared memory of a team of warps
  kRegisters,  // longer rows of up to kMostRegisterSelect elements, each in the registers of a block
  kBlock,      // longer rows whose keys fit in the shared memory of a block
  kCluster,    // rows whose keys fit in the shared memory of a cluster of blocks, or of a block if they are few
  kLong,       // longer rows, by several blocks each
  kNone,       // a sort is faster
};
constexpr const char* kSelectingNames[] = {"empty", "thread",  "warp", "teams", "registers",
                                           "block", "cluster", "long", "none"};

struct SelectPlan {
  Selecting algorithm = Selecting::kEmpty;
  bool turns = false;  // the axis is not the last: columns are transposed to rows, into the workspace
  int threads = 0;
  int64_t table_at = 0;  // where the counts of the ranks are: in shared memory after the keys, or in a row's workspace
  int64_t shared_bytes = 0;
  int64_t workspace_bytes = 0;  // workspace of one outer index
  // Keys of a row in shared memory, for kThread, and for kWarp where a warp goes by steps.
  int64_t pitch = 0;
  bool bisects = false;  // for kWarp: whether a warp bisects intervals of keys
  // Blocks of a cluster, each of which has `table_at` bytes of the row at most; for kTeams, blocks of the launch, whose
  // teams have room for so many bytes of a row each.
  int64_t blocks = 1;
  int team = 1;  // for kTeams: warps of a team
  // The members below are for kLong.
  int64_t slices = 1;       // blocks that share a row
  int64_t slice_packs = 0;  // vectors of 16 bytes in a slice
  // The most elements that a warp keeps in shared memory, and the most of its steps that they come from.
  int kept = 0, kept_steps = 0;
  int64_t turned_bytes = 0;  // bytes of the transposed rows, which stand before the rows' workspaces
  // In bytes of a row's workspace: where its lists would begin, which stand after the heads and tables of all rows; and
  // how large it is. `list_size` is how many elements a list has room for, which takes `list_bytes`.
  int64_t list_at = 0, list_size = 0, list_bytes = 0, row_bytes = 0;
  int64_t tiles = 0;     // of a partition: tiles of a row that blocks move
  bool apart = false;    // whether a kernel of its own takes the samples; else each block takes that of its row
  bool counts = false;   // whether blocks count all keys of 16 bits, if all blocks of a row run at the same time
  bool overlap = false;  // whether the second kernel may start before the first one ends
};

constexpr int kSelectBinBits = 9;          // there are 2^9 parts of an interval of keys, each with a count
constexpr int kSelectFew = 64;             // the most elements that are compared with each other
constexpr int kMostRanks = 9;              // 8 quantiles and the last element of the row
constexpr int kMostClusterThreads = 1024;  // threads of a block of kCluster, or half as many
// For short rows: threads of a block; the longest rows that one thread selects from, and those that a warp selects
// from.
constexpr int kShortSelectThreads = 128;
constexpr int64_t kMostThreadSelect = 64, kMostWarpSelect = 1024;
// Elements of a row in the registers of a thread, and the longest rows that the registers of a block hold.
constexpr int kRegisterSelect = 32;
constexpr int64_t kMostRegisterSelect = 512 * kRegisterSelect;
// For rows that no block holds: the threads of a block, the most elements that are listed in the end, the bits of a
// part's number in a table, the sets of tables in the workspace, the most steps from which a warp keeps elements, and
// the bytes of the head of a row's workspace.
constexpr int kLongThreads = 512, kLongFew = 2048, kLongBinBits = 9, kLongTables = 3, kMostKeptSteps = 32;
constexpr int64_t kLongHeadBytes = 1024;
constexpr int64_t kKeyCountsBytes = 2 << 16;  // of the counts of all keys of 16 bits, if a block counts them
constexpr int64_t kPartitionTile = 8192;  // elements of a row that a block of its partition moves, if several share it

SelectPlan plan_select(const Select& problem, const Gpu& gpu);

// Of each contiguous row, the k elements that come first in an order, in order of appearance: a partition (kth in
// select.h) of which only the first part is wanted. Top-k takes it for large k.
inline Select firsts_of(const Rows& rows, int64_t k, int bits) {
  Select problem;
  problem.rows = rows;
  problem.count = 1;
  problem.bits = bits;
  problem.kth = k - 1;
  return problem;
}

// By kLong, in rows of any length. A workspace of any number of rows has as many times the bytes of one.
SelectPlan plan_firsts(const Rows& rows, int64_t k, int bits, const Gpu& gpu);

}  // namespace jaxgpuops::select
