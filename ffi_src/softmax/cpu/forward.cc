// Softmax, log_softmax, logsumexp and cross-entropy on the CPU.
//
// A first sweep over the blocks of a row finds the maximum of each block and the sum of the exponentials relative to
// that maximum. A second sweep writes the results; its multiplication also converts the exponentials from the block's
// maximum to the row's. If one thread has the whole row and the row fits into its cache, the first sweep keeps its
// exponentials, so that each element is read from memory once. Otherwise the second sweep reads the elements and
// computes the exponentials again.
#include <optional>

#include "softmax/cpu/run.h"
#include "softmax/cpu/operands.h"

namespace jaxgpuops::softmax::cpu {
namespace {

template <class Format>
class Forward {
 public:
  using Bits = typename Format::Bits;
  using C = Computed<Format>;
  static constexpr int64_t kTaskElements = kTask;

  Forward(const Problem& problem, const Buffers& buffers, const Strips& strips)
      : problem_(problem),
        buffers_(buffers),
        strips_(strips),
        x_(static_cast<const Bits*>(buffers.x)),
        entropy_(problem.op == Op::kCrossEntropy || problem.op == Op::kCrossEntropyGrad),
        exponentials_(problem.op == Op::kSoftmax || problem.op == Op::kCrossEntropyGrad) {}

  // The labels of a unit's columns; only cross-entropy has them.
  struct Labels {
    explicit Labels(const Forward& job, const Unit& unit)
        : position(new int64_t[unit.columns()]),
          numbers(new C[2 * unit.columns()]),
          logit(numbers.get()),
          gradient(logit + unit.columns()),
          row_where(job.buffers_.row_where ? new uint8_t[unit.columns()] : nullptr),
          z_sums(job.problem_.label_smoothing != 0 ? job.strips_.blocks * unit.columns() : 0) {}

    bool counts(int64_t c) const { return !row_where || row_where[c]; }

    std::unique_ptr<int64_t[]> position;  // position of the label along the axis; -1 if the label is no class
    std::unique_ptr<C[]> numbers;
    C *logit, *gradient;  // logit is -inf if the label is no class
    std::unique_ptr<uint8_t[]> row_where;
    std::vector<double> z_sums;  // for each block, the sums of its logits
  };

  struct Stats {
    Stats(const Forward& job, const Unit& unit)
        : unit(unit),
          numbers(new C[(2 * job.strips_.blocks + 3) * unit.columns()]),
          maxima(numbers.get()),
          sums(maxima + job.strips_.blocks * unit.columns()),
          m(sums + job.strips_.blocks * unit.columns()),
          a(m + unit.columns()),
          b(a + unit.columns()) {
      if (job.buffers_.scale || job.problem_.factor != 1)
        multiplier = multipliers<C>(job.problem_, job.buffers_, job.strips_, unit);
      if (job.entropy_) job.read_labels(unit, labels.emplace(job, unit));
    }

    Unit unit;
    std::vector<C> multiplier;
    std::unique_ptr<C[]> numbers;
    C *maxima, *sums;      // for each block, the maximum and the sum of each column
    C *m, *a, *b;          // for each column: the maximum, and two coefficients of the result
    bool special = false;  // some row has a NaN or an infinite maximum
    std::optional<Labels> labels;
  };

  struct Scratch {
    explicit Scratch(const Forward& job)
        : z(new C[(job.strips_.resident ? job.strips_.blocks : 1) * job.strips_.elements]),
          terms(new C[job.strips_.elements]),
          bias(job.buffers_.bias, job.problem_.bias, job.strips_),
          where(job.buffers_.where, job.problem_.where, job.strips_),
          bias_block(bias ? new Bits[job.strips_.elements] : nullptr),
          where_block(where ? new uint8_t[job.strips_.elements] : nullptr) {}

