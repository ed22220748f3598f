// The loops that handlers.cc calls.
#pragma once

#include "common/cpu/parallel.h"
#include "select/select.h"

namespace jaxgpuops::select {

// Finds the elements of x of the given ranks, and their indices.
void select(const Select& problem, const void* x, const int32_t* ranks, void* values, int32_t* indices,
            const Workers& workers);

// Finds quantiles of x between the elements of the given ranks. `beside`: how they lie (quantile.h).
void quantile(const Select& problem, int64_t beside, const void* x, const int32_t* ranks, const void* shares, void* out,
              const Workers& workers);

}  // namespace jaxgpuops::select
