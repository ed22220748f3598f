// Softmax and its derivatives on the CPU. Each is a source file of its own because it is compiled for many dtypes.
#pragma once

#include "common/cpu/parallel.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax::cpu {

void run_forward(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers);

}  // namespace jaxgpuops::softmax::cpu
