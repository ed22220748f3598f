// The mixture-of-experts gate on the CPU, a row at a time: top-k's selector chooses, and vectorised loops compute the
// scores.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd_math.h"
#include "common/rounding.h"
#include "topk/cpu/selector.h"
#include "topk_softmax/call.h"

namespace jaxgpuops::topk_softmax {
namespace {

constexpr int64_t kTaskElements = 1 << 15;  // target number of elements of a task
constexpr int64_t kSorted = 32;             // the longest row that is sorted whole
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Float32 {
  using Bits = uint32_t;
  static JAXGPUOPS_INLINE float decode(uint32_t bits) { return bits_as<float>(bits); }
  static JAXGPUOPS_INLINE uint32_t encode(float value) { return bits_as<uint32_t>(value); }
};

template <class Element>
JAXGPUOPS_SIMD void decode_row(const typename Element::Bits* bits, int64_t n, float* z) {
  for (int64_t j = 0; j < n; ++j) z[j] = Element::decode(bits[j]);
}

JAXGPUOPS_INLINE float larger(float a, float b) { return b > a ? b : a; }  // ignores b if it is NaN
JAXGPUOPS_INLINE float add(float a, float b) { return a + b; }

// Folds a row in 16 lanes. The order is fixed, and the compiler can vectorise it.
template <class Fold>
JAXGPUOPS_INLINE float fold_row(const float* z, int64_t n, float first, Fold fold) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, first);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = fold(lanes[l], z[j + l]);
  for (; j < n; ++j) lanes[j % kLanes] = fold(lanes[j % kLanes], z[j]);
  for (int64_t half = kLanes / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] = fold(lanes[l], lanes[l + half]);
  return lanes[0];
}

JAXGPUOPS_SIMD float max_of_row(const float* z, int64_t n) { return fold_row(z, n, -kInfinity, larger); }

// Sets e = e^(z - top), and returns the sum of e.
JAXGPUOPS_SIMD float exp_row(const float* z, int64_t n, float top, float* e) {
  for (int64_t j = 0; j < n; ++j) e[j] = exp_negative(z[j] - top);
  return fold_row(e, n, 0, add);
}

JAXGPUOPS_SIMD float sum_of_row(const float* z, int64_t n) { return fold_row(z, n, 0, add); }

JAXGPUOPS_SIMD void scale_row(float* e, int64_t n, float inverse) {
  for (int64_t j = 0; j < n; ++j) e[j] *= inverse;
}

// Computes the sigmoid divided by e^shift, for shift <= 0, without overflow: e^(z - shift) / (1 + e^z) if z <= 0. If z
// > 0, the callers' shift is 0 and the value is 1 / (1 + e^-z).
JAXGPUOPS_SIMD void sigmoid_row(const float* z, int64_t n, float shift, float* s) {
  for (int64_t j = 0; j < n; ++j) {
    const float below = exp_negative(z[j] - shift), magnitude = z[j] > 0 ? -z[j] : z[j];
    s[j] = (z[j] > 0 ? 1.0f : below) / (1 + exp_negative(magnitude));
  }
}

// Square roots of log(1 + e^z). Where z is below kFar, log(1 + e^z) is e^z, and the result is divided by e^(shift / 2);
// `shift` is at most kFar, or 0.
JAXGPUOPS_SIMD void root_row(const float* z, int64_t n, float shift, float* s) {
  for (int64_t j = 0; j < n; ++j) {
    const float e = exp_negative(z[j] > 0 ? -z[j] : z[j]), u = 1 + e;
    // Log(1 + e), corrected by what rounding changed in u = 1 + e.
    const float log = u == 1 ? e : log_above_one(u) * (e / (u - 1));
    const float near = (z[j] > 0 ? z[j] : 0.0f) + log;
    s[j] = z[j] < kFar ? exp_negative((z[j] - shift) / 2) : std::sqrt(near);
  }
}

// Computes the keys by which elements are selected, as bits of score + bias.
JAXGPUOPS_SIMD void add_bias(const float* scores, int64_t n, const float* bias, int64_t stride, uint32_t* keys) {
  for (int64_t j = 0; j < n; ++j) {
    const float sum = scores[j] + bias[j * stride];
    keys[j] = sum == sum ? bits_as<uint32_t>(sum) : 0x7fc00000u;
  }
}

