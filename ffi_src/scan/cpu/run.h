// The kinds of scan on the CPU. They have source files of their own because each is compiled for many types.
#pragma once

#include "common/cpu/parallel.h"
#include "scan/scan.h"

namespace jaxgpuops::scan::cpu {

void run_cumulative(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_linear(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_linear_vjp(const Problem& problem, const Buffers& buffers, const Workers& workers);

}  // namespace jaxgpuops::scan::cpu
