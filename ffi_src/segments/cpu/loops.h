// The loops that handlers.cc calls.
#pragma once

#include "common/cpu/parallel.h"
#include "segments/segments.h"

namespace jaxgpuops::segments {

void reduce_segments(const Segments& problem, const void* data, const int32_t* ids, void* out, const Workers& workers);

void segment_softmax(const Segments& problem, const void* data, const int32_t* ids, void* out, bool logs,
                     const Workers& workers);

}  // namespace jaxgpuops::segments
