// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "search/distinct.h"
#include "search/plan.h"

namespace jaxgpuops::search {

cudaError_t launch_search(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                          const void* sorted, int32_t* places);

// The forms of launch_search for short rows, for many queries of a row, and for still more of 8 or 16 bits.
cudaError_t launch_search_rows(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places);

cudaError_t launch_search_tree(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                               const void* sorted, int32_t* places);

cudaError_t launch_search_table(cudaStream_t stream, const SearchPlan& plan, const Search& problem, const void* queries,
                                const void* sorted, int32_t* places);

// What a choice for `unique` has besides: the different elements of the row x. If they are not too many, the results
// are written from there, and the other operands are not read. Otherwise, unless they are null, `bits` gets the words
// of all units, and `before` how many bits are set before each unit.
struct ChooseDistinct {
  Distinct* found = nullptr;
  const void* x = nullptr;
  uint32_t *bits = nullptr, *before = nullptr;
};

cudaError_t launch_choose(cudaStream_t stream, const ChoosePlan& plan, const Choose& problem,
                          const ChooseBuffers& buffers, void* workspace, const ChooseDistinct& distinct = {});

// The forms of launch_unique for few elements, and by counts.
// `found`: if not null, x has the `found->candidates` least elements of a longer row, in no order, whose numbers there
// are at `numbers`. If these are not enough to give all results, nothing is written.
cudaError_t launch_unique_compare(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                  const UniqueBuffers& buffers, Distinct* found = nullptr,
                                  const uint32_t* numbers = nullptr);

cudaError_t launch_unique_counts(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                                 const UniqueBuffers& buffers, void* workspace);

cudaError_t launch_unique(cudaStream_t stream, const UniquePlan& plan, const Unique& problem,
                          const UniqueBuffers& buffers, void* workspace);

}  // namespace jaxgpuops::search
