// The policy of cross-entropy and its gradient (see policy.cuh).
#pragma once

#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

// The arguments of cross-entropy. kPlain: of most gradients with a mean: rows (inner == 1), one cotangent, no label
// smoothing and no z_loss. What kernels need is short then, and so is their code.
template <class E, bool kPlain>
struct EntropyArgs {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  const Bits* logits;
  const int32_t* labels;
  const uint8_t* where;
  const Acc* cotangent;           // null if no gradient is asked for
  Acc *loss, *maximum, *log_sum;  // with a gradient, only the loss is written
  Acc label_smoothing, z_loss, length;
  Broadcast where_at, cotangent_at;

  __device__ bool has_gradient() const { return cotangent != nullptr; }
  __device__ Acc smoothing() const { return label_smoothing; }
  __device__ Acc share() const { return label_smoothing / length; }
  __device__ Acc squares() const { return z_loss; }
  __device__ bool counts(int64_t outer, int64_t i) const { return !where || where[where_at(outer, 0, i)]; }
  __device__ Acc cotangent_of(int64_t outer, int64_t i) const { return cotangent[cotangent_at(outer, 0, i)]; }
};
template <class E>
struct EntropyArgs<E, true> {
  using Bits = typename E::Bits;
  using Acc = typename E::Acc;
  const Bits* logits;
  const int32_t* labels;
  const uint8_t* where;
  const Acc* cotangent;
  Acc* loss;

  __device__ static constexpr bool has_gradient() { return true; }
  __device__ static constexpr Acc smoothing() { return 0; }
  __device__ static constexpr Acc share() { return 0; }
  __device__ static constexpr Acc squares() { return 0; }
  __device__ bool counts(int64_t outer, int64_t) const { return !where || where[outer]; }
  __device__ Acc cotangent_of(int64_t, int64_t) const { return *cotangent; }
};

// The policy of cross_entropy and its gradient. The label is excluded from the row's statistics, so that 1 - p of the
// label is computed as the sum of the other elements and not lost to rounding. kPlain changes no bits.
template <class E, bool kPlain = false>
struct CrossEntropy : ExponentialSum<E, sizeof(typename E::Bits) == 2>, row_engine::PlainArgs {
  using Base = ExponentialSum<E, sizeof(typename E::Bits) == 2>;
  using typename Base::Acc;
  using typename Base::Bits;
  using typename Base::Shift;
  using Args = EntropyArgs<E, kPlain>;
  static constexpr int kSums = kPlain ? 1 : 2;
  static constexpr bool kIsPlain = kPlain;
  static constexpr bool kDecoded = false, kMasked = false, kHole = true, kPlainSum = !kPlain, kStoredPeak = true;
  static constexpr bool kKeeps = sizeof(Bits) == 8;  // exponentials of float64 take most of the time
  static constexpr bool kFast = sizeof(Bits) < 8, kLarge = kFast, kPackColumns = false, kAlong = false,
                        kSingleColumns = !kPlain;

  struct Row {
    bool counts;
    int label;  // -1: the label is no class
    Acc z_label, cotangent;
  };
  struct Final {
    Shift shift;
    Acc slope, offset;  // the gradient is slope e^(z - peak) - offset
    Acc at_label;       // the gradient at the label
    // for the loss: sums of e^(z - peak) without and at the label, and of z; one thread computes the loss
    Acc others, of_label, total;
  };

  __device__ static Row row(const Args& args, int64_t outer, int64_t i, int64_t length, int64_t inner) {
    return completed(args, begun(args, outer, i, length, inner), outer, i, length, inner);
  }
  __device__ static bool counts(const Args& args, int64_t outer, int64_t i) { return args.counts(outer, i); }
  // A row is loaded in two steps: completed() reads the label's logit, whose address depends on what begun() loads.
  __device__ static Row begun(const Args& args, int64_t outer, int64_t i, int64_t length, int64_t inner) {
    Row row = {};
    row.counts = counts(args, outer, i);
    row.label = args.labels[outer * inner + i];
    if (args.has_gradient()) row.cotangent = args.cotangent_of(outer, i);
    return row;
  }
  __device__ static Row completed(const Args& args, Row row, int64_t outer, int64_t i, int64_t length, int64_t inner) {
    row = checked(row, length);
    const Acc z_label = row.label < 0 ? Acc(0) : E::load(args.logits[(outer * length + row.label) * inner + i]);
    return with_logit(row, z_label);
  }
  __device__ static Row checked(Row row, int64_t length) {
    if (!row.counts || row.label < 0 || row.label >= length) row.label = -1;
    return row;
  }
  __device__ static Row with_logit(Row row, Acc z_label) {
    row.z_label = row.label < 0 ? nan<Acc>() : z_label;
    return row;
  }
  __device__ static bool skip(const Row& row) { return !row.counts; }
  __device__ static Row counted(Row row) {
    row.counts = true;
    return row;
  }
  __device__ static int64_t hole(const Row& row) { return row.label; }
  __device__ static Bits pad(const Args&, int) { return E::store(-infinity<Acc>()); }
  __device__ static Acc value(const Args&, Acc x) { return x; }
  __device__ static Acc ordered_value(const Args&, Acc x) { return x; }
  __device__ static bool add_plain(const Args& args) { return args.smoothing() != 0; }
  __device__ static Acc scaled(int k, Acc sum, Acc weight) { return k == 0 ? rounded_product(sum, weight) : sum; }

