// Gradients of cross-entropies of rows that are not whole vectors.
#include "softmax/cuda/cross_entropy.cuh"
#include "softmax/cuda/loose_rows.cuh"

namespace jaxgpuops::softmax {
namespace {

// Results of 16 bits are multiples of what is added up. Those of float32 need more accurate exponentials.
template <class P>
struct GivenEntropy : P::Args {
  static constexpr bool kOutput = true, kKept = sizeof(typename P::Bits) == 2;
};

}  // namespace

cudaError_t launch_loose_entropy(cudaStream_t stream, const RowPlan& plan, const Problem& problem,
                                 const Buffers& buffers) {
  return with_float(problem.dtype, [&](auto element) -> cudaError_t {
    using E = decltype(element);
    if constexpr (sizeof(typename E::Bits) > 4) {
      return cudaErrorInvalidValue;
    } else {
      const auto run = [&](auto plain) {
        using P = CrossEntropy<E, decltype(plain)::value>;
        return launch_loose_rows<P>(stream, plan, problem, buffers,
                                    GivenEntropy<P>{entropy_args_of<P>(problem, buffers)});
      };
      return is_plain_entropy(plan, problem) ? run(std::true_type()) : run(std::false_type());
    }
  });
}

}  // namespace jaxgpuops::softmax
