// The softmax and reduce kernels behind a C interface, for softmax_lab.py: the plan's choices may be overridden.
#include "broadcasts.h"
#include "reduce/cuda/launch.h"
#include "softmax/cuda/launch.h"

using namespace jaxgpuops;

namespace {

void tell(const RowPlan& plan, int64_t* chosen) {
  const int64_t facts[] = {static_cast<int64_t>(plan.algorithm),
                           plan.vectors,
                           int64_t{1} << plan.lane_bits,
                           plan.spans,
                           plan.block_warps,
                           plan.blocks,
                           plan.vector,
                           plan.workspace_bytes};
  for (int i = 0; i < 8; ++i) chosen[i] = facts[i];
}

constexpr int kMapWords = 35;

}  // namespace

// call = {family (0: softmax, 1: reduce), op, dtype, outer, length, inner, capability, transpose, wide, queries,
// query_stride, tuned vectors, cluster, block warps, split}; numbers = {factor, label_smoothing, z_loss}; maps = those
// of scale, bias, where, row_where, cotangent. buffers = {x, y, scale, bias, where, labels, row_where, cotangent, out,
// loss, lse, workspace, maximum, log_sum}. Without buffers nothing runs, and `call[15]` says whether the call is
// general. `chosen` receives {algorithm, vectors, lanes, spans, block warps, blocks, vector, workspace bytes}. Returns
// a cudaError_t.
extern "C" int lab_softmax(void* stream, void** buffers, const int64_t* call, const double* numbers,
                           const int64_t* maps, int64_t* chosen) {
  const Rows rows{call[3], call[4], call[5]};
  const Gpu gpu = gpu_of(static_cast<int>(call[6]));
  const RowTuning tuning{static_cast<int>(call[11]), static_cast<int>(call[12]), static_cast<int>(call[13]),
                         call[14] != 0};
  if (call[0] == 1) {
    reduce::Problem problem;
    problem.op = static_cast<reduce::Op>(call[1]);
    problem.dtype = static_cast<DType>(call[2]);
    problem.rows = rows;
    problem.wide_result = call[8];
    problem.where = read(maps + 2 * kMapWords);
    problem.masked = buffers ? buffers[4] != nullptr : call[15] != 0;
    const RowPlan plan = reduce::plan_reduce(problem, gpu, -1, tuning);
    tell(plan, chosen);
    if (!buffers) return cudaSuccess;
    const reduce::Buffers b{buffers[0], buffers[1], static_cast<const uint8_t*>(buffers[4]), buffers[8]};
    return reduce::launch_reduce(static_cast<cudaStream_t>(stream), plan, problem, b, buffers[11]);
  }
  softmax::Problem problem;
  problem.op = static_cast<softmax::Op>(call[1]);
  problem.dtype = static_cast<DType>(call[2]);
  problem.rows = rows;
  problem.transpose = call[7];
  problem.queries = call[9];
  problem.query_stride = call[10];
  problem.factor = numbers[0];
  problem.label_smoothing = numbers[1];
  problem.z_loss = numbers[2];
  problem.scale = read(maps);
  problem.bias = read(maps + kMapWords);
  problem.where = read(maps + 2 * kMapWords);
  problem.row_where = read(maps + 3 * kMapWords);
  problem.cotangent = read(maps + 4 * kMapWords);
  softmax::Buffers b;
  if (buffers) {
    b.x = buffers[0];
    b.y = buffers[1];
    b.scale = buffers[2];
    b.bias = buffers[3];
    b.where = static_cast<const uint8_t*>(buffers[4]);
    b.labels = static_cast<const int32_t*>(buffers[5]);
    b.row_where = static_cast<const uint8_t*>(buffers[6]);
    b.cotangent = buffers[7];
    b.out = buffers[8];
    b.loss = buffers[9];
    b.lse = buffers[10];
    b.maximum = buffers[12];
    b.log_sum = buffers[13];
  }
  const bool masked = b.where || problem.queries;
  problem.general = buffers
                        ? softmax::is_general(problem.op, problem.factor, b.scale, b.bias, masked, problem.transpose)
                        : call[15] != 0;
  const RowPlan plan = softmax::plan_softmax(problem, gpu, -1, tuning);
  tell(plan, chosen);
  if (!buffers) return cudaSuccess;
  return softmax::launch_softmax(static_cast<cudaStream_t>(stream), plan, problem, b, buffers[11]);
}

extern "C" const char* lab_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
extern "C" const char* lab_name(int algorithm) { return name(static_cast<RowAlgorithm>(algorithm)); }

#if defined(__CUDACC__)
namespace {

// Reads, or copies, 32 KiB a block.
template <bool kCopy>
__global__ void __launch_bounds__(256) floor_kernel(const uint4* from, uint4* to, int64_t count) {
  constexpr int kEach = 8;
  const int64_t first = int64_t{blockIdx.x} * kEach * 256 + threadIdx.x;
  uint4 v[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) v[j] = first + j * 256 < count ? from[first + j * 256] : uint4{};
  uint32_t all = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (kCopy && first + j * 256 < count) to[first + j * 256] = v[j];
    all |= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (!kCopy && all == 0x12345678u) *to = uint4{};
}

}  // namespace

extern "C" int lab_floor(void* stream, const void* from, void* to, int64_t bytes, int copy) {
  const auto blocks = static_cast<unsigned>((bytes + (32 << 10) - 1) / (32 << 10));
  const auto kernel = copy ? floor_kernel<true> : floor_kernel<false>;
  kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from),
                                                                static_cast<uint4*>(to), bytes / 16);
  return cudaGetLastError();
}
#endif
