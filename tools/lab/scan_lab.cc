// The scan kernels behind a C interface, for scan_lab.py: the plan's choice of algorithm may be overridden.
#include "broadcasts.h"
#include "scan/cuda/launch.h"

using namespace jaxgpuops;
using namespace jaxgpuops::scan;

// call = {kind, op, dtype, outer, length, inner, reverse, exclusive, transpose, initial, segmented, capability, forced
// algorithm or -1}. buffers = {x, a, y, h0, starts, out, out2, workspace}. Without an x nothing runs. `chosen` receives
// {algorithm, layout, threads, tile, tiles, strips, workspace bytes}. Returns a cudaError_t.
extern "C" int lab_scan(void* stream, void** buffers, const int64_t* call, const int64_t* a, const int64_t* starts,
                        int64_t* chosen) {
  Problem problem;
  problem.kind = static_cast<Kind>(call[0]);
  problem.op = static_cast<Op>(call[1]);
  problem.dtype = static_cast<DType>(call[2]);
  problem.rows = {call[3], call[4], call[5]};
  problem.reverse = call[6];
  problem.exclusive = call[7];
  problem.transpose = call[8];
  problem.initial = call[9];
  problem.segmented = call[10];
  problem.a = read(a);
  problem.starts = read(starts);
  Plan plan = plan_scan(problem, gpu_of(static_cast<int>(call[11])), -1, static_cast<int>(call[12]));
  const int64_t facts[] = {static_cast<int64_t>(plan.algorithm),
                           static_cast<int64_t>(plan.layout),
                           plan.threads(),
                           plan.tile,
                           plan.tiles,
                           plan.strips,
                           plan.workspace_bytes};
  for (int i = 0; i < 7; ++i) chosen[i] = facts[i];
  if (!buffers) return cudaSuccess;
  Buffers b;
  b.x = buffers[0];
  b.a = buffers[1];
  b.y = buffers[2];
  b.h0 = buffers[3];
  b.starts = static_cast<const uint8_t*>(buffers[4]);
  b.out = buffers[5];
  b.out2 = buffers[6];
  return launch_scan(static_cast<cudaStream_t>(stream), plan, problem, b, buffers[7]);
}

extern "C" const char* lab_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
extern "C" const char* lab_name(int algorithm) { return name(static_cast<Algorithm>(algorithm)); }
extern "C" const char* lab_layout(int layout) { return name(static_cast<Layout>(layout)); }
