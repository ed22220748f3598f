// How a scan is cut into tiles, and how tiles are scanned. The cut decides in which order elements are combined, so it
// depends on length, inner and the width of the dtype only, and not on the number of threads or rows.
#pragma once

#include <memory>
#include <vector>

#include "common/cpu/parallel.h"
#include "common/rounding.h"
#include "scan/cpu/monoid.h"

namespace jaxgpuops::scan::cpu {

constexpr int64_t kColumns = 16;            // with at least so many columns, columns are the lanes
constexpr int64_t kColumnLanes = 64;        // the least number of columns that are lanes; more if the axis is short
constexpr int64_t kParts = 32;              // lanes that share a long row
constexpr int64_t kShort = 512;             // the longest row that is one lane
constexpr int64_t kBlockTiles = 32;         // tiles of a block, if lanes share rows
constexpr int64_t kBlockSteps = 512;        // steps of a block of columns; few, so that rounding errors do not add up
constexpr int64_t kTaskElements = 1 << 15;  // target number of elements of a task of short rows

// A strip is the rows that are scanned side by side. Its tiles follow each other along the axis and form blocks. The
// fold of a block starts with its own first element, so that blocks can be folded in parallel.
struct Cut {
  explicit Cut(const Rows& rows) : rows(rows) {
    const int64_t fitting = kTileElements / std::max<int64_t>(rows.length, 1);  // lanes of a tile that has all steps
    run = rows.inner;
    if (rows.inner >= kColumns || rows.length <= kShort) {
      const int64_t least = rows.inner >= kColumns ? kColumnLanes : ceil_div(kParts / 2, rows.inner) * rows.inner;
      const int64_t most = std::clamp(fitting, least, kMaxLanes);
      run = std::min(run, most);
      if (rows.length <= kShort) outers = most / run;
    } else {
      parts = kParts / rows.inner;
    }
    runs_per_outer = ceil_div(rows.inner, run);
    if (runs_per_outer > 1) outers = 1;
    strips = ceil_div(rows.outer, outers) * runs_per_outer;
    width = outers * run;
    tile_steps = kTileElements / (width * parts);
    block = parts > 1 ? kBlockTiles * tile_steps * parts : kBlockSteps;
    blocks = ceil_div(rows.length, block);
  }

  // The cut for RowWorker: each strip is a single row of neighbouring elements.
  Cut(const Rows& rows, int64_t tile_steps)
      : rows(rows),
        run(1),
        width(1),
        runs_per_outer(1),
        strips(rows.outer),
        tile_steps(tile_steps),
        block(kBlockTiles * tile_steps),
        blocks(ceil_div(rows.length, block)) {}

  // Finds the rows of a strip. If lanes share rows, each row occurs once for each of its parts.
  void find(int64_t strip, Lanes& lanes) const {
    lanes.outer = strip / runs_per_outer * outers;
    lanes.inner = strip % runs_per_outer * run;
    lanes.run = std::min(run, rows.inner - lanes.inner);
    lanes.parts = parts > 1;
    lanes.count = lanes.run * (parts > 1 ? parts : std::min(outers, rows.outer - lanes.outer));
  }

  const Rows rows;
  int64_t run, outers = 1;  // inner and outer indices of a strip
  int64_t width;            // rows of a strip
  int64_t parts = 1;        // lanes that share a row
  int64_t runs_per_outer, strips, tile_steps, block, blocks;
};

// Folds the steps [begin, end) of each lane. Step `begin` is combined with the step before it.
template <class M>
JAXGPUOPS_SIMD void fold_steps(typename M::C* e, int64_t lanes, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = s * lanes; i < (s + 1) * lanes; ++i)
      M::store(e, i, M::combine(M::load(e, i - lanes), M::load(e, i)));
  }
}

