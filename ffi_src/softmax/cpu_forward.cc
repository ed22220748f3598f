// Softmax, log_softmax, logsumexp and cross-entropy on the CPU.
//
// The exponentials of a block are relative to its own maximum; the factor that makes them relative to the row's comes
// with the last multiplication. So a block is read once from memory, and its exponentials are taken once, where a
// thread does all of a row and the row fits into its cache; else the second sweep does the same again.
#include <cmath>

#include "softmax/cpu.h"
#include "softmax/cpu_operands.h"

namespace jaxgpuops::softmax::cpu {
namespace {

template <class C>
constexpr C kNaN = std::numeric_limits<C>::quiet_NaN();

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

  struct Label {
    bool counts = true;     // row_where
    int64_t position = -1;  // -1: no class
    C logit = kNaN<C>;
    C gradient = kNaN<C>;
  };

  struct Stats {
    Stats(const Forward& job, const Unit& unit)
        : unit(unit), maxima(job.strips_.blocks * unit.columns()), sums(maxima.size()), m(unit.columns()), a(m), b(m) {
      if (job.buffers_.scale || job.problem_.factor != 1) multiplier = multipliers<C>(job.problem_, job.buffers_, unit);
      if (job.entropy_) job.read_labels(*this);
    }

    Unit unit;
    std::vector<C> multiplier;
    std::vector<C> maxima, sums;  // of blocks
    std::vector<C> m, a, b;       // of columns: the maximum, the numbers of the result
    bool special = false;         // a row has no finite maximum, or NaN
    std::vector<Label> labels;
    std::vector<double> z_sums;
  };

  struct Scratch {
    explicit Scratch(const Forward& job)
        : z(new C[(job.strips_.resident ? job.strips_.blocks : 1) * job.strips_.elements]),
          terms(new C[job.strips_.elements]),
          bias(job.buffers_.bias, job.problem_.bias),
          where(job.buffers_.where, job.problem_.where),
          bias_block(bias ? new Bits[job.strips_.elements] : nullptr),
          where_block(where ? new uint8_t[job.strips_.elements] : nullptr) {}

    std::unique_ptr<C[]> z, terms;
    StripOperand<Bits> bias;
    StripOperand<uint8_t> where;
    std::unique_ptr<Bits[]> bias_block;
    std::unique_ptr<uint8_t[]> where_block;
    Lanes<C> lanes;
    int64_t count[Units::kMaxColumns];  // elements that an outer index has in the block
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
    if (!stats.z_sums.empty()) {
      sum_block<false, Identity>(x, x, place, scratch.count, static_cast<const C*>(nullptr), scratch.terms.get(),
                                 {sums});
      std::copy(sums, sums + columns, &stats.z_sums[block * columns]);
    }
    if (place.single() && x == z) pad(unit.outers, place.stride, scratch.count, z);
    if (place.single()) {
      row_maxima(x, {unit.outers, place.stride, scratch.count}, maxima);
    } else {
      for (int64_t r = 0; r < unit.outers; ++r)
        column_maxima(x + r * place.stride, scratch.count[r], unit.width, place.lanes, maxima + r * unit.width);
    }
    // e^(inf - inf) would be NaN, also in a row that has none.
    std::vector<int64_t> infinite;
    for (int64_t c = 0; c < columns; ++c)
      if (maxima[c] == kInfinity<C> && !has_nan(place, scratch.count, x, c)) infinite.push_back(c);
    // Cross-entropy sums without the label: its gradient is that sum, where 1 - p would have lost it.
    for (int64_t c = 0; entropy_ && c < columns; ++c) {
      const int64_t at = (stats.labels[c].position - place.first) * unit.width, r = c / unit.width;
      if (at >= 0 && at < scratch.count[r]) z[r * place.stride + at + c % unit.width] = -kInfinity<C>;
    }
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
    C* sums = stats.sums.data();  // from here on of columns
    std::copy_n(stats.maxima.data(), columns, stats.m.data());
    if (strips_.blocks > 1) combine(stats);
    for (int64_t c = 0; c < columns; ++c) stats.special |= is_special(stats.m[c], sums[c]);
    if (entropy_) return finish_entropy(stats);
    if (problem_.op == Op::kSoftmax) {
      for (int64_t c = 0; c < columns; ++c) stats.a[c] = 1 / sums[c];
    } else {
      logarithms(sums, columns, stats.b.data());
      stats.a = stats.m;
    }
    for (int64_t c = 0; stats.special && c < columns; ++c)
      if (is_special(stats.m[c], sums[c])) (problem_.op == Op::kSoftmax ? stats.a : stats.b)[c] = kNaN<C>;
    if (problem_.op != Op::kLogSumExp) return;
    for (int64_t c = 0; c < columns; ++c) {
      const bool special = is_special(stats.m[c], sums[c]), nan = sums[c] != sums[c];
      const C lse = !special ? stats.m[c] + stats.b[c] : nan ? kNaN<C> : stats.m[c];
      if (problem_.wide_result) {
        static_cast<C*>(buffers_.lse)[row(stats.unit, c)] = lse;
      } else {
        static_cast<Bits*>(buffers_.lse)[row(stats.unit, c)] = Format::encode(lse);
      }
    }
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
    const C* a = stats.a.data();
    if (exponentials_ && strips_.blocks > 1) {
      scale_relative(a, maxima, stats.m.data(), columns, scratch.a);
      a = scratch.a;
    }
    const C* b = stats.b.data();
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
    // Masked entries of rows that became NaN.
    for (int64_t c = 0; stats.special && buffers_.where && c < columns; ++c) {
      const int64_t r = c / unit.width, i = c % unit.width, position = place.first;
      if (!is_special(stats.m[c], stats.sums[c])) continue;
      const uint8_t* where = buffers_.where + problem_.where(unit.outer + r, position, unit.inner + i);
      Bits* to = out + place.offset(r) + i;
      for (int64_t p = 0; p < place.steps; ++p)
        if (!where[p * problem_.where.axis_stride]) to[p * place.rows.inner] = masked;
    }
  }