// The working memory of a thread, which is reused from row to row.
template <class Element, bool kBiased>
class Gate {
 public:
  Gate(const Problem& problem, const Buffers& buffers)
      : problem_(problem),
        buffers_(buffers),
        selector_(problem.k, problem.rows.length, kOrder),
        scratch_(std::max(selector_.scratch_elements(), kSorted)),
        row_(problem.rows.inner > 1 ? problem.rows.length : 0),
        keys_(kBiased ? problem.rows.length : 0),
        kept_(problem.groups > 1 ? problem.topk_groups * problem.group_size() : 0),
        of_groups_(problem.groups),
        chosen_(problem.topk_groups),
        z_(problem.rows.length),
        e_(problem.rows.length) {}

  void run(int64_t o, int64_t i) {
    const auto [outer, n, inner] = problem_.rows;
    const int64_t k = problem_.k;
    const Bits* row = static_cast<const Bits*>(buffers_.logits) + o * n * inner + i;
    if (inner > 1) {
      for (int64_t j = 0; j < n; ++j) row_[j] = row[j * inner];
      row = row_.data();
    }
    const bool of_row = problem_.score == Score::kSoftmax && (kBiased || !problem_.normalize);
    if (kBiased || of_row || buffers_.log_sums) decode_row<Element>(row, n, z_.data());
    if (of_row || buffers_.log_sums) {
      top_ = max_of_row(z_.data(), n);
      const float sum = exp_row(z_.data(), n, top_, e_.data());
      inverse_ = 1 / sum;
      if (buffers_.log_sums) buffers_.log_sums[o * inner + i] = log_sum(sum);
    }
    const auto* best = choose(row, o, i);
    int32_t* indices = buffers_.indices + o * k * inner + i;
    for (int64_t j = 0; j < k; ++j) {
      const auto index = static_cast<int32_t>(place(index_of<Key>(best[j])));
      indices[j * inner] = index;
      z_[j] = Element::decode(row[index]);
    }
    weigh();
    Bits* weights = static_cast<Bits*>(buffers_.weights) + o * k * inner + i;
    for (int64_t j = 0; j < k; ++j) weights[j * inner] = Element::encode(e_[j] * problem_.scale);
  }

 private:
  using Bits = typename Element::Bits;
  using Key = std::conditional_t<kBiased, uint32_t, Bits>;
  inline static const KeyOrder kOrder = key_order(KeyKind::kFloat, 8 * sizeof(Key), true);

  // The logarithm of the sum of e^z over the row; `sum` is the sum of e^(z - top).
  float log_sum(float sum) const {
    if (std::isfinite(top_)) return top_ + std::log(sum);
    const float* end = z_.data() + problem_.rows.length;
    const float* nan = std::find_if(z_.data(), end, [](float z) { return z != z; });
    return nan == end ? top_ : *nan;
  }

  // The best k in order, of the row or of its chosen groups.
  const Composite<Key>* choose(const Bits* row, int64_t o, int64_t i) {
    const int64_t n = problem_.rows.length;
    const Key* keys;
    if constexpr (kBiased) {
      if (problem_.score == Score::kSoftmax) {
        scale_row(e_.data(), n, inverse_);
      } else {
        score_row(n, 0);
      }
      const Broadcast& bias = problem_.bias;
      add_bias(e_.data(), n, buffers_.bias + bias(o, 0, i), bias.axis_stride, keys_.data());
      keys = keys_.data();
    } else {
      keys = row;
    }
    if (problem_.groups == 1) return sorted(keys, n);
    choose_groups(keys);
    const int64_t size = problem_.group_size();
    for (int64_t g = 0; g < problem_.topk_groups; ++g)
      std::copy_n(keys + chosen_[g] * size, size, kept_.data() + g * size);
    return sorted(kept_.data(), problem_.topk_groups * size);
  }

  // The index in the row of the element that has index `at` among the elements of the chosen groups.
  int64_t place(int64_t at) const {
    if (problem_.groups == 1) return at;
    const int64_t size = problem_.group_size();
    return chosen_[at / size] * size + at % size;
  }

  // The best groups, ascending: by their best logit or by the sum of their two best keys.
  void choose_groups(const Key* keys) {
    const int64_t size = problem_.group_size();
    for (int64_t g = 0; g < problem_.groups; ++g) {
      Key best = 0, second = 0;
      for (int64_t j = g * size; j < (g + 1) * size; ++j) {
        const Key key = encode(keys[j], kOrder);
        second = std::max(second, std::min(best, key));
        best = std::max(best, key);
      }
      if constexpr (kBiased) {
        if (size > 1) {
          const float sum = bits_as<float>(decode(best, kOrder)) + bits_as<float>(decode(second, kOrder));
          best = encode(sum == sum ? bits_as<uint32_t>(sum) : 0x7fc00000u, kOrder);
        }
      }
      of_groups_[g] = compose(best, static_cast<uint32_t>(g));
    }
    const int64_t count = problem_.topk_groups;
    std::nth_element(of_groups_.begin(), of_groups_.begin() + (count - 1), of_groups_.end(), std::greater<>());
    for (int64_t g = 0; g < count; ++g) chosen_[g] = index_of<Key>(of_groups_[g]);
    std::sort(chosen_.begin(), chosen_.end());
  }