// Prepends the elements of step `step` to those of each step in [0, end): combines them as what comes before.
template <class M>
JAXGPUOPS_SIMD void prepend(typename M::C* e, int64_t lanes, int64_t step, int64_t end) {
  for (int64_t s = 0; s < end; ++s) {
    const int64_t from = (step - s) * lanes;
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = s * lanes; i < (s + 1) * lanes; ++i)
      M::store(e, i, M::combine(M::load(e, i + from), M::load(e, i)));
  }
}

// A Kind converts the operands of one kind of scan to elements, and folds to results. Its members are
//
//   Monoid                          the monoid, whose elements are in the first planes
//   kPlanes                         the number of planes
//   bind(lanes)                     selects a strip
//   Monoid::Value initial(lane)     the fold before the first position
//   build(tile, planes)             makes the elements of a tile
//   finish(tile, planes)            writes the results, from the fold up to each step and the fold before the tile
template <class Kind>
class Worker {
 public:
  using M = typename Kind::Monoid;
  using C = typename M::C;
  using Value = typename M::Value;

  Worker(const Cut& cut, const Kind& kind) : cut_(cut), kind_(kind), memory_(new C[Kind::kPlanes * kPlane]) {
    tile_.length = cut.rows.length;
  }

  void turn_to(int64_t strip) {
    cut_.find(strip, lanes_);
    tile_.lanes = lanes_.count;
    tile_.run = lanes_.run;
    kind_.bind(lanes_);
  }
  int64_t rows() const { return lanes_.count / cut_.parts; }

  // Scans a block. For each row, `carry` has the fold of all blocks before it, and is null for the first block. `total`
  // is set to the fold of the block itself, unless it is the last one.
  void scan(int64_t block, const Value* carry, Value* total) { run<true>(block, carry, total); }
  void fold(int64_t block, Value* total) { run<false>(block, nullptr, total); }

 private:
  template <bool kScan>
  void run(int64_t block, const Value* carry, Value* total) {
    const int64_t first = block * cut_.block, last = std::min(cut_.rows.length, first + cut_.block);
    const int64_t tile_length = cut_.tile_steps * cut_.parts;
    for (int64_t at = first; at < last; at += tile_length) {
      tile_.steps = ceil_div(std::min(tile_length, last - at), cut_.parts);
      tile_.first = at;
      if (cut_.parts > 1) tile_.spread = tile_.steps;
      C* e = memory_.get() + kMaxLanes;
      kind_.build(tile_, e);
      const bool empty = block > 0 && at == first;  // the block has no fold yet
      if (cut_.parts > 1) {
        scan_parts<kScan>(e, carry, total, empty);
      } else {
        scan_rows<kScan>(e, carry, total, empty, std::min(at + tile_length, last) < cut_.rows.length);
      }
      if (kScan) kind_.finish(tile_, e);
    }
  }

  template <bool kScan>
  void scan_rows(C* e, const Value* carry, Value* total, bool empty, bool goes_on) {
    const int64_t lanes = tile_.lanes, steps = tile_.steps;
    if (tile_.first == 0) {
      for (int64_t w = 0; w < lanes; ++w) M::store(e, w - lanes, kind_.initial(w));
    } else if (!empty) {
      for (int64_t w = 0; w < lanes; ++w) M::store(e, w - lanes, total[w]);
    }
    fold_steps<M>(e, lanes, empty ? 1 : 0, steps);
    if (kScan && carry) {
      Value before[kMaxLanes];
      for (int64_t w = 0; w < lanes; ++w) {
        before[w] = empty ? carry[w] : M::combine(carry[w], total[w]);
        total[w] = M::load(e, (steps - 1) * lanes + w);
        M::store(e, steps * lanes + w, carry[w]);
      }
      prepend<M>(e, lanes, steps, steps);
      for (int64_t w = 0; w < lanes; ++w) M::store(e, w - lanes, before[w]);
    } else if (goes_on) {
      for (int64_t w = 0; w < lanes; ++w) total[w] = M::load(e, (steps - 1) * lanes + w);
    }
  }

