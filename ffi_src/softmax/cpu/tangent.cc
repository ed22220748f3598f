// The derivatives of softmax and log_softmax on the CPU: a first sweep sums over the row, a second one writes the
// results. The formulas are those of softmax/cuda/policy.cuh, which explains why likely elements are summed apart.
#include "softmax/cpu/run.h"
#include "softmax/cpu/operands.h"

namespace jaxgpuops::softmax::cpu {
namespace {

template <class Format>
class Tangent {
 public:
  using Bits = typename Format::Bits;
  using C = Computed<Format>;

  Tangent(const Problem& problem, const Buffers& buffers, const Strips& strips)
      : problem_(problem), buffers_(buffers), strips_(strips) {}

  static constexpr int64_t kTaskElements = kTask;
  static constexpr int kSums = 3;

  struct Stats {
    Stats(const Tangent& job, const Unit& unit)
        : unit(unit),
          multiplier(multipliers<C>(job.problem_, job.buffers_, job.strips_, unit)),
          sums(kSums * job.strips_.blocks * unit.columns()) {}

    // Sum k of the columns of a block. After finish(), block 0 has the coefficients of the results instead.
    C* sum(int k, int64_t block) { return &sums[(block * kSums + k) * unit.columns()]; }

    Unit unit;
    std::vector<C> multiplier, sums;
  };

  struct Scratch {
    explicit Scratch(const Tangent& job)
        : kept(job.strips_.elements * (job.strips_.resident ? job.strips_.blocks : 1)),
          t(new C[2 * kept + job.strips_.elements]),
          terms(t.get() + 2 * kept),
          where(job.buffers_.where, job.problem_.where, job.strips_),
          where_block(where ? new uint8_t[job.strips_.elements] : nullptr) {}

    int64_t kept;  // number of elements of t in scratch memory; as many of p follow
    std::unique_ptr<C[]> t;
    C* terms;
    StripOperand<uint8_t> where;
    std::unique_ptr<uint8_t[]> where_block;
    int64_t count[Units::kMaxColumns];  // for each outer index, the number of its elements in the block
  };

  bool has_output() const { return true; }

  void partial(Stats& stats, int64_t block, Scratch& scratch, bool keep) const {
    Place place(strips_, stats.unit, block);
    const auto [t, p] = load(place, scratch, keep && strips_.resident ? block : 0);
    C* const sums[kSums] = {stats.sum(0, block), stats.sum(1, block), stats.sum(2, block)};
    const auto sum = [&, t = t, p = p](auto first) {
      const C* none = nullptr;
      // No prefetch of the next block: the cache has room only for this block of t and p, which output() reads again.
      sum_block<false, decltype(first), ProbabilityOfOthers, TangentOfLikely>(t, p, place, scratch.count, none,
                                                                              scratch.terms, sums);
    };
    if (transposed()) {
      sum(TangentOfOthers{});
    } else {
      sum(ProductOfOthers{});
    }
  }

  void finish(Stats& stats) const {
    for (int64_t c = 0; c < stats.unit.columns(); ++c) {
      double of[kSums] = {};
      for (int64_t b = 0; b < strips_.blocks; ++b)
        for (int k = 0; k < kSums; ++k) of[k] += stats.sum(k, b)[c];
      const auto [others, rest, likely] = of;
      stats.sum(0, 0)[c] = static_cast<C>(transposed() ? others + likely : likely);
      stats.sum(1, 0)[c] = static_cast<C>(transposed() ? rest : others - rest * likely);
      stats.sum(2, 0)[c] = static_cast<C>(others);
    }
  }

