#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace flashoverlap::core {

/// The middle value, or the mean of the two middle ones; 0 when there is none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const std::size_t half = values.size() / 2;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(half);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

}  // namespace flashoverlap::core
