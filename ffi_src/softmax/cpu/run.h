// Softmax and its derivatives on the CPU. They have source files of their own because each is compiled for many types.
#pragma once

#include "common/cpu/parallel.h"
#include "softmax/softmax.h"

namespace jaxgpuops::softmax::cpu {

void run_forward(const Problem& problem, const Buffers& buffers, const Workers& workers);
void run_tangent(const Problem& problem, const Buffers& buffers, const Workers& workers);

}  // namespace jaxgpuops::softmax::cpu
