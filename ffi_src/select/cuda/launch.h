// The functions by which the handlers launch this family's CUDA kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "select/plan.h"

namespace jaxgpuops::select {

struct SelectResults {
  void* values;
  int32_t* indices;              // not of quantiles
  const void* shares = nullptr;  // of quantiles
  int64_t beside = 1;            // how quantiles lie (quantile.h)
};

cudaError_t launch_select(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const int32_t* ranks, const SelectResults& results, void* workspace);

// The form of launch_select for rows that a team of warps holds in shared memory: along the last axis, or turned.
cudaError_t launch_select_teams(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that the registers of a block hold: along the last axis, or turned.
cudaError_t launch_select_registers(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                    const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that a cluster of blocks holds: along the last axis, or turned.
cudaError_t launch_select_cluster(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                  const int32_t* ranks, const SelectResults& results);

// The form of launch_select for rows that several blocks share: along the last axis, or turned.
cudaError_t launch_select_long(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                               const int32_t* ranks, const SelectResults& results, void* workspace);

// The form of launch_select for short rows. A thread has a row along any axis, or a warp has a row along the last axis.
cudaError_t launch_select_short(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                const int32_t* ranks, const SelectResults& results);

// The form of launch_select_short for rows of 65 to kMostWarpSelect elements.
cudaError_t launch_select_bisect(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                                 const int32_t* ranks, const SelectResults& results);

// `problem` is one of firsts_of(), with an order. The results of a row are k values and indices.
cudaError_t launch_firsts(cudaStream_t stream, const SelectPlan& plan, const Select& problem, const void* x,
                          const SelectResults& results, void* workspace);

}  // namespace jaxgpuops::select