    std::unique_ptr<C[]> z, terms;
    StripOperand<Bits> bias;
    StripOperand<uint8_t> where;
    std::unique_ptr<Bits[]> bias_block;
    std::unique_ptr<uint8_t[]> where_block;
    Lanes<C> lanes;
    int64_t count[Units::kMaxColumns];  // for each outer index, the number of its elements in the block
    C m[kMaxColumns], a[kMaxColumns];
  };

  bool has_output() const { return buffers_.out; }

  void partial(Stats& stats, int64_t block, Scratch& scratch, bool keep) const {
    const Unit& unit = stats.unit;
    const int64_t columns = unit.columns();
    const Place place(strips_, unit, block);
    C* z = scratch.z.get() + (keep && strips_.resident ? block * strips_.elements : 0);
    C *maxima = &stats.maxima[block * columns], *sums = &stats.sums[block * columns];
    const C* x = load(stats, place, scratch, z);
    if (entropy_ && !stats.labels->z_sums.empty()) {
      sum_block<false, Identity>(x, x, place, scratch.count, static_cast<const C*>(nullptr), scratch.terms.get(),
                                 {sums});
      std::copy(sums, sums + columns, &stats.labels->z_sums[block * columns]);
    }
    if (place.single() && x == z) pad(unit.outers, place.stride, scratch.count, z);
    if (place.single()) {
      row_maxima(x, {unit.outers, place.stride, scratch.count}, maxima);
    } else {
      for (int64_t r = 0; r < unit.outers; ++r)
        column_maxima(x + r * place.stride, scratch.count[r], unit.width, place.lanes, maxima + r * unit.width);
    }
    // A row with an infinite maximum and no NaN must get the sum 1, since e^(inf - inf) would make it NaN.
    std::vector<int64_t> infinite;
    for (int64_t c = 0, any = any_is(maxima, columns, kInfinity<C>); any && c < columns; ++c)
      if (maxima[c] == kInfinity<C> && !has_nan(place, scratch.count, x, c)) infinite.push_back(c);
    if (entropy_) leave_labels_out(stats, place, scratch.count, z);
    guard(maxima, columns, scratch.m);
    if (exponentials_) {
      sum_block<true, Exp>(x, x, place, scratch.count, scratch.m, keep && keeps() ? terms(place, z) : z, {sums},
                           x != z);
    } else {
      sum_block<false, Exp>(x, x, place, scratch.count, scratch.m, scratch.terms.get(), {sums}, x != z);
    }
    for (const int64_t c : infinite) sums[c] = 1;
  }

  void finish(Stats& stats) const {
    const int64_t columns = stats.unit.columns();
    C* sums = stats.sums;  // from here on the sums of whole columns
    std::copy_n(stats.maxima, columns, stats.m);
    if (strips_.blocks > 1) combine(stats);
    stats.special = any_is_special(stats.m, sums, columns);
    if (entropy_) return finish_entropy(stats);
    if (problem_.op == Op::kSoftmax) {
      reciprocals(sums, columns, stats.a);
    } else {
      logarithms(sums, columns, stats.b);
    }
    if (problem_.op == Op::kLogSumExp) {
      const C *m = stats.m, *b = stats.b;
      if (buffers_.lse) return log_sum_exps<Format>(m, sums, b, columns, of_rows<Bits>(buffers_.lse, stats.unit));
      return log_sum_exp_parts(m, sums, b, columns, of_rows<C>(buffers_.maximum, stats.unit),
                               of_rows<C>(buffers_.log_sum, stats.unit));
    }
    for (int64_t c = 0; stats.special && c < columns; ++c)
      if (is_special(stats.m[c], sums[c])) (problem_.op == Op::kSoftmax ? stats.a : stats.b)[c] = kNaN<C>;
  }

