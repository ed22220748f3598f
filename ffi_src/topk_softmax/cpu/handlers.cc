// The mixture-of-experts gate on the CPU, a row at a time: top-k's selector chooses, and vectorised loops compute the
// scores.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/cpu/narrow_float.h"
#include "common/cpu/simd_math.h"
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

// Sets the keys by which a row is selected: the bits of score + bias, where every NaN is the same.
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
    if (!problem_.sigmoid && (kBiased || !problem_.normalize)) {
      decode_row<Element>(row, n, z_.data());
      top_ = max_of_row(z_.data(), n);
      inverse_ = 1 / exp_row(z_.data(), n, top_, e_.data());
    }
    const auto* best = choose(row, o, i);
    int32_t* indices = buffers_.indices + o * k * inner + i;
    for (int64_t j = 0; j < k; ++j) {
      const int32_t index = index_of<Key>(best[j]);
      indices[j * inner] = index;
      z_[j] = Element::decode(row[index]);
    }
    weigh();
    Bits* weights = static_cast<Bits*>(buffers_.weights) + o * k * inner + i;
    for (int64_t j = 0; j < k; ++j) weights[j * inner] = Element::encode(e_[j]);
  }

 private:
  using Bits = typename Element::Bits;
  using Key = std::conditional_t<kBiased, uint32_t, Bits>;
  inline static const KeyOrder kOrder = key_order(KeyKind::kFloat, 8 * sizeof(Key), true);

  // Returns the best k elements, best first.
  const Composite<Key>* choose(const Bits* row, int64_t o, int64_t i) {
    if constexpr (kBiased) {
      const int64_t n = problem_.rows.length;
      if (problem_.sigmoid) {
        decode_row<Element>(row, n, z_.data());
        sigmoid_row(z_.data(), n, 0, e_.data());
      } else {
        scale_row(e_.data(), n, inverse_);
      }
      const Broadcast& bias = problem_.bias;
      add_bias(e_.data(), n, buffers_.bias + bias(o, 0, i), bias.axis_stride, keys_.data());
      return sorted(keys_.data());
    } else {
      return sorted(row);
    }
  }

  const Composite<Key>* sorted(const Key* keys) {
    const int64_t n = problem_.rows.length;
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

  // Sets e to the weights of the chosen logits z.
  void weigh() {
    const int64_t k = problem_.k;
    const float* z = z_.data();
    float* e = e_.data();
    if (problem_.normalize) {
      const float top = max_of_row(z, k);
      float sum;
      if (problem_.sigmoid) {
        sigmoid_row(z, k, std::min(top, 0.0f), e);
        sum = sum_of_row(e, k);
      } else {
        sum = exp_row(z, k, top, e);
      }
      for (int64_t j = 0; j < k; ++j) e[j] /= sum;
    } else if (problem_.sigmoid) {
      sigmoid_row(z, k, 0, e);
    } else {
      exp_row(z, k, top_, e);
      scale_row(e, k, inverse_);
    }
  }

  const Problem& problem_;
  const Buffers& buffers_;
  topk::Selector<Key> selector_;
  Composite<Key> list_[kSorted];
  std::vector<Composite<Key>> scratch_;
  std::vector<Bits> row_;
  std::vector<Key> keys_;
  std::vector<float> z_, e_;
  float top_ = 0, inverse_ = 1;  // the softmax of the row is e^(z - top_) * inverse_
};

template <class Element, bool kBiased>
void run(const Call& call, const Workers& workers) {
  const Rows& rows = call.problem.rows;
  if (rows.count() == 0 || call.problem.k == 0) return;
  const int64_t rows_a_task = std::max<int64_t>(1, kTaskElements / rows.length);
  parallel_for(workers, (rows.count() + rows_a_task - 1) / rows_a_task, [&](int64_t task) {
    Gate<Element, kBiased> gate(call.problem, call.buffers);
    const int64_t last = std::min(rows.count(), (task + 1) * rows_a_task);
    for (int64_t r = task * rows_a_task; r < last; ++r) gate.run(r / rows.inner, r % rows.inner);
  });
}

ffi::Error topk_softmax(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> weights, ffi::Result<ffi::AnyBuffer> indices, int64_t axis,
                        int64_t score, bool normalize, bool biased) {
  return handle("jaxgpuops.topk_softmax", [&] {
    const Call call = call_of(logits, rest, *weights, *indices, axis, score, normalize, biased);
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
