// The functions that both modules have for Python.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "build_facts.h"
#include "ffi.h"

namespace jaxgpuops {

namespace nb = nanobind;

inline void define_module(nb::module_& module, std::initializer_list<std::vector<Target>> families) {
  module.def(
      "targets",
      [families = std::vector<std::vector<Target>>(families)] {
        nb::dict capsules;
        for (const auto& family : families)
          for (const Target& target : family)
            capsules[target.name] = nb::capsule(reinterpret_cast<void*>(target.handler));
        return capsules;
      },
      "FFI handlers by target name.");

  module.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Version of the XLA FFI headers this module was built with: (major, minor).");

  module.def(
      "build_info",
      [] {
        nb::dict info;
        info["cuda"] = kCudaBuilt;
        info["cuda_reason"] = kCudaReason;
        info["cuda_version"] = kCudaVersion;
        info["cuda_architectures"] = kCudaArchitectures;
        info["compiler"] = kCompiler;
        info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
        return info;
      },
      "Facts of the build; cuda_reason says why there is no CUDA module.");
}

}  // namespace jaxgpuops