 private:
  static bool is_special(C m, C sum) { return !(std::abs(m) < kInfinity<C>) || sum != sum; }

  // What exponentials are relative to: e^(-inf) is 0 also where there is nothing else.
  static void guard(const C* maxima, int64_t columns, C* m) {
    for (int64_t c = 0; c < columns; ++c) m[c] = maxima[c] == -kInfinity<C> ? C(0) : maxima[c];
  }

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

  int64_t row(const Unit& unit, int64_t c) const {
    return (unit.outer + c / unit.width) * strips_.rows.inner + unit.inner + c % unit.width;
  }

  void read_labels(Stats& stats) const {
    const Unit& unit = stats.unit;
    const int64_t length = strips_.rows.length, inner = strips_.rows.inner;
    stats.labels.resize(unit.columns());
    if (problem_.label_smoothing != 0) stats.z_sums.resize(stats.maxima.size());
    for (int64_t c = 0; c < unit.columns(); ++c) {
      const int64_t o = unit.outer + c / unit.width, i = unit.inner + c % unit.width;
      Label& label = stats.labels[c];
      if (buffers_.row_where) label.counts = buffers_.row_where[problem_.row_where(o, 0, i)];
      const int64_t position = buffers_.labels[row(unit, c)];
      if (!label.counts || position < 0 || position >= length) continue;
      label.position = position;
      label.logit = Format::decode(x_[(o * length + position) * inner + i]);
    }
  }

  // Elements of the block that are there, and not masked whole.
  void set_counts(const Stats& stats, const Place& place, int64_t* count) const {
    for (int64_t r = 0; r < place.unit.outers; ++r) {
      const bool skipped = entropy_ && place.single() && !stats.labels[r].counts;
      const int64_t steps = skipped ? 0 : visible_steps(problem_, place.unit.outer + r, place.first, place.steps);
      count[r] = steps * place.unit.width;
    }
  }

  // Whether a block lies in memory as it would in scratch memory.
  bool in_vectors(const Place& place) const {
    return std::is_same_v<Bits, C> && place.dense() && place.stride == place.steps * place.unit.width;
  }

  // Whether the logits of the block are used where they lie: all of them, in whole vectors, and no label to be left
  // out.
  bool direct(const Stats& stats, const Place& place) const {
    const int64_t last = place.first + place.steps;
    const auto in_block = [&](const Label& label) { return label.position >= place.first && label.position < last; };
    return in_vectors(place) && stats.multiplier.empty() && !buffers_.bias && !buffers_.where && !buffers_.row_where &&
           problem_.queries == 0 && std::none_of(stats.labels.begin(), stats.labels.end(), in_block);
  }

  const C* in_memory(const Place& place) const { return reinterpret_cast<const C*>(x_ + place.offset(0)); }

  // Whether the blocks of a row are kept till it is known what becomes of them.
  bool keeps() const { return strips_.resident || strips_.blocks == 1; }

  // Where a block's exponentials are kept: where the results will be, if they lie so there. That may be where the
  // logits are.
  C* terms(const Place& place, C* z) const {
    return in_vectors(place) ? static_cast<C*>(buffers_.out) + place.offset(0) : z;
  }

