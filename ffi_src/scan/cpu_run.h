// How a scan is cut into tiles, and tiles are scanned. The cut, and so the association, depends on length, inner and
// the width of the type only: not on the number of threads, nor on how many rows there are.
#pragma once

#include <memory>
#include <vector>

#include "common/parallel.h"
#include "scan/cpu_monoid.h"

namespace jaxgpuops::scan::cpu {

constexpr int64_t kColumns = 16;            // from as many columns on, they are the lanes
constexpr int64_t kColumnLanes = 64;        // .. as many of them, or more where they are short
constexpr int64_t kParts = 32;              // lanes of a long row
constexpr int64_t kShort = 512;             // longest row that is a lane itself
constexpr int64_t kBlockTiles = 32;         // tiles of a block, of a row in parts
constexpr int64_t kBlockSteps = 512;        // of a block of columns: short, so that rounding errors do not add up
constexpr int64_t kTaskElements = 1 << 15;  // about as many as a task of short rows takes

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A strip is as many rows as are scanned side by side. Its tiles follow each other along the axis, in blocks: the fold
// of a block starts from its own first element, so that blocks can be folded at the same time.
struct Cut {
  explicit Cut(const Rows& rows) : rows(rows) {
    const int64_t fitting = kTileElements / std::max<int64_t>(rows.length, 1);  // lanes of a tile that has all steps
    if (rows.inner >= kColumns) {
      width = std::min(rows.inner, std::clamp(fitting, kColumnLanes, kMaxLanes));
      strips_per_outer = ceil_div(rows.inner, width);
      strips = rows.outer * strips_per_outer;
    } else if (rows.length <= kShort) {
      width = std::clamp(fitting, kParts / 2, kMaxLanes);
      strips = ceil_div(rows.count(), width);
    } else {
      parts = kParts / rows.inner;
      width = rows.inner;
      strips = rows.outer;
    }
    tile_steps = kTileElements / (width * parts);
    block = parts > 1 ? kBlockTiles * tile_steps * parts : kBlockSteps;
    blocks = ceil_div(rows.length, block);
  }

  // The rows of the strip; with parts, as many times.
  void find(int64_t strip, Lanes& lanes) const {
    lanes.along = rows.inner >= kColumns          ? Along::kInner
                  : rows.inner == 1 && parts == 1 ? Along::kOuter
                                                  : Along::kAnywhere;
    if (lanes.along == Along::kInner) {
      lanes.outer[0] = strip / strips_per_outer, lanes.inner[0] = strip % strips_per_outer * width;
      lanes.count = std::min(width, rows.inner - lanes.inner[0]);
    } else if (parts == 1) {
      lanes.count = std::min(width, rows.count() - strip * width);
      int64_t outer = strip * width / rows.inner, inner = strip * width % rows.inner;
      for (int64_t w = 0; w < (lanes.along == Along::kOuter ? 1 : lanes.count); ++w) {
        lanes.outer[w] = outer, lanes.inner[w] = inner;
        if (++inner == rows.inner) ++outer, inner = 0;
      }
    } else {
      lanes.count = parts * width;
      for (int64_t w = 0; w < lanes.count; ++w) lanes.outer[w] = strip, lanes.inner[w] = w % width;
    }
  }

  const Rows rows;
  int64_t width;      // rows of a strip
  int64_t parts = 1;  // lanes that share a row
  int64_t strips_per_outer = 1, strips, tile_steps, block, blocks;
};

// Folds each lane from its step `begin`, which is combined with the step before it.
template <class M>
JAXGPUOPS_SIMD void fold_steps(typename M::C* e, int64_t lanes, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) {
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = s * lanes; i < (s + 1) * lanes; ++i)
      M::store(e, i, M::combine(M::load(e, i - lanes), M::load(e, i)));
  }
}

// Puts the elements of one step before those of the steps [0, end).
template <class M>
JAXGPUOPS_SIMD void prepend(typename M::C* e, int64_t lanes, int64_t step, int64_t end) {
  for (int64_t s = 0; s < end; ++s) {
    const int64_t from = (step - s) * lanes;
    JAXGPUOPS_INDEPENDENT
    for (int64_t i = s * lanes; i < (s + 1) * lanes; ++i)
      M::store(e, i, M::combine(M::load(e, i + from), M::load(e, i)));
  }
}

// A Kind makes elements and results. It has
//   Monoid                          its elements are in the first planes
//   kPlanes                         in all
//   bind(lanes)                     turns to another strip
//   Monoid::Value initial(lane)     the fold of no element
//   build(tile, planes)             makes the elements of a tile
//   finish(tile, planes)            writes the results, from the folds up to each step; also that before the first
template <class Kind>
class Worker {
 public:
  using M = typename Kind::Monoid;
  using C = typename M::C;
  using Value = typename M::Value;

