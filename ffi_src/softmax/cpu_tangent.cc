// The derivatives of softmax and log_softmax on the CPU: a sum over the row, then a sweep.
#include "softmax/cpu.h"
#include "softmax/cpu_operands.h"

namespace jaxgpuops::softmax::cpu {
namespace {

template <class Format>
class Tangent {
 public:
  using Bits = typename Format::Bits;
  using C = Computed<Format>;

  Tangent(const Problem& problem, const Buffers& buffers, const Strips& strips)
      : problem_(problem), buffers_(buffers), strips_(strips) {}

  struct Stats {
    Stats(const Tangent& job, const Unit& unit)
        : unit(unit),
          multiplier(multipliers<C>(job.problem_, job.buffers_, unit)),
          sums(job.strips_.blocks * unit.columns()) {}

    Unit unit;
    std::vector<C> multiplier;
    std::vector<C> sums;  // of blocks
  };

  struct Scratch {
    explicit Scratch(const Tangent& job)
        : t(new C[3 * job.strips_.elements]),
          y(t.get() + job.strips_.elements),
          terms(y + job.strips_.elements),
          where(job.buffers_.where, job.problem_.where),
          where_block(where ? new uint8_t[job.strips_.elements] : nullptr) {}

    std::unique_ptr<C[]> t;
    C *y, *terms;
    StripOperand<uint8_t> where;
    std::unique_ptr<uint8_t[]> where_block;
    int64_t count[Units::kMaxColumns];  // elements that an outer index has in the block
  };

  bool has_output() const { return true; }

  void partial(Stats& stats, int64_t block, Scratch& scratch, bool) const {
    Place place(strips_, stats.unit, block);
    const auto [t, y] = load(place, scratch);
    C* sums = &stats.sums[block * stats.unit.columns()];
    const C* none = nullptr;
    if (problem_.op == Op::kSoftmaxJvp) {
      sum_block<SoftmaxProduct, false>(t, y, place, scratch.count, none, scratch.terms, sums);
    } else if (problem_.transpose) {
      sum_block<Identity, false>(t, y, place, scratch.count, none, scratch.terms, sums);
    } else {
      sum_block<LogSoftmaxProduct, false>(t, y, place, scratch.count, none, scratch.terms, sums);
    }
  }

  void finish(Stats& stats) const {
    const int64_t columns = stats.unit.columns();
    for (int64_t c = 0; strips_.blocks > 1 && c < columns; ++c) {
      double sum = 0;
      for (int64_t b = 0; b < strips_.blocks; ++b) sum += stats.sums[b * columns + c];
      stats.sums[c] = static_cast<C>(sum);
    }
  }

  void output(Stats& stats, int64_t block, Scratch& scratch, bool kept) const {
    const Unit& unit = stats.unit;
    Place place(strips_, unit, block);
    if (!kept || strips_.blocks > 1) load(place, scratch);
    const auto [t, y] = operands(place, scratch);
    const C *a = stats.multiplier.data(), *b = stats.sums.data();
    if (problem_.op == Op::kSoftmaxJvp) {
      store_block<Format, SoftmaxTangent>(t, y, place, scratch.count, a, b, buffers_.out);
    } else if (problem_.transpose) {
      store_block<Format, LogSoftmaxCotangent>(t, y, place, scratch.count, a, b, buffers_.out);
    } else {
      store_block<Format, LogSoftmaxTangent>(t, y, place, scratch.count, a, b, buffers_.out);
    }
    Bits* out = static_cast<Bits*>(buffers_.out);
    for (int64_t r = 0; r < unit.outers; ++r) {
      const int64_t visible = scratch.count[r] / unit.width;
      if (visible < place.steps) fill_from(out, place, r, visible, Bits{});
      if (!scratch.where) continue;
      const uint8_t* where = where_of(place, r, scratch);
      Bits* to = out + place.offset(r);
      if (place.dense()) {
        clear_masked(to, scratch.count[r], where);
      } else {
        for (int64_t p = 0; p < visible; ++p)
          clear_masked(to + p * place.rows.inner, unit.width, where + p * unit.width);
      }
    }
  }

 private:
  const uint8_t* where_of(const Place& place, int64_t r, Scratch& scratch) const {
    return scratch.where.block(place.unit, place.unit.outer + r, place.first, scratch.count[r] / place.unit.width,
                               scratch.where_block.get());
  }

  struct Pair {
    const C *t, *y;
  };

  // Whether t and y are used where they lie.
  bool direct(const Place& place) const {
    return std::is_same_v<Bits, C> && place.dense() && problem_.queries == 0 && !buffers_.where;
  }

  // t and y of the block, once they are loaded.
  Pair operands(Place& place, const Scratch& scratch) const {
    if (!direct(place)) return {scratch.t.get(), scratch.y};
    place.stride = place.rows.length * place.rows.inner;
    const int64_t at = place.offset(0);
    return {static_cast<const C*>(buffers_.x) + at, static_cast<const C*>(buffers_.y) + at};
  }

  // Masked entries are as if t were 0.
  Pair load(Place& place, Scratch& scratch) const {
    const Unit& unit = place.unit;
    C* t = scratch.t.get();
    for (int64_t r = 0; r < unit.outers; ++r)
      scratch.count[r] = visible_steps(problem_, unit.outer + r, place.first, place.steps) * unit.width;
    if (direct(place)) return operands(place, scratch);
    if (problem_.queries == 0) {
      load_blocks<Format>(buffers_.x, place, t);
      load_blocks<Format>(buffers_.y, place, scratch.y);
    } else {
      for (int64_t r = 0; r < unit.outers; ++r) {
        load_block<Format>(buffers_.x, place, r, scratch.count[r] / unit.width, t + r * place.stride);
        load_block<Format>(buffers_.y, place, r, scratch.count[r] / unit.width, scratch.y + r * place.stride);
      }
    }
    for (int64_t r = 0; scratch.where && r < unit.outers; ++r) {
      const uint8_t* where = where_of(place, r, scratch);
      apply_mask(t + r * place.stride, scratch.count[r], where, C(0));
      apply_mask(scratch.y + r * place.stride, scratch.count[r], where, -kInfinity<C>);
    }
    return {t, scratch.y};
  }

  const Problem& problem_;
  const Buffers& buffers_;
  const Strips& strips_;
};

}  // namespace

void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.rows.elements() == 0) return;
  const Strips strips(problem.rows, kShape);
  with_format(problem.dtype,
              [&](auto format) { run_strips(Tangent<decltype(format)>(problem, buffers, strips), strips, workers); });
}

}  // namespace jaxgpuops::softmax::cpu