  __device__ static Final finish(const Args& args, const Row& row, const Stat<CrossEntropy>& stat) {
    if (!row.counts) {
      Final final = {};
      final.shift = Base::guard(Acc(0));
      return final;
    }
    const bool has_label = row.label >= 0;
    const Shift shift = Base::guard(has_label ? larger_number(stat.peak(), row.z_label) : stat.peak());
    const Acc others = rounded_product(stat.sum(0), Base::weight(stat.peak(), shift));
    const Acc of_label = has_label ? Base::exponential(row.z_label, shift) : Acc(0);
    Final final = {shift, 0, 0, 0, others, of_label, kPlain ? Acc(0) : stat.sum(kSums - 1)};
    if (!args.has_gradient()) return final;
    const Acc sum = others + of_label;
    const Acc g = has_label && sum < infinity<Acc>() ? row.cotangent : nan<Acc>();
    const Acc inverse = 1 / sum;
    Acc pull = 0;  // the derivative of z_loss lse^2 by lse; each probability is weighted by it
    if (args.squares() != 0) pull = 2 * args.squares() * (Base::peak_of(shift) + Base::log_of(sum, shift));
    final.slope = g * (inverse * (1 + pull));
    final.offset = g * args.share();
    final.at_label = g * ((pull * of_label - others) * inverse + args.smoothing() - args.share());
    return final;
  }
  __device__ static void write_row(const Args& args, int64_t index, const Row& row, const Final& final) {
    Acc loss = 0, peak = 0, log_sum = 0;
    if (row.counts) {
      const Acc others = final.others, of_label = final.of_label;
      peak = Base::peak_of(final.shift);
      const Acc smoothing = args.smoothing(), z_loss = args.squares();
      // For a probability near 1, log(1 + others / of_label) keeps the digits that the logarithm of the whole sum
      // loses.
      const bool likely = others < of_label && of_label < infinity<Acc>();
      log_sum = likely ? (row.z_label - peak) + logarithm_beyond_1(others / of_label)
                       : Base::log_of(others + of_label, final.shift);
      const Acc lse = peak + log_sum;
      loss = (peak - row.z_label) + log_sum;
      loss *= 1 - smoothing;
      if constexpr (!kPlain)
        if (smoothing != 0) loss += smoothing * ((peak - final.total / args.length) + log_sum);
      if (z_loss != 0) loss += z_loss * lse * lse;
    }
    args.loss[index] = loss;
    if constexpr (!kPlain) {
      if (args.has_gradient()) return;
      args.maximum[index] = maximum_of(peak, log_sum);
      args.log_sum[index] = log_sum;
    }
  }
  __device__ static Acc output(const Args&, const Row& row, const Final& final, Acc z, Acc) {
    const Acc value = fused_multiply_add(Base::exponential(z, final.shift), final.slope, -final.offset);
    // A row that does not count gets 0 whatever its logits are. The mask avoids a branch for every element. (Kernels of
    // rows have read none of its logits, but have padding for them.)
    if (kPlain) return value;
    using Word = std::conditional_t<sizeof(Acc) == 8, uint64_t, uint32_t>;
    return bits_as<Acc>(bits_as<Word>(value) & -static_cast<Word>(row.counts));
  }
  // The same, of e^(z - peak of the span), if there is no label smoothing.
  __device__ static bool keeps(const Args& args) { return args.has_gradient() && args.smoothing() == 0; }
  __device__ static Acc factor_of_kept(const Final& final, Acc peak) {
    return rounded_product(Base::weight(peak, final.shift), final.slope);
  }
  __device__ static Acc output_of_kept(const Final& final, Acc factor, Acc kept) {
    return fused_multiply_add(kept, factor, -final.offset);
  }
  __device__ static Acc hole_output(const Args&, const Row&, const Final& final) { return final.at_label; }
};

template <class P>
typename P::Args entropy_args_of(const Problem& problem, const Buffers& buffers) {
  using Acc = typename P::Acc;
  typename P::Args args = {};
  args.logits = static_cast<const typename P::Bits*>(buffers.x);
  args.labels = buffers.labels;
  args.where = buffers.row_where;
  args.cotangent = static_cast<const Acc*>(buffers.cotangent);
  args.loss = static_cast<Acc*>(buffers.loss);
  if constexpr (!P::kIsPlain) {
    args.where_at = problem.row_where;
    args.cotangent_at = problem.cotangent;
    args.label_smoothing = static_cast<Acc>(problem.label_smoothing);
    args.z_loss = static_cast<Acc>(problem.z_loss);
    args.length = static_cast<Acc>(problem.rows.length);
    args.maximum = static_cast<Acc*>(buffers.maximum);
    args.log_sum = static_cast<Acc*>(buffers.log_sum);
  }
  return args;
}

// In cross_entropy_rows.cu: whether it has the kernel of a call, and that kernel.
bool is_plain_entropy(const RowPlan& plan, const Problem& problem);
cudaError_t launch_plain_cross_entropy(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);
// In cross_entropy_loose.cu.
cudaError_t launch_loose_entropy(cudaStream_t, const RowPlan&, const Problem&, const Buffers&);

}  // namespace jaxgpuops::softmax
