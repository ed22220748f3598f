// The CPU implementation of searchsorted, as handlers.cc calls it.
#pragma once

#include "common/cpu/parallel.h"
#include "count/count.h"

namespace jaxgpuops::count {

void search(const Search& problem, const void* queries, const void* sorted, int32_t* places, const Workers& workers);

}  // namespace jaxgpuops::count
