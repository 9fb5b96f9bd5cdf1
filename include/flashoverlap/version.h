#pragma once

#include <string_view>

namespace flashoverlap {

/// Version of this library, "major.minor.patch". CMakeLists.txt reads it from here.
inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace flashoverlap