  void output(Stats& stats, int64_t block, Scratch& scratch, bool kept) const {
    const Unit& unit = stats.unit;
    Place place(strips_, unit, block);
    const int64_t at = kept && strips_.resident ? block : 0;
    set_counts(place, scratch);
    const auto [t, p] =
        kept && (strips_.resident || strips_.blocks == 1) ? operands(place, scratch, at) : load(place, scratch, at);
    const auto store = [&, t = t, p = p](auto result) {
      store_block<Format, decltype(result)>(t, p, place, scratch.count, buffers_.out, stats.multiplier.data(),
                                            stats.sum(0, 0), stats.sum(1, 0), stats.sum(2, 0));
    };
    if (problem_.op == Op::kSoftmaxJvp) {
      store(SoftmaxTangent{});
    } else if (transposed()) {
      store(LogSoftmaxCotangent{});
    } else {
      store(LogSoftmaxTangent{});
    }
    Bits* out = static_cast<Bits*>(buffers_.out);
    for (int64_t r = 0; r < unit.outers; ++r) {
      const int64_t visible = scratch.count[r] / unit.width;
      if (visible < place.steps) fill_from(out, place, r, visible, Bits{});
      if (!scratch.where) continue;
      const uint8_t* where = where_of(place, r, scratch);
      Bits* to = out + place.offset(r);
      if (place.turned) {
        for_columns(strips_, unit, [&](int64_t c, int64_t o, int64_t i) {
          for (int64_t p = 0; p < place.steps; ++p)
            if (!where[p * unit.width + c]) out[strips_.at(o, p, i)] = Bits{};
        });
      } else if (place.dense()) {
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

  bool of_logarithms() const { return problem_.op != Op::kSoftmaxJvp; }
  bool transposed() const { return of_logarithms() && problem_.transpose; }

  struct Pair {
    const C *t, *p;
  };

  // Whether t and y are used in place, without a copy.
  bool direct(const Place& place) const {
    return std::is_same_v<Bits, C> && place.dense() && problem_.queries == 0 && !buffers_.where;
  }

  void set_counts(const Place& place, Scratch& scratch) const {
    for (int64_t r = 0; r < place.unit.outers; ++r)
      scratch.count[r] = visible_steps(problem_, place.unit.outer + r, place.first, place.steps) * place.unit.width;
  }

  // The t and p of a block that load() has put into slot `at` of scratch memory.
  Pair operands(Place& place, const Scratch& scratch, int64_t at) const {
    const C* t = scratch.t.get() + at * strips_.elements;
    if (!direct(place)) return {t, t + scratch.kept};
    place.stride = place.rows.length * place.rows.inner;
    const int64_t first = place.offset(0);
    return {static_cast<const C*>(buffers_.x) + first,
            of_logarithms() ? t + scratch.kept : static_cast<const C*>(buffers_.y) + first};
  }

  // Loads a block into slot `at` of scratch memory. A masked entry counts as t = 0.
  Pair load(Place& place, Scratch& scratch, int64_t at) const {
    const Unit& unit = place.unit;
    C *t = scratch.t.get() + at * strips_.elements, *p = t + scratch.kept;
    const C* y = p;
    set_counts(place, scratch);
    if (direct(place)) {
      y = static_cast<const C*>(buffers_.y) + place.offset(0);
    } else if (problem_.queries == 0) {
      load_blocks<Format>(buffers_.x, place, t);
      load_blocks<Format>(buffers_.y, place, p);
    } else {
      for (int64_t r = 0; r < unit.outers; ++r) {
        load_block<Format>(buffers_.x, place, r, scratch.count[r] / unit.width, t + r * place.stride);
        load_block<Format>(buffers_.y, place, r, scratch.count[r] / unit.width, p + r * place.stride);
      }
    }
    for (int64_t r = 0; scratch.where && r < unit.outers; ++r) {
      const uint8_t* where = where_of(place, r, scratch);
      apply_mask(t + r * place.stride, scratch.count[r], where, C(0));
      apply_mask(p + r * place.stride, scratch.count[r], where, of_logarithms() ? -kInfinity<C> : C(0));
    }
    const Pair pair = operands(place, scratch, at);
    for (int64_t r = 0; of_logarithms() && r < unit.outers; ++r)
      exponentials(y + r * place.stride, scratch.count[r], p + r * place.stride);
    return pair;
  }

  const Problem& problem_;
  const Buffers& buffers_;
  const Strips& strips_;
};

}  // namespace

void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.rows.elements() == 0) return;
  const Strips strips = strips_of(problem);
  with_format(problem.dtype,
              [&](auto format) { run_strips(Tangent<decltype(format)>(problem, buffers, strips), strips, workers); });
}

}  // namespace jaxgpuops::softmax::cpu
