#pragma once

namespace flashoverlap::tune {

/// Simulated times within this factor are taken as equal: no machine profile is better than that.
constexpr double kAlike = 1.005;

}  // namespace flashoverlap::tune
