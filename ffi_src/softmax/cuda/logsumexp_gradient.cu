// The gradient of logsumexp from x and one cotangent for each row: softmax, times that number. The kernels of the row
// engine read x once and write the gradient once, so that the forward pass, if nothing else needs it, is not run.
#include "row_engine/cuda/small.cuh"
#include "softmax/cuda/loose_rows.cuh"

namespace jaxgpuops::softmax {
namespace {

template <class E>
struct LogSumExpGradient : ExponentialSum<E, sizeof(typename E::Bits) == 2>, row_engine::PlainArgs {
  using Base = ExponentialSum<E, sizeof(typename E::Bits) == 2>;
  using typename Base::Acc;
  using typename Base::Bits;
  using typename Base::Shift;
  static constexpr int kSums = 1;
  static constexpr bool kDecoded = false, kMasked = false, kHole = false, kPlainSum = false, kKeeps = false,
                        kStoredPeak = true;
  static constexpr bool kFast = sizeof(Bits) < 8, kLarge = kFast, kPackColumns = kFast, kAlong = kFast,
                        kSingleColumns = false;

  struct Args {
    const Bits* cotangent;
    Broadcast at;
  };
  struct Row {
    Acc cotangent;
  };
  struct Final {
    Shift shift;
    Acc factor;
    Acc most;  // e^(z - peak) = 0 makes the gradient 0 up to this z: everywhere, or at -inf if the row has a NaN
  };

  __device__ static Row row(const Args& args, int64_t outer, int64_t i, int64_t, int64_t) {
    return {E::load(args.cotangent[args.at(outer, 0, i)])};
  }
  __device__ static bool skip(const Row&) { return false; }
  __device__ static Args of_statistics(Args args) { return args; }
  __device__ static Bits pad(const Args&, int) { return E::store(-infinity<Acc>()); }
  __device__ static Acc value(const Args&, Acc x) { return x; }
  __device__ static Acc ordered_value(const Args&, Acc x) { return x; }
  __device__ static Acc scaled(int, Acc sum, Acc weight) { return rounded_product(sum, weight); }

  // In a row with +inf, all other elements have the probability 0.
  __device__ static Final finish(const Args&, const Row& row, const Stat<LogSumExpGradient>& stat) {
    const Acc sum = stat.sum(0);
    return {Base::guard(stat.peak()), sum == infinity<Acc>() ? Acc(0) : row.cotangent / sum,
            sum == sum ? infinity<Acc>() : -infinity<Acc>()};
  }
  __device__ static void write_row(const Args&, int64_t, const Row&, const Final&) {}
  __device__ static Acc output(const Args&, const Row&, const Final& final, Acc z, Acc) {
    const Acc e = Base::exponential(z, final.shift);
    return e == 0 && z <= final.most ? Acc(0) : rounded_product(e, final.factor);
  }
};

template <class P>
struct GivenGradient : P::Args {
  static constexpr bool kOutput = true, kKept = false;
};

}  // namespace
}  // namespace jaxgpuops::softmax

// (Gradients of 3000 x 8001 float16 took 32.3 us so, and 33.9.)
template <class E>
constexpr bool jaxgpuops::row_engine::kShiftsAtOnce<jaxgpuops::softmax::LogSumExpGradient<E>> = true;

// There is always a result, so there need be no kernels for statistics only.
template <class E>
constexpr bool jaxgpuops::row_engine::kLean<jaxgpuops::softmax::LogSumExpGradient<E>> = false;
template <class E>
constexpr bool jaxgpuops::row_engine::kOftenStatistics<jaxgpuops::softmax::LogSumExpGradient<E>> = false;

namespace jaxgpuops::softmax {

cudaError_t launch_log_sum_exp_gradient(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                        const Buffers& buffers, void* workspace) {
  return with_float(problem.dtype, [&](auto element) {
    using P = LogSumExpGradient<decltype(element)>;
    auto p = parameters_of<P>(problem, buffers);
    p.args = {static_cast<const typename P::Bits*>(buffers.cotangent), problem.cotangent};
    if constexpr (sizeof(typename P::Bits) <= 4)
      if (plan.single && plan.spread)
        return launch_loose_rows<P>(stream, plan, problem, buffers, GivenGradient<P>{p.args});
    if (plan.algorithm == RowAlgorithm::kSmall)
      return row_engine::run_small<P>(stream, plan, problem.rows, p.operands[0], p.out, p.args);
    return row_engine::run<P>(stream, plan, problem.rows, p, workspace);
  });
}

}  // namespace jaxgpuops::softmax
