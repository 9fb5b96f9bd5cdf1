#pragma once

#include <cstdint>
#include <string_view>

#include "core/fail.h"

/// Checks that the layer, its controller and its router share.
namespace flashoverlap::ops {

/// `name` as the message has it, with "controller: " in front for the controller's options.
inline void at_least(std::string_view name, std::int64_t value, std::int64_t minimum) {
  if (value >= minimum) return;
  core::fail(ErrorKind::kBadArgument, "{} is {}; at least {} is expected", name, value, minimum);
}

}  // namespace flashoverlap::ops