  const Composite<Key>* sorted(const Key* keys, int64_t n) {
    if (n <= kSorted) {
      topk::compose_all(keys, n, kOrder, 0, list_);
      sort_by_key<Key>(list_, n, scratch_.data());
      return list_;
    }
    selector_.reset();
    selector_.offer(keys, n, 0, scratch_.data());
    auto* best = selector_.finish(scratch_.data());
    sort_by_key<Key>(best, problem_.k, scratch_.data());
    return best;
  }

  // Sets e to the scores of n logits z, for scores other than softmax.
  void score_row(int64_t n, float shift) {
    (problem_.score == Score::kSigmoid ? sigmoid_row : root_row)(z_.data(), n, shift, e_.data());
  }

  // Sets e to the weights of the chosen logits z.
  void weigh() {
    const int64_t k = problem_.k;
    float* e = e_.data();
    const bool softmax = problem_.score == Score::kSoftmax;
    if (problem_.normalize) {
      const float top = max_of_row(z_.data(), k);
      float sum;
      if (softmax) {
        sum = exp_row(z_.data(), k, top, e);
      } else if (problem_.score == Score::kSigmoid) {
        score_row(k, std::min(top, 0.0f));
        sum = sum_of_row(e, k);
      } else {
        score_row(k, top < kFar ? top : 0);
        sum = sum_of_row(e, k) + (top - top);  // NaN if the largest logit is infinite, as for softmax
      }
      for (int64_t j = 0; j < k; ++j) e[j] /= sum;
    } else if (softmax) {
      exp_row(z_.data(), k, top_, e);
      scale_row(e, k, inverse_);
    } else {
      score_row(k, 0);
    }
  }

  const Problem& problem_;
  const Buffers& buffers_;
  topk::Selector<Key> selector_;
  Composite<Key> list_[kSorted];
  std::vector<Composite<Key>> scratch_;
  std::vector<Bits> row_;
  std::vector<Key> keys_, kept_;
  std::vector<Composite<Key>> of_groups_;
  std::vector<int64_t> chosen_;  // the chosen groups
  std::vector<float> z_, e_;
  float top_ = 0, inverse_ = 1;  // the softmax of the row is e^(z - top_) * inverse_
};

template <class Element, bool kBiased>
void run(const Call& call, const Workers& workers) {
  const Rows& rows = call.problem.rows;
  if (rows.count() == 0 || call.problem.k == 0) return;
  const int64_t rows_a_task = std::max<int64_t>(1, kTaskElements / rows.length);
  parallel_for(workers, ceil_div(rows.count(), rows_a_task), [&](int64_t task) {
    Gate<Element, kBiased> gate(call.problem, call.buffers);
    const int64_t last = std::min(rows.count(), (task + 1) * rows_a_task);
    for (int64_t r = task * rows_a_task; r < last; ++r) gate.run(r / rows.inner, r % rows.inner);
  });
}

ffi::Error topk_softmax(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices,
                        ffi::RemainingRets more, int64_t axis, int64_t score, bool normalize, bool biased,
                        int64_t groups, int64_t topk_groups, double scale, bool log_sums) {
  return handle("jaxgpuops.topk_softmax", [&] {
    const Options options{axis, score, normalize, biased, groups, topk_groups, scale, log_sums};
    const Call call = call_of(logits, rest, *weights, *indices, more, options);
    if (more.size() > (log_sums ? 1u : 0u)) throw invalid("there are too many results");
    const auto of = [&](auto element) {
      using Element = decltype(element);
      biased ? run<Element, true>(call, workers_of(pool)) : run<Element, false>(call, workers_of(pool));
    };
    switch (call.problem.dtype) {
      case DType::kFloat16: return of(Float16{});
      case DType::kBFloat16: return of(BFloat16{});
      default: return of(Float32{});
    }
  });
}

XLA_FFI_DEFINE_HANDLER(kTopkSoftmax, topk_softmax, gate_binding<OnCpu>());

}  // namespace

std::vector<Target> cpu_targets() { return {{"jaxgpuops.topk_softmax", kTopkSoftmax}}; }

}  // namespace jaxgpuops::topk_softmax