  void output(Stats& stats, int64_t block, Scratch& scratch, bool kept) const {
    const Unit& unit = stats.unit;
    const int64_t columns = unit.columns();
    const Place place(strips_, unit, block);
    const C* maxima = &stats.maxima[block * columns];
    C* z = scratch.z.get() + (kept && strips_.resident ? block * strips_.elements : 0);
    const C* x = z;
    kept &= keeps();
    if (kept) {
      set_counts(stats, place, scratch.count);
      if (exponentials_)
        x = terms(place, z);
      else if (direct(stats, place))
        x = in_memory(place);
    } else {
      x = load(stats, place, scratch, z);
      guard(maxima, columns, scratch.m);
    }
    const C* a = problem_.op == Op::kLogSoftmax ? stats.m : stats.a;
    if (exponentials_ && strips_.blocks > 1) {
      scale_relative(a, maxima, stats.m, columns, scratch.a);
      a = scratch.a;
    }
    const C* b = problem_.op == Op::kSoftmax ? a : stats.b;  // softmax has one coefficient only
    C zero = 0;
    const auto store = [&](auto result, const auto*... numbers) {
      store_block<Format, decltype(result)>(x, x, place, scratch.count, buffers_.out, numbers...);
    };
    switch (problem_.op) {
      case Op::kSoftmax: kept ? store(Product{}, a, b) : store(ExpProduct{}, a, scratch.m); break;
      case Op::kLogSoftmax: store(Difference{}, a, b); break;
      default: kept ? store(Affine{}, a, b) : store(ExpAffine{}, a, b, scratch.m);
    }
    if (problem_.op == Op::kLogSoftmax) zero = -kInfinity<C>;
    const Bits masked = Format::encode(zero);
    Bits* out = static_cast<Bits*>(buffers_.out);
    for (int64_t r = 0; r < unit.outers; ++r)
      if (scratch.count[r] < place.steps * unit.width) fill_from(out, place, r, scratch.count[r] / unit.width, masked);
    if (entropy_) return set_labels(stats, place, out);
    // In rows whose results are NaN, masked entries still get the value of masked entries.
    if (!stats.special || !buffers_.where) return;
    for_columns(strips_, unit, [&](int64_t c, int64_t o, int64_t i) {
      if (!is_special(stats.m[c], stats.sums[c])) return;
      const uint8_t* where = buffers_.where + problem_.where(o, place.first, i);
      Bits* to = out + strips_.at(o, place.first, i);
      for (int64_t p = 0; p < place.steps; ++p)
        if (!where[p * problem_.where.axis_stride]) to[p * strips_.memory.inner] = masked;
    });
  }

 private:
  static void pad(int64_t outers, int64_t stride, int64_t* count, C* z) {
    for (int64_t r = 0; r < outers; ++r) {
      const int64_t padded = round_up(count[r], 16);
      std::fill(z + r * stride + count[r], z + r * stride + padded, -kInfinity<C>);
      count[r] = padded;
    }
  }

  static bool has_nan(const Place& place, const int64_t* count, const C* z, int64_t c) {
    const int64_t width = place.unit.width, r = c / width;
    const C* x = z + r * place.stride;
    for (int64_t i = c % width; i < count[r]; i += width)
      if (x[i] != x[i]) return true;
    return false;
  }

  // The results of a unit's rows are contiguous, so a pointer to the first one suffices.
  template <class T>
  T* of_rows(void* results, const Unit& unit) const {
    return static_cast<T*>(results) + unit.first_row(strips_.rows);
  }

  void read_labels(const Unit& unit, Labels& labels) const {
    const int64_t length = strips_.rows.length;
    const int32_t* label = buffers_.labels + unit.first_row(strips_.rows);
    for_columns(strips_, unit, [&](int64_t c, int64_t o, int64_t i) {
      if (labels.row_where) labels.row_where[c] = buffers_.row_where[problem_.row_where(o, 0, i)];
      const int64_t position = label[c];
      const bool valid = labels.counts(c) && position >= 0 && position < length;
      labels.position[c] = valid ? position : -1;
      labels.logit[c] = valid ? Format::decode(x_[strips_.at(o, position, i)]) : -kInfinity<C>;
    });
  }

