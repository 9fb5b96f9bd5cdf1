#pragma once

#include <string>

namespace flashoverlap::core {

/// This host's name; "?" where the system does not tell.
[[nodiscard]] std::string host_name();

}  // namespace flashoverlap::core
