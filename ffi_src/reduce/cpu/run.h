// The CPU implementation of the reductions, as handlers.cc calls it.
#pragma once

#include "common/cpu/parallel.h"
#include "reduce/reduce.h"

namespace jaxgpuops::reduce::cpu {

void run(const Problem& problem, const Buffers& buffers, const Workers& workers);

}  // namespace jaxgpuops::reduce::cpu
