#pragma once

#include <cstdint>
#include <optional>

/// Environment variables, read strictly: a value that is not understood is an error, never a default.
namespace flashoverlap::core {

/// Value of the environment variable `name`: a decimal integer in [low, high], an optional minus sign, and
/// nothing else. No value when unset or empty. Throws Error(kBadArgument) that names the variable, its value
/// and what is accepted.
std::optional<std::int64_t> integer_from_environment(const char* name, std::int64_t low, std::int64_t high);

/// The same for a switch: 1, true, on; 0, false, off.
std::optional<bool> boolean_from_environment(const char* name);

}  // namespace flashoverlap::core
