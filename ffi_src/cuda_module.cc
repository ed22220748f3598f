// jaxgpuops._cuda: the CUDA handlers. Imports where there is no GPU and no driver.
#include <nanobind/nanobind.h>

#include "families.h"
#include "module.h"

NB_MODULE(_cuda, module) {
  using namespace jaxgpuops;
  define_module(module, {JAXGPUOPS_FAMILIES(cuda_targets)});
}