  template <bool kScan>
  void scan_parts(C* e, const Value* carry, Value* total, bool empty) {
    const int64_t lanes = tile_.lanes, steps = tile_.steps;
    fold_steps<M>(e, lanes, 1, steps);
    for (int64_t row = 0; row < cut_.width; ++row) {
      Value sum = tile_.first == 0 ? kind_.initial(row) : total[row];
      bool none = empty;
      for (int64_t w = row; w < lanes; w += cut_.width) {
        const Value part = M::load(e, (steps - 1) * lanes + w);
        if (kScan) M::store(e, w - lanes, !carry ? sum : none ? carry[row] : M::combine(carry[row], sum));
        sum = none ? part : M::combine(sum, part);
        none = false;
      }
      total[row] = sum;
    }
    if (kScan) prepend<M>(e, lanes, -1, steps);
  }

  const Cut& cut_;
  Kind kind_;
  std::unique_ptr<C[]> memory_;
  Lanes lanes_;
  Tile tile_;
};

// Scans all strips. make() returns a Worker, or an object with the same members.
template <class Make>
void run_cut(const Cut& cut, const Workers& workers, const Make& make) {
  using M = typename decltype(make())::M;
  using Value = typename M::Value;
  if (cut.blocks == 1 || workers.threads == 1 || cut.strips >= 2 * workers.threads) {
    const int64_t strips_per_task = std::max<int64_t>(1, kTaskElements / (cut.width * cut.rows.length));
    parallel_for(workers, ceil_div(cut.strips, strips_per_task), [&](int64_t task) {
      auto worker = make();
      Value carry[kMaxLanes], total[kMaxLanes];
      const int64_t last = std::min(cut.strips, (task + 1) * strips_per_task);
      for (int64_t strip = task * strips_per_task; strip < last; ++strip) {
        worker.turn_to(strip);
        for (int64_t block = 0; block < cut.blocks; ++block) {
          worker.scan(block, block > 0 ? carry : nullptr, total);
          if (block + 1 == cut.blocks) break;
          for (int64_t w = 0; w < worker.rows(); ++w) carry[w] = block > 0 ? M::combine(carry[w], total[w]) : total[w];
        }
      }
    });
    return;
  }

  // There are a few long strips: fold each block, then fold these folds in order, then scan each block. `folds` first
  // has the fold of each block, and then the fold of all blocks up to it.
  std::vector<Value> folds(cut.strips * cut.blocks * cut.width);
  const auto fold_of = [&](int64_t strip, int64_t block) { return &folds[(strip * cut.blocks + block) * cut.width]; };
  parallel_for(workers, cut.strips * (cut.blocks - 1), [&](int64_t task) {
    auto worker = make();
    const int64_t strip = task / (cut.blocks - 1), block = task % (cut.blocks - 1);
    worker.turn_to(strip);
    worker.fold(block, fold_of(strip, block));
  });
  for (int64_t strip = 0; strip < cut.strips; ++strip)
    for (int64_t block = 1; block < cut.blocks - 1; ++block)
      for (int64_t w = 0; w < cut.width; ++w)
        fold_of(strip, block)[w] = M::combine(fold_of(strip, block - 1)[w], fold_of(strip, block)[w]);
  parallel_for(workers, cut.strips * cut.blocks, [&](int64_t task) {
    auto worker = make();
    Value total[kMaxLanes];
    const int64_t strip = task / cut.blocks, block = task % cut.blocks;
    worker.turn_to(strip);
    worker.scan(block, block > 0 ? fold_of(strip, block - 1) : nullptr, total);
  });
}

template <class Kind>
void run(const Rows& rows, const Kind& kind, const Workers& workers) {
  if (rows.elements() == 0) return;
  const Cut cut(rows);
  run_cut(cut, workers, [&] { return Worker<Kind>(cut, kind); });
}

}  // namespace jaxgpuops::scan::cpu
