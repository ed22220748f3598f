// Sets words: those at even places to one number, those at odd places to another. It writes 4 bytes a word.
#include "common/cuda/set_words.h"

#include <algorithm>

#include "common/cuda/intrinsics.cuh"
#include "common/cuda/launch.cuh"

namespace jaxgpuops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostSetBlocks = 132 * 8;

__global__ void __launch_bounds__(kThreads)
    set_words_kernel(uint32_t* words, int64_t count, uint32_t even, uint32_t odd) {
  let_dependents_start();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t packs = reinterpret_cast<uintptr_t>(words) % 16 == 0 ? count / 4 : 0;
  for (int64_t i = thread; i < packs; i += stride) reinterpret_cast<uint4*>(words)[i] = {even, odd, even, odd};
  for (int64_t i = 4 * packs + thread; i < count; i += stride) words[i] = i & 1 ? odd : even;
}

}  // namespace

cudaError_t launch_set_words(cudaStream_t stream, uint32_t* words, int64_t count, uint32_t even, uint32_t odd) {
  Launch config;
  config.block = dim3(kThreads);
  config.grid =
      dim3(static_cast<unsigned>(std::clamp<int64_t>((count / 4 + kThreads - 1) / kThreads, 1, kMostSetBlocks)));
  return launch(stream, config, set_words_kernel, words, count, even, odd);
}

}  // namespace jaxgpuops
