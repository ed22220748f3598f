// The kinds of scan on the CPU. Each is a source file of its own because it is compiled for many dtypes.
#pragma once

#include "common/cpu/parallel.h"
#include "scan/scan.h"

namespace jaxgpuops::scan::cpu {

void run_cumulative(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_linear(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_linear_vjp(const Problem& problem, const Buffers& buffers, const Workers& workers);

}  // namespace jaxgpuops::scan::cpu