  Worker(const Cut& cut, const Kind& kind) : cut_(cut), kind_(kind), memory_(new C[Kind::kPlanes * kPlane]) {
    tile_.length = cut.rows.length;
    tile_.uniform = cut.parts == 1;
  }

  void turn_to(int64_t strip) {
    cut_.find(strip, lanes_);
    tile_.lanes = lanes_.count;
    kind_.bind(lanes_);
    rows_ = lanes_.count / cut_.parts;
    for (int64_t w = 0; w < rows_; ++w) initial_[w] = kind_.initial(w);
  }
  int64_t rows() const { return rows_; }

  // Scans a block. `carry` has the fold of all blocks before it, for each row; the first block has none. `total`
  // becomes the fold of the block.
  void scan(int64_t block, const Value* carry, Value* total) { run<true>(block, carry, total); }
  void fold(int64_t block, Value* total) { run<false>(block, nullptr, total); }

 private:
  template <bool kScan>
  void run(int64_t block, const Value* carry, Value* total) {
    const int64_t first = block * cut_.block, last = std::min(cut_.rows.length, first + cut_.block);
    const int64_t tile_length = cut_.tile_steps * cut_.parts;
    bool empty = block > 0;  // no fold yet
    if (!empty) std::copy_n(initial_, rows_, total);
    for (int64_t at = first; at < last; at += tile_length, empty = false) {
      tile_.steps = ceil_div(std::min(tile_length, last - at), cut_.parts);
      tile_.first[0] = at;
      for (int64_t w = 1; !tile_.uniform && w < tile_.lanes; ++w) tile_.first[w] = at + w / cut_.width * tile_.steps;
      C* e = memory_.get() + kMaxLanes;
      kind_.build(tile_, e);
      if (cut_.parts > 1) {
        scan_parts<kScan>(e, carry, total, empty);
      } else {
        scan_rows<kScan>(e, carry, total, empty);
      }
      if (kScan) kind_.finish(tile_, e);
    }
  }

  template <bool kScan>
  void scan_rows(C* e, const Value* carry, Value* total, bool empty) {
    const int64_t lanes = tile_.lanes, steps = tile_.steps;
    if (!empty)
      for (int64_t w = 0; w < lanes; ++w) M::store(e, w - lanes, total[w]);
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
    } else {
      for (int64_t w = 0; w < lanes; ++w) total[w] = M::load(e, (steps - 1) * lanes + w);
    }
  }

  template <bool kScan>
  void scan_parts(C* e, const Value* carry, Value* total, bool empty) {
    const int64_t lanes = tile_.lanes, steps = tile_.steps;
    fold_steps<M>(e, lanes, 1, steps);
    for (int64_t row = 0; row < cut_.width; ++row) {
      Value sum = total[row];
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
  int64_t rows_;
  Value initial_[kMaxLanes];
};

template <class Kind>
void run(const Rows& rows, const Kind& kind, const Workers& workers) {
  using M = typename Kind::Monoid;
  using Value = typename M::Value;
  if (rows.elements() == 0) return;
  const Cut cut(rows);

  if (cut.blocks == 1 || workers.threads == 1 || cut.strips >= 2 * workers.threads) {
    const int64_t strips_per_task = std::max<int64_t>(1, kTaskElements / (cut.width * rows.length));
    parallel_for(workers, ceil_div(cut.strips, strips_per_task), [&](int64_t task) {
      Worker<Kind> worker(cut, kind);
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

  // Few long strips: fold each block, then the folds in order, then scan each block.
  std::vector<Value> folds(cut.strips * cut.blocks * cut.width);  // at [block], then: up to and including it
  const auto fold_of = [&](int64_t strip, int64_t block) { return &folds[(strip * cut.blocks + block) * cut.width]; };
  parallel_for(workers, cut.strips * (cut.blocks - 1), [&](int64_t task) {
    Worker<Kind> worker(cut, kind);
    const int64_t strip = task / (cut.blocks - 1), block = task % (cut.blocks - 1);
    worker.turn_to(strip);
    worker.fold(block, fold_of(strip, block));
  });
  for (int64_t strip = 0; strip < cut.strips; ++strip)
    for (int64_t block = 1; block < cut.blocks - 1; ++block)
      for (int64_t w = 0; w < cut.width; ++w)
        fold_of(strip, block)[w] = M::combine(fold_of(strip, block - 1)[w], fold_of(strip, block)[w]);
  parallel_for(workers, cut.strips * cut.blocks, [&](int64_t task) {
    Worker<Kind> worker(cut, kind);
    Value total[kMaxLanes];
    const int64_t strip = task / cut.blocks, block = task % cut.blocks;
    worker.turn_to(strip);
    worker.scan(block, block > 0 ? fold_of(strip, block - 1) : nullptr, total);
  });
}

}  // namespace jaxgpuops::scan::cpu
