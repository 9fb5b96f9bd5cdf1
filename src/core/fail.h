#pragma once

#include <fmt/core.h>

#include <utility>

#include "flashoverlap/error.h"

namespace flashoverlap::core {

/// Throws Error(kind) with a formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

/// A negative Verdict with a formatted reason.
template <typename... Args>
Verdict no(fmt::format_string<Args...> format, Args&&... args) {
  return Verdict{fmt::format(format, std::forward<Args>(args)...)};
}

}  // namespace flashoverlap::core
