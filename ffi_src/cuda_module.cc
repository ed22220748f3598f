// jaxgpuops._cuda: the CUDA handlers. Imports where there is no GPU and no driver.
#include <nanobind/nanobind.h>

#include "along_axis/call.h"
#include "count/call.h"
#include "module.h"
#include "moe/call.h"
#include "reduce/call.h"
#include "scan/call.h"
#include "softmax/call.h"
#include "sort/call.h"
#include "topk/call.h"
#include "topk_softmax/call.h"

NB_MODULE(_cuda, module) {
  using namespace jaxgpuops;
  define_module(module, {topk::cuda_targets(), along_axis::cuda_targets(), scan::cuda_targets(),
                         topk_softmax::cuda_targets(), softmax::cuda_targets(), reduce::cuda_targets(),
                         sort::cuda_targets(), count::cuda_targets(), moe::cuda_targets()});
}