  // Cross-entropy excludes the label from the sum: the label's gradient is made of the sum of the others, which would
  // be lost to rounding in 1 - p.
  void leave_labels_out(const Stats& stats, const Place& place, const int64_t* count, C* z) const {
    const Unit& unit = stats.unit;
    for_columns(strips_, unit, [&](int64_t c, int64_t o, int64_t i) {
      const int64_t at = (stats.labels->position[c] - place.first) * unit.width;
      const int64_t r = place.turned ? 0 : o - unit.outer, column = place.turned ? c : i - unit.inner;
      if (at >= 0 && at < count[r]) z[r * place.stride + at + column] = -kInfinity<C>;
    });
  }

  // Sets how many elements of the block each outer index has: none of a row that does not count, else those that a
  // causal mask leaves.
  void set_counts(const Stats& stats, const Place& place, int64_t* count) const {
    for (int64_t r = 0; r < place.unit.outers; ++r) {
      const bool skipped = entropy_ && place.single() && !stats.labels->counts(r);
      const int64_t steps = skipped ? 0 : visible_steps(problem_, place.unit.outer + r, place.first, place.steps);
      count[r] = steps * place.unit.width;
    }
  }

  // Whether the block has the same layout in memory as in scratch memory.
  bool in_vectors(const Place& place) const {
    return std::is_same_v<Bits, C> && place.dense() && place.stride == place.steps * place.unit.width;
  }

  // Whether the logits of the block are used in place, without a copy. That needs the layout of scratch memory, logits
  // that equal x, and no label in the block that has to be excluded.
  bool direct(const Stats& stats, const Place& place) const {
    if (!in_vectors(place) || !stats.multiplier.empty() || buffers_.bias || buffers_.where || buffers_.row_where ||
        problem_.queries != 0)
      return false;
    if (!entropy_) return true;
    const int64_t* position = stats.labels->position.get();
    return std::none_of(position, position + place.unit.columns(),
                        [&](int64_t p) { return p >= place.first && p < place.first + place.steps; });
  }

  const C* in_memory(const Place& place) const { return reinterpret_cast<const C*>(x_ + place.offset(0)); }

  // Whether partial() keeps the blocks of a row until output() needs them.
  bool keeps() const { return strips_.resident || strips_.blocks == 1; }

  // Where the exponentials of a block are kept: in the buffer of the results if its layout allows, else in z. The
  // buffer of the results may also be that of the logits.
  C* terms(const Place& place, C* z) const {
    return in_vectors(place) ? static_cast<C*>(buffers_.out) + place.offset(0) : z;
  }

  // Returns the logits of the block with masked entries at -inf: in place, or copied to z.
  const C* load(const Stats& stats, const Place& place, Scratch& scratch, C* z) const {
    const Unit& unit = stats.unit;
    const int64_t width = unit.width;
    set_counts(stats, place, scratch.count);
    if (direct(stats, place)) return in_memory(place);
    if (place.turned || (problem_.queries == 0 && !buffers_.row_where)) {
      load_blocks<Format>(x_, place, z);
    } else {
      for (int64_t r = 0; r < unit.outers; ++r)
        load_block<Format>(x_, place, r, scratch.count[r] / width, z + r * place.stride);
    }
    if (stats.multiplier.empty() && !scratch.bias && !scratch.where) return z;
    for (int64_t r = 0; r < unit.outers; ++r) {
      C* x = z + r * place.stride;
      const int64_t count = scratch.count[r], outer = unit.outer + r;
      if (!stats.multiplier.empty() && place.single()) {
        scale_row(x, count, stats.multiplier[r]);
      } else if (!stats.multiplier.empty()) {
        scale_columns(x, count, place.lanes, scratch.lanes.spread(&stats.multiplier[r * width], width, place.lanes));
      }
      if (scratch.bias)
        add_bias<Format>(x, count,
                         scratch.bias.block(unit, outer, place.first, count / width, scratch.bias_block.get()));
      if (scratch.where)
        apply_mask(x, count, scratch.where.block(unit, outer, place.first, count / width, scratch.where_block.get()),
                   -kInfinity<C>);
    }
    return z;
  }

