// The loops that handlers.cc calls.
#pragma once

#include "common/cpu/parallel.h"
#include "search/search.h"

namespace jaxgpuops::search {

// Finds what the mask chooses, or where elements differ from the one before.
void choose(const Choose& problem, const ChooseBuffers& buffers, const Workers& workers);

// Finds the different elements of each row. For few of them, it takes less time than a sort.
void unique(const Unique& problem, const UniqueBuffers& buffers, const Workers& workers);

void search(const Search& problem, const void* queries, const void* sorted, int32_t* places, const Workers& workers);

}  // namespace jaxgpuops::search
