// What gradients of softmax and log_softmax are made from where parts of a row or column are read on their own: a share
// is what a part has of the sums. gradient_split.cu and gradient_parts.cu have the kernels.
//
// The elements at the peak are not in the sum of the others. So if one element has almost all of the probability, what
// it lacks to 1 is not lost.
#pragma once

#include "softmax/cuda/dispatch.cuh"

namespace jaxgpuops::softmax {

struct Share {
  float peak;
  float count, own;        // how many logits are equal to the peak, and the sum of their cotangents
  float others, weighted;  // of other logits: the sum of e^(z - peak), and of cotangents, times that for softmax

  // ExponentialSum::add() says why this is accurate enough.
  static __device__ float exponential(float x) { return fast_exp2(rounded_product(x, 1.44269504f)); }
  __device__ float& sum(int i) { return i == 0 ? count : i == 1 ? own : i == 2 ? others : weighted; }
  static __device__ Share none() { return {-infinity<float>(), 0, 0, 0, 0}; }
  // Makes the sums relative to another peak that is not below the present one. Where the weight is 0, cotangents are
  // dropped even if they are infinite, as they are where rows stay in registers.
  __device__ void raise(float to, bool logs) {
    if (to == peak) return;
    const float weight = exponential(peak - to);
    others = weight * (others + count);
    weighted += own;
    if (!logs) weighted = weight == 0 ? 0.f : weight * weighted;
    peak = to;
    count = own = 0;
  }
  template <bool kLogs>
  __device__ void add(float z, float cotangent) {
    const bool is_peak = z == peak;
    const float e = is_peak ? 0.f : exponential(z - peak);
    if (is_peak) count += 1, own += cotangent;
    others += e;
    if constexpr (kLogs) {
      if (!is_peak) weighted += cotangent;
    } else if (e != 0) {
      weighted = fused_multiply_add(e, cotangent, weighted);
    }
  }
  __device__ void add(Share share, bool logs) {
    const float larger = larger_number(peak, share.peak);
    raise(larger, logs);
    share.raise(larger, logs);
    count += share.count;
    own += share.own;
    others += share.others;
    weighted += share.weighted;
  }
};

// The gradient of an element, given the share that the whole row is.
template <class E>
struct Gradient {
  using Acc = typename E::Acc;
  Acc peak, inverse, origin, total, of_likely;

  Gradient() = default;
  __device__ Gradient(const Share& row, bool logs) : peak(row.peak) {
    const Acc sum = row.others + row.count;
    const bool plain = sum < infinity<Acc>() && peak - peak == 0;  // there is no NaN or +inf, and not only -inf
    inverse = plain ? 1 / sum : nan<Acc>();
    const bool likely = inverse > Acc(0.75);  // then one element is at the peak
    origin = likely && !logs ? row.own : Acc(0);
    total = likely && !logs ? fused_multiply_add(-origin, row.others, row.weighted) : row.weighted + row.own;
    if (!logs) total *= inverse;
    of_likely = fused_multiply_add(row.others * inverse, total, -row.weighted);
  }
  template <bool kLogs>
  __device__ Acc at(Acc z, Acc cotangent) const {
    const Acc y = exponential<E>(z - peak) * inverse;
    if constexpr (kLogs) return y > Acc(0.75) ? of_likely : cotangent - rounded_product(y, total);
    return y == 0 ? Acc(0) : rounded_product(y, (cotangent - origin) - total);
  }
};

}  // namespace jaxgpuops::softmax