  void combine(Stats& stats) const {
    const int64_t columns = stats.unit.columns();
    std::vector<double> totals(columns);
    for (int64_t b = 1; b < strips_.blocks; ++b) maximum_of(stats.maxima + b * columns, columns, stats.m);
    for (int64_t b = 0; b < strips_.blocks; ++b)
      add_relative(stats.sums + b * columns, stats.maxima + b * columns, stats.m, columns, totals.data());
    std::copy(totals.begin(), totals.end(), stats.sums);
  }

  // Writes the losses and the summands of lse, and sets the coefficients of the gradient, which is a e^(z - m) - b
  // except at the label.
  void finish_entropy(Stats& stats) const {
    const Unit& unit = stats.unit;
    const int64_t columns = unit.columns();
    Labels& labels = *stats.labels;
    const std::unique_ptr<C[]> numbers(new C[7 * columns]);
    C *at_label = numbers.get(), *sums = at_label + columns, *log_sums = sums + columns, *means = log_sums + columns;
    C *cotangent = means + columns, *maximum = cotangent + columns, *log_sum = maximum + columns;
    C* loss = of_rows<C>(buffers_.loss, unit);
    if (buffers_.maximum) {
      maximum = of_rows<C>(buffers_.maximum, unit);
      log_sum = of_rows<C>(buffers_.log_sum, unit);
    }
    const double length = static_cast<double>(strips_.rows.length);
    const Entropy<C> rows{problem_.label_smoothing,
                          problem_.z_loss,
                          length,
                          labels.position.get(),
                          labels.logit,
                          stats.m,
                          stats.sums,
                          at_label,
                          sums,
                          log_sums,
                          means};
    add_labels(stats.sums, labels.logit, stats.m, columns, at_label, sums, log_sums);
    for (int64_t c = 0; c < columns && !labels.z_sums.empty(); ++c) {
      double mean = 0;
      for (int64_t b = 0; b < strips_.blocks; ++b) mean += labels.z_sums[b * columns + c];
      means[c] = static_cast<C>(mean / length);
    }
    losses(rows, columns, loss, maximum, log_sum);
    if (problem_.op == Op::kCrossEntropyGrad) {
      const C* given = static_cast<const C*>(buffers_.cotangent);
      for_columns(strips_, unit,
                  [&](int64_t c, int64_t o, int64_t i) { cotangent[c] = given[problem_.cotangent(o, 0, i)]; });
      gradients(rows, maximum, log_sum, cotangent, columns, stats.a, stats.b, labels.gradient);
    }
    for (int64_t c = 0; c < columns && labels.row_where; ++c)
      if (!labels.row_where[c]) loss[c] = maximum[c] = log_sum[c] = 0;
  }

  // Overwrites the gradients that the formula of the row does not cover: those of labels, and of rows that do not
  // count.
  void set_labels(const Stats& stats, const Place& place, Bits* out) const {
    const Labels& labels = *stats.labels;
    const int64_t step = strips_.memory.inner;
    for_columns(strips_, stats.unit, [&](int64_t c, int64_t o, int64_t i) {
      Bits* to = out + strips_.at(o, place.first, i);
      const int64_t p = labels.position[c] - place.first;
      if (p >= 0 && p < place.steps) to[p * step] = Format::encode(labels.gradient[c]);
      for (int64_t s = 0; !labels.counts(c) && !place.single() && s < place.steps; ++s) to[s * step] = Bits{};
    });
  }

  const Problem& problem_;
  const Buffers& buffers_;
  const Strips& strips_;
  const Bits* x_;
  const bool entropy_, exponentials_;
};

}  // namespace

void run_forward(const Problem& problem, const Buffers& buffers, const Workers& workers) {
  if (problem.rows.count() == 0) return;
  const Strips strips = strips_of(problem);
  with_format(problem.dtype,
              [&](auto format) { run_strips(Forward<decltype(format)>(problem, buffers, strips), strips, workers); });
}

}  // namespace jaxgpuops::softmax::cpu