  // The logits of the block, masked, in z or in memory.
  const C* load(const Stats& stats, const Place& place, Scratch& scratch, C* z) const {
    const Unit& unit = stats.unit;
    const int64_t width = unit.width;
    set_counts(stats, place, scratch.count);
    if (direct(stats, place)) return in_memory(place);
    if (problem_.queries == 0 && !buffers_.row_where) {
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
    for (int64_t b = 1; b < strips_.blocks; ++b) maximum_of(&stats.maxima[b * columns], columns, stats.m.data());
    for (int64_t b = 0; b < strips_.blocks; ++b)
      add_relative(&stats.sums[b * columns], &stats.maxima[b * columns], stats.m.data(), columns, totals.data());
    std::copy(totals.begin(), totals.end(), stats.sums.begin());
  }

  // Losses and lse, and what gradients are made of: a e^(z - m) - b, but for the label.
  void finish_entropy(Stats& stats) const {
    const int64_t columns = stats.unit.columns();
    std::vector<C> numbers(4 * columns);
    C *logits = numbers.data(), *at_label = logits + columns, *sums = at_label + columns, *log_sums = sums + columns;
    for (int64_t c = 0; c < columns; ++c)
      logits[c] = stats.labels[c].position < 0 ? -kInfinity<C> : stats.labels[c].logit;
    add_labels(stats.sums.data(), logits, stats.m.data(), columns, at_label, sums, log_sums);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t at = row(stats.unit, c);
      C &loss = static_cast<C*>(buffers_.loss)[at], &lse = static_cast<C*>(buffers_.lse)[at];
      loss = lse = 0;
      if (stats.labels[c].counts) finish_row(stats, c, at_label[c], sums[c], log_sums[c], loss, lse);
    }
  }

  void finish_row(Stats& stats, int64_t c, C at_label, C sum, C log_sum, C& loss, C& lse) const {
    const Unit& unit = stats.unit;
    const double length = static_cast<double>(strips_.rows.length), smoothing = problem_.label_smoothing;
    Label& label = stats.labels[c];
    const C m = stats.m[c], rest = stats.sums[c];
    const bool special = is_special(m, sum);
    const bool nan = rest != rest || (label.position >= 0 && label.logit != label.logit);
    lse = nan ? kNaN<C> : special ? m : m + log_sum;
    double result = special ? lse - label.logit : log_sum - (label.logit - m);
    if (smoothing != 0) {
      double mean = 0;
      for (int64_t b = 0; b < strips_.blocks; ++b) mean += stats.z_sums[b * unit.columns() + c];
      mean /= length;
      result = (1 - smoothing) * result + smoothing * (special ? lse - mean : log_sum - (mean - m));
    }
    if (problem_.z_loss != 0) result += problem_.z_loss * lse * lse;
    loss = static_cast<C>(result);
    if (problem_.op != Op::kCrossEntropyGrad) return;
    const double cotangent = static_cast<const C*>(
        buffers_.cotangent)[problem_.cotangent(unit.outer + c / unit.width, 0, unit.inner + c % unit.width)];
    const double z_factor = 2 * problem_.z_loss * lse, share = smoothing / length;
    const bool valid = !special && label.position >= 0;
    stats.a[c] = valid ? static_cast<C>(cotangent * (1 + z_factor) / sum) : kNaN<C>;
    stats.b[c] = static_cast<C>(cotangent * share);
    if (valid) label.gradient = static_cast<C>(cotangent * ((z_factor * at_label - rest) / sum + (smoothing - share)));
  }

  // Gradients that are not like their rows': of labels, and of rows that do not count.
  void set_labels(const Stats& stats, const Place& place, Bits* out) const {
    const Unit& unit = stats.unit;
    for (int64_t c = 0; c < unit.columns(); ++c) {
      const Label& label = stats.labels[c];
      Bits* to = out + place.offset(c / unit.width) + c % unit.width;
      const int64_t p = label.position - place.first;
      if (label.counts && p >= 0 && p < place.steps) to[p * place.rows.inner] = Format::encode(label.gradient);
      for (int64_t i = 0; !label.counts && !place.single() && i < place.steps; ++i) to[i * place.rows.inner] = Bits{};
    }
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
  const Strips strips(problem.rows, kShape);
  with_format(problem.dtype,
              [&](auto format) { run_strips(Forward<decltype(format)>(problem, buffers, strips), strips, workers); });
}

}  // namespace jaxgpuops::softmax::cpu
