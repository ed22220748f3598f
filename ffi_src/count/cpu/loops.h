// The loops that handlers.cc calls.
#pragma once

#include "common/cpu/parallel.h"
#include "count/count.h"

namespace jaxgpuops::count {

void reduce_segments(const Segments& problem, const void* data, const int32_t* ids, void* out, const Workers& workers);

void segment_softmax(const Segments& problem, const void* data, const int32_t* ids, void* out, bool logs,
                     const Workers& workers);

// Finds the elements of x of the given ranks, and their indices.
void select(const Select& problem, const void* x, const int32_t* ranks, void* values, int32_t* indices,
            const Workers& workers);

// Finds quantiles of x between the elements of the given ranks.
void quantile(const Select& problem, const void* x, const int32_t* ranks, const void* shares, void* out,
              const Workers& workers);

// Finds what the mask chooses, or where elements differ from the one before.
void choose(const Choose& problem, const ChooseBuffers& buffers, const Workers& workers);

void search(const Search& problem, const void* queries, const void* sorted, int32_t* places, const Workers& workers);

}  // namespace jaxgpuops::count
