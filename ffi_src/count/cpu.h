// The CPU implementations of the family that have files of their own, seen from the handlers in cpu.cc.
#pragma once

#include "common/parallel.h"
#include "count/count.h"

namespace jaxgpuops::count {

void search(const Search& problem, const void* queries, const void* sorted, int32_t* places, const Workers& workers);

}  // namespace jaxgpuops::count
