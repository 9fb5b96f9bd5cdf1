// What NCCL and NVSHMEM have in common: libraries that are loaded at run time.
#pragma once

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "core/fail.h"

namespace flashoverlap::cuda {

/// "2.30.7" for 23007.
inline std::string library_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10'000, version % 10'000 / 100, version % 100);
}

/// What the environment's `variable` names, otherwise `usual`.
inline std::string chosen_library(const char* variable, const char* usual) {
  const char* const chosen = std::getenv(variable);
  return chosen != nullptr && *chosen != '\0' ? chosen : usual;
}

/// The function of that name. Error(kUnsupported) where the library has none; `release`: the first with it.
template <class Function>
void find_function(void* library, const std::string& path, Function& function, const char* name,
                   std::string_view release) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr)
    core::fail(ErrorKind::kUnsupported, "{} has no {}; {} or later has it", path, name, release);
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace flashoverlap::cuda
